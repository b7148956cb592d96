"""Grouping of a shard's members into samples.

A sample is made of adjacent members of one key: ``a/001.jpg`` and ``a/001.cls`` are the fields ``jpg`` and ``cls`` of
the sample ``a/001``. Members of other keys end it, so a shard never has to be held in memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from wds_async.errors import ChecksumMismatch, ConfigError, DuplicateField, MissingField, ShardFormatError
from wds_async.redact import redact
from wds_async.tar.parse import Member

__all__ = [
    "SKIP_META",
    "Keys",
    "RawSample",
    "StoredSample",
    "admission",
    "at_place_of",
    "base_plus_ext",
    "complete",
    "empty_at_place_of",
    "expected",
    "key_behind",
    "key_of",
    "name_behind",
    "samples",
]

Keys = Callable[[str], tuple[str, str] | tuple[None, None]]
"""From a member's name to its key and field, or to two None: it belongs to no sample."""

SKIP_META = r"__[^/]*__($|/)"
"""Members whose name begins so (``__index__``, ``__meta__/info.json``) describe the shard; they are no fields."""

_Sample = TypeVar("_Sample", bound=dict[str, Any])

_skip_meta = re.compile(SKIP_META)
_RECENT = 16384
MAX_FIELDS = 100_000  # of one sample: members without end under one key would fill the memory
_NO_KEY = "\0"  # a prefix that no name of a tar has


class RawSample(dict[str, Any]):
    """A sample with its place in its shard: ``__key__``, ``__url__`` and fields of bytes, or what was made of them.

    Its attributes ``shard`` (URL), ``offset`` (of its first header block, in bytes, in the uncompressed tar) and
    ``stop`` stay through pickling, copying, decoding and renaming; a function that builds a new dictionary loses them.
    ``stop`` is the offset of the next sample's first header, or None for the last sample of its shard. For the last one
    before damage it is the offset of the member that is damaged.
    """

    __slots__ = ("offset", "shard", "stop")

    shard: str
    offset: int
    stop: int | None

    def copy(self) -> RawSample:
        """Return a shallow copy, with ``shard``, ``offset`` and ``stop``."""
        other = type(self)(self)
        other.shard, other.offset, other.stop = self.shard, self.offset, self.stop
        return other


class StoredSample(RawSample):
    """A sample out of a state that had the sample itself, and not its place. It is not read again by its place: that
    does not tell which source of a mix had read it."""

    __slots__ = ()


def at_place_of(sample: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return ``result``, which was made of ``sample``, with its place in the shard if it has one."""
    if type(sample) is not RawSample or type(result) is not dict:
        return result
    placed = empty_at_place_of(sample)
    placed.update(result)
    return placed


def empty_at_place_of(sample: dict[str, Any]) -> dict[str, Any]:
    """Return an empty dict for what is made of ``sample``, with its place in the shard if it has one."""
    if type(sample) is not RawSample:
        return {}
    placed = RawSample()
    placed.shard, placed.offset, placed.stop = sample.shard, sample.offset, sample.stop
    return placed


def base_plus_ext(path: str) -> tuple[str, str] | tuple[None, None]:
    """Return key and field of a member's name: ``a/b.c/001.seg.png`` gives ``("a/b.c/001", "seg.png")``.

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
    """Return the ``admit`` of ``parse.members`` by WebDataset's arguments: names that match ``skip_meta`` (``None``:
    none) are passed over, the others renamed, then selected by their new name."""
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
    keys: Keys = base_plus_ext,
    lcase: bool = True,
    suffixes: Collection[str] | None = None,
    local_path: str | None = None,
    on_error: Callable[[Exception], bool] | None = None,
    on_return: Callable[[str, int], object] | None = None,
    on_cut: Callable[[str, Exception], bool] | None = None,
    drop_first: Callable[[str, int], object] | None = None,
    rename_files: Callable[[str], str] | None = None,
    expect: Sequence[Collection[str]] = (),
) -> Iterator[RawSample]:
    """Yield the samples of one shard.

    ``keys`` splits a name into key and field; fields are lower-cased unless ``lcase`` is False; with
    ``suffixes`` only these fields are kept (a sample may then be left with its key alone). ``local_path``
    becomes ``__local_path__``. Meta members (``SKIP_META``) and names without a field are passed over, and a
    sample with a true ``__bad__`` is dropped.

    A ``DuplicateField``, or what ``keys`` raises, goes to ``on_error``: True drops the member and goes on,
    False yields the sample as it is and ends here; without it the exception is raised. A sample without the fields of
    ``expect`` (from `expected`) is ``MissingField``: True drops it and goes on, False ends here.

    What ``members`` raises is raised. The sample before it is yielded first where it is known to be whole, because the
    last header that was read belongs to another key (see `name_behind`; ``rename_files`` is what ``members`` renamed
    by). ``on_cut(key, exception)`` is called with the key of the sample that the exception cut, which is not yielded,
    unless it returns True. With ``drop_first`` the ``members`` begin behind a gap, so that the first sample may lack
    some: ``drop_first(key, offset)`` is called and that sample is not yielded. ``on_return(key, offset)`` is called
    when a key begins a sample again, behind others, if it came among the last 16384; it costs a small sample 8 %.
    """
    came = _Recent(on_return).came if on_return is not None else None
    grouped = _group(
        members,
        url,
        keys=keys,
        lcase=lcase,
        suffixes=suffixes,
        local_path=local_path,
        on_error=on_error or _raise,
        drops=came if drop_first is None else _first_dropped(drop_first, came),
        is_whole=functools.partial(_is_whole, keys, rename_files, on_cut),
    )
    return complete(grouped, expect, on_error or _raise) if expect else grouped


