"""The table of figures and the plot come from the results, whatever they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures

BAR = {"measure": "CPU | s/GB", "bar": "≤ 0.8", "measured": "0.71", "met": True}


def document(name: str, *bars: dict[str, Any]) -> dict[str, Any]:
    return {"benchmark": name, "date": "2026-11-21", "machine": {"cpus": 2}, "bars": list(bars)}


def test_rows_in_order_with_their_command() -> None:
    lines = figures.table([document("tls", {**BAR, "met": False}), document("http", BAR, BAR)]).splitlines()
    assert lines[2] == r"| CPU \| s/GB | ≤ 0.8 | 0.71 | yes | `python -m benchmarks.http` |"
    assert lines[4].endswith("| **no** | `python -m benchmarks.tls` |")
    assert lines[-1] == "Measured 2026-11-21: cpus 2."


def test_only_what_is_between_the_markers_changes() -> None:
    text = f"before\n{figures.START}\nold\n{figures.END}\nafter\n"
    assert figures.fill(text, "new") == f"before\n{figures.START}\nnew\n{figures.END}\nafter\n"
    with pytest.raises(ValueError, match="figures"):
        figures.fill("no markers", "new")


def test_the_whole_way(tmp_path: Path) -> None:
    page, image = tmp_path / "performance.md", tmp_path / "speed.svg"
    page.write_text(f"{figures.START}\n{figures.END}\n", encoding="utf-8")
    assert figures.main(tmp_path, page, image) == 1
    (tmp_path / "http.json").write_text(json.dumps(document("http", BAR)), encoding="utf-8")
    assert figures.main(tmp_path, page, image) == 0
    assert "0.71" in page.read_text(encoding="utf-8")
    assert not image.exists()


def test_the_page_and_the_plot_are_those_of_the_results(tmp_path: Path) -> None:
    page, image = tmp_path / "performance.md", tmp_path / "speed.svg"
    page.write_text(f"{figures.START}\n{figures.END}\n", encoding="utf-8")
    assert figures.main(page=page, image=image) == 0
    docs = figures.ROOT / "docs"
    assert page.read_text(encoding="utf-8").strip() in (docs / "performance.md").read_text(encoding="utf-8")
    assert image.read_text(encoding="utf-8") == (docs / "img" / "speed.svg").read_text(encoding="utf-8")
