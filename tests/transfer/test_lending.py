"""Memory that is lent: in turn, within its bytes, and back whatever becomes of who waits."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable

import pytest

from tests.transfer.reading import KIB, MIB
from wds_async.transfer.slabs import LARGEST_BYTES, Slab, SlabBudget


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


def test_who_is_cancelled_holds_nobody_back() -> None:
    async def program(lender: SlabBudget) -> None:
        all_of_it = await lender.take(MIB)
        large, small = asyncio.ensure_future(lender.take(MIB)), asyncio.ensure_future(lender.take(1))
        await turns()
        large.cancel()
        await turns()
        lender.give_back(all_of_it)
        lender.give_back(await small)
        # In the very turn in which it is lent:
        all_of_it = await lender.take(MIB)
        late, following = asyncio.ensure_future(lender.take(MIB)), asyncio.ensure_future(lender.take(1))
        await turns()
        lender.give_back(all_of_it)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        lender.give_back(await following)

    run(program)


def test_what_a_thread_reads_is_lent_to_nobody_before_it_has_ended() -> None:
    async def program(lender: SlabBudget) -> None:
        slab = await lender.take(MIB)
        view = slab.view[:]
        view[:] = b"x" * MIB
        out, into = os.pipe()
        thread = threading.Thread(target=os.write, args=(into, view))
        thread.start()
        got = await asyncio.to_thread(os.read, out, 1)
        lender.give_back(slab, view)
        waiting = asyncio.ensure_future(lender.take(1))
        await turns()
        assert not waiting.done()
        assert lender.held_bytes == MIB
        while len(got) < MIB:
            got += os.read(out, MIB)
        thread.join()
        lender.lend()
        lender.give_back(await waiting)
        assert got == b"x" * MIB
        os.close(out)
        os.close(into)

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
