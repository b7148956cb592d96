"""Indexes of shards, made by reading their headers; and which shards have one that is up to date."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from wds_async.config import transfer_config
from wds_async.errors import CostLimitReached, ShardFormatError, WdsError
from wds_async.indexed.shardindex import ShardFacts, ShardIndex
from wds_async.observe.cost_limit import enforce
from wds_async.redact import redact
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.tar.blocks import padded
from wds_async.tar.decompress import plain
from wds_async.tar.group import admission, base_plus_ext
from wds_async.tar.index import DaliIndex, MemberEntry, headers_of
from wds_async.tar.source import ByteSource
from wds_async.transfer.probe import probe
from wds_async.transfer.reader import ShardStream, open_shards

__all__ = ["ScannedShard", "scan_shards", "up_to_date"]


@dataclass(frozen=True, slots=True)
class ScannedShard:
    """Result of reading the headers of one shard: its ``index`` or the ``error`` that it ended with, and, where it was
    wanted, the text of DALI's index."""

    url: str
    index: ShardIndex | None = None
    dali: str = ""
    error: Exception | None = None


def scan_shards(
    urls: Iterable[str],
    *,
    dali: bool = False,
    options: StorageOptions = NOTHING_GIVEN,
    received: Callable[[int], object] = lambda _: None,
) -> Iterator[ScannedShard]:
    """Read the headers of ``urls`` and yield what each shard holds, in order; an error ends its shard only.

    All bytes are read, many shards at once, and none are kept. ``dali``: make the text of DALI's index too.
    ``received(n)`` is called when ``n`` bytes more have come. CostLimitReached is raised.
    """
    with open_shards(urls, options=options) as opened:
        enforce(opened)
        for stream in opened:
            try:
                yield _scan(stream, DaliIndex() if dali else None, received)
            except WdsError as exn:
                if opened.closed or isinstance(exn, CostLimitReached):
                    raise
                yield ScannedShard(stream.url, error=exn)


def _scan(stream: ShardStream, dali: DaliIndex | None, received: Callable[[int], object]) -> ScannedShard:
    size, admit, last = 0, admission(), None
    keys, starts, stops = [], array("q"), array("q")

    def read() -> memoryview | None:
        nonlocal size
        piece = stream.read()
        if piece is not None:
            size += len(piece)
            received(len(piece))
        return piece

    source = ByteSource(plain(read, stream.url), stream.url, stream.is_open_ended)
    try:
        for name, start, offset, length, sparse in headers_of(source):
            key = base_plus_ext(name)[0] if admit(name) is not None else None
            if key is None:
                continue
            if key != last:
                last = key
                keys.append(key)
                starts.append(start)
                stops.append(0)
            stops[-1] = offset + padded(length)
            if dali is not None:
                _add(dali, MemberEntry(name, offset, length), sparse, source, start)
        unpacked = source.arrived
    finally:
        source.drop()
    packed = size != unpacked
    while read() is not None:  # behind the end of the archive
        pass
    if dali is not None and packed:
        raise ShardFormatError(f"{redact(stream.url)}: it is compressed, and DALI reads plain tars only")
    index = ShardIndex.of(stream.url, size, stream.version, starts, stops, keys=keys, plain=not packed)
    return ScannedShard(stream.url, index, "" if dali is None else dali.text())


def _add(dali: DaliIndex, entry: MemberEntry, sparse: bool, source: ByteSource, start: int) -> None:
    """Add a member to DALI's index. Raise ShardFormatError for one that it cannot hold."""
    try:
        if sparse:
            raise ValueError("it is stored sparse, so its bytes stand at no one place; pack the shard without --sparse")
        dali.add(entry)
    except ValueError as exn:
        raise source.error(ShardFormatError, f"member {entry.name!r:.200} at byte {start}: {exn}", start) from None


def up_to_date(facts: Mapping[str, ShardFacts], options: StorageOptions = NOTHING_GIVEN) -> Iterator[tuple[str, bool]]:
    """Yield each of the URLs, in order, with whether the facts of its index are certain to be those of the shard as it
    is now: by the size and version in the first answer of its store, for one small request a shard."""
    urls: Sequence[str] = list(facts)
    for url, probed in zip(urls, probe(urls, options, config=transfer_config()), strict=True):
        good = probed.error is None and probed.checked
        yield url, good and facts[url].fits(probed.size, probed.version)
