"""Put the results into docs/benchmarks.md and draw the README's plots: ``python -m benchmarks.report``.

Each ``results/*.json`` is one scenario (see `Bench.save`). Its bars become rows of one table, and each of its cases a
table of the peers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.bench import ROOT

__all__ = ["bars", "cases", "fill", "main", "peers", "plot"]

ORDER = (
    *("http", "https", "s3", "gs", "az", "small", "large", "loader", "workers", "images", "images-file", "decode"),
    *("store", "link", "busy", "first", "resume", "exact", "shards", "size", "cache", "memory", "faults", "verify"),
    *("service", "index", "interleave", "filters", "signing", "listing", "importtime", "planning"),
)
COLUMNS = (
    *("peer", "MB/s", "CPU s/GB", "samples/s", "CPU ms a sample", "first, ms", "memory, MB", "sent / size", "requests"),
)
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
OURS, OTHER, FLOOR = "#1a7f5a", "#b0b7bf", "#dfe4e8"
Document = Mapping[str, Any]


def _in_order(documents: Iterable[Document]) -> list[Document]:
    def place(document: Document) -> tuple[int, str]:
        name = document["benchmark"]
        return (ORDER.index(name) if name in ORDER else len(ORDER), name)

    return sorted(documents, key=place)


def _row(*cells: object) -> str:
    return "| " + " | ".join(" ".join(str(cell).replace("|", "\\|").split()) for cell in cells) + " |"


def bars(documents: Iterable[Document]) -> str:
    """Return Markdown: a row a bar, then what machines and days they are from."""
    documents = _in_order(document for document in documents if document["bars"])
    lines = ["| measure | bar | measured | met | scenario |", "|---|---|---|---|---|"]
    for document in documents:
        for bar in document["bars"]:
            if "peak memory" in bar["measure"] and document["benchmark"] not in ("memory", "listing") and bar["met"]:
                continue  # each scenario checks it; one of them is about it
            met = "yes" if bar["met"] else "**no**"
            lines.append(_row(bar["measure"], bar["bar"], bar["measured"], met, f"`{document['benchmark']}`"))
    return "\n".join([*lines, "", f"Measured {'; '.join(_origins(documents))}."])


def _origins(documents: Iterable[Document]) -> list[str]:
    return sorted({f"{document['date']}: {_machine(document.get('machine'))}" for document in documents})


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
    for document in _in_order(documents):
        for case in {**document["medians"], **document["absent"]}:
            readings = document["medians"].get(case, {})
            turns = document["options"]["repeat"]
            parts.append(f"**{case}** (`{document['benchmark']}`; medians of {turns}, least..most)\n")
            parts.append(_row(*COLUMNS))
            parts.append("|---" * len(COLUMNS) + "|")
            for name, reading in sorted(readings.items(), key=lambda item: -item[1]["mb_s"]):
                parts.append(_reading(name, reading))
            absent = document["absent"].get(case, {})
            parts.append("\n" + "".join(f"- {name}: {reason}\n" for name, reason in absent.items()))
    return "\n".join(parts).strip()


def _reading(name: str, reading: Mapping[str, Any]) -> str:
    gigabytes, whole = reading["size_bytes"] / 1e9, not reading["only_first"]
    samples = reading["samples"] if whole else 0
    slowest, fastest = (1e3 * gigabytes / wall for wall in reversed(reading["spread"]["wall_s"]))
    least, most = (cpu / gigabytes for cpu in reading["spread"]["cpu_s"])
    return _row(
        f"**{name}**" if name.startswith("wds_async") else name,
        f"{reading['mb_s']:,.0f} ({slowest:,.0f}..{fastest:,.0f})" if whole else "",
        f"{reading['cpu_s_per_gb']:.2f} ({least:.2f}..{most:.2f})" if whole else "",
        f"{samples / reading['wall_s']:,.0f}" if samples else "",
        f"{1e3 * reading['cpu_s'] / samples:.3f}" if samples else "",
        f"{1e3 * reading['first_s']:.0f}" if reading["first_s"] else "",
        f"{reading['pss_bytes'] / 1e6:,.0f}",
        f"{reading['wire_bytes'] / reading['size_bytes']:.3f}" if reading["wire_bytes"] else "",
        f"{reading['requests']:,}" if reading["requests"] else "",
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
        for line, name in enumerate(sorted(values, key=lambda one: values[one], reverse=measure == "throughput")):
            width, y = max(2, round(160 * values[name] / max(values.values()))), 66 + 24 * line
            drawn.append(
                f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name.replace("wds_async, ", "")}</text>'
            )
            drawn.append(
                f'<rect x="{left}" y="{y}" width="{width}" height="18" rx="2" fill="{_colour(readings[name])}"/>'
            )
            value = format(values[name], form)
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
    for name, inner in (("bars", bars(documents)), ("peers", peers(documents)), ("cases", cases(documents))):
        text = fill(text, name, inner)
    page.write_text(text, encoding="utf-8")
    for measure in PLOTS:
        drawing = plot(documents, measure)
        if drawing:
            (images / f"benchmark-{measure}.svg").write_text(drawing, encoding="utf-8")
    print(f"{page}: results of {', '.join(document['benchmark'] for document in documents)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
