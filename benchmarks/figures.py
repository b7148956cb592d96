"""Put the measured figures into README.md: ``python -m benchmarks.figures``, after ``make bench``.

Each ``results/*.json`` has the bars of one benchmark (see `harness.Bench.save`); they become rows of the table
between the markers ``<!-- figures -->`` and ``<!-- /figures -->``, each with the command that makes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["fill", "main", "table"]

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
    "first_sample",
    "filters",
    "decode",
    "loader",
)


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a row a bar, in the order of `ORDER`, then what machine and day they are from."""
    documents = sorted(results, key=lambda document: _place(document["benchmark"]))
    lines = ["| measure | bar | measured | met | command |", "|---|---|---|---|---|"]
    for document in documents:
        command = f"`python -m benchmarks.{document['benchmark']}`"
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


def fill(readme: str, inner: str) -> str:
    """``readme`` with ``inner`` between the markers. Raises ValueError where they are missing."""
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"README.md has no {START} … {END}")
    return f"{before}{START}\n{inner}\n{END}{after}"


def main(folder: Path = ROOT / "benchmarks" / "results", readme: Path = ROOT / "README.md") -> int:
    """Fill the README from every result there is; 1 where there is none."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    documents = [document for document in documents if document.get("bars")]
    if not documents:
        print(f"no results in {folder}: run `make bench` first", file=sys.stderr)
        return 1
    readme.write_text(fill(readme.read_text(encoding="utf-8"), table(documents)), encoding="utf-8")
    print(f"{readme}: figures of {', '.join(document['benchmark'] for document in documents)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
