"""Dataset specifications: which sources a dataset is mixed of, from a YAML or JSON file, a URL or a dict.

::

    dataset:
      - shards: gs://bucket/a-{000000..000033}.tar
        name: a
        weight: 2
        extensions: nrm.jpg;json
        scale: [1.0, 3.0]        # any other key reaches the samples, in ``__source__``
      - shards: [b-0.tar, b-1.tar]

Formats: the ``dataset:`` list of WebDataset's older README; the ``datasets:`` of its ``MultiShardSample`` (``prefix``,
``buckets``, ``resample``, ``choose``); its JSON shard lists (``wids_version`` 1), and plain lists of shards.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from wds_async import environment
from wds_async.errors import ConfigError, UnsafeContent, UrlError
from wds_async.redact import redact
from wds_async.shardlists.document import Document, read
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.urls import expand_urls, merge_url, scheme

__all__ = ["Spec", "SpecSource", "call", "is_function", "is_specification", "load"]

_FUNCTION = re.compile(r"[A-Za-z_]\w+(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


_SUFFIX = re.compile(r"\.(ya?ml|json)$", re.IGNORECASE)


_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")


_MAX_RANGE = 10**7  # of fetched braces: {0..999999999999} would fill the memory


_SOURCE_KEYS = frozenset(
    (
        "shards",
        "shardlist",
        "name",
        "weight",
        "extensions",
        "nsamples",
        "resample",
        "choose",
        "buckets",
        "storage_options",
    )
)


_SHARD_LIST_KEYS = frozenset(("wids_version", "__kind__"))


_EXAMPLE = "a specification holds `dataset:` with a list of `- shards: …`, `datasets:`, or a JSON `shardlist`"


def is_function(urls: Any) -> bool:
    """Whether ``urls`` is ``"package.module:function"`` (and no file is called so)."""
    if not isinstance(urls, str) or scheme(urls) or not _FUNCTION.fullmatch(urls):
        return False
    return not os.path.lexists(urls)


def is_specification(urls: Any) -> bool:
    """Whether ``urls`` is a dict, a path or URL that ends in ``.yaml``, ``.yml`` or ``.json``, or a function's name."""
    if isinstance(urls, (dict, Spec)) or is_function(urls):
        return True
    if not isinstance(urls, (str, os.PathLike)):
        return False
    name = os.fspath(urls)
    if isinstance(name, bytes):
        return False
    if scheme(name) in ("http", "https"):
        name = re.split(r"[?#]", name, maxsplit=1)[0]
    return _SUFFIX.search(name) is not None


def call(name: str) -> Any:
    """What ``"package.module:function"`` returns: a pipeline, dataset or other iterable of samples.

    It runs code; so the name has to come from the program's own arguments. An object that is no function is taken as it
    is. Raises ConfigError where the module or the function is not there or gives something else.
    """
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exn:
        if exn.name is None or not (module_name + ".").startswith(exn.name + "."):
            raise
        raise ConfigError(f"{name}: Python finds no module {exn.name!r}; is its folder on PYTHONPATH?") from exn
    if not hasattr(module, function):
        raise ConfigError(f"{name}: {module.__file__} has no {function!r}")
    found = getattr(module, function)
    result = found if hasattr(found, "__iter__") and not isinstance(found, type) else found()
    if isinstance(result, (str, bytes, Mapping, Spec)) or not hasattr(result, "__iter__"):
        raise ConfigError(f"{name} returned a {type(result).__name__}: it must return a pipeline or dataset")
    return result


def load(
    urls: str | os.PathLike[str] | Mapping[str, Any] | Spec, storage_options: StorageOptions = NOTHING_GIVEN
) -> Spec:
    """The specification in a file, at a URL, or in a dict. ``storage_options`` are for reading and listing it.

    Relative names of shards mean files beside the specification; those of a local ``datasets:`` are relative to the
    working directory, as WebDataset reads them, and ``$X`` in it is the environment's. What comes from elsewhere
    than this machine (or the program) names neither local files nor ``pipe:`` commands nor variables nor
    ``storage_options``, which might lead credentials elsewhere.

    Raises ConfigError and UrlError that name the line and say what would be right, UnsafeContent for forbidden shards,
    and a StorageError where it cannot be read.
    """
    if isinstance(urls, Spec):
        return urls
    if is_function(urls):
        raise ConfigError(f"{urls} is a function, not a list of sources: spec.call runs it")
    if isinstance(urls, Mapping):
        return _spec(Document("the specification", dict(urls), options=storage_options))
    return _spec(read(os.fspath(urls), storage_options))


