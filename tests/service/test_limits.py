"""Limits: bytes a second, turns of fetches, and cost."""

from __future__ import annotations

import asyncio
import heapq
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.servers import Origin
from tests.service.serving import Inside, ask
from tests.transfer.reading import data, quick
from wds_async.errors import ConfigError, CostLimitReached
from wds_async.observe.cost_limit import ServiceCostLimit
from wds_async.observe.prices import PriceTable
from wds_async.service.cache.origin import NO_CLIENT, Client, Urgency
from wds_async.service.limits import FairScheduler, FetchSlot, RateLimit
from wds_async.transfer.ranges import RangeFetcher
from wds_async.transfer.rate_limits import TokenBucket
from wds_async.transfer.traffic import Traffic

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


async def test_who_leaves_holds_nobody_up() -> None:
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


async def test_no_limit_waits_for_nothing() -> None:
    assert RateLimit().of(NO_CLIENT) is None
    assert RateLimit(1.0).of(NO_CLIENT) is not None
    for _ in range(100):
        await RateLimit().take(Client("", "a"), 1 << 40)


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


DEMAND, AHEAD, PLAN = Urgency.DEMAND, Urgency.AHEAD, Urgency.PLAN


def client(letter: str) -> Client:
    """A capital letter's tenant is "t"; that of the others is ""."""
    return Client("t" if letter.isupper() else "", letter)


class Hall:
    """Fetches that are begun and ended by hand; ``began`` is the order in which they had their turns."""

    def __init__(self, limit: int, store: str = "s3://one") -> None:
        self.scheduler = FairScheduler(limit)
        self.store = store
        self.began: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.slot: dict[str, FetchSlot] = {}

    async def ask(self, name: str, urgency: Urgency = DEMAND, store: str | None = None) -> None:
        """``name`` begins with its client's letter."""
        self.ends[name] = asyncio.Event()
        store = self.store if store is None else store
        self.slot[name] = self.scheduler.slot(client(name[0]), urgency, store and f"{store}/d/{name}")
        self.tasks[name] = asyncio.create_task(self._fetch(name))
        await self.settle()

    async def _fetch(self, name: str) -> None:
        async with self.slot[name]:
            self.began.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await self.settle()

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.parametrize("urgency", Urgency)
async def test_tenants_take_turns_however_many_clients_each_has(urgency: Urgency) -> None:
    hall = Hall(1)
    for name in ("a0", "b0", "c0", "d0", "Z0", "Z1", "Z2"):
        await hall.ask(name, urgency)
    for name in ("a0", "b0", "Z0", "c0", "Z1", "d0", "Z2"):
        assert hall.began[-1] == name
        await hall.end(name)
    assert hall.scheduler.running == hall.scheduler.waiting == 0


async def test_a_tenant_whose_fetches_all_hang_leaves_places_to_others() -> None:
    hall = Hall(64, store="")
    for i in range(640):
        await hall.ask(f"{'abcdefghijklmnop'[i % 16]}{i}")
    held = len(hall.began)
    assert held == 74, "a seventh more than one client may have"
    for i in range(20):
        await hall.ask(f"Z{i}")
    assert hall.began[held] == "Z0"
    for i in range(20):
        await hall.end(f"Z{i}")
    assert hall.began[held:] == [f"Z{i}" for i in range(20)]
    await hall.close()


async def test_readers_come_before_reading_ahead_before_plans() -> None:
    hall = Hall(1)
    await hall.ask("a0", PLAN)
    for name, urgency in (("a1", PLAN), ("b1", AHEAD), ("c1", DEMAND), ("a2", AHEAD), ("b2", DEMAND)):
        await hall.ask(name, urgency)
    for name in ("a0", "c1", "b2", "b1", "a2", "a1"):
        assert hall.began[-1] == name
        await hall.end(name)


async def test_plans_and_reading_ahead_leave_places_free() -> None:
    hall = Hall(8)
    for i in range(9):
        await hall.ask(f"p{i}", PLAN)
    assert len(hall.began) == 6
    await hall.ask("a", AHEAD)
    assert hall.began[-1] == "a"
    await hall.ask("b", AHEAD)
    assert hall.began[-1] == "a", "the last place is for readers"
    await hall.ask("c", DEMAND)
    assert hall.began[-1] == "c"
    await hall.end("c")
    await hall.end("p0")
    assert hall.began[-1] == "b", "and the plans still wait"
    await hall.close()


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 16, 64, 100])
async def test_who_is_alone_has_them_all_and_leaves_some_to_others(limit: int) -> None:
    hall = Hall(limit, store="")
    for i in range(2 * limit + 10):
        await hall.ask(f"a{i}")
    assert len(hall.began) == limit
    await hall.ask("b")
    assert hall.began[-1] == "b"
    await hall.close()


