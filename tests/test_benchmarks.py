"""The benchmarks can be listed, and one runs from its shards to its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report
from tests.servers.nginx import _program
from tests.servers.process import required

ROOT = Path(__file__).parent.parent


def benchmarks(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_list_has_scenarios_and_peers() -> None:
    listed = benchmarks("--list")
    assert "Undecoded images of 100 KB, plain HTTP." in listed
    assert "a bare recv_into loop" in listed


@pytest.mark.servers
def test_a_scenario_runs(tmp_path: Path) -> None:
    with required():
        _program()
    path = tmp_path / "http.json"
    benchmarks("--run", "http", "--quick", "--peers", "wds_async", "--json", str(path))
    document = json.loads(path.read_text())
    readings = document["medians"]["images, http"]
    assert {"wds_async", "recv_into"} <= readings.keys()
    ours = readings["wds_async"]
    assert ours["wire_bytes"] >= ours["size_bytes"]
    assert ours["cpu_s"] > 0
    assert ours["pss_bytes"] > 0
    assert ours["requests"] > 1


def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    assert report.main(page=page, images=tmp_path) == 0
    assert page.read_text() == (ROOT / "docs" / "benchmarks.md").read_text()
    for drawn in tmp_path.glob("*.svg"):
        assert drawn.read_text() == (ROOT / "docs" / "img" / drawn.name).read_text()


def test_a_table_has_every_peer_or_its_reason() -> None:
    numbers = dict.fromkeys(("mb_s", "cpu_s_per_gb", "wall_s", "cpu_s", "first_s"), 1.5)
    whole = dict.fromkeys(("size_bytes", "samples", "pss_bytes", "wire_bytes", "requests"), 10**9)
    reading = {
        "peer": "wds_async",
        **numbers,
        **whole,
        "only_first": False,
        "turns": 5,
        "part": 0.25,
        "spread": {"wall_s": (1.0, 2.0), "cpu_s": (1.0, 2.0)},
    }
    case, name = next(iter(report.PLOTTED)), "wds_async"
    document = {"benchmark": "http", "what": "Samples.", "date": "2026-01-01", "medians": {case: {name: reading}}}
    document["absent"] = {case: {"another": "does not read it"}}
    text = report.cases([document])
    assert "1.50 (1.00..2.00)" in text
    assert "wds_async (25% of the data)" in text
    assert "Not in it: another: does not read it." in text
    drawing = report.plot([document], "memory")
    assert drawing is not None
    assert ">1,000</text>" in drawing
    assert report.plot([{**document, "medians": {}}], "memory") is None
    assert "**memory** | | not measured" in " ".join(report.goals([{**document, "bars": []}]).split())
    with pytest.raises(ValueError, match="bars"):
        report.fill("no markers", "bars", "new")
