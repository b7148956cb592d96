"""The bar and the summary line: drawn once, right with many workers, silent unless asked for."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from wds_async.dataset import WebDataset
from wds_async.observe import progress
from wds_async.observe.progress import Label
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
    assert progress.summary(stats, 10.0, "train epoch 4") == (
        "train epoch 4: 2.00 GB in 10.0 s, 200.0 MB/s, 4,000 samples (400/s); 3 faults healed, 2 bad samples, "
        "1 bad shards; bound by the network or the store: the consumer waited for bytes 90% of the time"
    )
    assert "0 bad samples, passed over: 2 shards, 3.0 MB; " in progress.summary(
        Stats(passed_shards=2, bad_bytes=3e6), 1.0, "train epoch 4"
    )
    # What bounds an iteration that was left early is not known before its reader is closed.
    assert progress.summary(Stats(bytes=1, samples=1), 1.0, "x").endswith("0 bad samples")


def test_leaving_early_and_errors_are_said() -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise KeyError("x")

    board = Board()
    shown, out = console()
    watched = progress.watch(reading(board, 100), board, True, 0, 1, console=shown)
    assert [next(watched) for _ in range(3)] == [0, 1, 2]
    watched.close()  # type: ignore[attr-defined]
    assert "epoch 1 (left early): 3.0 MB" in out.getvalue()
    with pytest.raises(KeyError):
        list(progress.watch(broken(), board, True, 0, 1, console=shown))
    assert "epoch 2 (ended by KeyError)" in out.getvalue()


def test_a_terminal_gets_a_bar_that_is_gone_in_the_end() -> None:
    shown, out = console(terminal=True)
    board = Board()
    list(progress.watch(reading(board, 3), board, True, 0, 1, console=shown, label=Label("train")))
    frames = out.getvalue().split("\x1b[J")  # what is below the cursor is erased before each drawing
    assert "train epoch 1  3 samples  " in frames[-3]
    assert frames[-2] == ""
    assert frames[-1].startswith("train epoch 1: 3.0 MB")
    assert not frames[-1].count("\x1b")


def test_the_meter_shows_rates_of_the_last_seconds() -> None:
    board, now = Board(), [0.0]
    meter = progress._EpochMeter(board, Label("train"), None, 1, clock=lambda: now[0])
    for _ in range(10):
        now[0] += 1.0
        board.counters().add("samples", 100)
        board.counters().add("bytes", 5e6)
        text = meter.draw().plain
    assert text == "train epoch 1  1,000 samples  100/s  5.0 MB/s  waits for the program"
    now[0] += 10.0
    assert meter.draw().plain == "train epoch 1  1,000 samples  0/s  0.0 MB/s  nothing moves"
    for waited_s, words in ((9, "waits for the network or the store"), (3, "network and program balanced")):
        now[0] += 10.0
        meter.draw()
        now[0] += 10.0
        board.counters().add("bytes", 5e6)
        board.counters().add("wait_s", waited_s)
        assert meter.draw().plain.endswith(words)


def test_the_meter_shows_the_share_of_the_epoch_and_how_long_it_lasts() -> None:
    board, now = Board(), [0.0]
    meter = progress._EpochMeter(board, Label("val"), 4000, 7, clock=lambda: now[0])
    now[0] += 90.0
    board.counters().add("samples", 1000)
    assert meter.draw().plain.startswith(
        "val epoch 7  ━━━━──────────── 25%  1,000 of 4,000 samples  0:04:30 left  11/s "
    )
    now[0] += 90.0
    board.counters().add("samples", 3100)  # more than was known
    assert meter.draw().plain.startswith("val epoch 7  ━━━━━━━━━━━━━━━━ 100%  4,100 of 4,000 samples  0:00:00 left")


def test_two_bars_are_two_lines() -> None:
    """Of one process; `test_bars_of_several_processes` has those of several."""
    shown, out = console(terminal=True)
    boards = [Board(), Board()]
    pairs = [
        progress.watch(reading(board, 10**12), board, True, 0, 1, console=shown, label=Label(name))
        for board, name in zip(boards, ("train", "[val]"), strict=True)
    ]
    both = re.compile(r"\r\ntrain epoch 1 [^\r\n]*\r\n\[val\] epoch 1 [^\r\n]*\x1b8")
    give_up = time.monotonic() + 60
    for _ in zip(*pairs, strict=True):
        if both.search(out.getvalue()) or time.monotonic() > give_up:
            break
        time.sleep(0.001)  # the bars are drawn by time, however fast the samples pass
    for pair in pairs:
        pair.close()  # type: ignore[attr-defined]
    assert both.search(out.getvalue())
    assert len(re.findall(r"epoch 1 \(left early\): ", out.getvalue())) == 2


BARS = """
import sys
import wds_async as wds

