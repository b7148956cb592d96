"""Slabs: nothing is given twice, what comes back is used again, and waiting callers are served in turn."""

from __future__ import annotations

import asyncio
import errno
import itertools
import mmap
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.transfer.reading import KIB, MIB
from wds_async.transfer.slabs import LARGEST_BYTES, MIN_SLAB_BYTES, Slab, SlabBudget, SlabPool, slab_bytes

BLOCK = 512 * KIB


SIZES = [MIN_SLAB_BYTES << i for i in range(4)]


def _fits(pool: SlabPool, size: int) -> int:
    """How many slabs of ``size`` can be had now with the reserves; they are given back."""
    taken = []
    while (slab := pool.take(size, reserve=True)) is not None:
        taken.append(slab)
    for slab in taken:
        pool.give_back(slab)
    return len(taken)


class Pool(RuleBasedStateMachine):
    """Each reader takes at will, and with the reserve only while it holds none, as the window does."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlabPool(4 * BLOCK, BLOCK)
        self.held: dict[int, list[tuple[Slab, int]]] = {}
        self.readers = 0
        self.marks = 0

    def _reserved(self, reader: int) -> bool:
        return any(slab.reserved for slab, _ in self.held[reader])

    def _all(self) -> list[tuple[Slab, int]]:
        return [entry for entries in self.held.values() for entry in entries]

    @rule()
    def reader_comes(self) -> None:
        if len(self.held) < 4:
            self.pool.readers += 1
            self.held[self.readers] = []
            self.readers += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def reader_goes(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(sorted(self.held)))
        for slab, _ in self.held.pop(reader):
            self.pool.give_back(slab)
        self.pool.readers -= 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), size=st.sampled_from(SIZES), head=st.booleans())
    def take(self, data: st.DataObject, size: int, head: bool) -> None:
        reader = data.draw(st.sampled_from(sorted(self.held)))
        reserve = head and not self._reserved(reader)
        slab = self.pool.take(size, reserve=reserve)
        if slab is None:
            # A head that may use its reserve never waits.
            assert not reserve
            return
        assert len(slab.view) == slab.size
        assert slab.size == (BLOCK if slab.reserved else size)
        assert reserve or not slab.reserved
        self.marks += 1
        mark = self.marks % 251
        slab.view[:] = bytes([mark]) * slab.size
        self.held[reader].append((slab, mark))

    @precondition(lambda self: self._all())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from([r for r in sorted(self.held) if self.held[r]]))
        slab, mark = self.held[reader].pop(data.draw(st.integers(0, len(self.held[reader]) - 1)))
        assert bytes(slab.view) == bytes([mark]) * slab.size, "somebody else wrote into this slab"
        self.pool.give_back(slab)
        with pytest.raises(ValueError, match="released"):
            len(slab.view)

    @invariant()
    def nothing_overlaps(self) -> None:
        spans = sorted((slab.address, slab.address + slab.size) for slab, _ in self._all())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))

    @invariant()
    def the_budget_holds(self) -> None:
        most = self.pool.budget_bytes + max(0, len(self.held) - 1) * BLOCK
        assert self.pool.used_bytes == sum(slab.size for slab, _ in self._all()) <= most
        assert self.pool.used_bytes <= self.pool.peak_bytes
        assert self.pool.mapped_bytes <= self.pool.budget_bytes + 3 * BLOCK

    @invariant()
    def every_free_reserve_is_there(self) -> None:
        assert _fits(self.pool, BLOCK) >= sum(not self._reserved(reader) for reader in self.held)

    @invariant()
    def pieces_merge_again(self) -> None:
        if not self._all():
            assert _fits(self.pool, BLOCK) == 4 + max(0, len(self.held) - 1)


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


TestPool = Pool.TestCase


@pytest.mark.parametrize(
    ("wanted", "most", "size"),
    [
        (0, 4 << 20, MIN_SLAB_BYTES),
        (1, 4 << 20, MIN_SLAB_BYTES),
        (MIN_SLAB_BYTES, 4 << 20, MIN_SLAB_BYTES),
        (MIN_SLAB_BYTES + 1, 4 << 20, 2 * MIN_SLAB_BYTES),
        (5 << 20, 4 << 20, 4 << 20),
    ],
)
def test_slab_bytes(wanted: int, most: int, size: int) -> None:
    assert slab_bytes(wanted, most) == size


def test_only_the_reserve_is_left() -> None:
    pool = SlabPool(4 * BLOCK, BLOCK)
    pool.readers = 1
    assert [pool.take(BLOCK) is not None for _ in range(4)] == [True, True, True, False]
    head = pool.take(MIN_SLAB_BYTES, reserve=True)
    assert head is not None
    assert (head.reserved, head.size) == (True, BLOCK)
    assert pool.take(MIN_SLAB_BYTES) is None


def test_where_the_system_has_no_memory_nothing_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlabPool(4 * BLOCK, BLOCK)
    first = pool.take(BLOCK)
    assert first is not None

    def none(*given: object, **how: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", none)
        for _ in range(3):
            assert pool.take(MIN_SLAB_BYTES) is None  # the first one comes back some time
        with pytest.raises(OSError, match="Cannot allocate"):
            SlabPool(BLOCK, BLOCK).take(MIN_SLAB_BYTES)
    assert (pool.used_bytes, pool.mapped_bytes) == (BLOCK, BLOCK)
    taken = [first]
    while (slab := pool.take(MIN_SLAB_BYTES)) is not None:
        taken.append(slab)
    for number, slab in enumerate(taken):
        slab.view[:] = bytes([number]) * slab.size
    assert all(slab.view == bytes([number]) * slab.size for number, slab in enumerate(taken))
    assert sum(slab.size for slab in taken) == 4 * BLOCK


def run(program: Callable[[SlabBudget], Awaitable[None]], memory_bytes: int = MIB) -> None:
    async def main() -> None:
        lender = SlabBudget(memory_bytes)
        async with asyncio.timeout(30):
            await program(lender)
        assert lender.held_bytes == 0
        lender.close()

    asyncio.run(main())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_in_turn_also_where_a_small_one_would_fit() -> None:
    async def program(lender: SlabBudget) -> None:
        got: list[tuple[str, Slab]] = []

        async def one(name: str, size: int) -> None:
            got.append((name, await lender.take(size)))

        first, second = await lender.take(512 * KIB), await lender.take(256 * KIB)
        waiting = [asyncio.ensure_future(one(name, size)) for name, size in (("large", MIB), ("small", 1), ("b", 1))]
        await turns()
        assert not got
        assert lender.held_bytes == 768 * KIB
        lender.give_back(first)
        await turns()
        assert not got
        lender.give_back(second)
        await turns()
        assert [name for name, _ in got] == ["large"]
        lender.give_back(got[0][1])
        await asyncio.gather(*waiting)
        assert [name for name, _ in got] == ["large", "small", "b"]
        assert lender.held_bytes == 2 * 64 * KIB
        for _, slab in got[1:]:
            lender.give_back(slab)

    run(program)


def test_a_view_is_gone_with_its_slab() -> None:
    async def program(lender: SlabBudget) -> None:
        slab = await lender.take(1)
        view = slab.view[:10]
        lender.give_back(slab, view)
        with pytest.raises(ValueError, match="released"):
            bytes(view)

    run(program)


def test_sizes() -> None:
    async def program(lender: SlabBudget) -> None:
        assert lender.largest_bytes == LARGEST_BYTES
        with pytest.raises(ValueError, match="at most"):
            await lender.take(LARGEST_BYTES + 1)

    run(program, 3 * LARGEST_BYTES)
    with pytest.raises(ValueError, match="at least"):
        SlabBudget(1000)
