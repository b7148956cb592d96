"""The benchmarks can be listed, and one runs from its shards to its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
