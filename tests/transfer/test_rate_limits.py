"""Leave to ask origins: in turn, within connections and bytes a second, and nobody starves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.transfer.test_circuit_breaker import Clock
from wds_async.transfer.rate_limits import OriginLimits


def run(program: Callable[[OriginLimits, Clock], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        clock = Clock()
        async with asyncio.timeout(30):
            await program(OriginLimits(**limits, clock=clock), clock)

    asyncio.run(main())


class Asker:
    """Tasks that ask for leave, and what they were given, in order."""

    def __init__(self, limits: OriginLimits, clock: Clock) -> None:
        self.limits, self.clock = limits, clock
        self.given: list[tuple[str, float]] = []
        self.gates: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, origin: str, size: int = 1, *, received: int | None = None, **more: Any) -> asyncio.Task[None]:
        gate = asyncio.Event()

        async def one() -> None:
            async with self.limits.permit(origin, size, **more) as permit:
                self.given.append((origin, self.clock.now - 1000.0))
                self.gates.append(gate)
                await gate.wait()
                permit.settle(size if received is None else received)

        self.tasks.append(asyncio.ensure_future(one()))
        return self.tasks[-1]

    async def land(self, count: int = 1) -> None:
        """The first ones that fly end."""
        for _ in range(count):
            self.gates.pop(0).set()
            await self.clock.to(self.clock.now)

    async def end(self) -> None:
        while self.gates:
            await self.land()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert (self.limits.flying, self.limits.waiting) == (0, 0)

    @property
    def flying(self) -> Counter[str]:
        return Counter(origin for origin, _ in self.given[-len(self.gates) :]) if self.gates else Counter()


def test_connections_of_all_and_of_one() -> None:
    async def program(limits: OriginLimits, clock: Clock) -> None:
        asker = Asker(limits, clock)
        for _ in range(5):
            asker.ask("a")
        await clock.to(clock.now)
        assert (limits.flying, limits.waiting) == (3, 2)  # of one
        for _ in range(5):
            asker.ask("b")
        await clock.to(clock.now)
        assert (limits.flying, limits.waiting) == (5, 5)  # of all
        while asker.gates:
            await asker.land()
            assert limits.flying <= 5
        await asker.end()
        assert Counter(origin for origin, _ in asker.given) == {"a": 5, "b": 5}

    run(program, connections=5, origin_connections=3)


def test_first_come_first_served_within_one_and_origins_in_turn() -> None:
    async def program(limits: OriginLimits, clock: Clock) -> None:
        asker = Asker(limits, clock)
        for name in ("a", *("a" * 6), *("b" * 3), *("c" * 3)):
            asker.ask(name)
        await clock.to(clock.now)
        while asker.gates:
            await asker.land()
        await asker.end()
        assert "".join(origin for origin, _ in asker.given) == "aabcabcabcaaa"

    run(program, connections=1)


def test_one_that_hangs_leaves_some_to_others() -> None:
    async def program(limits: OriginLimits, clock: Clock) -> None:
        asker = Asker(limits, clock)
        for name, flying in (("a", 56), ("b", 7), ("c", 1)):
            for _ in range(100):
                asker.ask(name)
            await clock.to(clock.now)
            assert Counter(origin for origin, _ in asker.given)[name] == flying
        for task in asker.tasks:
            task.cancel()
        await asyncio.gather(*asker.tasks, return_exceptions=True)
        await clock.to(clock.now)
        asker.gates.clear()
        await asker.end()

    run(program, connections=64)


def test_room_that_an_origin_has_by_itself() -> None:
    async def program(limits: OriginLimits, clock: Clock) -> None:
        asker, room = Asker(limits, clock), [2]
        for _ in range(6):
            asker.ask("a", room=lambda: room[0])
        await clock.to(clock.now)
        assert limits.flying == 2
        room[0] = 4
        await asker.land()
        assert limits.flying == 4
        await asker.end()

    run(program)


def test_bytes_a_second_with_a_burst_of_one() -> None:
    async def program(limits: OriginLimits, clock: Clock) -> None:
        asker = Asker(limits, clock)
        for _ in range(31):
            asker.ask("a", 100)
        await clock.to(clock.now)
        assert len(asker.given) == 11  # a second's worth, and the one that overdraws it
        await clock.to(1000.5)
        assert len(asker.given) == 16
        await clock.to(1002.0)
        assert len(asker.given) == 31
        await asker.end()
        await clock.to(1100.0)  # what is not used is not saved up
        for _ in range(40):
            asker.ask("a", 100)
        await clock.to(clock.now)
        assert len(asker.given) == 31 + 11
        await clock.to(1110.0)
        await asker.end()

    run(program, bytes_per_s=1000.0)


def test_a_large_one_waits_no_longer_than_its_turn() -> None:
    async def program(limits: OriginLimits, clock: Clock) -> None:
        asker = Asker(limits, clock)
        for name, size in (("a", 1000), ("small", 100), ("large", 5000), ("small", 100), ("small", 100)):
            asker.ask(name, size)
        await clock.to(1000.2)
        assert [origin for origin, _ in asker.given] == ["a", "small", "large"]
        await clock.to(1005.0)
        assert len(asker.given) == 3
        await clock.to(1005.3)
        assert len(asker.given) == 5
        await asker.end()

    run(program, bytes_per_s=1000.0)


def test_one_origin_that_is_over_its_rate_holds_back_no_other() -> None:
    async def program(limits: OriginLimits, clock: Clock) -> None:
        asker = Asker(limits, clock)
        for name in "aaabbb":
            asker.ask(name, 2000)
        await clock.to(1000.9)
        assert Counter(origin for origin, _ in asker.given) == {"a": 1, "b": 1}
        await clock.to(1001.1)
        assert Counter(origin for origin, _ in asker.given) == {"a": 2, "b": 2}
        await clock.to(1003.1)
        await asker.end()
        assert len(asker.given) == 6

    run(program, origin_bytes_per_s=1000.0)


@pytest.mark.parametrize(("received", "at"), [(0, 1000.0), (3000, 1002.0)])
def test_what_came_counts_and_not_what_was_expected(received: int, at: float) -> None:
    async def program(limits: OriginLimits, clock: Clock) -> None:
        asker = Asker(limits, clock)
        asker.ask("a", 2000, received=received)
        await clock.to(clock.now)
        await asker.land()
        asker.ask("a", 1)
        await clock.to(at - 0.01) if at > 1000 else None
        assert len(asker.given) == 1
        await clock.to(at)
        assert len(asker.given) == 2
        await asker.end()

    run(program, bytes_per_s=1000.0)


def test_more_bytes_over_a_connection_go_before_new_ones() -> None:
    async def program(limits: OriginLimits, clock: Clock) -> None:
        asker, pieces = Asker(limits, clock), []

        async def stream() -> None:
            async with limits.permit("a", 0):
                for number in range(3):
                    await limits.more("a", 1000)
                    pieces.append((number, clock.now - 1000.0))

        streaming = asyncio.ensure_future(stream())
        await clock.to(clock.now)
        asker.ask("a", 1000)
        await clock.to(1005.0)
        await streaming
        assert [number for number, _ in pieces] == [0, 1, 2]
        assert pieces[2][1] == pytest.approx(1.0)
        assert asker.given[0][1] >= pieces[2][1]
        await asker.end()

    run(program, connections=1, bytes_per_s=1000.0)


def test_who_is_cancelled_gives_back_its_place() -> None:
    async def program(limits: OriginLimits, clock: Clock) -> None:
        asker = Asker(limits, clock)
        asker.ask("a")
        await clock.to(clock.now)
        second, third = asker.ask("a"), asker.ask("a")
        await clock.to(clock.now)
        second.cancel()
        await clock.to(clock.now)
        assert limits.waiting == 1
        asker.gates.pop(0).set()
        for _ in range(20):  # in the very turn in which it is given leave
            await asyncio.sleep(0)
            if limits.waiting == 0:
                third.cancel()
                break
        asker.ask("b")
        await clock.to(clock.now)
        assert asker.given[-1][0] == "b"
        await asker.end()

    run(program, connections=1)
