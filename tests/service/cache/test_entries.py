"""One object: its state."""

from __future__ import annotations

import asyncio

import pytest

from tests.service.cache.doubles import CHUNK
from wds_async.service.cache.entries import BLOCK, ChunkFetch, ObjectEntry, ObjectReader, cost, facts_of_row
from wds_async.service.cache.index import Chunks
from wds_async.service.cache.origin import Urgency
from wds_async.storage.base import Checksum
from wds_async.transfer.ranges import Facts

FACTS = Facts(3 * CHUNK + 5, '"etag"', {"etag": '"etag"'}, Checksum("crc32c", b"abcd", "x-goog-hash"), True)


def entry_of(facts: Facts = FACTS) -> ObjectEntry:
    return ObjectEntry(7, "key", "s3://bucket/a?signature", facts, "tenant", Chunks(facts.size, CHUNK))


def test_facts_come_back_from_their_row() -> None:
    row = entry_of().row(1.0, 2.0, 3)
    assert facts_of_row(row) == FACTS
    assert (row.key, row.held, row.last) == ("key", 0, 3)
    assert "signature" not in repr(row)  # the URL may hold one, and is not kept
    assert facts_of_row(entry_of(Facts(None, "", {}, None, False)).row(0, 0, 0)) == Facts(None, "", {}, None, False)


def test_what_it_takes_of_the_disk() -> None:
    entry = entry_of()
    assert cost(1) == BLOCK
    assert entry.disk_bytes == 3 * CHUNK + BLOCK
    assert entry.disk_bytes_with(CHUNK + 1, CHUNK + 2) == CHUNK
    entry.chunks.add(3, 0)
    entry.chunks.add(0, 0, on_probation=True)
    assert entry.held == BLOCK
    assert entry.disk_bytes_with(0, 1) == CHUNK + BLOCK
    assert entry_of(Facts(None, "v", {}, None)).disk_bytes == 0


@pytest.mark.parametrize(
    ("facts", "in_order"),
    [
        (FACTS, False),
        (Facts(5, "v", {}, None, False), True),
        (Facts(None, "v", {}, None), True),
        (Facts(5, "", {}, None), True),
    ],
)
def test_what_is_read_in_order(facts: Facts, in_order: bool) -> None:
    entry = entry_of(facts)
    assert entry.in_order == in_order
    if in_order:
        entry.ended(9)
        assert entry.in_order
        assert entry.facts.size == entry.chunks.size == 9


def test_what_readers_need() -> None:
    entry = entry_of()
    assert not entry.busy
    entry.readers.append(ObjectReader("a", Urgency.DEMAND, 1, 3))
    assert [entry.needed(number) for number in range(4)] == [False, True, True, False]
    assert entry.busy


def test_a_flight_that_nobody_wants_is_given_up_unless_it_has_begun() -> None:
    async def main() -> None:
        one, other = ObjectReader("a", Urgency.PLAN), ObjectReader("b", Urgency.DEMAND)
        for begun in (False, True):
            flight = ChunkFetch(0, Urgency.PLAN, "a")
            flight.task = asyncio.create_task(asyncio.sleep(60))
            flight.begun = begun
            flight.join(one, Urgency.PLAN)
            flight.join(other, Urgency.DEMAND)
            flight.holders |= {one, other}
            assert flight.urgency == Urgency.DEMAND
            assert not flight.leave(one)
            assert not flight.left.is_set()
            assert flight.leave(other) is not begun
            assert flight.left.is_set()
            assert not flight.holders
            flight.task.cancel()
            await asyncio.wait([flight.task])

    asyncio.run(main())


def test_who_joins_hastens() -> None:
    class Turn:
        asked: tuple[object, ...] = ()

        def hasten(self, urgency: Urgency, client: str = "") -> None:
            self.asked = (urgency, client)

    async def main() -> None:
        flight, turn = ChunkFetch(0, Urgency.PLAN, "plan"), Turn()
        flight.slot = turn
        flight.join(ObjectReader("later", Urgency.DEMAND), Urgency.PLAN)
        assert turn.asked == ()
        flight.join(ObjectReader("now", Urgency.DEMAND), Urgency.DEMAND)
        assert turn.asked == (Urgency.DEMAND, "now")

    asyncio.run(main())
