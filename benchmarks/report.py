"""Put the results into docs/benchmarks.md and draw the README's plots: ``python -m benchmarks.report``.

Each ``results/*.json`` is one scenario (see `Bench.save`). Its bars become rows of the table of `GOALS`, or of the one
of all others, and each of its cases a table of the peers.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.bench import ROOT

__all__ = ["GOALS", "bars", "cases", "fill", "goals", "main", "peers", "plot"]

ORDER = (
    *("http", "https", "small", "busy", "images", "images-file", "loader", "workers", "link", "store", "shards"),
    *("size", "faults-peers", "faults", "service", "memory", "s3", "gs", "az", "large", "first", "resume", "cache"),
    *("decode", "exact", "verify", "index", "interleave", "filters", "signing", "listing", "importtime", "planning"),
)
COLUMNS = (
    *("peer", "MB/s", "over ours", "CPU s/GB", "over ours", "samples/s", "CPU ms a sample", "first, ms"),
    *("memory, MB", "sent / size", "requests", "turns"),
)
GOALS = {
    "undecoded images over http": {"http": "http: CPU"},
    "undecoded images over TLS": {"https": "https: (CPU|throughput)"},
    "small samples": {"small": "samples per CPU second"},
    "a consumer busy in pure Python, over TLS": {"busy": "busy consumer"},
    "pictures decoded and cropped to 224, batches of 64, 2 workers": {
        "images": "(photos|noise).* 2 workers",
        "images-file": "(photos|noise).* 2 workers",
    },
    "undecoded samples through 2 workers": {"loader": "2 workers, undecoded"},
    "shaped links, store-like server": {"link": "link of .* http://.* share of what it carries"},
    "cost of a sample from 0.1 to 100 GB and from 1 to 1,000 shards": {"size": "CPU a", "shards": "CPU a"},
    "5 % of the requests fail, default budget": {"faults": "5 % faults, [a-z-]*, all kinds", "faults-peers": "5 %"},
    "cold through the service": {"service": "cold"},
    "memory": {"http": "http: .*memory", "memory": "(66 MB|one shard).*(shards|TLS|store-like|GB): peak"},
}
"""What must be reached above all, and the bars that tell it: by scenario the beginnings of their measures."""
PLOTTED = {
    "images, http": "HTTP, one machine",
    "images, https": "HTTPS, one machine",
    "store-like, 66 MB shards": "a store 50 ms away",
}
PLOTS = {
    "throughput": ("MB/s (more is better)", "mb_s", 1.0, ",.0f"),
    "cpu": ("CPU seconds per GB (less is better)", "cpu_s_per_gb", 1.0, ".2f"),
    "memory": ("peak memory of all processes, MB (less is better)", "pss_bytes", 1e-6, ",.0f"),
}
_LONGEST = 8
"""Bars are as long as that of eight times our figure at most: one peer takes a hundred times as much CPU."""
OURS, OTHER, FLOOR = "#1a7f5a", "#b0b7bf", "#dfe4e8"
Document = Mapping[str, Any]


def _in_order(documents: Iterable[Document]) -> list[Document]:
    def place(document: Document) -> tuple[int, str]:
        name = document["benchmark"]
        return (ORDER.index(name) if name in ORDER else len(ORDER), name)

    return sorted(documents, key=place)


def _row(*cells: object) -> str:
    return "| " + " | ".join(" ".join(str(cell).replace("|", "\\|").split()) for cell in cells) + " |"


_HEAD = ["| measure | wanted | measured | met | scenario, day |", "|---|---|---|---|---|"]


def goals(documents: Iterable[Document]) -> str:
    """Return Markdown: `GOALS` with their bars, or that they were not measured, and how many are met."""
    found = {document["benchmark"]: document for document in documents}
    lines, met, count = [*_HEAD], 0, 0
    for goal, places in GOALS.items():
        rows = [(name, bar) for name, pattern in places.items() for bar in _matching(found.get(name), pattern)]
        lines.append(_row(f"**{goal}**", "", "" if rows else "not measured", "", "" if rows else ", ".join(places)))
        lines += [_bar(bar, found[name]) for name, bar in rows]
        met, count = met + sum(bar["met"] for _, bar in rows), count + len(rows)
    return "\n".join([*lines, "", f"{met} of these {count} bars are met. {_origins(found.values())}"])


def _matching(document: Document | None, pattern: str) -> list[Mapping[str, Any]]:
    return [bar for bar in document["bars"] if re.match(pattern, bar["measure"])] if document else []


def bars(documents: Iterable[Document]) -> str:
    """Return Markdown: a row for each bar that is not one of `GOALS`."""
    lines = [*_HEAD]
    for document in _in_order(documents):
        name = document["benchmark"]
        above = [bar for places in GOALS.values() if name in places for bar in _matching(document, places[name])]
        for bar in document["bars"]:
            if "peak memory" in bar["measure"] and name not in ("memory", "listing") and bar["met"]:
                continue  # each scenario checks it; one of them is about it
            if bar not in above:
                lines.append(_bar(bar, document))
    return "\n".join(lines)


def _bar(bar: Mapping[str, Any], document: Document) -> str:
    where = f"`{document['benchmark']}`, {document['date'][5:]}"
    return _row(bar["measure"], bar["bar"], bar["measured"], "yes" if bar["met"] else "**no**", where)


def _origins(documents: Iterable[Document]) -> str:
    days = sorted(f"{document['date']}: {_machine(document.get('machine'))}" for document in documents)
    return f"Measured {'; '.join(dict.fromkeys(days))}."


def _machine(machine: object) -> str:
    if isinstance(machine, Mapping):
        return ", ".join(f"{key} {value}" for key, value in machine.items())
    return str(machine or "a machine that was not noted")


def peers(documents: Iterable[Document]) -> str:
    """Return Markdown: what each peer of the results is, and the format that it reads."""
    known: dict[str, list[str]] = {}
    for document in documents:
        known.update(document.get("peers", {}))
    lines = ["| peer | what it is | format |", "|---|---|---|"]
    return "\n".join([*lines, *(_row(name, *cells) for name, cells in sorted(known.items()))])


def cases(documents: Iterable[Document]) -> str:
    """Return Markdown: for each case a table of its peers, fastest first, and why others are not in it."""
    parts = []
    for document in _in_order(one for one in documents if one["medians"]):
        parts.append(f"### `{document['benchmark']}`\n\n{document['what']} {document['date']}.\n")
        for case in {**document["medians"], **document["absent"]}:
            readings = document["medians"].get(case, {})
            parts.append(f"**{case}**\n\n{_row(*COLUMNS)}\n{'|---' * len(COLUMNS)}|")
            for name, reading in sorted(readings.items(), key=lambda item: -item[1]["mb_s"]):
                parts.append(_reading(name, reading, readings.get("wds_async")))
            absent = [f"{name}: {' '.join(text.split())}" for name, text in document["absent"].get(case, {}).items()]
            parts.append(f"\nNot in it: {'; '.join(absent)}.\n" if absent else "")
    return "\n".join(parts).strip()


def _reading(name: str, reading: Mapping[str, Any], ours: Mapping[str, Any] | None) -> str:
    gigabytes, whole = reading["size_bytes"] / 1e9, not reading["only_first"]
    beside = ours if whole and ours is not reading else None
    if reading["part"] < 1:
        name += f" ({reading['part']:.0%} of the data)"
    samples = reading["samples"] if whole else 0
    slowest, fastest = (1e3 * gigabytes / wall for wall in reversed(reading["spread"]["wall_s"]))
    least, most = (cpu / gigabytes for cpu in reading["spread"]["cpu_s"])
    return _row(
        f"**{name}**" if name.startswith("wds_async") else name,
        f"{reading['mb_s']:,.0f} ({slowest:,.0f}..{fastest:,.0f})" if whole else "",
        f"{reading['mb_s'] / beside['mb_s']:.2f}" if beside else "",
        f"{reading['cpu_s_per_gb']:.2f} ({least:.2f}..{most:.2f})" if whole else "",
        f"{reading['cpu_s_per_gb'] / beside['cpu_s_per_gb']:.2f}" if beside else "",
        f"{samples / reading['wall_s']:,.0f}" if samples else "",
        f"{1e3 * reading['cpu_s'] / samples:.3f}" if samples else "",
        f"{1e3 * reading['first_s']:.0f}" if reading["first_s"] else "",
        f"{reading['pss_bytes'] / 1e6:,.0f}",
        f"{reading['wire_bytes'] / reading['size_bytes']:.3f}" if reading["wire_bytes"] else "",
        f"{reading['requests']:,}" if reading["requests"] else "",
        reading["turns"],
    )


def fill(text: str, name: str, inner: str) -> str:
    """Return ``text`` with ``inner`` between ``<!-- name -->`` and ``<!-- /name -->``. Raises ValueError where they are
    missing."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begun, rest = text.partition(start)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"the page has no {start} … {end}")
    return f"{before}{start}\n{inner}\n{end}{after}"