async def test_one_whose_fetches_all_hang_does_not_hold_up_others() -> None:
    hall = Hall(64, store="")
    for i in range(200):
        await hall.ask(f"a{i}", DEMAND if i % 2 else AHEAD)
    held = set(hall.began)
    for i in range(20):
        await hall.ask(f"b{i}", AHEAD)
    for i in range(20):  # each that ends makes room for the next, and never for those of a
        await hall.end(f"b{i}")
    assert set(hall.began) - held == {f"b{i}" for i in range(20)}
    await hall.close()


async def test_many_clients_of_a_store_that_hangs_are_as_one() -> None:
    hall = Hall(64)
    for i in range(160):
        await hall.ask(f"{'abcdefghijklmnop'[i % 16]}{i}", DEMAND, "s3://dead")
    assert len(hall.began) == 64
    for name in ("x", "y"):
        await hall.ask(name, DEMAND, "s3://alive")
        assert hall.began[-1] == name
    await hall.end("a0")
    assert len(hall.began) == 66, "the dead one is given nothing more while others are there"
    await hall.end("x")
    await hall.end("y")
    assert len(hall.began) > 66
    await hall.close()


async def test_who_leaves_in_the_moment_of_its_turn() -> None:
    hall = Hall(1)
    for name in ("a", "b", "c"):
        await hall.ask(name)
    hall.ends["a"].set()
    await asyncio.sleep(0)  # a is over, and b was told, but has not run yet
    hall.tasks["b"].cancel()
    await hall.settle()
    assert hall.began[-1] == "c"
    await hall.end("c")
    assert hall.scheduler.running == hall.scheduler.waiting == 0


def test_a_limit_of_nothing() -> None:
    with pytest.raises(ValueError):
        FairScheduler(0)


