"""Put the measured figures into docs/performance.md and draw the README's plot: ``python -m benchmarks.figures``.

Each ``results/*.json`` has the bars of one benchmark (see `harness.Bench.save`). They become rows of the table
between the markers ``<!-- figures -->`` and ``<!-- /figures -->``, each with the command that measures it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["fill", "main", "plot", "table"]

ROOT = Path(__file__).parent.parent
START, END = "<!-- figures -->", "<!-- /figures -->"
ORDER = (
    "http",
    "tls",
    "small",
    "store",
    "busy",
    "link",
    "clouds",
    "faults",
    "verify",
    "service",
    "memory",
    "importtime",
    "planning",
    "first_sample",
    "filters",
    "decode",
    "loader",
    "exact",
    "interleave",
    "index",
    "distributed-map",
    "distributed-reshard",
    "distributed-index",
    "distributed-plan",
    "distributed-raydata",
    "distributed-feed",
    "distributed-peers",
)
PLOTTED = {
    "plain HTTP": "HTTP, on one machine",
    "store-like, 66 MB shards": "store, 50 ms away",
    "small samples": "samples of 200 bytes",
}
COLOURS = {"wds_async": "#1a7f5a", "webdataset": "#b0b7bf"}
PANELS = (("MB/s (more is better)", "mb_s", ",.0f"), ("CPU seconds per GB (less is better)", "cpu_s_per_gb", ".2f"))


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a row a bar, in the order of `ORDER`, then what machine and day they are from."""
    documents = sorted(results, key=lambda document: _place(document["benchmark"]))
    lines = ["| measure | bar | measured | met | command |", "|---|---|---|---|---|"]
    for document in documents:
        module = document["benchmark"].replace("distributed-", "distributed.")
        command = f"`python -m benchmarks.{module}`"
        for bar in document["bars"]:
            if "peak memory" in bar["measure"] and document["benchmark"] != "memory" and bar["met"]:
                continue  # each benchmark checks it; one of them is about it
            cells = [_cell(bar[name]) for name in ("measure", "bar", "measured")]
            lines.append(f"| {' | '.join(cells)} | {'yes' if bar['met'] else '**no**'} | {command} |")
    origins = sorted({f"{document['date']}: {_machine(document.get('machine'))}" for document in documents})
    return "\n".join([*lines, "", f"Measured {'; '.join(origins)}."])


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _cell(text: object) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


def _machine(machine: object) -> str:
    if isinstance(machine, Mapping):
        return ", ".join(f"{key} {value}" for key, value in machine.items())
    return str(machine or "a machine that was not noted")


def fill(text: str, inner: str) -> str:
    """Return ``text`` with ``inner`` between the markers. Raises ValueError where they are missing."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page of figures has no {START} … {END}")
    return f"{before}{START}\n{inner}\n{END}{after}"


def plot(results: Iterable[Mapping[str, Any]]) -> str:
    """Return an SVG with throughput and CPU of wds_async beside webdataset, for the cases in `PLOTTED`."""
    medians = {case: readers for document in results for case, readers in document["medians"].items()}
    drawn = []
    for column, (title, unit, form) in enumerate(PANELS):
        left = 190 + 410 * column
        drawn.append(f'<text x="{left}" y="24" font-weight="bold">{title}</text>')
        for row, (case, label) in enumerate(PLOTTED.items()):
            top = 44 + 62 * row
            values = {name: medians[case][name][unit] for name in COLOURS}
            if column == 0:
                drawn.append(f'<text x="178" y="{top + 26}" text-anchor="end">{label}</text>')
            for line, (name, value) in enumerate(values.items()):
                width, y = max(2, round(270 * value / max(values.values()))), top + 22 * line
                drawn.append(f'<rect x="{left}" y="{y}" width="{width}" height="18" rx="2" fill="{COLOURS[name]}"/>')
                drawn.append(f'<text x="{left + width + 8}" y="{y + 14}" fill="#59636e">{format(value, form)}</text>')
    for column, (name, colour) in enumerate(COLOURS.items()):
        x = 190 + 130 * column
        drawn.append(f'<rect x="{x}" y="242" width="14" height="14" rx="2" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 22}" y="254" fill="#59636e">{name}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 270" font-family="Helvetica, Arial, sans-serif"'
    return "\n".join(
        [f'{head} font-size="15" role="img">', "<title>wds_async and webdataset</title>", *drawn, "</svg>\n"]
    )


def main(
    folder: Path = ROOT / "benchmarks" / "results",
    page: Path = ROOT / "docs" / "performance.md",
    image: Path = ROOT / "docs" / "img" / "speed.svg",
) -> int:
    """Fill the page and draw the plot from all results; return 1 where there is none."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    documents = [document for document in documents if document.get("bars")]
    if not documents:
        print(f"no results in {folder}: run `make bench` first", file=sys.stderr)
        return 1
    page.write_text(fill(page.read_text(encoding="utf-8"), table(documents)), encoding="utf-8")
    if PLOTTED.keys() <= {case for document in documents for case in document.get("medians", ())}:
        image.write_text(plot(documents), encoding="utf-8")
    print(f"{page}: figures of {', '.join(document['benchmark'] for document in documents)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
