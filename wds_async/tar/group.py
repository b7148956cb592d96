"""From a shard's members to its samples.

A sample is what adjacent members of one key say: ``a/001.jpg`` and ``a/001.cls`` are the fields ``jpg`` and
``cls`` of the sample ``a/001``. Members of other keys end it, so a shard never has to be held in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from wds_async.errors import DuplicateField, ShardFormatError
from wds_async.redact import redact
from wds_async.tar.parse import Member

__all__ = ["SKIP_META", "RawSample", "admission", "base_plus_ext", "samples"]

SKIP_META = r"__[^/]*__($|/)"
"""Members whose name begins so (``__index__``, ``__meta__/info.json``) describe the shard; they are no fields."""

_skip_meta = re.compile(SKIP_META)
_RECENT = 16384
MAX_FIELDS = 100_000
"""Of one sample: members without end under one key would fill the memory."""
_NO_KEY = "\0"  # a prefix that no name of a tar has


class RawSample(dict[str, Any]):
    """A sample as it stands in its shard: ``__key__``, ``__url__`` and fields of bytes.

    Beside the dictionary it knows the ``shard`` (its URL) and the ``offset`` (of its first header block, in
    bytes, in the uncompressed tar). Neither is a key. Both stay through pickling and copying; a stage that
    builds a new dictionary loses them.
    """

    __slots__ = ("offset", "shard")

    shard: str
    offset: int

    def copy(self) -> RawSample:
        """A shallow copy, with ``shard`` and ``offset``."""
        other = RawSample(self)
        other.shard, other.offset = self.shard, self.offset
        return other


def base_plus_ext(path: str) -> tuple[str, str] | tuple[None, None]:
    """Key and field of a member's name: ``a/b.c/001.seg.png`` gives ``("a/b.c/001", "seg.png")``.

    The key ends at the first dot of the last component. A name without one has neither: ``(None, None)``;
    nor has one that begins with its dot, unless the folder it is in has no dot in its own name: WebDataset
    then takes the folder for the key (``a/.jpg`` gives ``("a/", "jpg")``).
    """
    if "/" not in path:
        key, _, ext = path.partition(".")
        return (key, ext) if key and len(key) < len(path) else (None, None)
    slash = path.rfind("/")
    dot = path.find(".", slash + 1)
    if dot < 0:
        return None, None
    if dot == slash + 1 and "." in path[path.rfind("/", 0, slash) + 1 : slash]:
        return None, None
    return path[:dot], path[dot + 1 :]


def admission(
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
    skip_meta: str | None = SKIP_META,
) -> Callable[[str], str | None]:
    """The ``admit`` of ``parse.members`` that WebDataset's three arguments ask for: names that match
    ``skip_meta`` (``None``: none) are passed over, the others renamed, then selected by their new name."""
    meta = re.compile(skip_meta) if skip_meta is not None else None

    def admit(name: str) -> str | None:
        if meta is not None and meta.match(name):
            return None
        if rename_files is not None:
            name = rename_files(name)
        return name if select_files is None or select_files(name) else None

    return admit


def samples(
    members: Iterable[Member],
    url: str,
    *,
    keys: Callable[[str], tuple[str, str] | tuple[None, None]] = base_plus_ext,
    lcase: bool = True,
    suffixes: Collection[str] | None = None,
    local_path: str | None = None,
    on_duplicate: Callable[[Exception], bool] | None = None,
    on_return: Callable[[str, int], object] | None = None,
    on_cut: Callable[[str, Exception], bool] | None = None,
    drop_first: Callable[[str, int], object] | None = None,
) -> Iterator[RawSample]:
    """The samples of one shard.

    ``keys`` splits a name into key and field; fields are lower-cased unless ``lcase`` is False; with
    ``suffixes`` only these fields are kept (a sample may then be left with its key alone). ``local_path``
    becomes ``__local_path__``. Meta members (``SKIP_META``) and names without a field are passed over, and a
    sample with a true ``__bad__`` is dropped.

    A ``DuplicateField``, or what ``keys`` raises, goes to ``on_duplicate``: True drops the member and goes on,
    False yields the sample as it is and ends here; without it the exception is raised. What ``members`` raises
    is raised; the sample that was being put together is not yielded then, and ``on_cut(key, exception)`` is told of it:
    True says that it is whole, so it is yielded and ends the shard. ``drop_first(key, offset)``, where it is given,
    says that ``members`` begin behind a gap: the first sample may lack members, so it is told of and not yielded.
    ``on_return(key, offset)`` is told of a key that begins a sample again, behind others, if it came among the last
    16384; it costs a small sample 8 %.
    """
    return _group(
        members,
        url,
        keys=keys,
        lcase=lcase,
        suffixes=suffixes,
        local_path=local_path,
        on_duplicate=on_duplicate or _raise,
        came=_Recent(on_return).came if on_return is not None else None,
        on_cut=on_cut,
        drop_first=drop_first,
    )


class _Recent:
    """The keys of the last samples: at least ``_RECENT`` of them, at most twice as many."""

    __slots__ = ("_new", "_old", "_tell")

    def __init__(self, tell: Callable[[str, int], object]) -> None:
        self._tell = tell
        self._new: set[str] = set()
        self._old: set[str] = set()

    def came(self, key: str, offset: int) -> None:
        new, count = self._new, len(self._new)
        new.add(key)
        if len(new) == count or key in self._old:
            self._tell(key, offset)
        elif count == _RECENT:
            self._old, self._new = new, set()


def _group(
    members: Iterable[Member],
    url: str,
    *,
    keys: Callable[[str], tuple[str, str] | tuple[None, None]],
    lcase: bool,
    suffixes: Collection[str] | None,
    local_path: str | None,
    on_duplicate: Callable[[Exception], bool],
    came: Callable[[str, int], None] | None,
    on_cut: Callable[[str, Exception], bool] | None,
    drop_first: Callable[[str, int], object] | None,
) -> Iterator[RawSample]:
    sample = RawSample(__key__=None, __bad__=True)  # what there is before the first: nothing to yield
    prefix, cut = _NO_KEY, 0  # what names of the current key begin with; only where it is plain what `keys` does
    fields: dict[str, str] = {}  # one string for each field's name, whatever the number of samples
    try:
        for name, data, offset in members:
            # An extension seen before holds no slash, so it is one here too; any other goes the long way.
            field = fields.get(name[cut:]) if name.startswith(prefix) else None
            if field is None:
                if name.startswith("__") and _skip_meta.match(name):
                    continue
                try:
                    key, ext = keys(name)
                except Exception as exn:
                    if on_duplicate(exn):
                        continue
                    break
                if key is None or ext is None:
                    continue
                if key != sample["__key__"]:
                    if not sample.get("__bad__"):
                        yield sample
                    sample = RawSample()
                    sample["__key__"] = key
                    sample["__url__"] = sample.shard = url
                    sample.offset = offset
                    if keys is base_plus_ext:
                        prefix, cut = key + ".", len(key) + 1
                    if drop_first is not None:
                        _behind(drop_first, sample)
                        drop_first = None
                    if came is not None:
                        came(key, offset)
                field = fields.get(ext) or _field(fields, ext, lcase, sample)
            if field in sample:
                if on_duplicate(_duplicate(url, sample, name, field, offset)):
                    continue
                break
            if suffixes is None or field in suffixes:
                sample[field] = data
            if local_path is not None:
                sample["__local_path__"] = local_path
    except Exception as exn:
        if on_cut is None or sample.get("__bad__") or not on_cut(sample["__key__"], exn):
            raise
    if not sample.get("__bad__"):
        yield sample


def _behind(drop: Callable[[str, int], object], sample: RawSample) -> None:
    """Mark the sample that comes first behind a gap, so that it is not yielded."""
    sample["__bad__"] = True
    drop(sample["__key__"], sample.offset)


def _field(fields: dict[str, str], ext: str, lcase: bool, sample: RawSample) -> str:
    if len(sample) > MAX_FIELDS:
        raise ShardFormatError(
            f"{redact(sample.shard)}: sample {sample['__key__']!r} has more than {MAX_FIELDS:,} fields; are the names"
            " of its members right?"
        ).at(redact(sample.shard), sample.offset)
    if len(fields) >= 4096:  # a shard whose extensions never repeat must not grow this without end
        fields.clear()
    fields[ext] = field = ext.lower() if lcase else ext
    return field


def _raise(exn: Exception) -> bool:
    raise exn


def _duplicate(url: str, sample: RawSample, name: str, field: str, offset: int) -> DuplicateField:
    fields = [key for key in sample if not key.startswith("__")][:20]
    error = DuplicateField(
        f"{redact(url)}: member {name!r} at byte {offset} gives sample {sample['__key__']!r} the field {field!r}"
        f" again; it has {fields} (extensions are compared in lower case)"
    )
    error.__dict__.update(key=sample["__key__"], field=field)
    return error.at(redact(url), offset)
