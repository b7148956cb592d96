"""The progress bar and the summary line of an epoch, with any number of DataLoader workers.

One process of a rank draws the bar: worker 0, or the main process without workers; its figures are totals over all of
them (`transfer.stats.Board`). The last worker to end its epoch prints the summary: each leaves its figures in a small
file in the board's folder, and the one that finds all files adds them up. On a terminal the bar is a line of its
`screen`, which other bars and ranks share; elsewhere a plain line is printed every ten seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from wds_async import config, packages, world
from wds_async.observe import screen
from wds_async.observe.prices import Range, meter_of_job
from wds_async.stages import Traits
from wds_async.transfer.stats import Board, Boards, Stats
from wds_async.transfer.traffic import Traffic

__all__ = ["Label", "Watch", "summary", "watch"]

T = TypeVar("T")

_PLAIN_EVERY_S = 10.0
_RATES_S = 3.0
_CELLS = 16
_passes: weakref.WeakKeyDictionary[Board | Boards, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Label:
    """Text of a bar besides its figures: the ``name`` of the data, the epoch that its readers count, and the number of
    samples in an epoch of this rank (``total(num_workers)``), None where it is unknown."""

    name: str = "wds_async"
    epochs: tuple[world.SharedEpoch, ...] = ()
    total: Callable[[int], int | None] | None = None

    def text(self, fallback: int) -> str:
        """Return ``train epoch 3``, with the rank if there are several; ``fallback`` where no epochs are counted."""
        epoch = max((counter.get() for counter in self.epochs), default=fallback)
        here = world.place()
        return f"{self.name} epoch {epoch}{f' rank {here.rank}' if here.world_size > 1 else ''}"


class Watch:
    """A pipeline stage that shows progress; ``enabled`` None follows ``WDS_PROGRESS``."""

    traits = Traits(one_to_one=True, same_items=True, state=True)

    def __init__(self, board: Board | Boards, enabled: bool | None = None, label: Label = Label()) -> None:
        self.board = board
        self.enabled = enabled
        self.label = label

    def detached(self) -> Watch:
        """Return one that shows nothing."""
        return Watch(self.board, False, self.label)

    def run(self, source: Iterable[T]) -> Iterator[T]:
        """Return ``source`` unchanged, with a bar if enabled."""
        enabled = config.settings().progress if self.enabled is None else self.enabled
        here = world.place()
        return watch(iter(source), self.board, enabled, here.worker, here.num_workers, label=self.label)


def watch(
    iterator: Iterator[T],
    board: Board | Boards,
    enabled: bool,
    worker: int,
    num_workers: int,
    *,
    console: Console | None = None,
    label: Label = Label(),
) -> Iterator[T]:
    """Return ``iterator`` itself, or with a bar and a summary line on stderr (``console``) where ``enabled``.

    ``worker`` of ``num_workers`` is this process's place among those that read the same pass.
    """
    if not enabled:
        return iterator
    return _watched(iterator, board, worker, num_workers, console or Console(stderr=True), label)


def _watched(
    iterator: Iterator[T], board: Board | Boards, worker: int, num_workers: int, console: Console, label: Label
) -> Iterator[T]:
    number = _passes[board] = _passes.get(board, 0) + 1
    before, start = board.counters().values(), time.time()
    meter = meter_of_job()
    cost_before = meter.dollars(_traffic(board))
    how = " (left early)"
    try:
        meter_of_pass = _EpochMeter(board, label, label.total(num_workers) if label.total else None, number)
        with _bar(meter_of_pass, console) if worker == 0 else contextlib.nullcontext():
            yield from iterator
            how = ""
    except Exception as exn:
        how = f" (ended by {type(exn).__name__})"
        raise
    finally:
        if not sys.is_finalizing():
            shares = [{
                "stats": [now - then for now, then in zip(board.counters().values(), before, strict=True)],
                "start": start,
                "end": time.time(),
                "how": how,
                "cost": meter.dollars(_traffic(board)).since(cost_before).as_list(),
                "label": label.text(number),
            }]  # fmt: skip
            if num_workers > 1:
                shares = _all_shares(board.folder, shares[0], worker, num_workers, number)
            if shares:
                screen.say(console, _summary_of(shares))


def _all_shares(folder: Path, share: dict[str, Any], worker: int, num_workers: int, number: int) -> list[Any]:
    """Return the shares of all workers if this one is the last to end its epoch, else none."""
    pass_id = f"{_generation(worker)}-{number}"
    paths = [folder / f"epoch-{pass_id}-{i}" for i in range(num_workers)]
    # Renamed when complete, so that no process reads half of it. Never as long as one of the board's rows.
    aside = folder / f"epoch-{pass_id}-{worker}.new"
    aside.write_text(json.dumps(share).ljust(1024))
    os.replace(aside, paths[worker])
    try:
        shares = [json.loads(path.read_text()) for path in paths]
        # Two that end at once may both see all files; only one can create this one.
        (folder / f"summary-{pass_id}").open("x").close()
    except (FileNotFoundError, FileExistsError):
        return []
    for path in paths:
        path.unlink(missing_ok=True)
    return shares


def _summary_of(shares: list[Any]) -> str:
    stats = Stats(*map(sum, zip(*(share["stats"] for share in shares), strict=True)))
    cost = Range(*map(sum, zip(*(share["cost"] for share in shares), strict=True)))
    wall_s = max(share["end"] for share in shares) - min(share["start"] for share in shares)
    how = next((share["how"] for share in shares if share["how"]), "")
    return summary(stats, wall_s, shares[0]["label"], how, cost)


def _generation(worker: int) -> int:
    """Return a number that only the workers of one DataLoader iterator share."""
    data = packages.loaded("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return os.getppid() if info is None else int(info.seed) - worker


def _traffic(board: Board | Boards) -> Traffic:
    """Return this process's requests to origins so far."""
    boards = board.boards if isinstance(board, Boards) else [board]
    return sum((one.counters().traffic for one in boards), Traffic())


