"""The picture of `wds-async top`: rates by the difference of two readings of each source."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wds_async.cli import terminal
from wds_async.cli.shards import human

__all__ = ["StatsReading", "StatsSource", "draw", "sparkline"]

_LEVELS = "▁▂▃▄▅▆▇█"
_KEPT = 120
_ROWS = 8
_NARROW, _BROAD, _WIDE = 90, 112, 130


@dataclass(frozen=True, slots=True)
class StatsReading:
    """One ``/v1/stats`` document, read at ``at_s`` of a monotonic clock; or the ``error`` there was instead."""

    at_s: float
    document: Mapping[str, Any] | None = None
    error: str = ""


@dataclass
class StatsSource:
    """One source: its last two readings and the rates before them."""

    address: str
    last: StatsReading | None = None
    before: StatsReading | None = None
    restarts: int = 0
    """Number of times that its counters were reset."""
    client: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Bytes a second to its clients (of a job: to its decoders), the oldest first."""
    origin: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Bytes a second from origins."""

    def take(self, reading: StatsReading) -> None:
        """Take in a new reading."""
        if reading.document is None:
            self.last, self.before = reading, None
            self.client.append(0.0)
            self.origin.append(0.0)
            return
        if self._began_anew(reading):
            self.restarts += 1
            self.last = None
        self.before, self.last = (self.last if self.alive else None), reading
        self.client.append(self.rate(self.taken))
        self.origin.append(self.rate("origin_bytes"))

    @property
    def alive(self) -> bool:
        """Whether the last reading succeeded."""
        return self.last is not None and self.last.document is not None

    @property
    def is_job(self) -> bool:
        """Whether it is a training job, and no service."""
        return bool(self.part("kind") == "job")

    @property
    def taken(self) -> str:
        """Name of the counter of bytes that its users take."""
        return "bytes" if self.is_job else "client_bytes"

    def part(self, name: str) -> Any:
        """Return a part of the last document; {} where there is none."""
        document = None if self.last is None else self.last.document
        return {} if document is None else document.get(name, {})

    def rate(self, counter: str) -> float:
        """Return the counter's change a second between the last two readings; 0.0 before there are two."""
        return self._rate(lambda document: document.get("counters", {}).get(counter, 0))

    def origin_rate(self, origin: str) -> float:
        """Return bytes a second from one origin."""
        return self._rate(lambda document: document.get("origins", {}).get(origin, {}).get("bytes", 0))

    def change(self, counter: str) -> float:
        """Return the counter's change between the last two readings."""
        if self.before is None or self.last is None:
            return 0.0
        return self.rate(counter) * (self.last.at_s - self.before.at_s)

    def _rate(self, pick: Any) -> float:
        before, last = self.before, self.last
        if before is None or last is None or before.document is None or last.document is None:
            return 0.0
        span_s = last.at_s - before.at_s
        return max(0.0, float(pick(last.document)) - float(pick(before.document))) / span_s if span_s > 0 else 0.0

    def _began_anew(self, reading: StatsReading) -> bool:
        before: Any = None if self.last is None else self.last.document
        if before is None or reading.document is None:
            return False
        now, then = reading.document, before
        if float(now.get("uptime_s", 0)) < float(then.get("uptime_s", 0)):
            return True
        return any(
            now["counters"].get(name, 0) < then["counters"].get(name, 0) for name in ("origin_bytes", self.taken)
        )


def sparkline(values: Iterable[float], width: int, most: float = 0.0) -> str:
    """Return the last ``width`` values as bars; the largest (or ``most``) is full, and only 0 is an empty one."""
    shown = list(values)[-width:]
    top = max([most, *shown], default=0.0)
    return "".join(_LEVELS[max(1, min(7, int(8 * value / top)))] if value > 0 else _LEVELS[0] for value in shown)


def draw(lines: list[StatsSource], width: int, *, at: float | None = None, keys: bool = False) -> RenderableType:
    """Return the picture of all sources for a terminal ``width`` columns wide; ``at`` is the time to show (now)."""
    parts: list[RenderableType] = [
        _head(lines, time.time() if at is None else at, keys and width >= _NARROW),
        _sources(lines, width),
    ]
    parts += [_unreachable(line, width) for line in lines if line.last is not None and not line.alive]
    for drawn in (_origins(lines, width), _slowest(lines, width), _plans(lines), _errors(lines, width)):
        if drawn is not None:
            parts += [Text(), drawn]
    return Group(*parts)


