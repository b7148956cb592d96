"""The steps from shards to samples as separate stages, for programs that put their own between them.

``group_by_keys(tar_file_expander(url_opener(shards)))`` is what `samples.tarfile_samples` does at once, and faster.
The items are WebDataset's: ``{"url": …, "stream": file}`` for a shard, and ``{"fname": …, "data": bytes, "__url__":
…}`` for a member.
"""

from __future__ import annotations

import io
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from wds_async import config, world
from wds_async.errors import DuplicateField, UrlError, WdsError
from wds_async.handlers import Handler, reraise_exception
from wds_async.reading.url_files import ShardFile, gopen
from wds_async.redact import redact
from wds_async.tar.decompress import plain
from wds_async.tar.group import SKIP_META, Keys, admission, base_plus_ext, complete, expected, key_behind, name_behind
from wds_async.tar.parse import Read, members
from wds_async.transfer.reader import open_shards

__all__ = [
    "EndOfShard",
    "Ended",
    "ShardOutcome",
    "base_plus_ext",
    "group_by_keys",
    "guarded",
    "meta_prefix",
    "meta_suffix",
    "tar_file_expander",
    "tar_file_iterator",
    "url_opener",
    "valid_sample",
]

Item = dict[str, Any]

meta_prefix = "__"
meta_suffix = "__"

_PIECE_BYTES = 256 << 10


def valid_sample(sample: Any) -> bool:
    """Return True for a dict with something in it and no true ``__bad__``."""
    return isinstance(sample, dict) and bool(sample) and not sample.get("__bad__", False)


class EndOfShard(Item):
    """The item behind the members of a shard: an empty dict whose items read like a member without a name.

    WebDataset 1.0.2 puts ``{}`` there, so that a loop that knows of it (``if item == {}``) can end the sample; older
    loops, which read ``item["fname"]`` of everything, broke on it (webdataset#384). Here these find a name that has
    no key, and pass over it. ``broken``: the shard was damaged, or could not be read to its end; ``last_member``
    is the name in the last header that was read before, None where it is not known.
    """

    def __init__(self, url: str = "", broken: bool = False, last_member: str | None = None) -> None:
        super().__init__()
        self.url = url
        self.broken = broken
        self.last_member = last_member

    def __missing__(self, key: str) -> Any:
        return {"fname": "", "data": b"", "__url__": self.url}[key]


_END = EndOfShard()


def url_opener(data: Iterable[Item], handler: Handler = reraise_exception, **kw: Any) -> Iterator[Item]:
    """Yield each dict of ``data``, which has a ``url``, with the opened file as its ``stream``.

    The files are read ahead by the engine, many shards at once, within the byte budget; one that is left before its
    end is fetched again if it is read later. With ``kw``, which are those of `gopen`, shards are opened one by one. An
    error of a shard's beginning goes to ``handler``: True passes over the shard, False ends here.
    """
    if kw:
        yield from _opened_singly(data, handler, kw)
        return
    ahead: deque[Item] = deque()

    def shards() -> Iterator[Item]:
        for sample in data:
            if not isinstance(sample, dict) or "url" not in sample:
                raise UrlError(f'a shard is a dict with a "url", not {sample!r:.80}')
            ahead.append(sample)
            yield sample

    setting = config.transfer_config(workers=world.place().num_workers)
    with open_shards(shards(), config=setting) as reader:
        for stream in reader:
            file = ShardFile(stream.url, stream)
            sample = ahead.popleft()
            try:
                buffered = io.BufferedReader(file)
                buffered.peek(1)
                sample["stream"] = buffered
                yield sample
            except Exception as exn:
                if handler(exn):
                    continue
                return
            finally:
                file.leave()


def _opened_singly(data: Iterable[Item], handler: Handler, kw: dict[str, Any]) -> Iterator[Item]:
    for sample in data:
        try:
            sample["stream"] = gopen(sample["url"], **kw)
        except Exception as exn:
            if handler(_named(exn, sample["url"])):
                continue
            return
        yield sample


