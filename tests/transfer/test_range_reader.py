"""Ranges of many objects at once, from blocking code."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.servers import Origin
from tests.transfer.reading import KIB, MIB, data, quick
from wds_async.errors import ObjectChanged, ReaderClosed, ShardNotFound, TruncatedShard
from wds_async.transfer.range_reader import RangeReader, WantedRange
from wds_async.transfer.ranges import Facts

CONTENT = data(3 * MIB)


@pytest.fixture
def reader() -> Iterator[RangeReader]:
    reader = RangeReader(quick())
    yield reader
    reader.close()


def threads() -> int:
    return sum(thread.name.startswith("wds-async-ranges") for thread in threading.enumerate())


def test_ranges_come_in_their_order_whatever_their_size(reader: RangeReader, origin: Origin) -> None:
    urls = [origin.add(f"{n}.bin", CONTENT[n:]) for n in range(3)]
    places = [(0, 10), (5, 3 * MIB - 10), (MIB, MIB + 1), (700_000, 1_300_000)]
    wanted = [WantedRange(url, start, stop) for url in urls for start, stop in places]
    expected = [CONTENT[n:][start:stop] for n in range(3) for start, stop in places]
    assert reader.read(wanted) == expected
    assert reader.read([]) == []


def test_connections_stay_from_call_to_call(reader: RangeReader, origin: Origin) -> None:
    url = origin.add("x.bin", CONTENT)
    for n in range(5):
        assert reader.read([WantedRange(url, n, n + 100)]) == [CONTENT[n : n + 100]]
    assert len({request.connection for request in origin.requests}) == 1


def test_the_first_error_is_raised_and_the_reader_goes_on(reader: RangeReader, origin: Origin) -> None:
    url = origin.add("x.bin", CONTENT)
    good = WantedRange(url, 0, 10)
    with pytest.raises(ShardNotFound, match=r"missing\.bin"):
        reader.read([good, WantedRange(origin.url("missing.bin"), 0, 10)])
    with pytest.raises(TruncatedShard, match="ends at byte 3145728"):
        reader.read([WantedRange(url, 3 * MIB - 5, 3 * MIB + 5)])
    with pytest.raises(TruncatedShard):
        reader.read([WantedRange(url, 4 * MIB, 5 * MIB)])
    with pytest.raises(ObjectChanged):
        reader.read([WantedRange(url, 0, 10, Facts(3 * MIB, 'etag "another"'))])
    assert reader.read([good]) == [CONTENT[:10]]


def test_close_ends_what_waits_and_a_later_read_starts_again(reader: RangeReader, origin: Origin) -> None:
    url = origin.add("x.bin", CONTENT)
    origin.behave(times=1, delay_s=60)
    assert threads() == 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.read, [WantedRange(url, 0, 10)])
        origin.wait_until(lambda one: len(one.requests) > 0)
        reader.close()
        with pytest.raises(ReaderClosed):
            waiting.result(timeout=20)
    assert threads() == 0
    assert reader.read([WantedRange(url, 0, 10)]) == [CONTENT[:10]]
    assert threads() == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_reads_by_connections_of_its_own(reader: RangeReader, origin: Origin) -> None:
    url = origin.add("x.bin", CONTENT)
    wanted = [WantedRange(url, 0, 300 * KIB)]
    assert reader.read(wanted) == [CONTENT[: 300 * KIB]]
    before = {request.connection for request in origin.requests}
    child = os.fork()
    if not child:
        good: Any = False
        try:
            good = reader.read(wanted) == [CONTENT[: 300 * KIB]]
            reader.close()
        finally:
            os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {request.connection for request in origin.requests} - before
    assert reader.read(wanted) == [CONTENT[: 300 * KIB]]