@dataclass(frozen=True)
class _Place:
    """How the names of shards are completed: ``prefix + bucket/name``, relative ones behind ``base``."""

    base: str = ""
    prefix: str = ""
    buckets: Any = ()
    environment: bool = False

    def complete(self, text: str, bucket: str) -> str:
        if self.environment:
            text, bucket = _from_environment(text), _from_environment(bucket)
        if bucket and not (scheme(text) or os.path.isabs(text)):
            text = bucket.rstrip("/") + "/" + text
        return "::".join(self._resolve(part) for part in self._parts(self.prefix + text))

    def _parts(self, text: str) -> list[str]:
        return [text] if scheme(text) else text.split("::")

    def _resolve(self, text: str) -> str:
        rooted = scheme(text) or os.path.isabs(text) or text.startswith(("~", "${"))
        if not self.base or rooted or re.fullmatch(r"\w+", text):  # a word before '::' is a link of fsspec's chain
            return text
        base = self.base
        while scheme(base) and (found := re.match(r"(\.\.?)/+", text)):
            text = text[found.end() :]
            if found[1] == ".." and base.count("/") > 3:  # not above scheme://host/
                base = base[:-1].rpartition("/")[0] + "/"
        return base + text


def _from_environment(text: str) -> str:
    """``$X`` and ``${X}``: the environment's ``WDS_X``, else its ``X``, else unchanged."""

    def value(reference: re.Match[str]) -> str:
        name = reference[1] or reference[2]
        ours = environment.variable(f"WDS_{name}")
        return next((v for v in (ours, environment.variable(name)) if v is not None), reference[0])

    return _VARIABLE.sub(value, text)


def _spec(document: Document) -> Spec:
    data = document.data
    if isinstance(data, list) and data:
        if isinstance(data[0], Mapping) and "shards" in data[0]:
            return _mixed(document, (), data, _Place(document.base), "")
        return Spec((_source(document, (), {"shards": data}, _Place(document.base), 0, at=()),))
    if isinstance(data, Mapping):
        if data.get("wids_version", 1) != 1:
            raise document.error(("wids_version",), f"{data['wids_version']!r}: version 1 is known")
        for key in ("dataset", "datasets"):
            if key in data:
                return _of_top_key(document, data, key)
        if "shards" in data or "shardlist" in data:
            known = {*_SHARD_LIST_KEYS, "base"} if "wids_version" in data else _SHARD_LIST_KEYS
            given = {k: v for k, v in data.items() if k not in known}
            source = _source(document, (), given, _Place(_base(document, data)), 0)
            return Spec((source,), source.name)
    what = f"keys {', '.join(map(str, data))}" if isinstance(data, Mapping) and data else f"{data!r:.60}"
    raise document.error((), f"no specification that is known ({what}): {_EXAMPLE}")


def _base(document: Document, data: Mapping[str, Any]) -> str:
    """What names are relative to; an index may say so itself, as for `shardindex.load_index`."""
    if "wids_version" not in data or not data.get("base"):
        return document.base
    return merge_url(document.base, _text(document, ("base",), data["base"])).rstrip("/") + "/"


def _of_top_key(document: Document, data: Mapping[str, Any], key: str) -> Spec:
    known = {key, "name", "prefix", "buckets", *_SHARD_LIST_KEYS}
    for other in data:
        if other not in known:
            raise document.error(
                (other,), f"{other!r} means nothing here; beside {key!r} stand {', '.join(sorted(known - {key}))}, "
                f"and what concerns one source stands beside its `shards:`"
            )  # fmt: skip
    sample = key == "datasets" and document.trusted
    prefix = _text(document, ("prefix",), data.get("prefix", ""))
    place = _Place(
        base="" if sample else document.base,
        prefix=_from_environment(prefix) if sample else prefix,
        buckets=data.get("buckets", ()),
        environment=sample,
    )
    return _mixed(document, (key,), data[key], place, _text(document, ("name",), data.get("name", "")))


def _mixed(document: Document, path: tuple[str | int, ...], given: Any, place: _Place, name: str) -> Spec:
    if not isinstance(given, list) or not given:
        raise document.error(path, f"{given!r:.60} is not a list of sources: write `- shards: …` for each")
    sources = tuple(_source(document, (*path, i), one, place, i) for i, one in enumerate(given))
    if not any(source.weight for source in sources):
        raise document.error(path, "every weight is 0: one source at least has to have a share")
    return Spec(sources, name)


