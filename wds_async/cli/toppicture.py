"""The picture of `wds-async top`: rates by the difference of two readings of each source."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wds_async.cli import terminal
from wds_async.cli.shards import human
from wds_async.observe.screen import bar

__all__ = ["StatsSource", "draw", "sparkline"]

_LEVELS = "▁▂▃▄▅▆▇█"
_KEPT = 120
_ROWS = 8
_NARROW, _BROAD, _WIDE = 90, 112, 130
_LEAST = {
    **dict.fromkeys(("taken/s", "fetched/s", "throttled", "requests", "$"), 9),
    **dict.fromkeys(("p50", "p99", "retries", "time", "size"), 7),
    **dict.fromkeys(("hits", "disk", "ahead", "conns", "hedges"), 5),
    "shards": 12,
}
"""Width of a column at least, so that changing figures move no other column."""
_Columns = list[tuple[str, Callable[[Any], RenderableType]]]


@dataclass
class StatsSource:
    """A service or job: its last ``/v1/stats`` document or the ``error`` there was instead, and the rates so far."""

    address: str
    document: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    restarts: int = 0
    """Number of times that its counters were reset."""
    client: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Bytes a second to its clients (of a job: to its decoders), the oldest first."""
    origin: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Bytes a second from origins."""
    _before: Mapping[str, Any] = field(default_factory=dict)
    _at_s: float = 0.0
    _span_s: float = 0.0

    def take(self, at_s: float, document: Mapping[str, Any], error: str = "") -> None:
        """Take in what was read at ``at_s`` of a monotonic clock: a document, or {} and the error."""
        self._before, self._span_s = self.document, at_s - self._at_s
        self.document, self.error, self._at_s = document, error, at_s
        if self._before and document and self._began_anew():
            self.restarts += 1
            self._before = {}
        self.client.append(self.rate(self.taken))
        self.origin.append(self.rate("origin_bytes"))

    def _began_anew(self) -> bool:
        now, then = self.document, self._before
        counters = [(each.get("uptime_s", 0), each["counters"]) for each in (now, then)]
        (uptime, new), (uptime_before, old) = counters
        fell = any(new.get(name, 0) < old.get(name, 0) for name in ("origin_bytes", self.taken))
        return fell or bool(uptime < uptime_before)

    @property
    def alive(self) -> bool:
        """True if the last reading succeeded."""
        return bool(self.document)

    @property
    def settled(self) -> bool:
        """True if it has rates or has failed."""
        return bool(self.error or self._before)

    @property
    def is_job(self) -> bool:
        """True if it is a training job, False for a service."""
        return self.document.get("kind") == "job"

    @property
    def taken(self) -> str:
        """Name of the counter of bytes that its users take."""
        return "bytes" if self.is_job else "client_bytes"

    @property
    def title(self) -> str:
        """The host's name; with the port, since a service and some jobs may share a host."""
        port = re.search(r":(\d+)", self.address)
        name = str(self.document.get("name") or "")
        return terminal.line(f"{name}:{port[1]}" if name and port else name or self.address)

    def part(self, name: str) -> Any:
        """Return a part of the last document; {} where there is none."""
        return self.document.get(name, {})

    def change(self, counter: str, origin: str = "") -> float:
        """Return the change of a counter (of one origin) between the last two readings; 0.0 before there are two."""

        def value(document: Mapping[str, Any]) -> float:
            row = document.get("origins", {}).get(origin, {}) if origin else document.get("counters", {})
            return float(row.get(counter, 0))

        return max(0.0, value(self.document) - value(self._before)) if self._before and self.document else 0.0

    def rate(self, counter: str, origin: str = "") -> float:
        """Return the change a second."""
        return self.change(counter, origin) / self._span_s if self._span_s > 0 else 0.0


