"""The README's table of figures comes from the results, whatever they are."""

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
    readme = tmp_path / "README.md"
    readme.write_text(f"{figures.START}\n{figures.END}\n", encoding="utf-8")
    assert figures.main(tmp_path, readme) == 1
    (tmp_path / "http.json").write_text(json.dumps(document("http", BAR)), encoding="utf-8")
    assert figures.main(tmp_path, readme) == 0
    assert "0.71" in readme.read_text(encoding="utf-8")


def test_the_readme_has_the_markers() -> None:
    text = (figures.ROOT / "README.md").read_text(encoding="utf-8")
    assert figures.fill(text, "x") != text