def _source(
    document: Document,
    path: tuple[str | int, ...],
    given: Any,
    place: _Place,
    index: int,
    at: tuple[str | int, ...] | None = None,
) -> SpecSource:
    """One source; ``at`` is where its shards stand, where that is not under a key of its own."""
    if not isinstance(given, Mapping):
        raise document.error(path, f"{given!r:.60} is not a source: write `- shards: …`, and its other keys below it")
    key = "shards" if "shards" in given else "shardlist"
    if key not in given:
        raise document.error(path, f"a source without shards ({', '.join(map(str, given))}): it needs `shards: …`")
    bucket = _bucket(document, path, given.get("buckets", place.buckets))
    where = (*path, key) if at is None else at
    document = _with_options(document, path, given)
    urls, counted, counts = _shards(document, where, given[key], place, bucket)
    resample = _resample(document, (*path, "resample"), given.get("resample"))
    choose = _count(document, (*path, "choose"), given.get("choose"), least=-1)
    if choose is not None and choose > len(urls):
        raise document.error((*path, "choose"), f"{choose} of {len(urls)} shards: no more can be chosen than there are")
    if choose and choose > 0 and resample:
        raise document.error((*path, "choose"), "stands beside `resample`: draw with replacement or without, not both")
    chosen = max(0, choose or 0)
    read = chosen or (resample if resample is not True and resample else len(urls))
    stated = _count(document, (*path, "nsamples"), given.get("nsamples"))
    weight = given.get("weight", read)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= sys.float_info.max:
        raise document.error((*path, "weight"), f"{weight!r:.60} is not a weight: write a number from 0 on")
    document.tell_of_misspelt(path, given, _SOURCE_KEYS)
    name = _text(document, (*path, "name"), given.get("name", _default_name(given[key], bucket, index)))
    return SpecSource(
        name=name,
        urls=tuple(urls),
        weight=weight,
        fields=_fields(document, (*path, "extensions"), given.get("extensions")),
        metadata={k: v for k, v in given.items() if k not in _SOURCE_KEYS},
        nsamples=counted if stated is None else stated,
        resample=resample,
        choose=chosen,
        counts=counts,
        storage_options=document.options,
    )


def _with_options(document: Document, path: tuple[str | int, ...], given: Mapping[str, Any]) -> Document:
    """The document as one source sees it: with the ``storage_options`` that it names."""
    if "storage_options" not in given:
        return document
    if not document.trusted:
        raise document.error(
            (*path, "storage_options"), "a fetched specification may not say where credentials go: give them to "
            "WebDataset(storage_options=…), or save it to a file and name that", UnsafeContent,
        )  # fmt: skip
    try:
        return replace(document, options=StorageOptions(given["storage_options"]))
    except ConfigError as exn:
        raise document.error((*path, "storage_options"), str(exn)) from exn


def _default_name(shards: Any, bucket: str, index: int) -> str:
    """WebDataset's ``@bucket``, else the pattern of the shards, else its number."""
    if bucket:
        return "@" + redact(bucket)
    return redact(shards) if isinstance(shards, str) else f"source {index}"


def _shards(
    document: Document, path: tuple[str | int, ...], given: Any, place: _Place, bucket: str
) -> tuple[list[str], int | None, dict[str, int]]:
    """The URLs, how many samples they hold where every entry tells, and how many each does where its entry tells."""
    entries = given if isinstance(given, list) else [given]
    if not entries:
        raise document.error(path, "an empty list of shards: name at least one")
    urls: list[str] = []
    total: int | None = 0
    counts: dict[str, int] = {}
    for i, entry in enumerate(entries):
        here = (*path, i) if isinstance(given, list) else path
        url, count = entry, None
        if isinstance(entry, Mapping):
            if "url" not in entry:
                raise document.error(here, f"a shard without `url` ({', '.join(map(str, entry))})")
            url, count = entry["url"], _count(document, (*here, "nsamples"), entry.get("nsamples"))
            here = (*here, "url")
        found = _urls(document, here, url, place, bucket)
        urls += found
        total = None if total is None or count is None else total + count
        if count is not None and len(found) == 1:
            counts[found[0]] = count
    return urls, total, counts


