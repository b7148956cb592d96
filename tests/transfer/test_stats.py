"""Counters of one process and of many."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from typing import Any

import pytest

from tests.servers import Origin
from tests.transfer.reading import bytes_of, data
from wds_async.transfer.stats import Board, Counters, Stats


def _count(board: Board, amount: int) -> None:
    board.counters().add("bytes", amount)
    board.counters().add_samples(2 * amount)


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


def test_nothing_is_on_disk_without_a_second_process() -> None:
    board = Board()
    board.counters().add("bytes", 3)
    assert board.total().bytes == 3
    assert not board.folder.exists()
    again = pickle.loads(pickle.dumps(board))
    assert again.folder == board.folder
    assert Board().total() == Stats()


def test_cells() -> None:
    counters = Counters()
    counters.add("bytes", 2)
    counters.add("bytes")
    counters.set("window_bytes", 7)
    counters.peak("window_peak_bytes", 5)
    counters.peak("window_peak_bytes", 3)
    stats = Stats(*counters.values())
    assert (stats.bytes, stats.window_bytes, stats.window_peak_bytes, stats.processes) == (3, 7, 5, 1)
    assert stats.as_dict()["bytes"] == 3
    assert (stats + stats).bytes == 6
    with pytest.raises(KeyError):
        counters.add("nonsense")


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