name, paths = sys.argv[1], sys.argv[2:]
items = iter(wds.WebDataset(paths, shardshuffle=False, progress=name))
next(items)
sys.stdin.readline()
print("a line of the program", flush=True)
sys.stdin.readline()
list(items)
"""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
def test_bars_of_several_processes(shards: Any, tmp_path: Path) -> None:
    paths = [str(path) for path in shards(2, 4)]
    (tmp_path / "bars.py").write_text(BARS)
    master, slave = os.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(progress.__file__).parents[2]), "TERM": "xterm"}
    children = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "bars.py"), name, *paths],
            stdin=subprocess.PIPE, stdout=slave, stderr=slave, text=True,
            env={**environment, "TMPDIR": str(tmp_path), "RANK": str(rank), "WORLD_SIZE": "2", "COLUMNS": "200"},
        )
        for rank, name in enumerate(("train", "val"))
    ]  # fmt: skip
    os.close(slave)
    shown = ""

    def read_until(pattern: str) -> str:
        nonlocal shown
        while not re.search(pattern, shown):
            shown += os.read(master, 65536).decode()
        before, shown = shown, ""
        return before

    lines = r"\r+\n[^\r\n]*(train|val) epoch 0[^\r\n]*\r+\n[^\r\n]*(train|val) epoch 0[^\r\n]*\x1b8"
    read_until(lines)
    children[0].stdin.write("\n")  # type: ignore[union-attr]
    children[0].stdin.flush()  # type: ignore[union-attr]
    read_until(r"a line of the program\r+\n(?s:.)*" + lines)  # and both are drawn again below it
    for child in children:
        child.communicate("\n\n")
        assert child.returncode == 0
    with contextlib.suppress(OSError):  # a terminal whose last user is gone
        while more := os.read(master, 65536):
            shown += more.decode()
    os.close(master)
    summaries = re.findall(r"(train|val) epoch 0 rank (\d): [^\r\n]* 4 samples ", shown)
    assert sorted(summaries) == [("train", "0"), ("val", "1")]
    assert shown.rpartition("\x1b[J")[2].count("\x1b") == 0  # no line is left


def test_a_dataset_knows_its_name_and_its_total(
    shards: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(path) for path in shards(2, 3)]

    def label(urls: Any, **more: Any) -> Label:
        (found,) = [
            s.label
            for s in WebDataset(urls, shardshuffle=False, **{"progress": True, **more}).pipeline
            if isinstance(s, progress.Watch)
        ]
        return found

    assert (label(paths).name, label(paths).total(1)) == ("shard", None)  # type: ignore[misc]
    assert label(paths, progress="mine").name == "mine"
    assert label(paths, length=60).total(2) == 60  # type: ignore[misc]
    index = {"wids_version": 1, "name": "toy", "shardlist": [{"url": path, "nsamples": 3} for path in paths]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert label(str(tmp_path / "index.json")).total(2) == 6  # type: ignore[misc]


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


def test_real_shards_in_one_process(shards: Any, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = WebDataset([str(path) for path in shards(3, 4)], shardshuffle=False, progress=True)
    assert len(list(dataset)) == 12
    err = capsys.readouterr().err
    assert re.fullmatch(r"shard epoch 0: [\d.]+ MB in .* 12 samples .*\n", err)


@pytest.mark.parametrize("persistent", [False, True])
def test_real_dataloader_workers(persistent: bool, shards: Any, capfd: pytest.CaptureFixture[str]) -> None:
    data = pytest.importorskip("torch.utils.data")
    dataset = WebDataset([str(path) for path in shards(4, 4)], shardshuffle=False, progress="train")
    loader = data.DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        assert len(list(loader)) == 16
    dataset.set_epoch(5)
    assert len(list(loader)) == 16
    del loader
    lines = capfd.readouterr().err.splitlines()
    assert [re.match(r"train epoch (\d): .* 16 samples ", line).group(1) for line in lines] == ["0", "1", "5"]  # type: ignore[union-attr]


def test_the_variable_turns_it_on(shards: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    board = Board()
    stage = progress.Watch(board)
    monkeypatch.setenv("WDS_PROGRESS", "0")
    assert list(stage.run([1])) == [1]
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("WDS_PROGRESS", "1")
    assert list(stage.run([1])) == [1]
    assert "wds_async epoch 1" in capsys.readouterr().err
