"""Indexes of shards, made by reading their headers; and which shards have one that is up to date."""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from wds_async.config import transfer_config
from wds_async.errors import CostLimitReached, ShardFormatError, WdsError
from wds_async.indexed.shardindex import ShardFacts, ShardIndex
from wds_async.observe.cost_limit import enforce, limit_of_job
from wds_async.redact import redact
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import locate
from wds_async.tar.blocks import padded
from wds_async.tar.decompress import compressed_by, plain
from wds_async.tar.group import admission, base_plus_ext
from wds_async.tar.index import DaliIndex, MemberEntry, headers_of
from wds_async.tar.source import ByteSource
from wds_async.transfer.probe import Probed, probe
from wds_async.transfer.range_reader import RangeReader, WantedRange
from wds_async.transfer.ranges import Facts
from wds_async.transfer.reader import ShardStream, open_shards
from wds_async.transfer.stats import Counters
from wds_async.transfer.traffic import Traffic

__all__ = ["ScannedShard", "scan_shards", "up_to_date"]

_PIECE_BYTES = 16 << 10
"""Bytes that are requested for a header: those of small members beside it come with it."""
_AT_ONCE = 64
_ROUND_TRIP_BYTES = 128 << 20
"""50 ms of 20 Gbit/s."""


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
    traffic: Traffic | None = None,
) -> Iterator[ScannedShard]:
    """Read the headers of ``urls`` and yield what each shard holds; an error ends its shard only.

    Many shards are read at once, and no bytes are kept. Where members are so large that it pays, only the headers are
    requested, by ranges (see `_pays`); these shards come first. Otherwise all bytes are read. Within both groups the
    order is that of ``urls``. ``dali``: make the text of DALI's index too. ``received(n)`` is called when ``n`` bytes
    more have come, and what was read is added to ``traffic`` at the end. CostLimitReached is raised.
    """
    todo, counted = list(urls), Traffic() if traffic is None else traffic
    with _HeaderReader(options, received) as headers:
        try:
            large = headers.of_large_members(todo)
            yield from headers.scan(large, dali)
        finally:
            counted.merge(headers.traffic)
    rest = [url for url in todo if url not in large]
    if not rest:
        return
    with open_shards(rest, options=options) as opened:
        enforce(opened)
        try:
            for stream in opened:
                try:
                    yield _scan(stream, DaliIndex() if dali else None, received)
                except WdsError as exn:
                    if opened.closed or isinstance(exn, CostLimitReached):
                        raise
                    yield ScannedShard(stream.url, error=exn)
        finally:
            counted.merge(opened.counters.traffic)


def _scan(stream: ShardStream, dali: DaliIndex | None, received: Callable[[int], object]) -> ScannedShard:
    size = 0

    def read() -> memoryview | None:
        nonlocal size
        piece = stream.read()
        if piece is not None:
            size += len(piece)
            received(len(piece))
        return piece

    source = ByteSource(plain(read, stream.url), stream.url, stream.is_open_ended)
    try:
        found = _samples_in(source, dali)
        unpacked = source.arrived
    finally:
        source.drop()
    packed = size != unpacked
    while read() is not None:  # behind the end of the archive
        pass
    if dali is not None and packed:
        raise ShardFormatError(f"{redact(stream.url)}: it is compressed, and DALI reads plain tars only")
    return _scanned(stream.url, size, stream.version, found, dali, not packed)


_Samples = tuple[list[str], Sequence[int], Sequence[int]]
"""Keys of samples, where each begins, and where it ends."""


def _scanned(
    url: str, size: int, version: str, found: _Samples, dali: DaliIndex | None, is_plain: bool = True
) -> ScannedShard:
    keys, starts, stops = found
    index = ShardIndex.of(url, size, version, starts, stops, keys=keys, plain=is_plain)
    return ScannedShard(url, index, "" if dali is None else dali.text())


def _samples_in(source: ByteSource, dali: DaliIndex | None) -> _Samples:
    """Return the samples of a tar, whose members are added to ``dali``."""
    admit, last = admission(), None
    keys, starts, stops = [], array("q"), array("q")
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
    return keys, starts, stops


def _add(dali: DaliIndex, entry: MemberEntry, sparse: bool, source: ByteSource, start: int) -> None:
    """Add a member to DALI's index. Raise ShardFormatError for one that it cannot hold."""
    try:
        if sparse:
            raise ValueError("it is stored sparse, so its bytes stand at no one place; pack the shard without --sparse")
        dali.add(entry)
    except ValueError as exn:
        raise source.error(ShardFormatError, f"member {entry.name!r:.200} at byte {start}: {exn}", start) from None


# ------------------------------------------------------------------ headers alone


class _SeekingSource(ByteSource):
    """Bytes of an object of ``size`` bytes, of which those that are passed over are not requested."""

    __slots__ = ("size",)

    def __init__(self, read_from: Callable[[int], memoryview | None], url: str, size: int) -> None:
        super().__init__(lambda: read_from(self.base), url)
        self.size = size

    def skip(self, size: int) -> int:
        """Pass over ``size`` bytes; returns how many there were, fewer only where the object ends."""
        if self.after is not None or size <= self.end - self.pos:
            return super().skip(size)
        at = self.offset
        self.drop()
        self.base = min(at + size, self.size)
        return self.base - at


