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
``buckets``, ``resample``, ``choose``); its JSON shard lists (``wids_version`` 1, with ``crc32c`` beside ``nsamples``),
plain lists of shards, and the folder of a job (see `jobs`).
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
from wds_async.errors import ConfigError, UnsafeContent, UrlError, WdsError
from wds_async.redact import redact
from wds_async.shardlists.document import Document, ValuePath, read
from wds_async.shardlists.jobs import is_job_folder, read_job
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.urls import expand_urls, merge_url, scheme

__all__ = ["Spec", "SpecSource", "call", "is_function", "is_specification", "load"]

_FUNCTION = re.compile(r"[A-Za-z_]\w+(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_SUFFIX = re.compile(r"\.(ya?ml|json)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")
_PLAIN = re.compile(r"(?!(?i:file):)[A-Za-z0-9+.-]+://[\w/.=@-]*[A-Za-z0-9]", re.ASCII)
"""URLs that stand for themselves alone: lists of a million shards hold little else."""
_MAX_RANGE = 10**7  # of fetched braces: {0..999999999999} would fill the memory

_SOURCE_KEYS = {"shards", "shardlist", "buckets", "storage_options", "extensions"}
_SOURCE_KEYS |= {"name", "weight", "nsamples", "resample", "choose"}
_SHARD_LIST_KEYS = frozenset(("wids_version", "__kind__"))


@dataclass(frozen=True, slots=True)
class SpecSource:
    """One source of a mix.

    ``urls``: its shards, expanded.
    ``weight``: its share in the mix, in any scale; by default the number of shards it reads an epoch. 0 leaves it out.
    ``fields``: the fields that its samples keep beside ``__…__``; None keeps all.
    ``metadata``: its other keys.
    ``nsamples``: samples of all its shards, where that is stated; ``counts``: those of single shards, by URL;
        ``sizes``: their bytes, likewise, and ``checksums`` their CRC-32C, as eight hexadecimal digits.
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
    sizes: Mapping[str, int] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    storage_options: StorageOptions = NOTHING_GIVEN


@dataclass(frozen=True, slots=True)
class Spec:
    """The sources of a dataset, in the order of the specification."""

    sources: tuple[SpecSource, ...]
    name: str = ""

    @property
    def nsamples(self) -> int | None:
        """Samples of an epoch, None where a source does not state its own."""
        total = 0
        for source in self.sources:
            if source.weight:
                if source.nsamples is None or source.resample or source.choose:
                    return None
                total += source.nsamples
        return total


def is_function(urls: Any) -> bool:
    """Return True for ``"package.module:function"`` where no file is called so."""
    if not isinstance(urls, str) or scheme(urls) or not _FUNCTION.fullmatch(urls):
        return False
    return not os.path.lexists(urls)


def is_specification(urls: Any) -> bool:
    """Return True for a dict, a path or URL that ends in ``.yaml``, ``.yml`` or ``.json``, a job's folder
    (``…/_wds/JOB``), or a function's name."""
    if isinstance(urls, (dict, Spec)) or is_function(urls):
        return True
    name = os.fspath(urls) if isinstance(urls, (str, os.PathLike)) else None
    if not isinstance(name, str):
        return False
    if scheme(name) in ("http", "https"):
        name = re.split(r"[?#]", name, maxsplit=1)[0]
    return _SUFFIX.search(name) is not None or is_job_folder(name)


def call(name: str) -> Any:
    """Return what ``"package.module:function"`` returns: a pipeline, dataset or other iterable of samples.

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
    made = getattr(module, function)
    if isinstance(made, type) or not hasattr(made, "__iter__"):
        made = made()
    if isinstance(made, (str, bytes, Mapping, Spec)) or not hasattr(made, "__iter__"):
        raise ConfigError(f"{name} returned a {type(made).__name__}: it must return a pipeline or dataset")
    return made


def load(
    urls: str | os.PathLike[str] | Mapping[str, Any] | Spec, storage_options: StorageOptions = NOTHING_GIVEN
) -> Spec:
    """Return the specification in a file, at a URL, or in a dict. ``storage_options`` are for reading and listing it.

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
    name = os.fspath(urls)
    return _spec(read_job(name, storage_options) if is_job_folder(name) else read(name, storage_options))


@dataclass(frozen=True)
class _Value:
    """A value in a document, and its path there for errors."""

    document: Document
    path: ValuePath
    data: Any

    def get(self, key: str | int, default: Any = None) -> _Value:
        data = self.data.get(key, default) if isinstance(self.data, Mapping) else self.data[key]
        return _Value(self.document, (*self.path, key), data)

    def error(self, message: str, kind: type[WdsError] = ConfigError) -> WdsError:
        return self.document.error(self.path, message, kind)

    def text(self) -> str:
        if isinstance(self.data, (dict, list)) or self.data is None:
            raise self.error(f"{self.data!r:.60} is not text")
        return str(self.data)

    def count(self, least: int = 0) -> int | None:
        data = self.data
        if data is not None and (isinstance(data, bool) or not isinstance(data, int) or data < least):
            raise self.error(f"{data!r} is not a count: write a whole number from 0 on")
        return data


@dataclass(frozen=True)
class _Names:
    """Rules by which names of shards are completed: ``prefix + bucket/name``, relative ones behind ``base``."""

    base: str = ""
    prefix: str = ""
    buckets: Any = ()
    environment: bool = False

    def complete(self, text: str, bucket: str) -> str:
        if self.environment:
            text, bucket = _from_environment(text), _from_environment(bucket)
        if bucket and not (scheme(text) or os.path.isabs(text)):
            text = bucket.rstrip("/") + "/" + text
        text = self.prefix + text
        return "::".join(self._resolve(part) for part in ([text] if scheme(text) else text.split("::")))

    def _resolve(self, text: str) -> str:
        rooted = scheme(text) or os.path.isabs(text) or text.startswith(("~", "${"))
        if not self.base or rooted or re.fullmatch(r"\w+", text):  # a word before '::' is a link of fsspec's chain
            return text
        base = self.base
        while scheme(base) and (dots := re.match(r"(\.\.?)/+", text)):
            text = text[dots.end() :]
            if dots[1] == ".." and base.count("/") > 3:  # not above scheme://host/
                base = base[:-1].rpartition("/")[0] + "/"
        return base + text


def _from_environment(text: str) -> str:
    """Replace ``$X`` and ``${X}`` by the environment's ``WDS_X``, else its ``X``, else leave them."""

    def value(reference: re.Match[str]) -> str:
        name = reference[1] or reference[2]
        values = (environment.variable(f"WDS_{name}"), environment.variable(name), reference[0])
        return next(value for value in values if value is not None)

    return _VARIABLE.sub(value, text)


def _spec(document: Document) -> Spec:
    data, top, names = document.data, _Value(document, (), document.data), _Names(document.base)
    if isinstance(data, list) and data:
        if isinstance(data[0], Mapping) and "shards" in data[0]:
            return Spec(_sources(top, names))
        return Spec((_source(replace(top, data={}), top, names, 0),))
    if isinstance(data, Mapping):
        if data.get("wids_version", 1) != 1:
            raise top.get("wids_version").error(f"{data['wids_version']!r}: version 1 is known")
        for key in ("dataset", "datasets"):
            if key in data:
                return _with_top_key(top, key)
        if "shards" in data or "shardlist" in data:
            ignored = _SHARD_LIST_KEYS
            if "wids_version" in data:
                ignored |= {"base"}
                if data.get("base"):  # as `index.load_index` reads it
                    names = _Names(merge_url(document.base, top.get("base").text()).rstrip("/") + "/")
            kept = replace(top, data={k: v for k, v in data.items() if k not in ignored})
            source = _source(kept, _shards_of(kept), names, 0)
            return Spec((source,), source.name)
    what = f"keys {', '.join(map(str, data))}" if isinstance(data, Mapping) and data else f"{data!r:.60}"
    example = "a specification holds `dataset:` with a list of `- shards: …`, `datasets:`, or a JSON `shardlist`"
    raise top.error(f"no specification that is known ({what}): {example}")


def _with_top_key(top: _Value, key: str) -> Spec:
    keys = {key, "name", "prefix", "buckets", *_SHARD_LIST_KEYS}
    for other in top.data:
        if other not in keys:
            raise top.get(other).error(
                f"{other!r} means nothing here; beside {key!r} stand {', '.join(sorted(keys - {key}))}, "
                "and what concerns one source stands beside its `shards:`"
            )
    prefix, buckets, names = top.get("prefix", "").text(), top.data.get("buckets", ()), _Names(top.document.base)
    if key == "datasets" and top.document.trusted:
        names = _Names(prefix=_from_environment(prefix), buckets=buckets, environment=True)
    else:
        names = replace(names, prefix=prefix, buckets=buckets)
    return Spec(_sources(top.get(key), names), top.get("name", "").text())


def _sources(value: _Value, names: _Names) -> tuple[SpecSource, ...]:
    if not isinstance(value.data, list) or not value.data:
        raise value.error(f"{value.data!r:.60} is not a list of sources: write `- shards: …` for each")
    items = [value.get(i) for i in range(len(value.data))]
    sources = tuple(_source(item, _shards_of(item), names, i) for i, item in enumerate(items))
    if not any(source.weight for source in sources):
        raise value.error("every weight is 0: one source at least has to have a share")
    return sources


def _shards_of(source: _Value) -> _Value:
    """Return the shards of a source. Raise ConfigError for what is no source."""
    data = source.data
    if not isinstance(data, Mapping):
        raise source.error(f"{data!r:.60} is not a source: write `- shards: …`, and its other keys below it")
    key = "shards" if "shards" in data else "shardlist"
    if key not in data:
        raise source.error(f"a source without shards ({', '.join(map(str, data))}): it needs `shards: …`")
    return source.get(key)


def _source(value: _Value, shards: _Value, names: _Names, index: int) -> SpecSource:
    data, bucket = value.data, _bucket(value.get("buckets", names.buckets))
    if "storage_options" in data:
        document = replace(value.document, options=_options(value.get("storage_options")))
        shards = replace(shards, document=document)
    listed = _shards(shards, names, bucket)
    urls = listed.urls
    drawn, chosen = value.get("resample"), value.get("choose")
    resample = drawn.data if isinstance(drawn.data, bool) else max(0, drawn.count(least=-1) or 0) or False
    choose = max(0, chosen.count(least=-1) or 0)
    if choose > len(urls):
        raise chosen.error(f"{choose} of {len(urls)} shards: no more can be chosen than there are")
    if choose and resample:
        raise chosen.error("stands beside `resample`: draw with replacement or without, not both")
    stated = value.get("nsamples").count()
    weight = data.get("weight", choose or (len(urls) if isinstance(resample, bool) else resample))
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= sys.float_info.max:
        raise value.get("weight").error(f"{weight!r:.60} is not a weight: write a number from 0 on")
    value.document.warn_of_misspelt(value.path, data, _SOURCE_KEYS)
    default = f"@{redact(bucket)}" if bucket else f"source {index}"  # the former is WebDataset's
    if not bucket and isinstance(shards.data, str):
        default = redact(shards.data)
    return SpecSource(
        name=value.get("name", default).text(),
        urls=tuple(listed.urls),
        weight=weight,
        fields=_fields(value.get("extensions")),
        metadata={k: v for k, v in data.items() if k not in _SOURCE_KEYS},
        nsamples=listed.total if stated is None else stated,
        resample=resample,
        choose=choose,
        counts=listed.counts,
        sizes=listed.sizes,
        checksums=listed.checksums,
        storage_options=shards.document.options,
    )


def _options(value: _Value) -> StorageOptions:
    if not value.document.trusted:
        raise value.error(
            "a fetched specification may not say where credentials go: give them to WebDataset(storage_options=…), or "
            "save it to a file and name that",
            UnsafeContent,
        )
    try:
        return StorageOptions(value.data)
    except ConfigError as exn:
        raise value.error(str(exn)) from exn


@dataclass
class _Listed:
    """The shards of one source: ``total`` are the samples of all, None where an entry does not state its own."""

    urls: list[str] = field(default_factory=list)
    total: int | None = 0
    counts: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)


