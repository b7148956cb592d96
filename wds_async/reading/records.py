"""Streams of records: files that hold CBOR (RFC 8949) or MessagePack objects one after another, read by the engine.

::

    wds.DataPipeline(wds.SimpleShardList("x-{000..099}.cbors"), wds.split_by_worker, wds.cbors_to_samples())

Files may be compressed (gzip, bzip2, xz, zstd, recognised by their content). Every object is a sample as it is: it gets
no ``__key__`` and no ``__url__``. A map is a `RawSample`, which knows where it stands in its file.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from wds_async import config, packages, world
from wds_async.errors import (
    CorruptShard,
    CostLimitReached,
    FieldTooLarge,
    ReaderClosed,
    ShardFormatError,
    TruncatedShard,
)
from wds_async.handlers import Handler, reraise_exception
from wds_async.observe.ledger import EpochLog, Ledger
from wds_async.reading.position import ReadState
from wds_async.reading.stage import ReadingStage
from wds_async.redact import redact
from wds_async.stages import Traits, stage_maker
from wds_async.tar.decompress import hands_through, plain
from wds_async.tar.group import RawSample
from wds_async.tar.source import Read
from wds_async.transfer.reader import ShardReader, ShardStream, open_shards
from wds_async.transfer.stats import Board, Counters

__all__ = [
    "MAX_OBJECT_BYTES",
    "RecordStage",
    "cbors2_to_samples",
    "cbors_to_samples",
    "msgpacks_to_samples",
    "record_samples",
]

MAX_OBJECT_BYTES = 256 << 20
"""The largest object that is taken, in bytes as it is encoded, unless ``max_object_bytes`` is given."""

_ADVICE = "write or copy the file again"

E = TypeVar("E", bound=ShardFormatError)

Objects = Callable[..., Iterator[tuple[Any, int, int]]]
"""Decoder of a file, ``(read, url, limit, base)``: it yields the objects, each with its offset and that of the byte
behind it. ``limit`` is the most bytes of an object, and ``base`` the offset of the first byte that ``read`` gives."""


def _cbor_objects(read: Read, url: str, limit: int, base: int = 0) -> Iterator[tuple[Any, int, int]]:
    """Decode what has arrived, and an object that is not all there once more when twice as much has."""
    cbor2 = _installed("cbor2")
    data = _gather(read, 1)
    while data:
        stream = io.BytesIO(data)
        decoder = cbor2.CBORDecoder(stream)
        good = 0
        try:
            while good < len(data):
                sample = decoder.decode()
                start, good = good, stream.tell()
                if good - start > limit:
                    raise _too_large(url, base + start, limit)
                yield sample, base + start, base + good
        except cbor2.CBORDecodeError as exn:
            cause: BaseException | None = exn  # inside a tag, the end of the data is the cause of another error
            while cause is not None and not isinstance(cause, cbor2.CBORDecodeEOF):
                cause = cause.__cause__
            if cause is None:
                raise _corrupt(url, base + good, exn) from exn
        rest = data[good:]
        base += good
        if len(rest) > limit:
            raise _too_large(url, base, limit)
        more = _gather(read, min(max(1, len(rest)), limit + 1 - len(rest)))
        if rest and not more:
            raise _truncated(url, base, base + len(rest))
        data = rest + more


def _gather(read: Read, size: int) -> bytes:
    """Return the next pieces, ``size`` bytes or more, fewer only at the end."""
    gathered = io.BytesIO()
    while gathered.tell() < size and (piece := read()) is not None:
        gathered.write(piece)
    return gathered.getvalue()


def _msgpack_objects(read: Read, url: str, limit: int, base: int = 0) -> Iterator[tuple[Any, int, int]]:
    msgpack = _installed("msgpack")
    fed = good = base  # offsets behind all bytes, and behind whole objects
    # What is fed at once waits in the buffer together with what was there.
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=limit + (4 << 20))
    while (piece := read()) is not None:
        fed += len(piece)
        try:
            unpacker.feed(piece)
            for sample in unpacker:
                start, good = good, base + unpacker.tell()
                if good - start > limit:
                    raise _too_large(url, start, limit)
                yield sample, start, good
        except msgpack.BufferFull as exn:
            raise _too_large(url, good, limit) from exn
        except FieldTooLarge:
            raise
        except (msgpack.UnpackException, ValueError, TypeError) as exn:  # the last: a map whose key is a list
            raise _corrupt(url, good, exn) from exn
        if fed - good > limit:
            raise _too_large(url, good, limit)
    if good < fed:
        raise _truncated(url, good, fed)


def _installed(module: str) -> Any:
    return packages.optional(module, "reading these records", "formats")


def _corrupt(url: str, offset: int, why: BaseException) -> CorruptShard:
    return _error(CorruptShard, url, offset, f"cannot be decoded: {type(why).__name__}: {why}; {_ADVICE}")


def _truncated(url: str, offset: int, end: int) -> TruncatedShard:
    return _error(TruncatedShard, url, offset, f"is cut by the end of the file at byte {end}; {_ADVICE}")


def _too_large(url: str, offset: int, limit: int) -> FieldTooLarge:
    return _error(FieldTooLarge, url, offset, f"is damaged, or larger than max_object_bytes={limit}")


def _error(kind: type[E], url: str, offset: int, what: str) -> E:
    return kind(f"{redact(url)}: the object at byte {offset} {what}").at(redact(url), offset)


def record_samples(
    src: Iterable[Any],
    objects: Objects,
    handler: Handler = reraise_exception,
    transfer: Mapping[str, Any] | None = None,
    max_object_bytes: int = MAX_OBJECT_BYTES,
    *,
    counters: Counters | None = None,
    opened: Callable[[ShardReader], Any] | None = None,
    ledger: EpochLog | None = None,
    state: ReadState | None = None,
) -> Iterator[Any]:
    """Yield the objects of the files in ``src`` (``{"url": …}`` or URLs), in order, read ahead within the byte budget.

    ``objects`` decodes a file. ``transfer`` sets fields of `config.TransferConfig` over the environment. An object
    takes up to twice its size in memory while it arrives; ``max_object_bytes`` is the most that it may have.

    An error of a file goes to ``handler``: True goes on with the next file, False ends the stream; what passes is noted
    in the `ledger`. Beside those of the engine these are CorruptShard, TruncatedShard and FieldTooLarge, with the byte
    where the object begins (after decompression), and MissingExtra without the package cbor2 or msgpack.
    """
    setting = config.transfer_config(workers=world.place().num_workers, **(transfer or {}))
    ledger = ledger or Ledger(Board()).begin(counters)
    state = state or ReadState()
    opening = functools.partial(open_shards, state.shards(src), config=setting, stats=ledger.counters)
    return _read(opening, opened, functools.partial(objects, limit=max_object_bytes), handler, ledger, state)


record_samples.traits = Traits(handler="handler", state=ReadState)  # type: ignore[attr-defined]


def _read(
    opening: Callable[[], ShardReader],
    opened: Callable[[ShardReader], Any] | None,
    objects: Objects,
    handler: Handler,
    ledger: EpochLog,
    state: ReadState,
) -> Iterator[Any]:
    counters = ledger.counters
    try:
        with opening() as reader:
            if opened is not None:
                opened(reader)
            for stream in reader:
                n, url, end = 0, stream.url, None
                file = RecordFile(stream)
                state.begin(file, stream.number)
                try:
                    for sample, start, stop in file.wanted(objects):
                        if n == 0:
                            end = file.end
                        n += 1
                        if type(sample) is dict:
                            sample = place = RawSample(sample)  # noqa: PLW2901 (the same one, which knows its place)
                        else:
                            place = RawSample()
                        place.shard, place.offset, place.stop = url, start, (None if stop == end else stop)
                        state.sample = place
                        yield sample
                except CostLimitReached:
                    raise
                except Exception as exn:
                    if reader.closed:  # memory was taken from the decoder
                        raise ReaderClosed("the dataset was closed while it was read") from None
                    goes_on = handler(exn)
                    stage = "records" if isinstance(exn, ShardFormatError) else "read"
                    ledger.note(exn, stage, shard=url, samples=None, rest=True)
                    if not goes_on:
                        state.stop()
                        return
                finally:
                    counters.add("samples", n)
                state.over(file)
                ledger.shard_over(url, n)
            counters.add("epochs")
    finally:
        del ledger  # which an error's frames would keep, see `recover.CorruptionPolicy`


class RecordFile:
    """One file of records while it is read."""

    def __init__(self, stream: ShardStream) -> None:
        self.stream = stream
        self._packed = False

    def wanted(self, objects: Objects) -> Iterator[tuple[Any, int, int]]:
        """Return the ``objects`` that its entry in the list of shards asks for: those ``behind`` an offset."""
        stream = self.stream
        if stream.start:  # only a file's beginning shows whether it is compressed
            return objects(stream.read, stream.url, base=stream.start)
        read, behind = plain(stream.read, stream.url), stream.info.get("behind", 0)
        self._packed = not hands_through(read)
        decoded = objects(read, stream.url)
        return itertools.dropwhile(lambda item: item[1] < behind, decoded) if behind else decoded

    @property
    def compressed(self) -> bool:
        """True if it can only be read from its start: it is compressed, or its size is not known."""
        return self._packed or self.stream.size is None

    @property
    def end(self) -> int | None:
        """Offset of its end, if it is known."""
        return None if self._packed else self.stream.size


class RecordStage(ReadingStage):
    """The stage from files to the objects in them, see `record_samples`."""


@stage_maker
def cbors_to_samples(
    handler: Handler = reraise_exception,
    transfer: Mapping[str, Any] | None = None,
    max_object_bytes: int = MAX_OBJECT_BYTES,
) -> RecordStage:
    """Return the stage from CBOR files to their objects, see `record_samples`. ConfigError for a wrong ``transfer``."""
    config.transfer_config(**(transfer or {}))
    return RecordStage(record_samples, _cbor_objects, handler, transfer, max_object_bytes)


cbors2_to_samples = cbors_to_samples


@stage_maker
def msgpacks_to_samples(
    handler: Handler = reraise_exception,
    transfer: Mapping[str, Any] | None = None,
    max_object_bytes: int = MAX_OBJECT_BYTES,
) -> RecordStage:
    """Return the stage from MessagePack files, like `cbors_to_samples`. Binaries come as bytes, strings as str; keys of
    maps may be numbers.
    """
    config.transfer_config(**(transfer or {}))
    return RecordStage(record_samples, _msgpack_objects, handler, transfer, max_object_bytes)
