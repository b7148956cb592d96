"""The bar and the summary line: drawn once, right with many workers, silent unless asked for."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from wds_async import progress
from wds_async.dataset import WebDataset
from wds_async.transfer.stats import Board, Stats


def console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=200, color_system=None), out


def reading(board: Board, samples: int, size: int = 1_000_000) -> Iterator[int]:
    """What a reader does to the board while its samples pass."""
    counters = board.counters()
    for i in range(samples):
        counters.add("samples")
        counters.add("bytes", size)
        yield i


def test_disabled_it_is_not_there_at_all() -> None:
    items = iter([1, 2])
    assert progress.watch(items, Board(), False, 0, 1) is items


def test_one_summary_an_epoch() -> None:
    board = Board()
    shown, out = console()
    for samples in (5, 3):
        watched = progress.watch(reading(board, samples), board, True, 0, 1, console=shown)
        assert list(watched) == list(range(samples))
    first, second = out.getvalue().splitlines()
    assert first.startswith("wds_async epoch 1: 5.0 MB in ")
    assert second.startswith("wds_async epoch 2: 3.0 MB in ")
    assert "3 samples" in second


def test_what_the_summary_says() -> None:
    stats = Stats(bytes=2e9, samples=4000, retries=3, bad_samples=2, bad_shards=1, wait_s=9, read_s=10)
    assert progress.summary(stats, 10.0, 4) == (
        "wds_async epoch 4: 2.00 GB in 10.0 s, 200.0 MB/s, 4,000 samples (400/s); 3 faults healed, 2 bad samples, "
        "1 bad shards; bound by the network or the store: the consumer waited for bytes 90% of the time"
    )
    assert "0 bad samples, passed over: 2 shards, 3.0 MB; " in progress.summary(
        Stats(passed_shards=2, bad_bytes=3e6), 1.0
    )


def test_leaving_early_is_said() -> None:
    board = Board()
    shown, out = console()
    watched = progress.watch(reading(board, 100), board, True, 0, 1, console=shown)
    assert [next(watched) for _ in range(3)] == [0, 1, 2]
    watched.close()  # type: ignore[attr-defined]
    assert "epoch 1 (left early): 3.0 MB" in out.getvalue()


def test_an_error_passes_and_is_said() -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise KeyError("x")

    shown, out = console()
    with pytest.raises(KeyError):
        list(progress.watch(broken(), Board(), True, 0, 1, console=shown))
    assert "(ended by KeyError)" in out.getvalue()


def test_a_terminal_gets_a_bar_that_is_gone_in_the_end() -> None:
    board = Board()
    board.counters().set("budget_bytes", 100)
    board.counters().set("window_bytes", 50)
    shown, out = console(terminal=True)
    list(progress.watch(reading(board, 3), board, True, 0, 1, console=shown))
    text = out.getvalue()
    assert "window ━━━━━━━━──────── 50%" in text
    assert text.rstrip().splitlines()[-1].startswith("wds_async epoch 1") or "\x1b[2K" in text


def test_the_meter_shows_rates_of_the_last_seconds() -> None:
    board, now = Board(), [0.0]
    meter = progress._Meter(board, clock=lambda: now[0])
    for _ in range(10):
        now[0] += 1.0
        board.counters().add("samples", 100)
        board.counters().add("bytes", 5e6)
        text = meter.draw().plain
    assert "1,000 samples  100/s  5.0 MB/s" in text
    now[0] += 10.0
    assert "1,000 samples  0/s  0.0 MB/s" in meter.draw().plain


def work(board: Board, worker: int, workers: int, samples: int, epochs: int, path: str, barrier: Any) -> None:
    """One worker of `test_many_workers_print_one_line`: what it prints goes to a file."""
    with open(path, "w", encoding="utf-8") as out:
        shown = Console(file=out, width=300)
        for _ in range(epochs):
            barrier.wait()
            for _ in progress.watch(reading(board, samples), board, True, worker, workers, console=shown):
                pass


def test_many_workers_print_one_line(tmp_path: Path) -> None:
    context = get_context("spawn")
    board, workers, epochs = Board(), 3, 4
    barrier = context.Barrier(workers)
    paths = [tmp_path / f"{i}.txt" for i in range(workers)]
    processes = [
        context.Process(target=work, args=(board, i, workers, 10 * (i + 1), epochs, str(paths[i]), barrier))
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    lines = sorted(line for path in paths for line in path.read_text().splitlines())
    # 10 + 20 + 30 samples of 1 MB: every epoch is whole, and none is reported twice.
    assert [re.match(r"wds_async epoch (\d): 60\.0 MB", line).group(1) for line in lines] == list("1234")  # type: ignore[union-attr]
    assert all("60 samples" in line for line in lines)
    assert board.total().samples == 60 * epochs


class Shown(Iterable[Any]):
    """A dataset with the stage put in, as WebDataset does it."""

    def __init__(self, paths: list[str]) -> None:
        self.dataset = WebDataset(paths, shardshuffle=False)
        board = next(stage.board for stage in self.dataset.pipeline if hasattr(stage, "board"))
        self.dataset.append(progress.Watch(board, enabled=True))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def test_real_shards_in_one_process(shards: Any, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(path) for path in shards(3, 4)]
    assert len(list(Shown(paths))) == 12
    err = capsys.readouterr().err
    assert re.fullmatch(r"wds_async epoch 1: [\d.]+ MB in .* 12 samples .*\n", err)


@pytest.mark.parametrize("persistent", [False, True])
def test_real_dataloader_workers(persistent: bool, shards: Any, capfd: pytest.CaptureFixture[str]) -> None:
    data = pytest.importorskip("torch.utils.data")
    dataset = Shown([str(path) for path in shards(4, 4)]).dataset
    loader = data.DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        assert len(list(loader)) == 16
    del loader
    lines = capfd.readouterr().err.splitlines()
    assert [re.match(r"wds_async epoch (\d): .* 16 samples ", line).group(1) for line in lines] == ["1", "2"]  # type: ignore[union-attr]


def test_the_variable_turns_it_on(shards: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    board = Board()
    stage = progress.Watch(board)
    monkeypatch.setenv("WDS_PROGRESS", "0")
    assert list(stage.run([1])) == [1]
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("WDS_PROGRESS", "1")
    assert list(stage.run([1])) == [1]
    assert "wds_async epoch 1" in capsys.readouterr().err