def _shards(value: _Value, names: _Names, bucket: str) -> _Listed:
    """Return the shards in ``value``, with what its entries state of single shards."""
    entries = [value.get(i) for i in range(len(value.data))] if isinstance(value.data, list) else [value]
    if not entries:
        raise value.error("an empty list of shards: name at least one")
    listed = _Listed()
    for entry in entries:
        count = size = crc32c = None
        if isinstance(entry.data, Mapping):
            if "url" not in entry.data:
                raise entry.error(f"a shard without `url` ({', '.join(map(str, entry.data))})")
            count, size, crc32c = entry.get("nsamples").count(), entry.data.get("filesize"), _crc32c(entry)
            entry = entry.get("url")  # noqa: PLW2901 (the URL of the entry)
        urls = _urls(entry, names, bucket)
        listed.urls += urls
        listed.total = None if listed.total is None or count is None else listed.total + count
        if len(urls) != 1:
            continue
        if count is not None:
            listed.counts[urls[0]] = count
        if type(size) is int and size > 0:
            listed.sizes[urls[0]] = size
        if crc32c is not None:
            listed.checksums[urls[0]] = crc32c
    return listed


def _crc32c(entry: _Value) -> str | None:
    text = entry.data.get("crc32c")
    if text is not None and not (isinstance(text, str) and re.fullmatch("[0-9a-fA-F]{8}", text)):
        raise entry.get("crc32c").error(f"{text!r:.60} is no CRC-32C: write eight hexadecimal digits, as text")
    return text