def summary(stats: Stats, wall_s: float, label: str, how: str = "", cost: Range | None = None) -> str:
    """Return the line of an epoch behind its ``label`` (`Label.text`): bytes, MB/s, samples, faults healed, bad
    samples, what was skipped, the bottleneck, and the cost, unless that is nothing."""
    dollars = f"; {cost} by the table of prices" if cost is not None and cost.high > 0 else ""
    wall_s = max(wall_s, 1e-9)
    bound = "" if stats.bytes and not stats.read_s else f"; {stats.bound_by()}"  # unknown before its reader is closed
    shards = f", {stats.bad_shards:.0f} bad shards" if stats.bad_shards else ""
    if stats.passed_shards or stats.bad_bytes:
        shards += f", passed over: {stats.passed_shards:.0f} shards, {_size(stats.bad_bytes)}"
    return (
        f"{label}{how}: {_size(stats.bytes)} in {wall_s:.1f} s, "
        f"{stats.bytes / wall_s / 1e6:,.1f} MB/s, {stats.samples:,.0f} samples "
        f"({stats.samples / wall_s:,.0f}/s); {stats.retries:.0f} faults healed, "
        f"{stats.bad_samples:.0f} bad samples{shards}{bound}{dollars}"
    )


@contextlib.contextmanager
def _bar(meter: _EpochMeter, console: Console) -> Iterator[None]:
    if screen.can_draw(console):
        with screen.ScreenLine(console, meter.draw):
            yield
        return
    done = threading.Event()

    def print_lines() -> None:
        while not done.wait(_PLAIN_EVERY_S):
            console.print(meter.draw().plain, soft_wrap=True, highlight=False)

    thread = threading.Thread(target=print_lines, name="wds-async-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _EpochMeter:
    """Share of the epoch and rates over the last few seconds, from the board's totals, drawn as one line."""

    def __init__(
        self,
        board: Board | Boards,
        label: Label,
        total: int | None,
        number: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board, self._label, self._total, self._number = board, label, total, number
        self._clock = clock
        self._began, self._first = clock(), board.total()
        self._past = deque([(self._began, self._first)])

    def draw(self) -> Text:
        """Return the line as it is now."""
        now, stats = self._clock(), self._board.total()
        while len(self._past) > 1 and now - self._past[1][0] > _RATES_S:
            self._past.popleft()
        then, before = self._past[0]
        self._past.append((now, stats))
        span = max(now - then, 1e-9)
        done = stats.samples - self._first.samples
        text = Text(self._label.text(self._number), style="bold")
        if self._total:
            share = min(1.0, done / self._total)
            text.append("  ").append_text(screen.bar(share, _CELLS))
            text.append(f" {share:.0%}  {done:,.0f} of {self._total:,} samples", style="cyan")
            if done:
                left_s = (now - self._began) * max(0.0, self._total - done) / done
                text.append(f"  {timedelta(seconds=int(left_s))} left", style="default")
        else:
            text.append(f"  {done:,.0f} samples", style="cyan")
        text.append(f"  {(stats.samples - before.samples) / span:,.0f}/s", style="default")
        text.append(f"  {(stats.bytes - before.bytes) / span / 1e6:,.1f} MB/s", style="green")
        return text.append(f"  {_pace(before, stats, span)}", style="default")


def _pace(before: Stats, stats: Stats, span: float) -> str:
    """Return what limited the pace between the two: whether the readers waited for bytes (see `Stats.bound_by`)."""
    if stats.bytes == before.bytes and stats.samples == before.samples:
        return "nothing moves"
    waited = (stats.wait_s - before.wait_s) / (span * max(1.0, stats.processes))
    if waited > 0.5:
        return "waits for the network or the store"
    return "waits for the program" if waited < 0.1 else "network and program balanced"


def _size(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
