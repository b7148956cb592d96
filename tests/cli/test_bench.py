"""``wds-async bench``: its table, its recommendation, its charts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.servers.origin import Origin
from wds_async.cli.bench import chart
from wds_async.cli.bench.command import decided, recommend, table
from wds_async.cli.bench.measure import Measurement, Moment, Outcome


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
    fast = Outcome(Measurement([]), 1.1, 0.1, 8 * 10**8, 500, 1.0, 10**6, 10**8)
    slow = Outcome(Measurement([], library="webdataset"), 1.5, 0.5, 2 * 10**8, 100, 1.0, 10**6, 3 * 10**8)
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
    lines = decided(
        Outcome(Measurement([]), 1, 1, 1, 1, 1, 1, 1, decisions=tuple((float(i), f"d{i}") for i in range(30)))
    )
    assert (len(lines), lines[0].split(), lines[-1].split()) == (11, ["0.00", "s", "d0"], ["29.00", "s", "d29"])
    assert "20 more" in lines[5]
    console = Console(record=True, width=100, file=io.StringIO())
    stats = {"connections_limit": 1024.0, "connections_peak": 64.0}
    large = Outcome(Measurement([], library="webdataset", workers=16), 1, 0, 10**11, 10**7, 999, 1, 10**11, stats=stats)
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


def test_a_function(call: Any, function: str) -> None:
    (row,) = json.loads(call("bench", function + "samples", "--seconds", "0", "--json").stdout)["rows"]
    assert (row["samples"], row["bytes"]) == (5, 15)
    (row,) = json.loads(call("bench", function + "batches", "--seconds", "0", "--json").stdout)["rows"]
    assert row["samples"] == 1
    for more in (["x.tar"], ["--pipeline", "decode"], ["--against", "webdataset"]):
        refused = call("bench", function + "samples", *more)
        assert refused.exit_code == 2
        assert "measured alone" in refused.output


MIB = 1 << 20


def outcome(workers: int, mb_s: float, *, peak: int = 100, budget: int = 128) -> Outcome:
    processes = max(1, workers)
    return Outcome(
        Measurement(["x.tar"], workers=workers),
        wall_s=1.0,
        first_s=0.0,
        bytes=int(mb_s * 1e6),
        samples=1,
        cpu_s=1.0,
        base_bytes=0,
        peak_bytes=0,
        stats={
            "budget_bytes": budget * MIB * processes,
            "window_peak_bytes": peak * MIB * processes,
        },
    )


def never(job: Measurement) -> Outcome:
    raise AssertionError("nothing more needs measuring")


def test_the_fewest_workers_within_five_per_cent() -> None:
    advice = recommend([outcome(1, 500), outcome(2, 960), outcome(4, 1000)], never)
    assert advice.workers == 2
    assert "within 5 %" in advice.text


def test_the_most_that_was_tried_may_not_be_enough() -> None:
    advice = recommend([outcome(1, 500), outcome(4, 1000)], never)
    assert advice.workers == 4
    assert "more may be faster" in advice.text


@pytest.mark.parametrize(("peak", "expected"), [(100, 128), (40, 64), (3, 32)])
def test_a_window_that_was_not_full_needs_no_more(peak: int, expected: int) -> None:
    assert recommend([outcome(0, 500, peak=peak)], never).budget_bytes == expected * MIB


@pytest.mark.parametrize(("faster", "expected"), [(560, 256), (510, 128)])
def test_a_full_window_is_tried_with_twice_the_budget(faster: float, expected: int) -> None:
    asked: list[Measurement] = []

    def more(job: Measurement) -> Outcome:
        asked.append(job)
        return outcome(2, faster, peak=256, budget=256)

    advice = recommend([outcome(2, 500, peak=128)], more)
    assert [job.budget_bytes for job in asked] == [256 * MIB]
    assert advice.budget_bytes == expected * MIB


def test_webdataset_is_never_recommended() -> None:
    other = outcome(4, 9999)
    theirs = Outcome(**{**other.__dict__, "job": Measurement(["x.tar"], library="webdataset", workers=4)})
    assert recommend([outcome(1, 500), theirs], never).workers == 1


def charted(library: str, workers: int) -> Outcome:
    moments = tuple(Moment(0.2 * i, 10**7 * i, 100 * i, 0.1 * i, 10**8) for i in range(1, 10))
    return Outcome(
        Measurement([], library=library, workers=workers), 2.0, 0.1, 10**8, 1000, 1.0, 10**7, 10**8, moments=moments
    )


def drawn(path: Path) -> tuple[int, int]:
    """Return width and height. Fail for an empty canvas."""
    image = pytest.importorskip("PIL.Image")
    with image.open(path) as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 10
        size: tuple[int, int] = picture.size
        return size


@pytest.mark.parametrize("libraries", [["wds_async"], ["wds_async", "webdataset"]])
def test_bench(libraries: list[str], tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.png"
    chart.bench([charted(library, workers) for workers in (0, 1, 4) for library in libraries], path)
    assert min(drawn(path)) > 400


def test_demo(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    course = chart.Course(
        rates=[(0.25 * i, 1e8 / i, 5e7) for i in range(1, 20)],
        losses=[(64 * i, 2.0 / i) for i in range(1, 50)],
        tests=[(1600, 0.9), (3200, 0.97)],
    )
    short = chart.Course(rates=[], losses=[(64, 2.0)], tests=[(64, 0.1)])  # too short to be sampled
    bare = Outcome(Measurement([]), 0.1, 0.1, 100, 1, 0.1, 0, 10**7)
    for each, outcomes in ((course, [charted("wds_async", 0), charted("webdataset", 0)]), (short, [bare])):
        chart.demo(each, outcomes, tmp_path / "demo.png")
        assert min(drawn(tmp_path / "demo.png")) > 800