def _head(lines: list[StatsSource], at: float, keys: bool) -> Text:
    alive = sum(line.alive for line in lines)
    head = Text("wds-async top", style="bold", no_wrap=True, overflow="ellipsis")
    head.append(time.strftime("  %H:%M:%S", time.localtime(at)), style="dim")
    head.append(f"  {human(sum(line.rate(line.taken) for line in lines))}/s taken", style="green")
    head.append(f"  {human(sum(line.rate('origin_bytes') for line in lines))}/s fetched", style="cyan")
    if len(lines) > 1 or not alive:
        head.append(f"  {alive} of {len(lines)} answer", style="dim" if alive == len(lines) else "red")
    return head.append("  q leaves", style="dim") if keys else head


def _sources(lines: list[StatsSource], width: int) -> Table:
    two = width >= _NARROW
    spark = max(8, min(40, (width - 94) // 2 if width >= _BROAD else width - 92))
    sparks = {"taken": two, "fetched": width >= _BROAD}
    table = _table("source")
    for name, shown in sparks.items():
        _column(table, f"{name}/s", 9)
        if shown:
            _column(table, "", spark, justify="left")
    _column(table, "hits", 4)
    _column(table, "ahead", 5)
    if two:
        _column(table, "disk", 4)
    _column(table, "window", 13 if two else 10, justify="left")
    _fit(table, width)
    for line in lines:
        if line.last is not None and not line.alive:
            continue
        row: list[RenderableType] = [_name(line)]
        for rates, style, name in ((line.client, "green", "taken"), (line.origin, "cyan", "fetched")):
            row += [Text(human(rates[-1]) if rates else "–")]
            row += [Text(sparkline(rates, spark), style=style)] if sparks[name] else []
        row += [_share(line, "hit_bytes", "ahead_bytes"), _share(line, "ahead_bytes"), *([_disk(line)] if two else [])]
        table.add_row(*row, _window(line, 8 if two else 5))
    return table


def _unreachable(line: StatsSource, width: int) -> Text:
    error = "" if line.last is None else line.last.error
    return Text(_clean(error, max(20, width - 20)) + "; asked again", style="red", no_wrap=True, overflow="ellipsis")


def _title(line: StatsSource) -> str:
    """The host's name; with the port, since a service and some jobs may share a host."""
    port = re.search(r":(\d+)", line.address)
    name = str(line.part("name") or "")
    return _clean(f"{name}:{port[1]}" if name and port else name or line.address, 30)


def _name(line: StatsSource) -> Text:
    if line.last is None:
        return Text(_clean(line.address, 40), style="dim")
    name = Text(_title(line), style="bold")
    if line.is_job:
        name.append(" job", style="dim")
    if line.alive and line.part("ready") is False:
        name.append(" not ready", style="yellow")
    if line.restarts:
        name.append(f" ↻{line.restarts}", style="yellow")
    return name


def _share(line: StatsSource, name: str, without: str = "") -> Text:
    """Return the share of a counter (less another) in what a service gave since the last reading, or ever where that is
    nothing."""
    now: dict[str, float] = line.part("counters")
    changes = {each: line.change(each) for each in ("hit_bytes", "miss_bytes", "ahead_bytes")}
    known = changes if changes["hit_bytes"] + changes["miss_bytes"] else now
    total = known.get("hit_bytes", 0) + known.get("miss_bytes", 0)
    return Text(f"{max(0, known.get(name, 0) - known.get(without, 0)) / total:.0%}" if total else "–")


def _disk(line: StatsSource) -> Text:
    """Return how full the cache of a service is."""
    gauges = line.part("gauges")
    limit = gauges.get("cache_limit_bytes")
    return Text(f"{gauges.get('cache_bytes', 0) / limit:.0%}" if limit else "–")


def _window(line: StatsSource, cells: int) -> Text:
    gauges, counters = line.part("gauges"), line.part("counters")
    limit = gauges.get("window_limit_bytes") or counters.get("budget_bytes") or 0
    if not limit:
        return Text("–")
    full = min(1.0, (gauges.get("window_bytes") or counters.get("window_bytes") or 0) / limit)
    bar = Text("━" * round(cells * full), style="green" if full < 0.9 else "yellow")
    return bar.append("─" * (cells - round(cells * full)), style="dim").append(f" {full:.0%}", style="default")


def _origins(lines: list[StatsSource], width: int) -> Table | None:
    rows = [(line, name, row) for line in lines for name, row in line.part("origins").items()]
    if not rows:
        return None
    rows.sort(key=lambda one: (-one[0].origin_rate(one[1]), -one[2].get("bytes", 0)))
    table = _table("origin")
    times = {"p50": "p50_s", **({"p99": "p99_s"} if width >= 70 else {})}
    counts = {"throttled": 9} if width < _NARROW else {"retries": 7, "throttled": 9, "connections": 5}
    counts |= {"requests": 9, "hedges": 6} if width >= _WIDE else {}
    _column(table, "fetched/s", 9)
    for name in times:
        _column(table, name, 7)
    for name, least in counts.items():
        _column(table, {"connections": "conns"}.get(name, name), least)
    _column(table, "$", 9)
    _fit(table, width)
    for line, name, row in rows[:_ROWS]:
        origin = Text(_clean(name, 60), style="bold")
        if len(lines) > 1:
            origin.append(f"  {_title(line)}", style="dim")
        numbers = [_count(row.get(key, 0), warn=key in ("retries", "throttled")) for key in counts]
        read = Text(human(line.origin_rate(name)))
        table.add_row(origin, read, *(_time(row.get(key)) for key in times.values()), *numbers, _dollars(row))
    return table


def _count(number: float, *, warn: bool) -> Text:
    return Text(f"{number:,.0f}", style="yellow" if warn and number else "default")


def _time(seconds: float | None) -> Text:
    if seconds is None:
        return Text("–")
    return Text(f"{1e3 * seconds:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s")


def _dollars(row: Mapping[str, Any]) -> Text:
    low, high = row.get("dollars") or (0.0, 0.0)
    return Text(f"{low:,.2f}" if round(low, 2) == round(high, 2) else f"{low:,.2f}–{high:,.2f}")


def _slowest(lines: list[StatsSource], width: int) -> Table | None:
    rows = sorted((row for line in lines for row in line.part("slowest")), key=lambda row: -row.get("seconds", 0))
    if not rows:
        return None
    table = _table("slowest")
    _column(table, "time", 7)
    _column(table, "size", 8)
    for row in rows[:5]:
        table.add_row(_url(row, width - 28), _time(row.get("seconds")), human(row.get("bytes", 0)))
    return table


def _plans(lines: list[StatsSource]) -> Table | None:
    rows = [row for line in lines for row in line.part("plans")]
    if not rows:
        return None
    table = _table("plan of")
    _column(table, "shards", 12)
    _column(table, "", 16, justify="left")
    _column(table, "ahead", 8)
    for row in rows[:_ROWS]:
        done, shards = row.get("done", 0), max(1, row.get("shards", 0))
        filled = round(16 * min(1.0, done / shards))
        bar = Text("━" * filled, style="green").append("─" * (16 - filled), style="dim")
        name = Text(_clean(str(row.get("client", "")), 32))
        if row.get("job"):
            name.append(f"  job {_clean(str(row['job']), 24)}", style="dim")
        table.add_row(
            name,
            f"{done:,} of {shards:,}",
            bar,
            human(row.get("ahead_bytes", 0)),
        )
    return table


def _errors(lines: list[StatsSource], width: int) -> Table | None:
    rows = sorted((row for line in lines for row in line.part("errors")), key=lambda row: -row.get("time", 0))
    if not rows:
        return None
    table = _table("errors")
    for row in rows[:5]:
        when = time.strftime("%H:%M:%S", time.localtime(row.get("time", 0)))
        text = Text(f"{when} ", style="dim").append(_clean(str(row.get("error", "")), width - 10), style="red")
        table.add_row(text)
    return table


def _table(first: str) -> Table:
    """Return a table whose first column shrinks where there is no room."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True, overflow="ellipsis")
    return table


def _column(table: Table, name: str, least: int, *, justify: Any = "right") -> None:
    table.add_column(name, justify=justify, no_wrap=True, min_width=least)


def _fit(table: Table, width: int) -> None:
    """Give the first column the width that the others do not need."""
    table.columns[0].max_width = max(8, width - sum((column.min_width or 0) + 2 for column in table.columns[1:]) - 2)


def _url(row: Mapping[str, Any], width: int) -> Text:
    """Return the end of a URL, which says more than its beginning."""
    url = terminal.line(str(row.get("url", "")))
    return Text(url if len(url) <= width else "…" + url[-(width - 1) :])


def _clean(text: str, width: int) -> str:
    shown = terminal.line(text)
    return shown if len(shown) <= width else shown[: max(1, width - 1)] + "…"
