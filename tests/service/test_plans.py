"""Plans over a real cache and a scripted origin: what is fetched ahead, for whom, how much, and until when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.service.cache.doubles import Bytes, Clock, content, get, running
from wds_async.errors import CostLimitReached
from wds_async.service import prefetch as rooms
from wds_async.service.allowlist import Allowed
from wds_async.service.cache.cache import ChunkCache
from wds_async.service.cache.origin import Client
from wds_async.service.config import ServiceConfig
from wds_async.service.prefetch import PrefetchPlans
from wds_async.service.refusals import Refusal

SIZE = 40_000
NAMES = [f"gs://bucket/{i:03}.tar" for i in range(40)]


class Stage:
    """A cache with plans, and an origin of 40 shards."""

    def __init__(self, cache: ChunkCache, origin: Bytes, clock: Clock, **settings: Any) -> None:
        self.cache, self.origin, self.clock = cache, origin, clock
        at_once = settings.pop("at_once", 8)
        config = ServiceConfig(**{"allow": ("gs://bucket/",), "ahead_bytes": 1 << 30, **settings})
        self.plans = PrefetchPlans(cache, config, Allowed(config), clock, at_once)

    async def announce(self, client: str, shards: list[str], tenant: str = "", **more: Any) -> dict[str, Any]:
        told = await self.plans.answer({"shards": shards, **more}, client=Client(tenant, client))
        await self.quiet()
        return told

    async def heard(self, client: str, url: str, after_s: float = 0.0) -> None:
        self.clock.now += after_s
        self.plans.heard(Client("", client), url)
        await self.quiet()

    async def quiet(self) -> None:
        """Until nothing is fetched any more; what waits at the gate stays there."""
        while self.plans._running and self.origin.gate.is_set():
            await asyncio.wait(self.plans._running, timeout=5)
        for _ in range(20):
            await asyncio.sleep(0.001)

    async def until(self, seen: Callable[[], bool]) -> None:
        while not seen():  # noqa: ASYNC110 (what it waits for is in an origin that knows of nobody)
            await asyncio.sleep(0.001)

    def fetched(self) -> list[str]:
        """The shards whose bytes were asked for, in order."""
        return list(dict.fromkeys(url for kind, url, _, _ in self.origin.asked if kind == "part"))

    def row(self, client: str) -> dict[str, Any]:
        return next(row for row in self.plans.as_list() if row["client"] == client)


@contextlib.asynccontextmanager
async def stage(folder: Path, limit: int = 40 * SIZE, **settings: Any) -> AsyncIterator[Stage]:
    origin, clock = Bytes(), Clock()
    for i, name in enumerate(NAMES):
        origin.put(name, content(SIZE, i))
    async with running(folder, origin, limit) as cache:
        found = Stage(cache, origin, clock, **settings)
        await found.plans.start()
        try:
            yield found
        finally:
            origin.gate.set()
            await found.plans.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


async def test_so_many_shards_ahead_and_no_more(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        told = await s.announce("a", NAMES, ahead=3, job="train")
        assert told == {"shards": 40, "ahead_bytes": 20 * SIZE, "lifetime_s": 60.0}
        assert sorted(s.fetched()) == NAMES[:4]
        assert s.plans.fetched_bytes == 4 * SIZE
        assert s.row("a") == {"client": "a", "job": "train", "shards": 40, "done": 0, "ahead_bytes": 4 * SIZE}
        await s.heard("a", NAMES[0])
        await s.heard("a", NAMES[1])
        assert sorted(s.fetched()) == NAMES[:5]
        assert (s.row("a")["done"], s.row("a")["ahead_bytes"]) == (1, 3 * SIZE)
        before = s.origin.bytes
        assert await get(s.cache, NAMES[1]) == content(SIZE, 1)
        assert s.origin.bytes == before, "it was there already"


async def test_a_shard_of_two_jobs_is_fetched_and_counted_once(tmp_path: Path) -> None:
    async with stage(tmp_path, limit=16 * SIZE) as s:  # 8 shards may be held
        await s.announce("a", NAMES[:8], ahead=7)
        await s.announce("b", list(reversed(NAMES[:8])), ahead=7)
        assert sorted(s.fetched()) == NAMES[:8]
        assert s.origin.bytes == s.plans.fetched_bytes == 8 * SIZE
        for name in NAMES[:8]:
            await s.heard("a", name)
        await s.announce("c", NAMES[8:16], ahead=7)
        assert sorted(s.fetched()) == NAMES[:8], "b has not read them yet, and they fill their half of the cache"
        for name in reversed(NAMES[:8]):
            await s.heard("b", name)
        await s.heard("c", "gs://bucket/other.tar")
        s.plans.sweep()
        await s.quiet()
        assert sorted(s.fetched()) == NAMES[:16]


def test_what_is_needed_soonest_comes_first(tmp_path: Path) -> None:
    """Of two clients, one takes 3 s for a shard and the other 1 s."""

    async def work() -> None:
        async with stage(tmp_path, limit=80 * SIZE, at_once=1) as s:
            slow, fast = NAMES[:20], NAMES[20:]
            await s.announce("slow", slow, ahead=0)
            await s.announce("fast", fast, ahead=0)
            for i in range(7):
                await s.heard("fast", fast[i], 1.0)
                if i % 3 == 0:
                    await s.heard("slow", slow[i // 3], 0.0)
            count = len(s.fetched())
            s.origin.gate.clear()
            for client in ("slow", "fast"):
                await s.plans.answer({"ahead": 10}, client=Client("", client))
            s.origin.gate.set()
            await s.quiet()
            order = s.fetched()[count:]
            assert order[1:] == sorted(order[1:], key=lambda url: due(url, slow, fast))
            assert len(order) == 20

    def due(url: str, slow: list[str], fast: list[str]) -> float:
        return 3.0 * (slow.index(url) - 2) + 0.1 if url in slow else 1.0 * (fast.index(url) - 6)

    run(work())


async def test_no_more_bytes_ahead_than_a_client_may_have(tmp_path: Path) -> None:
    async with stage(tmp_path, ahead_bytes=int(2.5 * SIZE)) as s:
        told = await s.announce("a", NAMES, ahead=10)
        assert told["ahead_bytes"] == int(2.5 * SIZE)
        assert sorted(s.fetched()) == NAMES[:2]
        assert s.row("a")["ahead_bytes"] == 2 * SIZE
        await s.heard("a", NAMES[0])
        assert sorted(s.fetched()) == NAMES[:3]
        await s.announce("b", NAMES[20:], ahead=10, ahead_bytes=SIZE)
        assert sorted(s.fetched()) == [*NAMES[:3], NAMES[20]]


async def test_a_shard_larger_than_the_budget_is_begun(tmp_path: Path) -> None:
    async with stage(tmp_path, ahead_bytes=8192) as s:
        await s.announce("a", NAMES)
        assert s.plans.fetched_bytes == 8192
        assert sorted(s.fetched()) == NAMES[:1]


async def test_without_a_disk_nothing_is_fetched_ahead() -> None:
    origin, clock = Bytes(), Clock()
    origin.put(NAMES[0], content(SIZE))
    async with running(None, origin, 0) as cache:
        s = Stage(cache, origin, clock)
        assert (await s.announce("a", NAMES))["ahead_bytes"] == 0
        assert origin.asked == []
        await s.plans.close()


async def test_a_client_that_has_gone_takes_its_plan_along(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.announce("a", NAMES[:20], ahead=1)
        await s.announce("b", NAMES[20:], ahead=1)
        await s.heard("b", NAMES[20], 50.0)
        s.clock.now += 11.0
        s.plans.sweep()
        assert [row["client"] for row in s.plans.as_list()] == ["b"]
        count = len(s.fetched())
        await s.heard("a", NAMES[1])
        assert len(s.fetched()) == count
        assert s.plans.drop(Client("", "b"))
        assert not s.plans.drop(Client("", "b"))
        assert s.plans.as_list() == []


async def test_fetches_end_with_their_plan_unless_others_wait_for_them(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        s.origin.gate.clear()
        await s.announce("a", NAMES[:2], ahead=1)
        await s.announce("b", NAMES[1:2], ahead=1)
        await s.until(lambda: len(s.fetched()) == 2)
        s.plans.drop(Client("", "a"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(s.plans._running) == 1
        s.origin.gate.set()
        await s.quiet()
        before = s.origin.bytes
        await get(s.cache, NAMES[1])
        assert s.origin.bytes == before


async def test_fetches_for_plans_are_shared_by_tenants_however_many_clients_each_has(tmp_path: Path) -> None:
    async with stage(tmp_path, limit=80 * SIZE, at_once=4) as s:
        s.origin.gate.clear()
        for number in range(6):
            await s.announce(f"{number}", NAMES[4 * number : 4 * number + 4], "many", ahead=3)
        await s.announce("one", NAMES[24:], "few", ahead=15)
        s.clock.now += 1000.0  # what tenant "many" needs is long overdue
        s.plans.heard(Client("few", "one"), NAMES[24])
        assert set(s.plans._running.values()) == {"many"}
        running = list[str]()
        for _ in range(12):
            next(iter(s.plans._running)).cancel()
            await asyncio.sleep(0.01)
            running = sorted(s.plans._running.values())
        assert running == ["few", "few", "many", "many"]


async def test_what_is_held_for_plans_is_shared_by_tenants(tmp_path: Path) -> None:
    async with stage(tmp_path, limit=32 * SIZE) as s:  # 16 shards may be held
        await s.announce("a", NAMES[:12], "one", ahead=11)
        assert len(s.fetched()) == 12, "all of it where there is one tenant"
        await s.announce("b", NAMES[20:], "two", ahead=19)
        assert len(s.fetched()) == 16
        for number in range(10):
            s.plans.heard(Client("one", "a"), NAMES[number])
        await s.announce("c", NAMES[12:20], "one", ahead=7)
        await s.quiet()
        rows = {row["client"]: row["ahead_bytes"] for row in s.plans.as_list()}
        assert rows == {"one/a": 2 * SIZE, "one/c": 6 * SIZE, "two/b": 8 * SIZE}
        s.plans.drop(Client("two", "b"))
        await s.quiet()
        assert {row["client"]: row["ahead_bytes"] for row in s.plans.as_list()}["one/c"] == 8 * SIZE


def test_a_tenant_leaves_places_for_plans_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "PLANS_AT_MOST", 16)

    async def work() -> None:
        async with stage(tmp_path) as s:
            for number in range(14):
                await s.announce(f"{number}", [], "greedy")
            with pytest.raises(Refusal) as caught:
                await s.announce("15", [], "greedy")
            assert caught.value.status == 429
            await s.announce("0", [], "modest")
            await s.announce("13", NAMES[:1], "greedy")  # in the place of the one that it has

    run(work())


async def test_a_reader_joins_what_its_plan_is_fetching(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        s.origin.gate.clear()
        await s.announce("a", NAMES[:1])
        await s.until(lambda: s.origin.under_way > 0)
        s.plans.heard(Client("", "a"), NAMES[0])
        reader = asyncio.create_task(get(s.cache, NAMES[0], client=Client("", "a")))
        await asyncio.sleep(0.01)
        s.origin.gate.set()
        assert await reader == content(SIZE, 0)
        await s.quiet()
        assert s.origin.bytes == SIZE


async def test_a_plan_is_replaced_and_keeps_what_was_fetched(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.announce("a", NAMES, ahead=2)
        await s.announce("a", NAMES[2:], ahead=2)
        assert sorted(s.fetched()) == NAMES[:5]
        assert s.origin.bytes == 5 * SIZE
        assert s.row("a")["ahead_bytes"] == 3 * SIZE
        await s.plans.answer({"position": 10}, client=Client("", "a"))
        await s.quiet()
        assert sorted(s.fetched()) == [*NAMES[:5], *NAMES[12:15]]


async def test_what_may_not_be_read_is_left_out(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        mixed = ["gs://other/x", "/etc/passwd", "http://169.254.169.254/", "pipe:cat x", *NAMES[:2], "gs://other/y"]
        await s.announce("a", mixed, ahead=10)
        assert {url for _, url, _, _ in s.origin.asked} == set(NAMES[:2])
        for shards, status in (
            (["gs://other/x"], 403),
            (["/etc/passwd"], 400),
            (["https://169.254.169.254/"], 403),
        ):
            with pytest.raises(Refusal) as caught:
                await s.announce("b", shards)
            assert caught.value.status == status


async def test_what_is_missing_is_passed_over(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.announce("a", ["gs://bucket/none.tar", *NAMES[:2]])
        assert sorted(s.fetched()) == NAMES[:2]
        assert s.row("a")["ahead_bytes"] == 2 * SIZE


class Broke(Bytes):
    """An origin that has become too dear."""

    async def facts(self, url: str) -> Any:
        raise CostLimitReached("5 dollars were spent")

    def part(self, *args: Any) -> Any:
        raise CostLimitReached("5 dollars were spent")


async def test_plans_pause_where_nothing_more_may_be_spent(tmp_path: Path) -> None:
    async with running(tmp_path, Broke(), 40 * SIZE) as cache:
        s = Stage(cache, Broke(), Clock())
        await s.announce("a", NAMES, ahead=30)
        first = s.plans._plans[Client("", "a")].following
        s.plans.sweep()
        assert s.plans._plans[Client("", "a")].following == first <= rooms._AT_ONCE
        s.clock.now += 31
        s.plans.heard(Client("", "a"), "gs://bucket/any")
        s.plans.sweep()
        assert s.plans._plans[Client("", "a")].following > first
        await s.plans.close()


@pytest.mark.parametrize(
    "said",
    [None, [], "x", {"shards": "gs://bucket/x"}, {"shards": [1]}, {"shards": [], "position": -1},
     {"shards": [], "ahead": "8"}, {"shards": [], "ahead": True}, {"shards": [], "ahead": 10**9},
     {"shards": [NAMES[0]], "ahead_bytes": -1}, {"shards": [NAMES[0], "a\0b"]}, {"shards": [NAMES[0], "x" * 5000]}],
)  # fmt: skip
async def test_messages_that_are_no_plans(tmp_path: Path, said: Any) -> None:
    async with stage(tmp_path) as s:
        with pytest.raises(Refusal) as caught:
            await s.plans.answer(said, client=Client("", "a"))
        assert caught.value.status == 400
        assert s.plans.as_list() == []
        with pytest.raises(Refusal) as caught:
            await s.plans.answer({"position": 3}, client=Client("", "a"))
        assert caught.value.status == 404


async def test_a_long_plan_is_taken_and_a_longer_one_is_not(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        names = [f"gs://bucket/{i:07}.tar" for i in range(rooms.SHARDS_AT_MOST)]
        told = await s.plans.answer({"shards": names, "ahead": 0, "position": 49_000}, client=Client("", "a"))
        assert told["shards"] == rooms.SHARDS_AT_MOST
        s.plans.heard(Client("", "a"), names[49_400])
        assert s.row("a")["done"] == 49_400
        with pytest.raises(Refusal) as caught:
            await s.plans.answer({"shards": ["x"] * (rooms.SHARDS_AT_MOST + 1)}, client=Client("", "b"))
        assert caught.value.status == 413
