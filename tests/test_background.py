"""Blocking calls on daemon threads, loops on threads, and workers that end with their parent.

What the latter looks like in a loader is in ``tests/isolated/test_processes.py``.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from wds_async import background
from wds_async.background import BlockingThreads, LoopThread


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


def test_a_loop_thread_cancels_its_tasks_and_ends() -> None:
    ended: list[str] = []

    async def at_end() -> None:
        ended.append("end")

    async def wait() -> None:
        try:
            await asyncio.sleep(50)
        finally:
            ended.append("cancelled")

    async def start() -> int:
        tasks.append(asyncio.get_running_loop().create_task(wait()))
        await asyncio.sleep(0)
        return 7

    tasks: list[asyncio.Task[None]] = []
    thread = LoopThread("wds-async-test", at_end)
    thread.start()
    assert thread.run(start()) == 7
    thread.stop()
    thread.join(10)
    assert (thread.alive, ended) == (False, ["cancelled", "end"])
    assert not thread.submit(print)


def test_no_other_process_is_watched() -> None:
    background.end_with_parent(pytest.fail)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("wds-async-orphan")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_process_of_the_programs_own_is_not_ended() -> None:
    child = multiprocessing.get_context("fork").Process(target=background.end_with_parent, args=(pytest.fail,))
    child.start()
    child.join(50)
    assert child.exitcode == 0


@pytest.mark.parametrize("descriptor", [True, False])
def test_the_end_of_a_process_is_seen(descriptor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a descriptor of it where the system has that, else by multiprocessing's own way."""
    if not descriptor:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    elif not hasattr(os, "pidfd_open"):
        pytest.skip("no pidfd")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    parent: Any = SimpleNamespace(pid=process.pid, join=process.wait)
    thread = threading.Thread(target=background._wait_for, args=(parent,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    process.communicate(b"\n")
    thread.join(50)
    assert not thread.is_alive()
    background._wait_for(parent)  # of one that has gone: at once