class Machine(RuleBasedStateMachine):
    """Any order of asking, ending, hastening and leaving, against a model of who is next."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.hall = self.loop.run_until_complete(self._hall())
        self.running: list[str] = []
        self.lines: dict[Urgency, dict[str, deque[str]]] = {urgency: {} for urgency in Urgency}
        self.client: dict[str, str] = {}
        self.store: dict[str, str] = {}

    async def _hall(self) -> Hall:
        return Hall(8)

    def teardown(self) -> None:
        self.loop.run_until_complete(self.hall.close())
        assert self.hall.scheduler.running == self.hall.scheduler.waiting == 0
        self.loop.close()

    def waiting(self) -> list[str]:
        return [name for line in self.lines.values() for queue in line.values() for name in queue]

    def take_out(self, name: str) -> Urgency:
        for urgency, line in self.lines.items():
            for client, queue in list(line.items()):
                if name in queue:
                    queue.remove(name)
                    if not queue:
                        del line[client]
                    return urgency
        raise AssertionError(name)

    def may(self, name: str, own: int, most: int) -> bool:
        """The rule, written out: of one client or one known store so many, and seven times what is free."""
        least = min(own, 7 * (most - len(self.running)))
        client, store = self.client[name], self.store[name]
        of_client = sum(self.client[other] == client for other in self.running)
        of_store = sum(self.store[other] == store for other in self.running)
        return of_client < least and (store == "" or of_store < least)

    def admit(self) -> None:
        for urgency, own, most in ((DEMAND, 8, 10), (AHEAD, 7, 9), (PLAN, 6, 8)):
            line = self.lines[urgency]
            while len(self.running) < most:
                client = next((client for client, queue in line.items() if self.may(queue[0], own, most)), None)
                if client is None:
                    break
                queue = line.pop(client)
                self.running.append(queue.popleft())
                if queue:
                    line[client] = queue
            if line and len(self.running) >= most:
                return

    @rule(
        client=st.sampled_from("abc"), urgency=st.sampled_from(Urgency), store=st.sampled_from(["", "s3://s", "s3://t"])
    )
    def ask(self, client: str, urgency: Urgency, store: str) -> None:
        self.ask_for(1, client, urgency, store)

    @rule(count=st.integers(2, 12), client=st.sampled_from("abc"), store=st.sampled_from(["", "s3://s", "s3://t"]))
    def flood(self, count: int, client: str, store: str) -> None:
        self.ask_for(count, client, DEMAND, store)

    def ask_for(self, count: int, client: str, urgency: Urgency, store: str) -> None:
        for _ in range(count):
            name = f"{client}{len(self.client)}"
            self.client[name], self.store[name] = client, store
            self.lines[urgency].setdefault(client, deque()).append(name)
            self.admit()
            self.loop.run_until_complete(self.hall.ask(name, urgency, store))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            name = data.draw(st.sampled_from(self.running))
            self.running.remove(name)
            self.admit()
            self.loop.run_until_complete(self.hall.end(name))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if everybody := [*self.running, *self.waiting()]:
            name = data.draw(st.sampled_from(everybody))
            if name in self.running:
                self.running.remove(name)
            else:
                self.take_out(name)
            self.admit()
            self.loop.run_until_complete(self.hall.cancel(name))

    @rule(data=st.data(), urgency=st.sampled_from([DEMAND, AHEAD]), client=st.sampled_from(["", "d"]))
    def hasten(self, data: st.DataObject, urgency: Urgency, client: str) -> None:
        if waiting := self.waiting():
            name = data.draw(st.sampled_from(waiting))
            slot = self.hall.slot[name]
            if urgency < slot.urgency:
                self.take_out(name)
                self.client[name] = client or slot.client.name
                self.lines[urgency].setdefault(self.client[name], deque()).append(name)
                self.admit()
            slot.hasten(urgency, Client("", client) if client else None)
            self.loop.run_until_complete(self.hall.settle())

    @invariant()
    def those_run_whose_turn_it_is(self) -> None:
        done = {name for name, task in self.hall.tasks.items() if task.done()}
        assert sorted(set(self.hall.began) - done) == sorted(self.running)
        assert self.hall.scheduler.running == len(self.running)
        assert self.hall.scheduler.waiting == len(self.waiting())

    @invariant()
    def a_newcomer_of_another_store_is_let_in(self) -> None:
        """As long as one client has all the others."""
        if len({self.client[name] for name in self.running}) <= 1:
            assert self.hall.scheduler.running <= 8
            assert self.hall.scheduler.may(self.hall.scheduler.slot(client("z"), DEMAND, "s3://z/x"))


TestMachine = Machine.TestCase


TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


CONTENT = data(300_000)


@asynccontextmanager
async def capped(tmp_path: Path, limit: float | None) -> AsyncIterator[tuple[RangeFetcher, ServiceCostLimit]]:
    prices = tmp_path / "prices.yaml"
    prices.write_text("origins: {'http://127.0.0.1': {internet: 1}}")  # a dollar a GB
    traffic = Traffic()
    now = iter(range(10**6))  # each look is a second later
    spending = ServiceCostLimit(traffic, PriceTable.load(prices), limit=limit, clock=lambda: float(next(now)))
    origin = RangeFetcher(quick(), memory_bytes=8 << 20, traffic=traffic, before_request=spending.check)
    try:
        yield origin, spending
    finally:
        await origin.close()


async def whole(origin: RangeFetcher, url: str) -> bytes:
    async with origin.part(url, 0, len(CONTENT)) as part:
        return bytes(part.view)


def test_behind_the_limit_nothing_is_asked(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("a/b.tar", CONTENT)

    async def go() -> None:
        async with capped(tmp_path, 0.0002) as (found, spending):
            assert await whole(found, url) == CONTENT
            asked = len(origin.requests)
            for call in (found.facts, lambda url: whole(found, url), lambda url: _stream(found, url)):
                with pytest.raises(CostLimitReached, match=r"cost_limit of \$0.0002 is reached"):
                    await call(url)
            with pytest.raises(CostLimitReached):
                await anext(found.entries(f"{origin.base}/a/"))
            assert len(origin.requests) == asked
            assert spending.exhausted

    asyncio.run(go())


def test_a_limit_outlives_the_process(origin: Origin, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("origins: {'http://127.0.0.1': {internet: 1}}")
    for number in range(3):
        origin.add(f"/{number}.tar", CONTENT)
    settings: dict[str, Any] = {"folder": tmp_path / "cache", "buckets": {"b": f"{origin.base}/"}, "private": True}
    settings |= {"prices": str(prices), "cost_limit": 0.0004}
    with Inside(**settings) as service:
        assert ask(f"{service.base}/ais/b/0.tar")[0] == 200
        assert json.loads(ask(f"{service.base}/v1/stats")[2])["cost"]["spent"][1] >= 0.0003
    with Inside(**settings) as service:
        assert ask(f"{service.base}/ais/b/1.tar")[0] == 200  # 0.0006 dollars now
        service.stored()
    asked = len(origin.requests)
    with Inside(**settings) as service:
        assert ask(f"{service.base}/ais/b/2.tar")[0] == 402
        assert ask(f"{service.base}/ais/b/1.tar")[0] == 200  # what is cached is served on
        page = ask(f"{service.base}/metrics")[2].decode()
        assert float(re.search(r'wds_cost_spent_dollars{bound="high"} (\S+)', page)[1]) >= 0.0006  # type: ignore[index]
    assert len(origin.requests) == asked
    costs = tmp_path / "cache" / "costs.json"
    state = json.loads(costs.read_text())
    costs.write_text(json.dumps({**state, "day": "2020-01-01"}))
    with Inside(**settings, cost_limit_per="day") as service:  # nothing was spent today
        assert ask(f"{service.base}/ais/b/2.tar")[0] == 200
    costs.write_text("{")
    with pytest.raises(ConfigError, match=r"costs\.json: what was spent until now cannot be read"):
        Inside(**settings).__enter__()


async def _stream(origin: RangeFetcher, url: str) -> Any:
    async with origin.stream(url) as (facts, _):
        return facts
