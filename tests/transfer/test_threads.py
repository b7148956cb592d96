"""Calls that block, on threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from wds_async.transfer.threads import BlockingThreads


def _run(scenario: Callable[[BlockingThreads], Coroutine[Any, Any, None]], most: int = 4) -> None:
    async def run() -> None:
        threads = BlockingThreads(asyncio.get_running_loop(), most)
        try:
            async with asyncio.timeout(10):
                await scenario(threads)
        finally:
            threads.stop()

    asyncio.run(run())


def test_results_and_errors() -> None:
    async def scenario(threads: BlockingThreads) -> None:
        assert await threads.call(divmod, 7, 2) == (3, 1)
        assert await threads.call(sorted, [1, 2], reverse=True) == [2, 1]
        with pytest.raises(ZeroDivisionError):
            await threads.call(divmod, 1, 0)
        assert await threads.call(threading.get_ident) != threading.get_ident()

    _run(scenario)


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_what_a_loop_does_not_bear_comes_as_an_error(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("3")

    async def scenario(threads: BlockingThreads) -> None:
        with pytest.raises(RuntimeError, match=f"{kind.__name__}: 3") as caught:
            await threads.call(fail)
        assert isinstance(caught.value.__cause__, kind)

    _run(scenario)


def test_no_more_threads_than_needed_or_allowed() -> None:
    async def scenario(threads: BlockingThreads) -> None:
        for _ in range(20):
            await threads.call(int)
        assert threads._threads == 1
        seen: set[int] = set()
        gate = threading.Barrier(4)

        def meet() -> None:
            seen.add(threading.get_ident())
            gate.wait(5)

        await asyncio.gather(*[threads.call(meet) for _ in range(8)])
        assert len(seen) == threads._threads == 4
        await asyncio.gather(*[threads.call(int) for _ in range(50)])
        assert threads._threads == 4

    _run(scenario)


def test_a_cancelled_call_ends_in_its_thread_and_the_thread_serves_on() -> None:
    async def scenario(threads: BlockingThreads) -> None:
        release, ended = threading.Event(), threading.Event()

        def wait() -> None:
            release.wait(5)
            ended.set()

        task = asyncio.ensure_future(threads.call(wait))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        assert await threads.call(ended.wait, 5)
        assert await threads.call(int) == 0

    _run(scenario, most=1)


def test_a_result_after_the_loop_has_closed_is_dropped() -> None:
    release = threading.Event()

    async def run() -> None:
        threads = BlockingThreads(asyncio.get_running_loop(), 1)
        task = asyncio.ensure_future(threads.call(release.wait, 5))
        await asyncio.sleep(0)
        task.cancel()
        threads.stop()

    asyncio.run(run())
    release.set()  # the fixture sees that the thread ends
