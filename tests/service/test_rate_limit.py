"""Bytes a second, on a clock that is set by hand."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

import pytest

from wds_async.service.cache.origin import NO_CLIENT, Client
from wds_async.service.limits import RateLimit
from wds_async.transfer.rate_limits import TokenBucket

KIB = 1024


class Time:
    """A clock, and what is to be called when."""

    def __init__(self) -> None:
        self.now = 100.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def __call__(self) -> float:
        return self.now

    def later(self, delay_s: float, function: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._calls, (self.now + delay_s, self._count, function))

    async def until(self, end: float) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        while self._calls and self._calls[0][0] <= end:
            self.now, _, function = heapq.heappop(self._calls)
            function()
            for _ in range(5):
                await asyncio.sleep(0)
        self.now = end


async def sends(pace: RateLimit, client: str, piece: int, sent: dict[str, int]) -> None:
    while True:
        await pace.take(Client("", client), piece)
        sent[client] = sent.get(client, 0) + piece


async def sent_in(
    seconds: float, pace: RateLimit, time: Time, clients: list[str], piece: int = 64 * KIB
) -> dict[str, int]:
    sent: dict[str, int] = {}
    tasks = [asyncio.create_task(sends(pace, client, piece, sent)) for client in clients]
    await time.until(time.now + seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return sent


def test_each_client_has_its_own_pace() -> None:
    async def run() -> dict[str, int]:
        time = Time()
        return await sent_in(10.0, RateLimit(1024 * KIB, clock=time, later=time.later), time, ["a", "a", "a", "b"])

    sent = asyncio.run(run())
    for client in ("a", "b"):
        assert 10 * 1024 * KIB <= sent[client] <= 10 * 1024 * KIB + 512 * KIB, "three connections are one client"


def test_a_tenant_has_a_pace_which_its_clients_share_in_turns() -> None:
    async def run() -> dict[Client, int]:
        time, sent = Time(), dict[Client, int]()
        pace = RateLimit(tenant_rate=1024 * KIB, clock=time, later=time.later)

        async def sends_on(client: Client) -> None:
            while True:
                await pace.take(client, 64 * KIB)
                sent[client] = sent.get(client, 0) + 64 * KIB

        many = [Client("t", "greedy")] * 30 + [Client("t", "small"), Client("u", "other")]
        tasks = [asyncio.create_task(sends_on(client)) for client in many]
        await time.until(time.now + 10)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return sent

    sent = asyncio.run(run())
    greedy, small, other = (sent[client] for client in sorted(sent))
    for tenant in (greedy + small, other):
        assert 10 * 1024 * KIB <= tenant <= 10 * 1024 * KIB + 512 * KIB
    assert small >= 0.4 * (greedy + small), "thirty connections are one client"


def test_who_leaves_holds_nobody_up() -> None:
    async def run() -> None:
        time = Time()
        pace = RateLimit(64 * KIB, clock=time, later=time.later)
        await pace.take(Client("", "a"), 1024 * KIB)
        gone = asyncio.create_task(pace.take(Client("", "a"), 64 * KIB))
        stays = asyncio.create_task(pace.take(Client("", "a"), 64 * KIB))
        await time.until(time.now)
        gone.cancel()
        assert not stays.done()
        await time.until(time.now + 30)
        assert stays.done()
        assert gone.cancelled()

    asyncio.run(run())


def test_no_limit_waits_for_nothing() -> None:
    async def run() -> None:
        assert RateLimit().of(NO_CLIENT) is None
        assert RateLimit(1.0).of(NO_CLIENT) is not None
        for _ in range(100):
            await RateLimit().take(Client("", "a"), 1 << 40)

    asyncio.run(run())


def test_a_bucket_fills_and_may_be_overdrawn() -> None:
    time = Time()
    bucket = TokenBucket(1024 * KIB, time, burst=256 * KIB)
    assert bucket.full
    bucket.take(256 * KIB + 1024 * KIB)
    assert bucket.wait_s() == pytest.approx(1.0)
    time.now += 0.5
    assert bucket.wait_s() == pytest.approx(0.5)
    time.now += 1000
    bucket.take(256 * KIB)
    assert bucket.wait_s() == 0
    bucket.take(1)
    assert bucket.wait_s() > 0, "what was not used is not saved up for ever"


def test_thousands_of_clients_are_forgotten() -> None:
    async def run() -> int:
        time = Time()
        pace = RateLimit(1024 * KIB, clock=time, later=time.later)
        for i in range(10_000):
            await pace.take(Client("", f"c{i}"), KIB)
            time.now += 0.01
        return len(pace._gates)

    assert asyncio.run(run()) <= 4200


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(ValueError):
        RateLimit(rate)