class _HeaderReader:
    """Reader of the headers of shards by ranges, of many shards at once. A context manager."""

    def __init__(self, options: StorageOptions, received: Callable[[int], object]) -> None:
        self._options, self._received = options, received
        self.traffic = Traffic()
        counters, limit = Counters(traffic=self.traffic), limit_of_job()
        if limit is not None:
            limit.watch(counters)
        config = transfer_config(verify="never")
        self._at_once = min(_AT_ONCE, config.connections)
        before = (lambda: None) if limit is None else limit.check
        self._ranges = RangeReader(config, options, traffic=counters.traffic, before_request=before)

    def __enter__(self) -> _HeaderReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._ranges.close()

    def of_large_members(self, urls: Sequence[str]) -> dict[str, Facts]:
        """Return those of ``urls`` whose headers alone should be read. All of them are looked at, by two small requests
        each, only where that holds for the first, the middle or the last."""
        few = list(dict.fromkeys(urls[at] for at in (0, len(urls) // 2, len(urls) - 1))) if urls else []
        if not self._look(few, len(urls)):
            return {}
        return self._look(list(dict.fromkeys(urls)), len(urls))

    def _look(self, urls: Sequence[str], count: int) -> dict[str, Facts]:
        probed = list(probe(urls, self._options, config=transfer_config()))
        enough = {one.url: Facts(one.size, one.version) for one in probed if self._may_pay(one)}
        with ThreadPoolExecutor(self._at_once) as pool:
            means = pool.map(self._mean_bytes, enough, enough.values())
            return {url: enough[url] for url, mean in zip(enough, means, strict=True) if _pays(mean, count)}

    @staticmethod
    def _may_pay(one: Probed) -> bool:
        is_plain = one.error is None and one.checked and not compressed_by(one.head)
        return is_plain and one.size is not None and one.size > 2 * _PIECE_BYTES and not locate(one.url).in_order

    def _mean_bytes(self, url: str, facts: Facts) -> float:
        """Return the bytes for each header, by the headers in the first piece of a shard; 0 for what is no tar."""
        assert facts.size is not None
        try:
            data = memoryview(self._read(url, facts, 0))
        except CostLimitReached:
            raise
        except WdsError:  # it will come again, where the shard is read
            return 0.0
        source = _SeekingSource(lambda at: data[at:] if at < len(data) else None, url, facts.size)
        count, stop = 0, 0
        with contextlib.suppress(ShardFormatError):
            for _, _, offset, length, _ in headers_of(source):
                count, stop = count + 1, offset + length
        return stop / max(1, count)

    def _read(self, url: str, facts: Facts, at: int) -> bytes | bytearray:
        assert facts.size is not None
        if at >= facts.size:
            return b""
        (data,) = self._ranges.read([WantedRange(url, at, min(at + _PIECE_BYTES, facts.size), facts)])
        self._received(len(data))
        return data

    def scan(self, shards: Mapping[str, Facts], dali: bool) -> Iterator[ScannedShard]:
        """Yield what each of ``shards`` holds, in their order."""
        waiting = iter(shards.items())
        with ThreadPoolExecutor(self._at_once) as pool:
            running = deque(pool.submit(self._scan, *one, dali) for one in itertools.islice(waiting, self._at_once))
            try:
                while running:
                    yield running.popleft().result()
                    running.extend(pool.submit(self._scan, *one, dali) for one in itertools.islice(waiting, 1))
            finally:
                self._ranges.close()
                for future in running:
                    future.cancel()

    def _scan(self, url: str, facts: Facts, dali: bool) -> ScannedShard:
        assert facts.size is not None
        source = _SeekingSource(lambda at: memoryview(self._read(url, facts, at)) or None, url, facts.size)
        index = DaliIndex() if dali else None
        try:
            return _scanned(url, facts.size, facts.version, _samples_in(source, index), index)
        except CostLimitReached:
            raise
        except WdsError as exn:
            return ScannedShard(url, error=exn)
        finally:
            source.drop()


def _pays(mean_bytes: float, shards: int) -> bool:
    """Return whether reading the headers alone pays for ``shards`` with a header for every ``mean_bytes`` bytes.

    Each header is found by the one before it, so that in one round trip every shard that is read at the same time
    passes over as many bytes. Where these are more than a link brings in that time, it is faster, and cheaper too.
    """
    return mean_bytes * min(shards, _AT_ONCE) >= _ROUND_TRIP_BYTES


def up_to_date(facts: Mapping[str, ShardFacts], options: StorageOptions = NOTHING_GIVEN) -> Iterator[tuple[str, bool]]:
    """Yield each of the URLs, in order, with whether the facts of its index are certain to be those of the shard as it
    is now: by the size and version in the first answer of its store, for one small request a shard."""
    urls: Sequence[str] = list(facts)
    for url, probed in zip(urls, probe(urls, options, config=transfer_config()), strict=True):
        good = probed.error is None and probed.checked
        yield url, good and facts[url].fits(probed.size, probed.version)