def _urls(document: Document, path: tuple[str | int, ...], given: Any, place: _Place, bucket: str) -> list[str]:
    from wds_async.storage.listing.expand import expand_listed  # noqa: PLC0415 (asyncio)

    if isinstance(given, os.PathLike):
        return expand_listed(given, document.options)  # of a dict: the program's own
    if not isinstance(given, str) or not given.strip():
        raise document.error(path, f"{given!r:.60} is not the name of a shard: write a URL or a path, as text")
    text = place.complete(given, bucket)
    try:
        if document.trusted:
            return expand_listed(text, document.options)
        _refuse_large(document, path, text)
        patterns = expand_urls(text, files=False)
        _refuse_unsafe(document, path, patterns)  # before anything is listed
        found = expand_listed(patterns, document.options)
    except UrlError as exn:
        raise document.error(path, str(exn), UrlError) from exn
    _refuse_unsafe(document, path, found)
    return found


def _refuse_large(document: Document, path: tuple[str | int, ...], text: str) -> None:
    if "${" in text:
        raise document.error(
            path, "reads a variable of this machine, which a fetched specification may not: save it to a file and name "
            "that, or write the URL out", UnsafeContent,
        )  # fmt: skip
    size = math.prod(abs(int(b) - int(a)) + 1 for a, b in _RANGE.findall(text))
    if size > _MAX_RANGE:
        raise document.error(path, f"{size} shards: more than {_MAX_RANGE} are not taken from elsewhere", UnsafeContent)


def _refuse_unsafe(document: Document, path: tuple[str | int, ...], urls: list[str]) -> None:
    """Of what was fetched, names of files and commands, also what a second expansion might make one."""
    for url in urls:
        document.refuse_local(path, url)
        try:
            expanded = "${" not in url and expand_urls(url) == [url]
        except UrlError:
            expanded = False
        if not expanded:
            raise document.unsafe(path, url)


def _bucket(document: Document, path: tuple[str | int, ...], given: Any) -> str:
    buckets = [given] if isinstance(given, str) else given
    if not isinstance(buckets, (list, tuple)) or len(buckets) > 1 or not all(isinstance(b, str) for b in buckets):
        raise document.error(path, f"buckets: {given!r:.60} is not one bucket: write `buckets: gs://bucket/folder`")
    return buckets[0] if buckets else ""


def _resample(document: Document, path: tuple[str | int, ...], given: Any) -> bool | int:
    if isinstance(given, bool):
        return given
    return max(0, _count(document, path, given, least=-1) or 0) or False


def _count(document: Document, path: tuple[str | int, ...], given: Any, least: int = 0) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise document.error(path, f"{given!r} is not a count: write a whole number from 0 on")
    return given


def _text(document: Document, path: tuple[str | int, ...], given: Any) -> str:
    if isinstance(given, (dict, list)) or given is None:
        raise document.error(path, f"{given!r:.60} is not text")
    return str(given)


def _fields(document: Document, path: tuple[str | int, ...], given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = given.split(";") if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n.strip() for n in names):
        raise document.error(path, f"{given!r:.60} names no fields: write `extensions: jpg;json` or a list")
    return tuple(name.strip().removeprefix(".").lower() for name in names)


@dataclass(frozen=True, slots=True)
class SpecSource:
    """One source of a mix.

    ``urls``: its shards, expanded.
    ``weight``: its share in the mix, in any scale; by default the number of shards it reads an epoch. 0 leaves it out.
    ``fields``: the fields that its samples keep beside ``__…__``; None keeps all.
    ``metadata``: its other keys.
    ``nsamples``: samples of all its shards, where that is stated; ``counts``: those of single shards, by URL.
    ``resample``: True draws its shards with replacement and without end; a number draws so many each epoch.
    ``choose``: so many of its shards each epoch, without replacement; 0 for all.
    ``storage_options``: those of its stores' clients, over what the dataset was given.
    """

    name: str
    urls: tuple[str, ...]
    weight: float
    fields: tuple[str, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    nsamples: int | None = None
    resample: bool | int = False
    choose: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    storage_options: StorageOptions = NOTHING_GIVEN


@dataclass(frozen=True, slots=True)
class Spec:
    """The sources of a dataset, in the order of the specification."""

    sources: tuple[SpecSource, ...]
    name: str = ""

    @property
    def nsamples(self) -> int | None:
        """Samples of an epoch, None where a source does not state its own."""
        counts = [source.nsamples for source in self.sources if source.weight]
        known = [n for n in counts if n is not None]
        whole = not any(source.resample or source.choose for source in self.sources if source.weight)
        return sum(known) if whole and len(known) == len(counts) else None