def sparkline(values: Iterable[float], width: int) -> str:
    """Return the last ``width`` values as bars; the largest is full, and only 0 is an empty one."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    return "".join(_LEVELS[max(1, min(7, int(8 * value / top)))] if value > 0 else _LEVELS[0] for value in shown)


def draw(sources: list[StatsSource], width: int, *, at: float | None = None, keys: bool = False) -> RenderableType:
    """Return the picture of all sources for a terminal ``width`` columns wide; ``at`` is the time to show (now)."""
    parts: list[RenderableType] = [_head(sources, time.time() if at is None else at, keys and width >= _NARROW)]
    parts += [_sources(sources, width) or Text()]
    for source in sources:
        if source.error:
            error = Text(terminal.line(source.error), style="red")
            error.truncate(width - 13, overflow="ellipsis")
            parts.append(error.append("; tried again"))
    for table in (_origins(sources, width), _slowest(sources, width), _plans(sources), _errors(sources)):
        if table is not None:
            parts += [Text(), table]
    return Group(*parts)


def _head(sources: list[StatsSource], at: float, keys: bool) -> Text:
    alive = sum(source.alive for source in sources)
    head = Text("wds-async top", style="bold", no_wrap=True, overflow="ellipsis")
    head.append(time.strftime("  %H:%M:%S", time.localtime(at)), style="dim")
    head.append(f"  {human(sum(source.rate(source.taken) for source in sources))}/s taken", style="green")
    head.append(f"  {human(sum(source.rate('origin_bytes') for source in sources))}/s fetched", style="cyan")
    if len(sources) > 1 or not alive:
        head.append(f"  {alive} of {len(sources)} answer", style="dim" if alive == len(sources) else "red")
    return head.append("  q leaves", style="dim") if keys else head


def _table(columns: _Columns, rows: Sequence[Any]) -> Table | None:
    """Return a table, a column a title and its cell of a row; only the first column shrinks. None without rows."""
    if not rows:
        return None
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for number, (title, _) in enumerate(columns):
        justify: Literal["left", "right"] = "right" if number and title not in ("", "window") else "left"
        table.add_column(title, justify=justify, no_wrap=number > 0, min_width=_LEAST.get(title))
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table


def _text(text: str, style: str = "") -> Text:
    """Return a cell of the first column, of which the end is cut off where there is no room."""
    return Text(terminal.line(text), style=style, no_wrap=True, overflow="ellipsis")


def _sources(sources: list[StatsSource], width: int) -> Table | None:
    two, broad = width >= _NARROW, width >= _BROAD
    cells = max(8, min(40, (width - 94) // 2 if broad else width - 92))

    def spark(name: str, style: str) -> Callable[[StatsSource], Text]:
        return lambda source: Text(sparkline(getattr(source, name), cells).ljust(cells), style=style)

    columns: _Columns = [
        ("source", _name),
        ("taken/s", lambda source: human(source.client[-1]) if source.client else "–"),
        *([("", spark("client", "green"))] if two else []),
        ("fetched/s", lambda source: human(source.origin[-1]) if source.origin else "–"),
        *([("", spark("origin", "cyan"))] if broad else []),
        ("hits", lambda source: _share(source, "hit_bytes", "ahead_bytes")),
        ("ahead", lambda source: _share(source, "ahead_bytes")),
        *([("disk", _disk)] if two else []),
        ("window", lambda source: _window(source, 8 if two else 5)),
    ]
    return _table(columns, [source for source in sources if not source.error])


def _name(source: StatsSource) -> Text:
    if not source.alive:
        return _text(source.address, "dim")
    name = _text(source.title, "bold")
    if source.is_job:
        name.append(" job", style="dim")
    if source.part("ready") is False:
        name.append(" not ready", style="yellow")
    if source.restarts:
        name.append(f" ↻{source.restarts}", style="yellow")
    return name


def _share(source: StatsSource, name: str, without: str = "") -> str:
    """Return the share of a counter (less another) in what a service gave since the last reading, or ever where that is
    nothing."""
    changes = {each: source.change(each) for each in ("hit_bytes", "miss_bytes", "ahead_bytes")}
    counts = changes if changes["hit_bytes"] + changes["miss_bytes"] else source.part("counters")
    total = counts.get("hit_bytes", 0) + counts.get("miss_bytes", 0)
    return f"{max(0, counts.get(name, 0) - counts.get(without, 0)) / total:.0%}" if total else "–"


def _disk(source: StatsSource) -> str:
    """Return how full the cache of a service is."""
    gauges = source.part("gauges")
    limit = gauges.get("cache_limit_bytes")
    return f"{gauges.get('cache_bytes', 0) / limit:.0%}" if limit else "–"


def _window(source: StatsSource, cells: int) -> Text:
    gauges, counters = source.part("gauges"), source.part("counters")
    limit = gauges.get("window_limit_bytes") or counters.get("budget_bytes") or 0
    if not limit:
        return Text("–")
    full = min(1.0, (gauges.get("window_bytes") or counters.get("window_bytes") or 0) / limit)
    return bar(full, cells, "green" if full < 0.9 else "yellow").append(f" {full:.0%}")


def _origins(sources: list[StatsSource], width: int) -> Table | None:
    rows = [(source, name, row) for source in sources for name, row in source.part("origins").items()]
    rows.sort(key=lambda each: (-each[0].rate("bytes", each[1]), -each[2].get("bytes", 0)))

    def name(row: tuple[StatsSource, str, Any]) -> Text:
        return _text(row[1], "bold").append(f"  {row[0].title}" if len(sources) > 1 else "", style="not bold dim")

    def count(key: str, style: str = "") -> Callable[[Any], Text]:
        return lambda row: Text(f"{row[2].get(key, 0):,.0f}", style=style if row[2].get(key) else "")

    columns: _Columns = [
        ("origin", name),
        ("fetched/s", lambda row: human(row[0].rate("bytes", row[1]))),
        ("p50", lambda row: _time(row[2].get("p50_s"))),
        *([("p99", lambda row: _time(row[2].get("p99_s")))] if width >= 70 else []),
        *([("retries", count("retries", "yellow"))] if width >= _NARROW else []),
        ("throttled", count("throttled", "yellow")),
        *([("conns", count("connections"))] if width >= _NARROW else []),
        *([("requests", count("requests")), ("hedges", count("hedges"))] if width >= _WIDE else []),
        ("$", lambda row: _dollars(row[2])),
    ]
    return _table(columns, rows[:_ROWS])


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1e3 * seconds:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def _dollars(row: Mapping[str, Any]) -> str:
    low, high = (f"{bound:,.2f}" for bound in row.get("dollars") or (0.0, 0.0))
    return low if low == high else f"{low}–{high}"


def _slowest(sources: list[StatsSource], width: int) -> Table | None:
    def url(row: Mapping[str, Any]) -> Text:
        """Return the end of the URL, which says more than its beginning."""
        text, room = terminal.line(str(row.get("url", ""))), width - 28
        return _text(text if len(text) <= room else "…" + text[1 - room :])

    columns: _Columns = [
        ("slowest", url),
        ("time", lambda row: _time(row.get("seconds"))),
        ("size", lambda row: human(row.get("bytes", 0))),
    ]
    return _table(columns, _rows(sources, "slowest", "seconds"))


def _plans(sources: list[StatsSource]) -> Table | None:
    def name(row: Mapping[str, Any]) -> Text:
        job = terminal.line(str(row.get("job") or ""))
        return _text(str(row.get("client", ""))).append(f"  job {job}" if job else "", style="dim")

    columns: _Columns = [
        ("plan of", name),
        ("shards", lambda row: f"{row.get('done', 0):,} of {max(1, row.get('shards', 0)):,}"),
        ("", lambda row: bar(row.get("done", 0) / max(1, row.get("shards", 0)), 16)),
        ("ahead", lambda row: human(row.get("ahead_bytes", 0))),
    ]
    return _table(columns, [row for source in sources for row in source.part("plans")][:_ROWS])


def _errors(sources: list[StatsSource]) -> Table | None:
    def error(row: Mapping[str, Any]) -> Text:
        when = time.strftime("%H:%M:%S ", time.localtime(row.get("time", 0)))
        return _text(when, "dim").append(terminal.line(str(row.get("error", ""))), style="not dim red")

    return _table([("errors", error)], _rows(sources, "errors", "time"))


def _rows(sources: list[StatsSource], name: str, key: str) -> list[Any]:
    """Return the five rows with the largest ``key``."""
    rows = [row for source in sources for row in source.part(name)]
    return sorted(rows, key=lambda row: -row.get(key, 0))[:5]