def expected(
    fields: Collection[str] | None, lcase: bool = True, suffixes: Collection[str] | None = None
) -> tuple[frozenset[str], ...]:
    """Return what every sample must have: for each of ``fields`` the names of which one is enough (``"jpg;png"``).

    Raises ConfigError for what is no collection of names, and for names that no sample can have: not in lower case
    under ``lcase``, or not among ``suffixes``.
    """
    if fields is None:
        return ()
    if isinstance(fields, str) or not all(isinstance(name, str) and name for name in fields):
        raise ConfigError(f'expect={fields!r}: it is a list of field names, as in expect=("jpg;png", "txt")')
    wanted = tuple(frozenset(name.split(";")) for name in fields)
    for names in wanted:
        if not any((not lcase or name == name.lower()) and (suffixes is None or name in suffixes) for name in names):
            why = "fields are in lower case" if suffixes is None else f"only the fields {sorted(suffixes)} are kept"
            raise ConfigError(f"expect: no sample has the field {';'.join(sorted(names))!r}, since {why}")
    return wanted


def complete(
    samples: Iterable[_Sample], expect: Sequence[Collection[str]], on_error: Callable[[Exception], bool]
) -> Iterator[_Sample]:
    """Yield the samples that have the fields of ``expect`` (from `expected`). ``on_error`` is called with the
    MissingField of any other: True drops that sample, False ends here."""
    for sample in samples:
        lacking = [";".join(sorted(names)) for names in expect if sample.keys().isdisjoint(names)]
        if not lacking:
            yield sample
        elif not on_error(_missing_field(sample, ", ".join(lacking))):
            return


def _missing_field(sample: dict[str, Any], lacking: str) -> MissingField:
    shard, offset, key = redact(str(sample.get("__url__"))), getattr(sample, "offset", None), sample.get("__key__")
    where = "" if offset is None else f" at byte {offset}"
    error = MissingField(
        f"{shard}: sample {key!r}{where} lacks {lacking}, which expect= names; it has {_fields_of(sample)}; the shard"
        " was cut between two members of the sample, or written so"
    ).at(shard, offset)
    error.key, error.field = key, lacking
    return error


def _fields_of(sample: dict[str, Any]) -> list[str]:
    return [name for name in sample if not name.startswith("__")][:20]


def name_behind(exn: Exception, rename_files: Callable[[str], str] | None = None) -> str | None:
    """Return the name, as ``rename_files`` makes it, of the last member whose header was read before ``exn`` ended a
    shard. None where it is not known, or describes the shard, or is not to be trusted, as after ChecksumMismatch."""
    name = getattr(exn, "last_member", None)
    if name is None or isinstance(exn, ChecksumMismatch) or _skip_meta.match(name):
        return None
    if rename_files is None:
        return str(name)
    try:
        name = rename_files(name)
    except Exception:  # `exn` is what counts; the member says nothing then
        return None
    return None if _skip_meta.match(name) else name


def key_behind(name: str | None, keys: Keys = base_plus_ext) -> str | None:
    """Return the key of a name from `name_behind`, None where it has none. Samples of other keys are whole."""
    try:
        return None if name is None else keys(name)[0]
    except Exception:  # as above
        return None


