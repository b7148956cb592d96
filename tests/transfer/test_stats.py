"""Counters of one process and of many."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from typing import Any

import pytest

from tests.servers import Origin
from tests.transfer.reading import bytes_of, data, quick
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Board, Boards, Stats


def _count(board: Board, amount: int) -> None:
    board.counters().add("bytes", amount)
    board.counters().add("samples", 2 * amount)


def _read(board: Board, url: str) -> None:
    bytes_of([url], counters=board.counters())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_totals_over_processes(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    board = Board()
    board.counters().add("bytes", 1)
    workers = [context.Process(target=_count, args=(board, 10**i)) for i in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    total = board.total()
    assert (total.bytes, total.samples, total.processes) == (11111, 22220, 5)
    folder = board.folder
    assert folder.exists()
    del board, workers, worker
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_readers_are_counted(origin: Origin) -> None:
    url = origin.add("x.tar", data(100_000))
    board = Board()
    _read(board, url)
    workers = [multiprocessing.get_context("fork").Process(target=_read, args=(board, url)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert board.total().bytes == 300_000
    assert board.total().shards == 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_worker_leaves_what_it_counted() -> None:
    def work(board: Board) -> None:
        _count(board, 5)
        os.kill(os.getpid(), 9)

    board = Board()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(board,))
    worker.start()
    worker.join()
    assert worker.exitcode == -9
    assert board.total().bytes == 5
    assert board.folder.exists()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_traffic_over_processes(origin: Origin, method: str) -> None:
    url = origin.add("x.tar", data(100_000))
    board = Board()
    _read(board, url)
    assert not board.folder.exists()
    context: Any = multiprocessing.get_context(method)
    workers = [context.Process(target=_read, args=(board, url)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    found = board.traffic().origins[origin.base]
    assert (found.requests, found.bytes) == (len(origin.requests), 300_000)
    assert 3 <= found.seconds.count <= found.requests  # some were behind the end, which nobody knew
    assert Boards([board, Board()]).traffic().as_dict() == board.traffic().as_dict()
    assert board.total().processes == 3  # what lies there is no row of counters


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_traffic_of_a_killed_worker_is_what_it_left(origin: Origin) -> None:
    url = origin.add("x.tar", data(100_000))

    def work(board: Board) -> None:
        _read(board, url)
        counters = board.counters()
        counters.traffic.origins[origin.base].connections = 5
        counters.leave_traffic()
        counters.traffic.origins[origin.base].bytes = 0
        os.kill(os.getpid(), 9)

    board = Board()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(board,))
    worker.start()
    worker.join()
    found = board.traffic().origins[origin.base]
    assert (found.bytes, found.connections) == (100_000, 0)  # nothing is under way any more
    (path,) = board.folder.glob("traffic-*.json")
    path.write_text("{")  # cut short, as a full disk leaves it
    assert board.traffic().origins == {}


def _read_long(board: Board, urls: list[str], go_on: Any) -> None:
    with open_shards(urls, config=quick(stall_timeout_s=0.2), stats=board.counters()) as reader:
        for shard in reader:
            while shard.read() is not None:
                pass
            go_on.wait()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_traffic_is_told_while_a_worker_reads(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", data(100_000)) for i in range(2)]
    board, context = Board(), multiprocessing.get_context("fork")
    go_on = context.Event()
    worker = context.Process(target=_read_long, args=(board, urls, go_on), daemon=True)
    worker.start()
    deadline = time.monotonic() + 30
    while not any(each.bytes >= 100_000 for each in board.traffic().origins.values()):  # it is written once a second
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert worker.is_alive()
    go_on.set()
    worker.join()


def test_nothing_is_on_disk_without_a_second_process() -> None:
    board = Board()
    board.counters().add("bytes", 3)
    assert board.total().bytes == 3
    assert not board.folder.exists()
    again = pickle.loads(pickle.dumps(board))
    assert again.folder == board.folder
    assert Board().total() == Stats()


@pytest.mark.parametrize(
    ("wait_s", "words"), [(9.0, "network or the store"), (0.5, "bound by the consumer"), (3.0, "balanced")]
)
def test_what_sets_the_pace(wait_s: float, words: str) -> None:
    assert words in Stats(bytes=1, read_s=10, wait_s=wait_s).bound_by()
    assert Stats().bound_by() == "nothing was read"


def test_notes_in_the_folder_are_no_counters() -> None:
    board = Board()
    board.counters().add("bytes", 7)
    board.folder.mkdir(parents=True)
    (board.folder / "x.lines").write_bytes(bytes([1]) * 8 * len(Stats().as_dict()))
    assert board.total() == Stats(bytes=7, processes=1)
    assert board.counters().get("bytes") == 7