def _urls(value: _Value, names: _Names, bucket: str) -> list[str]:
    from wds_async.storage.listing.expand import expand_listed  # noqa: PLC0415 (asyncio)

    name, document = value.data, value.document
    if isinstance(name, os.PathLike):
        return expand_listed(name, document.options)  # of a dict: the program's own
    if not isinstance(name, str) or not name.strip():
        raise value.error(f"{name!r:.60} is not the name of a shard: write a URL or a path, as text")
    text = names.complete(name, bucket)
    if _PLAIN.fullmatch(text):
        document.refuse_local(value.path, text)
        return [text]
    try:
        if document.trusted:
            return expand_listed(text, document.options)
        _refuse_large(value, text)
        patterns = expand_urls(text, files=False)
        _refuse_unsafe(value, patterns)  # before anything is listed
        urls = expand_listed(patterns, document.options)
    except UrlError as exn:
        raise value.error(str(exn), UrlError) from exn
    _refuse_unsafe(value, urls)
    return urls


def _refuse_large(value: _Value, text: str) -> None:
    if "${" in text:
        raise value.error(
            "reads a variable of this machine, which a fetched specification may not: save it to a file and name "
            "that, or write the URL out",
            UnsafeContent,
        )
    size = math.prod(abs(int(b) - int(a)) + 1 for a, b in _RANGE.findall(text))
    if size > _MAX_RANGE:
        raise value.error(f"{size} shards: more than {_MAX_RANGE} are not taken from elsewhere", UnsafeContent)


def _refuse_unsafe(value: _Value, urls: list[str]) -> None:
    """Refuse names of files and commands, and what a second expansion might make one."""
    for url in urls:
        value.document.refuse_local(value.path, url)
        try:
            expanded = "${" not in url and expand_urls(url) == [url]
        except UrlError:
            expanded = False
        if not expanded:
            raise value.document.unsafe(value.path, url)


def _bucket(value: _Value) -> str:
    buckets = [value.data] if isinstance(value.data, str) else value.data
    if not isinstance(buckets, (list, tuple)) or len(buckets) > 1 or not all(isinstance(b, str) for b in buckets):
        raise value.error(f"{value.data!r:.60} is not one bucket: write `buckets: gs://bucket/folder`")
    return buckets[0] if buckets else ""


def _fields(value: _Value) -> tuple[str, ...] | None:
    if value.data is None:
        return None
    names = value.data.split(";") if isinstance(value.data, str) else value.data
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) and n.strip() for n in names):
        raise value.error(f"{value.data!r:.60} names no fields: write `extensions: jpg;json` or a list")
    return tuple(name.strip().removeprefix(".").lower() for name in names)
