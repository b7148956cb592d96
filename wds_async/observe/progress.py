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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from wds_async import config, packages, world
from wds_async.observe import screen
from wds_async.observe.prices import Meter, Range, meter_of_job
from wds_async.pipeline import Traits
from wds_async.transfer.stats import Board, Boards, Stats
from wds_async.transfer.traffic import Traffic

__all__ = ["Label", "Watch", "summary", "watch"]

T = TypeVar("T")

_PLAIN_EVERY_S = 10.0
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

    traits = Traits(one_to_one=True, same_items=True)

    def __init__(self, board: Board | Boards, enabled: bool | None = None, label: Label = Label()) -> None:
        self.board = board
        self.enabled = enabled
        self.label = label

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
    meter, before_traffic = meter_of_job(), _traffic(board)
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
            change = [now - then for now, then in zip(board.counters().values(), before, strict=True)]
            share: dict[str, Any] = {"stats": change, "start": start, "end": time.time(), "how": how}
            share["cost"] = _cost(meter, before_traffic, _traffic(board))
            share["label"] = label.text(number)
            line = _alone(share) if num_workers == 1 else _last(board, share, worker, num_workers, number)
            if line is not None:
                screen.say(console, line)


def _alone(share: dict[str, Any]) -> str:
    cost = Range(*share["cost"])
    return summary(Stats(*share["stats"]), share["end"] - share["start"], share["label"], share["how"], cost)


def _last(board: Board | Boards, share: dict[str, Any], worker: int, num_workers: int, number: int) -> str | None:
    """Return the summary of all workers if this one is the last to end its epoch, else None."""
    folder = board.folder
    pass_id = f"{_generation(worker)}-{number}"
    mine = folder / f"epoch-{pass_id}-{worker}"
    # Renamed when complete, so that no process reads half of it. Never as long as one of the board's rows.
    aside = mine.with_name(mine.name + ".new")
    aside.write_text(json.dumps(share).ljust(1024))
    os.replace(aside, mine)
    all_shares = [folder / f"epoch-{pass_id}-{i}" for i in range(num_workers)]
    try:
        shares = [json.loads(path.read_text()) for path in all_shares]
        # Two that end at once may both see all files; only one can create this one.
        (folder / f"summary-{pass_id}").open("x").close()
    except (FileNotFoundError, FileExistsError):
        return None
    for path in all_shares:
        path.unlink(missing_ok=True)
    total = Stats(*map(sum, zip(*(one["stats"] for one in shares), strict=True)))
    wall_s = max(one["end"] for one in shares) - min(one["start"] for one in shares)
    how = next((one["how"] for one in shares if one["how"]), "")
    cost = Range(*(sum(bounds) for bounds in zip(*(one["cost"] for one in shares), strict=True)))
    return summary(total, wall_s, share["label"], how, cost)


def _generation(worker: int) -> int:
    """Return a number that only the workers of one DataLoader iterator share."""
    data = packages.loaded("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return os.getppid() if info is None else int(info.seed) - worker


def _traffic(board: Board | Boards) -> Traffic:
    """Return this process's requests to origins so far."""
    traffic = Traffic()
    for one in board.boards if isinstance(board, Boards) else [board]:
        traffic.merge(one.counters().traffic)
    return traffic


def _cost(meter: Meter, before: Traffic, after: Traffic) -> list[float]:
    """Return US dollars of the traffic between the two, at least and at most."""
    then, now = meter.dollars(before), meter.dollars(after)
    return [max(0.0, now.low - then.low), max(0.0, now.high - then.high)]


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
    thread = threading.Thread(target=_lines, args=(meter, console, done), name="wds-async-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _lines(meter: _EpochMeter, console: Console, done: threading.Event) -> None:
    while not done.wait(_PLAIN_EVERY_S):
        console.print(meter.draw().plain, soft_wrap=True, highlight=False)


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
        self._first = board.total()
        self._past: list[tuple[float, Stats]] = [(clock(), self._first)]
        self._began = clock()

    def draw(self) -> Text:
        """Return the line as it is now."""
        now, stats = self._clock(), self._board.total()
        while len(self._past) > 1 and now - self._past[1][0] > 3.0:
            self._past.pop(0)
        then, before = self._past[0]
        self._past.append((now, stats))
        span = max(now - then, 1e-9)
        done = stats.samples - self._first.samples
        text = Text(self._label.text(self._number), style="bold")
        if self._total:
            self._draw_share(text, done, now - self._began)
        else:
            text.append(f"  {done:,.0f} samples", style="cyan")
        text.append(f"  {(stats.samples - before.samples) / span:,.0f}/s", style="default")
        text.append(f"  {(stats.bytes - before.bytes) / span / 1e6:,.1f} MB/s", style="green")
        text.append(f"  {_pace(before, stats, span)}", style="default")
        return text

    def _draw_share(self, text: Text, done: float, passed_s: float) -> None:
        assert self._total is not None
        share = min(1.0, done / self._total)
        filled = round(_CELLS * share)
        text.append("  ").append("━" * filled, style="green").append("─" * (_CELLS - filled), style="dim")
        text.append(f" {share:.0%}  {done:,.0f} of {self._total:,} samples", style="cyan")
        if done:
            left_s = passed_s * max(0.0, self._total - done) / done
            text.append(f"  {_clock_time(left_s)} left", style="default")


def _pace(before: Stats, stats: Stats, span: float) -> str:
    """Return what limited the pace between the two: whether the readers waited for bytes (see `Stats.bound_by`)."""
    if stats.bytes == before.bytes and stats.samples == before.samples:
        return "nothing moves"
    waited = (stats.wait_s - before.wait_s) / (span * max(1.0, stats.processes))
    if waited > 0.5:
        return "waits for the network or the store"
    return "waits for the program" if waited < 0.1 else "network and program balanced"


def _clock_time(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{hours}:{minutes % 60:02}:{int(seconds) % 60:02}" if hours else f"{minutes}:{int(seconds) % 60:02}"


def _size(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
