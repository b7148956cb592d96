"""Datasets that are left in the middle, in each of the ways there are, nested, interleaved and on threads: the process
is clean each time, and the dataset can be read again."""

import gc
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common  # noqa: F401 - the path

import wds_async as wds
from tests.servers import Origin, make_shards
from wds_async.transfer import engine

KEYS = [f"{i:06d}" for i in range(20)]


def keys(items: Any) -> list[str]:
    return [sample["__key__"] for sample in items]


def engines() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wds-async")]


def clean(way: Callable[[], None]) -> None:
    engine.end_idle()
    deadline = time.monotonic() + 10
    while engines() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not engines(), (way.__name__, engines())


def left(way: Callable[[], None], *, at_once: bool = True) -> None:
    """Leave it in that way; nothing stays, and the dataset gives everything again. Not ``at_once``: once garbage was
    collected, and on a thread that nobody waits for."""
    way()
    if at_once:
        assert engine._current is None or not engine._current._pumps, way.__name__
    else:
        gc.collect()
    clean(way)
    origin.wait_until(lambda server: server.open_connections == 0)
    assert keys(dataset) == KEYS, way.__name__
    clean(way)


def by_break() -> None:
    for number, _ in enumerate(dataset):
        if number == 7:
            break


def by_del() -> None:
    iterator = iter(dataset)
    next(iterator)
    del iterator


def by_close() -> None:
    mine = wds.WebDataset(urls, shardshuffle=False)  # one that was closed stays so
    iterator = iter(mine)
    next(iterator)
    mine.close()


def by_an_exception_of_the_user() -> None:
    def fail(sample: Any) -> Any:
        if sample["__key__"] == KEYS[7]:
            raise LookupError("mine")
        return sample

    try:
        for _ in dataset.map(fail):
            pass
    except LookupError:
        pass
    else:
        raise AssertionError("nothing was raised")


def by_an_exception_in_the_loop() -> None:
    try:
        for sample in dataset:
            raise LookupError(sample["__key__"])
    except LookupError:
        pass


def by_a_generator_that_is_closed() -> None:
    def stage() -> Any:
        yield from dataset

    generator = stage()
    next(generator)
    generator.close()


def by_collection_on_another_thread() -> None:
    class Cycle:
        pass

    gc.disable()
    cycle: Any = Cycle()
    cycle.me, cycle.iterator = cycle, iter(dataset)
    next(cycle.iterator)
    del cycle
    assert engines()
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    gc.enable()


def nested() -> None:
    for number, _ in enumerate(dataset):
        assert keys(dataset) == KEYS
        if number == 2:
            break
    assert [(a["__key__"], b["__key__"]) for a, b in zip(dataset, dataset, strict=True)] == [(k, k) for k in KEYS]


def interleaved() -> None:
    for a, b in zip(dataset, other, strict=False):
        assert a["__key__"] == b["__key__"]
        if a["__key__"] == KEYS[11]:
            break


def on_threads() -> None:
    found: list[Any] = []

    def work(number: int) -> None:
        if number % 2:
            found.append(keys(dataset))
        else:
            next(iter(other))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [KEYS] * 4


def handed_to_another_thread() -> None:
    iterator = iter(dataset)
    got = [next(iterator)]
    thread = threading.Thread(target=lambda: got.extend(iterator))
    thread.start()
    thread.join()
    assert keys(got) == KEYS


WAYS = [by_break, by_del, by_close, by_an_exception_in_the_loop, by_an_exception_of_the_user,
        by_a_generator_that_is_closed, nested, interleaved, on_threads, handed_to_another_thread]  # fmt: skip

with Origin() as origin, tempfile.TemporaryDirectory() as folder:
    paths = make_shards(Path(folder), 4, 5, payload=200_000)
    urls = [origin.add(path.name, path.read_bytes()) for path in paths]
    dataset = wds.WebDataset(urls, shardshuffle=False)
    other = wds.WebDataset([str(path) for path in paths], shardshuffle=False)
    for way in WAYS:
        left(way)
    left(by_collection_on_another_thread, at_once=False)