def plot(documents: Iterable[Document], measure: str) -> str | None:
    """Return an SVG of one of `PLOTS` with a panel for each of the cases in `PLOTTED`; None where no case is there."""
    title, key, factor, form = PLOTS[measure]
    medians = {case: readings for document in documents for case, readings in document["medians"].items()}
    panels = {label: medians[case] for case, label in PLOTTED.items() if medians.get(case)}
    if not panels:
        return None
    drawn = []
    for column, (label, readings) in enumerate(panels.items()):
        left = 150 + 400 * column
        drawn.append(f'<text x="{left}" y="52" font-weight="bold">{label}</text>')
        values = {name: factor * reading[key] for name, reading in readings.items()}
        most = min(max(values.values()), _LONGEST * values.get("wds_async", math.inf))
        for line, name in enumerate(sorted(values, key=lambda one: values[one], reverse=measure == "throughput")):
            width, y = max(2, round(160 * min(1.0, values[name] / most))), 66 + 24 * line
            drawn.append(
                f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name.replace("wds_async, ", "")}</text>'
            )
            drawn.append(
                f'<rect x="{left}" y="{y}" width="{width}" height="18" rx="2" fill="{_colour(readings[name])}"/>'
            )
            value = f"{'… ' if values[name] > most else ''}{values[name]:{form}}"
            drawn.append(f'<text x="{left + width + 8}" y="{y + 14}" fill="#59636e">{value}</text>')
    height = 80 + 24 * max(map(len, panels.values()))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {400 * len(panels)} {height}" role="img"'
    style = 'font-family="Helvetica, Arial, sans-serif" font-size="14"'
    legend = f'<text x="12" y="24" font-size="16" font-weight="bold">{title}; light: raw bytes, no samples</text>'
    return "\n".join([f"{head} {style}>", f"<title>{title}</title>", legend, *drawn, "</svg>\n"])


def _colour(reading: Mapping[str, Any]) -> str:
    if reading["peer"] == "wds_async":
        return OURS
    return OTHER if reading["samples"] else FLOOR


def main(
    folder: Path = ROOT / "benchmarks" / "results",
    page: Path = ROOT / "docs" / "benchmarks.md",
    images: Path = ROOT / "docs" / "img",
) -> int:
    """Fill the page and draw the plots from all results; return 1 where there is none."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not documents:
        print(f"no results in {folder}: run `make bench` first", file=sys.stderr)
        return 1
    text = page.read_text(encoding="utf-8")
    for part in (goals, bars, peers, cases):
        text = fill(text, part.__name__, part(documents))
    page.write_text(text, encoding="utf-8")
    for measure in PLOTS:
        drawing = plot(documents, measure)
        if drawing:
            (images / f"benchmark-{measure}.svg").write_text(drawing, encoding="utf-8")
    print(f"{page}: results of {', '.join(document['benchmark'] for document in documents)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