def key_of(name: str, keys: Keys = base_plus_ext) -> str | None:
    """Return the key of the sample that a member of this name belongs to; None where it belongs to none."""
    if name.startswith("__") and _skip_meta.match(name):
        return None
    try:
        key, ext = keys(name)
    except Exception:  # `samples` calls it too, and its `on_error`
        return None
    return None if ext is None else key


class _Recent:
    """The keys of the last samples: at least ``_RECENT`` of them, at most twice as many."""

    __slots__ = ("_new", "_old", "_on_return")

    def __init__(self, on_return: Callable[[str, int], object]) -> None:
        self._on_return = on_return
        self._new: set[str] = set()
        self._old: set[str] = set()

    def came(self, key: str, offset: int) -> bool:
        """Note a new sample. Return False: none is dropped for this."""
        new, count = self._new, len(self._new)
        new.add(key)
        if len(new) == count or key in self._old:
            self._on_return(key, offset)
        elif count == _RECENT:
            self._old, self._new = new, set()
        return False


def _group(
    members: Iterable[Member],
    url: str,
    *,
    keys: Keys,
    lcase: bool,
    suffixes: Collection[str] | None,
    local_path: str | None,
    on_error: Callable[[Exception], bool],
    drops: Callable[[str, int], bool] | None,
    is_whole: Callable[[RawSample, Exception], bool],
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
                    if on_error(exn):
                        continue
                    break
                if key is None or ext is None:
                    continue
                if key != sample["__key__"]:
                    if not sample.get("__bad__"):
                        sample.stop = offset
                        yield sample
                    sample = RawSample()
                    sample["__key__"] = key
                    sample["__url__"] = sample.shard = url
                    sample.offset = offset
                    if keys is base_plus_ext:
                        prefix, cut = key + ".", len(key) + 1
                    if drops is not None and drops(key, offset):
                        sample["__bad__"] = True
                field = fields.get(ext) or _field(fields, ext, lcase, sample)
            if field in sample:
                if on_error(_duplicate(url, sample, name, field, offset)):
                    continue
                break
            if suffixes is None or field in suffixes:
                sample[field] = data
            if local_path is not None:
                sample["__local_path__"] = local_path
    except Exception as exn:
        if is_whole(sample, exn):
            yield sample
        raise
    if not sample.get("__bad__"):
        sample.stop = None
        yield sample


def _is_whole(
    keys: Keys,
    rename_files: Callable[[str], str] | None,
    on_cut: Callable[[str, Exception], bool] | None,
    sample: RawSample,
    exn: Exception,
) -> bool:
    """Call ``on_cut`` with the key of the sample that ``exn`` cut: that of the last header, or where it is not known
    ``sample``. Return whether ``sample``, the last one before ``exn``, is to be yielded."""
    key, good = sample["__key__"], not sample.get("__bad__")
    behind = key_behind(name_behind(exn, rename_files), keys)
    whole = behind not in (None, key)
    sample.stop = getattr(exn, "last_header", None) if whole else None
    if on_cut is not None and (whole or good):
        whole = on_cut(behind or key, exn) or whole
    return whole and good


def _first_dropped(
    drop_first: Callable[[str, int], object], came: Callable[[str, int], bool] | None
) -> Callable[[str, int], bool]:
    """Return a callback for each new sample that calls ``drop_first`` and returns True for the first of them."""
    is_first = True

    def drops(key: str, offset: int) -> bool:
        nonlocal is_first
        first, is_first = is_first, False
        if first:
            drop_first(key, offset)
        if came is not None:
            came(key, offset)
        return first

    return drops


def _field(fields: dict[str, str], ext: str, lcase: bool, sample: RawSample) -> str:
    if len(sample) > MAX_FIELDS:
        shard, key = redact(sample.shard), sample["__key__"]
        why = f"sample {key!r} has more than {MAX_FIELDS:,} fields; are the names of its members right?"
        raise ShardFormatError(f"{shard}: {why}").at(shard, sample.offset)
    if len(fields) >= 4096:  # a shard whose extensions never repeat must not grow this without end
        fields.clear()
    fields[ext] = field = ext.lower() if lcase else ext
    return field


def _raise(exn: Exception) -> bool:
    raise exn


def _duplicate(url: str, sample: RawSample, name: str, field: str, offset: int) -> DuplicateField:
    error = DuplicateField(
        f"{redact(url)}: member {name!r} at byte {offset} gives sample {sample['__key__']!r} the field {field!r}"
        f" again; it has {_fields_of(sample)} (extensions are compared in lower case)"
    )
    error.__dict__.update(key=sample["__key__"], field=field)
    return error.at(redact(url), offset)
