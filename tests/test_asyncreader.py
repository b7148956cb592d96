"""Samples for asyncio: order, bounds, errors, and that the thread ends whenever the caller is done."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.behaviour import BEFORE_HEAD
from wds_async.asyncreader import AsyncReader

RUNNERS: dict[str, Callable[[Any], Any]] = {"asyncio": asyncio.run}
try:
    import uvloop

    RUNNERS["uvloop"] = uvloop.run
except ImportError:  # Windows
    pass

each_loop = pytest.mark.parametrize("run", RUNNERS.values(), ids=RUNNERS)


class Source:
    """Numbers up to ``count``; knows how many were taken, whether it was closed, and by which thread."""

    def __init__(self, count: int | None, fail_at: int | None = None) -> None:
        self.count, self.fail_at = count, fail_at
        self.taken = 0
        self.thread: threading.Thread | None = None
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[int]:
        self.thread = threading.current_thread()
        try:
            for i in itertools.count() if self.count is None else range(self.count):
                if i == self.fail_at:
                    raise KeyError("broken sample")
                self.taken = i + 1
                yield i
        finally:
            self.closed.set()


@each_loop
def test_all_items_in_order_from_another_thread(run: Any) -> None:
    source = Source(1000)

    async def main() -> list[int]:
        return [item async for item in AsyncReader(source)]

    assert run(main()) == list(range(1000))
    assert source.thread is not threading.main_thread()


@each_loop
def test_samples_of_shards(run: Any, shards: Any) -> None:
    paths = shards(3, 5)

    async def main() -> list[str]:
        reader = AsyncReader([str(path) for path in paths])
        first = [sample["__key__"] async for sample in reader]
        assert first == [sample["__key__"] async for sample in reader]  # each loop is a pass of its own
        return first

    keys = run(main())
    assert len(keys) == len(set(keys)) == 15


def test_arguments_reach_webdataset(shards: Any) -> None:
    path: Path = shards(1, 4)[0]

    async def main() -> list[set[str]]:
        reader = AsyncReader(path, select_files=lambda name: name.endswith(".cls"))
        return [{k for k in sample if not k.startswith("__")} async for sample in reader]

    assert asyncio.run(main()) == [{"cls"}] * 4


@each_loop
def test_an_error_comes_at_its_place_and_stays(run: Any) -> None:
    async def main() -> None:
        items = aiter(AsyncReader(Source(10, fail_at=3)))
        assert [await anext(items) for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(KeyError, match="broken sample"):
                await anext(items)

    run(main())


def test_a_missing_shard_is_an_error_of_the_tree() -> None:
    async def main() -> None:
        with pytest.raises(FileNotFoundError, match=r"no-such\.tar"):
            async for _ in AsyncReader("no-such.tar"):
                pass

    asyncio.run(main())


def test_the_end_is_sticky() -> None:
    async def main() -> None:
        items = aiter(AsyncReader(Source(1)))
        assert await anext(items) == 0
        for _ in range(3):
            assert await anext(items, "end") == "end"

    asyncio.run(main())


@each_loop
def test_leaving_the_loop_ends_the_thread(run: Any) -> None:
    source = Source(None)

    async def main() -> None:
        async for item in AsyncReader(source, buffer=4):
            if item == 10:
                break
        gc.collect()
        assert await asyncio.to_thread(source.closed.wait, 2)

    run(main())
    assert source.taken <= 11 + 4 + 1


@each_loop
def test_cancelling_the_task_ends_the_thread(run: Any) -> None:
    source = Source(None)
    seen = []

    async def consume(started: asyncio.Event) -> None:
        async for item in AsyncReader(source):
            seen.append(item)
            started.set()
            await asyncio.sleep(0)

    async def main() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(consume(started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(source.closed.wait, 2)

    run(main())
    assert seen == list(range(len(seen)))


def test_the_context_waits_for_the_thread() -> None:
    source = Source(None)

    async def main() -> None:
        async with AsyncReader(source) as reader:
            items = aiter(reader)
            assert await anext(items) == 0
        assert source.closed.is_set()
        assert await anext(items, "end") == "end"

    asyncio.run(main())


def test_a_kept_error_keeps_no_thread() -> None:
    source = Gated()
    kept = []

    async def main() -> None:
        try:
            await asyncio.wait_for(anext(aiter(AsyncReader(source))), 0.01)
        except TimeoutError as exn:
            kept.append(exn)  # and its traceback
        source.gate.release()
        assert await asyncio.to_thread(source.closed.wait, 2)

    asyncio.run(main())


class Gated:
    """Items that come when they are let through."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[int]:
        try:
            for i in range(5):
                self.gate.acquire()
                yield i
        finally:
            self.closed.set()


def test_a_cancelled_wait_loses_nothing() -> None:
    async def main() -> list[int]:
        source = Gated()
        items = aiter(AsyncReader(source))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(items), 0.01)
        source.gate.release(5)
        return [item async for item in items]

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_closing_ends_a_read_that_stalls(origin: Any) -> None:
    url = origin.add("x.tar", b"\0" * 10240)
    origin.behave(stall_after=BEFORE_HEAD)

    async def main() -> None:
        async with AsyncReader(url) as reader:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(aiter(reader)), 0.1)
        assert [t.name for t in threading.enumerate() if t.name == "wds-async-reader"] == []

    asyncio.run(main())


def test_the_buffer_is_bounded() -> None:
    source = Source(None)

    async def main() -> None:
        async with AsyncReader(source, buffer=3) as reader:
            items = aiter(reader)
            for i in range(50):
                assert await anext(items) == i
                # taken by the caller, in the buffer, and one in the thread's hand
                assert source.taken <= i + 1 + 3 + 1

    asyncio.run(main())


def test_other_tasks_get_their_turn() -> None:
    async def main() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        async for _ in AsyncReader(Source(6400), buffer=6400):
            pass
        task.cancel()
        return turns

    assert asyncio.run(main()) >= 100


def test_a_loop_that_ends_first_is_no_error() -> None:
    source = Source(None)
    kept = []

    async def main() -> None:
        items = aiter(AsyncReader(source))
        kept.append(items)
        assert await anext(items) == 0

    asyncio.run(main())
    kept.clear()
    gc.collect()
    assert source.closed.wait(2)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="buffer=0"):
        AsyncReader([], buffer=0)
    with pytest.raises(TypeError, match="shardshuffle"):
        AsyncReader(range(3), shardshuffle=True)
