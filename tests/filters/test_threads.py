"""wds_async.filters.threads: threads ahead of the consumer, in order, that end with the iterator."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import leftover_threads
from wds_async import filters
from wds_async.errors import ConfigError, ReaderClosed
from wds_async.filters.threads import ordered_map
from wds_async.handlers import ignore_and_continue, ignore_and_stop


def mine() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("wds-async-map")}


def fails_on(*bad: int) -> Callable[[int], int]:
    def f(n: int) -> int:
        if n in bad:
            raise ZeroDivisionError(n)
        return n

    return f


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 5))
def test_everything_in_order(n: int, threads: int) -> None:
    assert list(ordered_map(range(n), str, threads)) == [str(i) for i in range(n)]


def test_order_is_kept_where_later_calls_end_first() -> None:
    second = threading.Event()

    def f(n: int) -> int:
        if n == 0:
            assert second.wait(20)
        if n == 1:
            second.set()
        return n

    assert list(ordered_map(range(5), f, 2)) == list(range(5))


def test_all_threads_work_at_once() -> None:
    together = threading.Barrier(3)
    found = list(ordered_map(range(6), lambda n: (together.wait(20), threading.get_ident())[1], 3))
    assert len(set(found)) == 3
    assert threading.get_ident() not in found


def test_at_most_two_items_a_thread_are_ahead() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for n in range(100):
            assert threading.current_thread() is threading.main_thread()
            taken.append(n)
            yield n

    iterator = ordered_map(source(), str, 3)
    assert taken == []
    for n in range(50):
        assert next(iterator) == str(n)
        assert len(taken) <= n + 6
    del iterator


def test_nothing_begins_before_the_first_item_is_asked_for() -> None:
    iterator = ordered_map(range(3), str, 2)
    assert mine() == set()
    assert next(iterator) == "0"
    assert len(mine()) == 2
    del iterator


def test_errors_reach_the_handler_in_order() -> None:
    seen: list[Any] = []

    def handler(exn: BaseException) -> bool:
        seen.append(exn.args[0])
        return True

    for n in ordered_map(range(10), fails_on(3, 4, 7), 3, handler):
        seen.append(n)
    assert seen == list(range(10))
    assert list(ordered_map(range(10), fails_on(3), 3, ignore_and_continue)) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert list(ordered_map(range(10), fails_on(3), 3, ignore_and_stop)) == [0, 1, 2]
    iterator = ordered_map(range(10), fails_on(3), 3)
    assert list(itertools.islice(iterator, 3)) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match="3"):
        next(iterator)


def test_what_is_no_exception_passes_every_handler() -> None:
    def f(n: int) -> int:
        raise SystemExit(n)

    with pytest.raises(SystemExit):
        list(ordered_map(range(3), f, 2, ignore_and_continue))


def test_an_error_of_the_source_comes_after_the_results_before_it() -> None:
    def source() -> Iterator[int]:
        yield from range(3)
        raise LookupError("source")

    iterator = ordered_map(source(), fails_on(1), 4, ignore_and_continue)
    assert list(itertools.islice(iterator, 2)) == [0, 2]
    with pytest.raises(LookupError, match="source"):
        next(iterator)


@pytest.mark.parametrize("how", ["exhausted", "closed", "dropped", "cycle", "failed", "stopped"])
def test_the_threads_end_with_the_iterator(how: str) -> None:
    before = set(threading.enumerate())
    handler = ignore_and_stop if how == "stopped" else None
    iterator: Any = ordered_map(range(100), fails_on(5), 3, *([handler] if handler else []))
    assert next(iterator) == 0
    assert len(mine()) == 3
    if how == "exhausted":
        iterator = ordered_map(range(3), str, 2)
        list(iterator)
    elif how == "closed":
        iterator.close()
    elif how == "failed":
        with pytest.raises(ZeroDivisionError):
            list(iterator)
    elif how == "stopped":
        assert list(iterator) == [1, 2, 3, 4]
    elif how == "cycle":
        loop = [iterator]
        loop.append(loop)  # type: ignore[arg-type]
        del loop
    kept = iterator if how in ("closed", "failed", "stopped") else None
    del iterator
    gc.collect()
    assert leftover_threads(before) == []
    del kept


def test_what_is_waiting_when_it_is_closed_is_not_begun() -> None:
    began: list[int] = []
    go = threading.Event()

    def f(n: int) -> int:
        began.append(n)
        if n:
            assert go.wait(20)
        return n

    before = set(threading.enumerate())
    iterator: Any = ordered_map(range(100), f, 1)
    assert next(iterator) == 0
    iterator.close()
    go.set()
    assert leftover_threads(before) == []
    assert set(began) <= {0, 1}


def test_no_sample_is_kept_alive() -> None:
    import weakref

    class Item:
        pass

    alive: list[weakref.ref[Item]] = []

    def source() -> Iterator[Item]:
        for _ in range(20):
            item = Item()
            alive.append(weakref.ref(item))
            yield item
            del item

    iterator = ordered_map(source(), lambda item: None, 2)
    for _ in range(12):
        next(iterator)
    assert sum(ref() is not None for ref in alive[:12]) <= 2  # those that the threads are just letting go of
    del iterator


def test_functions_of_torch_use_one_core_on_each_thread_and_all_of_them_elsewhere() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert set(ordered_map(range(50), lambda _: torch.get_num_threads(), 3)) == {1}
        assert torch.get_num_threads() == 4
        assert set(ordered_map(range(5), lambda _: run_apart(torch.get_num_threads), 3)) == {4}
    finally:
        torch.set_num_threads(before)


def run_apart(function: Callable[[], Any]) -> Any:
    """Return what ``function`` gives on a new thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_threads_must_be_some() -> None:
    for threads in (0, -1):
        with pytest.raises(ConfigError, match=f"threads={threads}"):
            ordered_map([], str, threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_cannot_go_on_and_can_begin_anew() -> None:
    iterator = ordered_map(range(10), str, 2)
    assert next(iterator) == "0"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            next(iterator)
        except ReaderClosed:
            status = 0 if list(ordered_map(range(3), str, 2)) == ["0", "1", "2"] else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert list(iterator) == [str(n) for n in range(1, 10)]


EXITS = {
    "in the middle": "it = ordered_map(itertools.count(), slow, 3); print(next(it))",
    "in a pipeline": "it = iter(DataPipeline(range(99), filters.map(slow, threads=3))); print(next(it))",
    "with a call that hangs": "it = ordered_map(itertools.count(), hang, 2); print(next(it))",
}


@pytest.mark.parametrize("case", EXITS)
def test_the_interpreter_ends_silently(case: str) -> None:
    script = f"""
import itertools, threading, time
from wds_async import filters
from wds_async.filters.threads import ordered_map
from wds_async.pipeline import DataPipeline
def slow(n):
    if n: threading.Event().wait(0.01)
    return n
def hang(n):
    if n: threading.Event().wait()
    return n
{EXITS[case]}
"""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)


# ---------------------------------------------------------------- as the filters use it


def test_map_with_threads() -> None:
    assert list(filters.map(lambda n: n if n % 3 else None, threads=2)(range(8))) == [1, 2, 4, 5, 7]
    samples = [{"__key__": str(n), "x": n} for n in range(5)]
    assert list(filters.map(lambda s: {"y": s["x"]}, threads=2)(samples)) == [
        {"__key__": str(n), "y": n} for n in range(5)
    ]


def test_decode_with_threads() -> None:
    raw = [{"__key__": str(n), "cls": b"%d" % n, "txt": b"x"} for n in range(20)]
    raw[4]["cls"] = b"?"
    found = list(filters.decode(threads=3, handler=ignore_and_continue)(raw))
    assert found == [{"__key__": str(n), "cls": n, "txt": "x"} for n in range(20) if n != 4]


def test_in_dataloader_workers() -> None:
    import torch

    from wds_async.pipeline import DataPipeline

    pipeline = DataPipeline(range(20), filters.map(fails_on(), threads=2))
    loader = torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=2)
    for _ in range(2):
        assert sorted(loader) == sorted([*range(20), *range(20)])
