"""Outages are waited out together: few probes, one wake for all, and one line that says what is going on."""

from __future__ import annotations

import asyncio
import collections
import heapq
import itertools
import logging
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.servers import BEFORE_HEAD, Origin
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick, snapshot
from wds_async.config import RetryPolicy
from wds_async.errors import TransferError
from wds_async.transfer.circuit_breaker import CircuitBreaker, FailureLog
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters

PART = 256 * KIB


class Timer:
    def __init__(self, when: float, callback: Callable[[], object]) -> None:
        self.when, self.callback, self.cancelled = when, callback, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """Time that passes when the test says so; everything that is due then happens in its order."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> Any:
        timer = Timer(when, callback)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    async def to(self, when: float) -> None:
        await self._settle()
        while self._timers and self._timers[0][0] <= when:
            self.now, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                timer.callback()
                await self._settle()
        self.now = when
        await self._settle()

    async def _settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def _run(scenario: Callable[[Clock, CircuitBreaker], Coroutine[Any, Any, None]]) -> None:
    clock = Clock()
    asyncio.run(scenario(clock, CircuitBreaker("http://h", clock, random.Random(5))))  # type: ignore[arg-type]


async def _sleeper(
    clock: Clock, breaker: CircuitBreaker, woken: list[tuple[float, bool]], *args: Any, **kwargs: Any
) -> None:
    may = await breaker.wait(*args, **kwargs)
    woken.append((clock.now - 1000.0, may))


@pytest.mark.parametrize("outage_s", [3.0, 60.0, 280.0])
def test_an_outage_is_probed_rarely_and_its_end_wakes_everybody(outage_s: float) -> None:
    policy, rng = RetryPolicy(), random.Random(1)
    asked: collections.Counter[int] = collections.Counter()
    done: list[float] = []

    async def part(clock: Clock, breaker: CircuitBreaker) -> None:
        for attempt in itertools.count(1):
            asked[int(clock.now - 1000)] += 1
            if clock.now >= 1000 + outage_s:
                breaker.record_success()
                done.append(clock.now - 1000 - outage_s)
                return
            breaker.record_failure("the connection was refused", clock.now)
            assert await breaker.wait(policy.delay_s(attempt, rng), 1000 + policy.timeout_s, cap_s=policy.cap_s)

    async def scenario(clock: Clock, breaker: CircuitBreaker) -> None:
        tasks = [asyncio.ensure_future(part(clock, breaker)) for _ in range(200)]
        await clock.to(1000 + outage_s + 6)
        assert breaker.waiting == 0
        await asyncio.gather(*tasks)

    _run(scenario)
    assert len(done) == 200
    assert max(done) < 5.0
    assert asked[0] <= 205
    assert all(asked[second] <= 5 for second in range(1, int(outage_s)))


def test_one_request_is_let_through_at_a_time_while_it_is_down() -> None:
    async def scenario(clock: Clock, breaker: CircuitBreaker) -> None:
        breaker.record_success()
        for _ in range(3):
            assert breaker.allow_request()
            breaker.record_failure("the connection was refused", clock.now)
        probes = 0
        for second in range(1, 61):
            await clock.to(1000 + second)
            probes += sum(breaker.allow_request() for _ in range(100))
        assert 15 <= probes <= 40
        breaker.record_success()
        assert breaker.allow_request()
        assert breaker.allow_request()

    _run(scenario)


def test_what_the_server_told_is_waited_for_to_its_end() -> None:
    async def scenario(clock: Clock, breaker: CircuitBreaker) -> None:
        woken: list[tuple[float, bool]] = []
        for _ in range(4):
            breaker.record_failure("503", clock.now)
        tasks = [
            asyncio.ensure_future(_sleeper(clock, breaker, woken, 0.1, 1300.0, retry_after_s=told))
            for told in (15.0, 3.0, 9.0)
        ]
        await clock.to(1001)
        assert not woken  # no probe either
        breaker.record_success()
        await clock.to(1030)
        await asyncio.gather(*tasks)
        assert [round(at, 3) for at, _ in woken] == [3.0, 9.0, 15.0]

    _run(scenario)


def test_what_it_told_one_part_is_not_kept_to_where_others_are_answered() -> None:
    """It may have too much to do for a moment; a part that waits for a second holds up all that is read behind it."""

    async def scenario(clock: Clock, breaker: CircuitBreaker) -> None:
        woken: list[tuple[float, bool]] = []
        for _ in range(40):
            breaker.record_success()
        breaker.record_failure("503", clock.now, throttled=True)
        assert breaker.healthy
        task = asyncio.ensure_future(_sleeper(clock, breaker, woken, 0.1, 1300.0, retry_after_s=15.0))
        await clock.to(1001)
        for _ in range(8):
            breaker.record_success()
        await clock.to(1002)
        await task
        assert [round(at) for at, _ in woken] == [1]

    _run(scenario)


def test_good_answers_in_a_row_wake_those_who_had_bad_luck() -> None:
    async def scenario(clock: Clock, breaker: CircuitBreaker) -> None:
        woken: list[tuple[float, bool]] = []
        breaker.record_success()
        breaker.record_failure("500", clock.now)
        breaker.record_success()
        tasks = [asyncio.ensure_future(_sleeper(clock, breaker, woken, 18.0, 1300.0)) for _ in range(20)]
        await clock.to(1002)
        for _ in range(6):
            breaker.record_success()
        await clock.to(1004)
        assert not woken
        breaker.record_success()
        await clock.to(1004.31)
        assert len(woken) == 20
        assert len({at for at, _ in woken}) > 10  # not all at once
        await asyncio.gather(*tasks)

    _run(scenario)


def test_a_part_whose_own_way_stays_broken_does_not_hammer() -> None:
    """Its server behind the redirect is gone, say, while others do well."""
    asked = []

    async def scenario(clock: Clock, breaker: CircuitBreaker) -> None:
        async def broken() -> None:
            for _ in range(1000):
                asked.append(clock.now)
                breaker.record_failure("refused", clock.now)
                await breaker.wait(15.0, 1300.0)

        task = asyncio.ensure_future(broken())
        for second in range(200):
            await clock.to(1000 + second / 10)
            for _ in range(50):
                breaker.record_success()
        task.cancel()

    _run(scenario)
    assert 10 <= len(asked) <= 21


def test_the_deadline_ends_the_waiting() -> None:
    async def scenario(clock: Clock, breaker: CircuitBreaker) -> None:
        woken: list[tuple[float, bool]] = []
        breaker.record_failure("refused", clock.now)
        lone = asyncio.ensure_future(_sleeper(clock, breaker, woken, 50.0, 1004.0))
        await clock.to(1005)
        for _ in range(3):
            breaker.record_failure("refused", clock.now)
        many = [asyncio.ensure_future(_sleeper(clock, breaker, woken, 5.0, 1010.0)) for _ in range(40)]
        await clock.to(1011)
        await asyncio.gather(lone, *many)
        assert woken[0] == (4.0, True)  # a last attempt
        tried = [at for at, may in woken[1:] if may]
        assert 0 < len(tried) < 20
        assert [at for at, may in woken if not may] == [10.0] * (40 - len(tried))

    _run(scenario)


def test_who_is_cancelled_is_not_waited_for() -> None:
    async def scenario(clock: Clock, breaker: CircuitBreaker) -> None:
        woken: list[tuple[float, bool]] = []
        for _ in range(3):
            breaker.record_failure("refused", clock.now)
        first = asyncio.ensure_future(_sleeper(clock, breaker, woken, 1.0, 1300.0))
        second = asyncio.ensure_future(_sleeper(clock, breaker, woken, 1.0, 1300.0))
        await clock.to(1000.1)
        first.cancel()
        await clock.to(1003)
        assert breaker.waiting == 0
        assert len(woken) == 1
        await asyncio.gather(first, second, return_exceptions=True)

    _run(scenario)


@pytest.mark.parametrize(("outage_s", "anew"), [(3.0, False), (15.0, True)])
def test_the_time_of_who_waits_begins_anew_after_an_outage(outage_s: float, anew: bool) -> None:
    async def scenario(clock: Clock, breaker: CircuitBreaker) -> None:
        breaker.record_success()
        breaker.record_failure("refused", clock.now)
        await clock.to(1000 + outage_s)
        breaker.record_success()
        assert (breaker.recovered_at == 1000 + outage_s) is anew

    _run(scenario)


def test_an_outage_is_told_once_a_minute_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(clock: Clock, breaker: CircuitBreaker) -> None:
        for second in range(0, 100, 2):
            await clock.to(1000 + second)
            breaker.record_failure("the connection was refused", clock.now)
            breaker.warn_of_outage("http://h/x.tar", "the connection was refused", 300.0)
        breaker.record_success()
        breaker.record_success()
        breaker.record_failure("reset", clock.now)
        breaker.warn_of_outage("http://h/x.tar", "reset", 300.0)
        breaker.record_success()

    with caplog.at_level(logging.WARNING, "wds_async"):
        _run(scenario)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "http://h/x.tar: nothing was read from there for 10 s: the connection was refused (attempt 6). "
        "Trying on until nothing has come for 300 s (WDS_TIMEOUT).",
        "http://h/x.tar: nothing was read from there for 70 s: the connection was refused (attempt 36). "
        "Trying on until nothing has come for 300 s (WDS_TIMEOUT).",
        "http://h: it answers again, after 98 s",
    ]


def test_names_are_redacted() -> None:
    assert CircuitBreaker("http://user:secret@h", Clock()).name == "http://user:***@h"  # type: ignore[arg-type]


def test_histories() -> None:
    history = FailureLog(100.0)
    history.add("a")
    assert history.summary(400.0) == ""
    history.add("a")
    assert history.summary(100.5) == " after 2 attempts"
    history.add("b")
    assert history.summary(400.0) == " after 3 attempts in 300 s (2 times a, once b)"
    for number in range(100):
        history.add(f"reason {number}")
    assert history.summary(400.0).endswith(", once reason 5, 94 times something else)")


# -- through the engine --------------------------------------------------------------------------------------------


def test_a_server_that_is_gone_and_comes_back(origin: Origin) -> None:
    contents = [data(3 * PART, i) for i in range(12)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    again = Origin(origin.files)
    again.port = origin.port
    patient = RetryPolicy(timeout_s=60.0, base_s=0.01, cap_s=0.1)
    counters, got = Counters(), []
    with open_shards(urls, config=quick(retry=patient, budget_bytes=1024 * KIB), stats=counters) as reader:
        for number, shard in enumerate(reader):
            if number == 1:
                origin.stop()
                threading.Timer(0.5, again.start).start()
            read = bytearray()
            while (piece := shard.read()) is not None:
                read += piece
            got.append(bytes(read))
    again.stop()
    assert got == contents
    assert again.requests
    assert 1 <= snapshot(counters).retries < 60


def test_a_storm_of_503_ends_for_all_at_once(origin: Origin) -> None:
    content = data(24 * PART)
    url = origin.add("x.tar", content)
    origin.behave(status=503, skip=4, times=30)
    counters = Counters()
    patient = RetryPolicy(timeout_s=60.0, base_s=0.01, cap_s=0.05)
    assert bytes_of([url], quick(retry=patient), counters) == [content]
    assert snapshot(counters).retries == 30
    assert snapshot(counters).throttled == 30


def test_the_end_tells_the_whole_history(origin: Origin) -> None:
    url = origin.add("x.tar", data(PART))
    origin.behave(status=503, times=4)
    origin.behave(cut_after=BEFORE_HEAD, cut="fin")
    ((_, error),) = outcomes([url], quick(connections=1, retry=RetryPolicy(max_attempts=6, base_s=0.001, cap_s=0.01)))
    assert isinstance(error, TransferError)
    assert "after 6 attempts (4 times the server answered 503 (503), 2 times the server closed" in str(error)
    assert (error.shard, error.offset) == (url, 0)


def test_an_object_that_always_fails_ends_though_others_do_well(origin: Origin) -> None:
    contents = [data(2 * PART, i) for i in range(10)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    origin.behave(path="/5.tar", status=500)
    found = outcomes(urls, quick(retry=RetryPolicy(timeout_s=0.4, base_s=0.01, cap_s=0.05)))
    for number, (got, error) in enumerate(found):
        assert (got == contents[number]) is (number != 5)
        assert (error is not None) is (number == 5)
    assert "the server answered 500" in str(found[5][1])