def tar_file_iterator(
    fileobj: Any,
    skip_meta: str | None = SKIP_META,
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | dict[str, Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[Item]:
    """Yield ``{"fname": …, "data": bytes}`` for every regular file of a tar (plain or compressed) in ``fileobj``.

    ``fileobj`` has a ``read`` or ``readinto``. Names that match ``skip_meta`` are passed over, the others renamed, then
    selected. What these functions raise goes to ``handler``: True goes on with the next member, False ends here. Damage
    goes there too, and ends here either way.
    """
    extra: Item = {}
    if isinstance(select_files, dict):
        warnings.warn(
            "tar_file_iterator's `info` is deprecated and removed in 1.0; add to the items what they need yourself",
            DeprecationWarning,
            stacklevel=2,
        )
        extra, select_files = select_files, None
    admit = _admission(skip_meta, select_files, rename_files)
    return _items(fileobj, str(getattr(fileobj, "name", fileobj)), admit, ShardOutcome(handler), extra)


def tar_file_expander(
    data: Iterable[Item],
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
    eof_value: Any = _END,
) -> Iterator[Item]:
    """Yield the members of the shards in ``data`` (from `url_opener`): ``{"fname": …, "data": bytes, "__url__": …}``,
    with ``__local_path__`` where the shard's dict has a ``local_path``.

    ``eof_value`` follows each shard, or nothing where it is None. The default, an `EndOfShard`, tells loops of any age
    that a shard is over, and whether it broke. Streams are closed when they are through. An error goes to ``handler``:
    True goes on with the next shard (or member, where ``select_files`` or ``rename_files`` raised it), False ends here.
    """
    admit = _admission(SKIP_META, select_files, rename_files)
    for source in data:
        outcome = ShardOutcome(handler)
        if not isinstance(source, dict) or "stream" not in source:
            if outcome(UrlError(f'an opened shard is a dict with "url" and "stream", not {source!r:.80}')):
                continue
            return
        url, stream = source["url"], source["stream"]
        extra = {"__url__": url}
        if source.get("local_path") is not None:
            extra["__local_path__"] = source["local_path"]
        try:
            yield from _items(stream, url, admit, outcome, extra)
        finally:
            if hasattr(stream, "close"):
                stream.close()
        if outcome.stop and outcome.broke is None:
            return
        if isinstance(eof_value, EndOfShard):
            behind = None if outcome.broke is None else name_behind(outcome.broke, rename_files)
            yield EndOfShard(url, outcome.broke is not None, behind)
        elif eof_value is not None:
            yield eof_value
        if outcome.stop:
            return


def group_by_keys(
    data: Iterable[Item],
    keys: Keys = base_plus_ext,
    lcase: bool = True,
    suffixes: Collection[str] | None = None,
    handler: Handler | None = reraise_exception,
    *,
    expect: Collection[str] | None = None,
) -> Iterator[Item]:
    """Yield the samples that the members in ``data`` (from `tar_file_expander`) make: those of one key that stand
    together in one shard.

    ``keys`` splits a name into key and field; ``lcase`` lower-cases fields; with ``suffixes`` only these are kept. A
    duplicate field (`DuplicateField`) and what ``keys`` raises go to ``handler``: True drops the member, False yields
    the sample as it is and ends here. The last sample of a shard that broke is dropped, unless the header of another
    sample came behind it. A sample that lacks a field of ``expect`` (``"jpg;png"``: one of the two) is `MissingField`:
    True drops it, False ends here. ConfigError for names in ``expect`` that no sample can have.
    """
    handler = handler or reraise_exception
    wanted = expected(expect, lcase, suffixes)
    samples = _grouped(data, keys, lcase, suffixes, handler)
    return complete(samples, wanted, handler) if wanted else samples


def _grouped(
    data: Iterable[Item], keys: Keys, lcase: bool, suffixes: Collection[str] | None, handler: Handler
) -> Iterator[Item]:
    sample: Item | None = None
    for item in data:
        try:
            if not item:
                if sample is not None and getattr(item, "broken", False):
                    whole = key_behind(getattr(item, "last_member", None), keys) not in (None, sample["__key__"])
                    sample = sample if whole else None
                if sample is not None and valid_sample(sample):
                    yield sample
                sample = None
                continue
            name, url = item["fname"], item["__url__"]
            key, field = keys(name)
            if key is None or field is None:
                continue
            if lcase:
                field = field.lower()
            if sample is None or key != sample["__key__"] or url != sample["__url__"]:
                if sample is not None and valid_sample(sample):
                    yield sample
                sample = {"__key__": key, "__url__": url}
            if field in sample:
                raise DuplicateField(f"{redact(url)}: {name!r} gives sample {key!r} the field {field!r} again")
            if suffixes is None or field in suffixes:
                sample[field] = item["data"]
            if item.get("__local_path__") is not None:
                sample["__local_path__"] = item["__local_path__"]
        except Exception as exn:
            if not handler(exn):
                break
    if sample is not None and valid_sample(sample):
        yield sample


class ShardOutcome:
    """The user's handler, and its outcome: ``stop`` after False or an exception of its own; ``broke`` is the error
    that ended the reading of the shard."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.broke: Exception | None = None
        self.stop = False

    def __call__(self, exn: Exception) -> bool:
        self.stop = True
        self.stop = not self.handler(exn)
        return not self.stop


class Ended(Exception):
    """The handler answered False about a member; it is not to be called again."""


def guarded(admit: Callable[[str], str | None], handler: Handler) -> Callable[[str], str | None]:
    """Return ``admit`` (of ``parse.members``) with its errors given to ``handler``: True passes over the member, False
    raises `Ended`."""

    def guard(name: str) -> str | None:
        try:
            return admit(name)
        except Exception as exn:
            exn.add_note(f"in select_files or rename_files, of the member {name!r}")
            if handler(exn):
                return None
            raise Ended from exn

    return guard


def _admission(
    skip_meta: str | None, select_files: Callable[[str], Any] | None, rename_files: Callable[[str], str] | None
) -> Callable[[str], str | None]:
    admit = admission(select_files, rename_files, skip_meta)

    def named(name: str) -> str | None:
        # Of names without a folder these say something about the shard, whatever ``skip_meta`` is.
        if name.startswith(meta_prefix) and name.endswith(meta_suffix) and "/" not in name:
            return None
        return admit(name)

    return named


def _items(
    fileobj: Any, url: str, admit: Callable[[str], str | None], outcome: ShardOutcome, extra: Item
) -> Iterator[Item]:
    try:
        unpacked, required = plain(_pieces(fileobj), url), getattr(getattr(fileobj, "raw", None), "is_open_ended", None)
        for name, data, _ in members(unpacked, url, admit=guarded(admit, outcome), end_required=required):
            yield {"fname": name, "data": data, **extra}
    except Ended:
        return
    except Exception as exn:
        if outcome.stop:  # what the handler itself raised, between two members
            raise
        outcome.broke = exn
        outcome(_named(exn, url))


def _named(exn: Exception, url: str) -> Exception:
    """Return ``exn`` with the shard among its arguments, as in WebDataset; errors of ours name it already."""
    if not isinstance(exn, WdsError):
        exn.args = (*exn.args, redact(url))
    return exn


def _pieces(fileobj: Any) -> Read:
    """Return the reader of ``fileobj``'s pieces, in one buffer where it can fill one."""
    if not hasattr(fileobj, "readinto"):
        return lambda: memoryview(fileobj.read(_PIECE_BYTES) or b"") or None
    buffer = memoryview(bytearray(_PIECE_BYTES))
    # What a buffered file got before an error is lost with it where it goes on until the buffer is full.
    readinto = fileobj.readinto1 if isinstance(fileobj, io.BufferedReader) else fileobj.readinto

    def read() -> memoryview | None:
        count = readinto(buffer)
        return buffer[:count] if count else None

    return read
