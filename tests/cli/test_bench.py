"""``wds-async bench``."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.servers.origin import Origin
from wds_async.cli.bench import decided, table
from wds_async.cli.measure import Job, Outcome


def test_summary(call: Any, shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    result = call("bench", *shards(2, 30), "--seconds", "0")
    assert result.exit_code == 0
    assert "wds_async" in result.output
    for column in ("workers", "MB/s", "samples/s", "CPU s/GB", "peak memory", "conns"):
        assert column in result.output


def test_against_webdataset(call: Any, shards: Any) -> None:
    pytest.importorskip("webdataset")
    result = call("bench", *shards(2, 30), "--seconds", "0", "--against", "webdataset", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert [row["library"] for row in rows] == ["wds_async", "webdataset"]
    assert rows[0]["samples"] == rows[1]["samples"] == 60
    assert rows[0]["bytes"] == rows[1]["bytes"]


def test_ratios_stand_below_the_pair() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    fast = Outcome(Job([]), 1.1, 0.1, 8 * 10**8, 500, 1.0, 10**6, 10**8)
    slow = Outcome(Job([], library="webdataset"), 1.5, 0.5, 2 * 10**8, 100, 1.0, 10**6, 3 * 10**8)
    console.print(table([fast, slow]))
    ratios = console.export_text().splitlines()[-1].split()
    assert ratios[:2] == ["better", "by"]
    assert [float(text) for text in ratios[2:] if text != "×"] == [4.0, 5.0, 4.0, 3.0, 5.0]


def test_the_decisions_on_connections_are_shown(call: Any, shards: Any) -> None:
    paths = shards(2, 30)
    with Origin({f"/{path.name}": path.read_bytes() for path in paths}) as origin:
        urls = [origin.url(path.name) for path in paths]
        (row,) = json.loads(call("bench", *urls, "--seconds", "0", "--json").stdout)["rows"]
        shown = call("bench", *urls, "--seconds", "0").stdout
    first = row["decisions"][0]
    assert first["at_s"] >= 0
    assert first["text"].startswith("connections 64 → ")
    assert "s  connections 64 → " in shown


def test_many_decisions_are_shortened_and_the_table_fits_into_100_columns() -> None:
    lines = decided(Outcome(Job([]), 1, 1, 1, 1, 1, 1, 1, decisions=tuple((float(i), f"d{i}") for i in range(30))))
    assert (len(lines), lines[0].split(), lines[-1].split()) == (11, ["0.00", "s", "d0"], ["29.00", "s", "d29"])
    assert "20 more" in lines[5]
    console = Console(record=True, width=100, file=io.StringIO())
    stats = {"connections_limit": 1024.0, "connections_peak": 64.0}
    large = Outcome(Job([], library="webdataset", workers=16), 1, 0, 10**11, 10**7, 999, 1, 10**11, stats=stats)
    console.print(table([large, large]))
    _, first, *_ = console.export_text().splitlines()
    assert first.split()[-1] == "1024"
    assert first.split()[1] == "16"


def test_several_worker_counts_give_a_recommendation_and_a_chart(call: Any, shards: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    png = tmp_path / "charts" / "bench.png"
    result = call("bench", *shards(4, 10), "--seconds", "0", "--workers", "0,2", "--png", png, "--json")
    answer = json.loads(result.stdout)
    assert [row["workers"] for row in answer["rows"]] == [0, 2]
    advice = answer["recommendation"]
    assert advice["workers"] in (0, 2)
    assert advice["budget_bytes"] >= 32 << 20
    assert "WDS_BUDGET=" in advice["text"]
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--workers", "two"], "--workers"),
        (["--workers", "1,-1"], "--workers"),
        (["--pipeline", "fast"], "--pipeline"),
        (["--pipeline", "bytes", "--workers", "2"], "--workers 0"),
        (["--budget", "lots"], "--budget"),
        (["--against", "tfrecord"], "--against"),
        (["--pipeline", "decode:rgb9"], "rgb8"),
    ],
)
def test_bad_options(options: list[str], word: str, call: Any) -> None:
    result = call("bench", "x.tar", *options)
    assert result.exit_code == 2
    assert word in result.output


def test_missing_shards(call: Any, tmp_path: Path) -> None:
    result = call("bench", tmp_path / "none.tar")
    assert result.exit_code == 1
    assert "none.tar" in result.output


def test_a_function(call: Any, function: str) -> None:
    (row,) = json.loads(call("bench", function + "samples", "--seconds", "0", "--json").stdout)["rows"]
    assert (row["samples"], row["bytes"]) == (5, 15)
    (row,) = json.loads(call("bench", function + "batches", "--seconds", "0", "--json").stdout)["rows"]
    assert row["samples"] == 1
    for more in (["x.tar"], ["--pipeline", "decode"], ["--against", "webdataset"]):
        refused = call("bench", function + "samples", *more)
        assert refused.exit_code == 2
        assert "measured alone" in refused.output
