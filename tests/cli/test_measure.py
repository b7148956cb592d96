"""Measured reads and what they count: both libraries alike; errors come back, nothing is left behind."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.servers.origin import Origin
from tests.servers.shards import sample_fields
from wds_async.cli.bench.measure import Measurement, Moment, Outcome, ProcessTree, measure
from wds_async.errors import ShardNotFound, WdsError


def weight(count: int) -> int:
    return sum(len(data) for i in range(count) for data in sample_fields(i).values())


@pytest.mark.parametrize("library", ["wds_async", "webdataset"])
def test_one_pass_counts_every_sample_and_byte(library: str, shards: Any) -> None:
    pytest.importorskip(library)
    urls = [str(path) for path in shards(2, 50)]
    outcome = measure(Measurement(urls, library=library, seconds=0))
    assert (outcome.samples, outcome.bytes) == (100, weight(100))
    assert 0 < outcome.first_s <= outcome.wall_s
    assert outcome.cpu_s > 0
    assert outcome.peak_bytes >= outcome.base_bytes > 1_000_000
    assert bool(outcome.stats) == (library == "wds_async")


@pytest.mark.parametrize("pipeline", ["raw", "bytes"])
def test_the_budget_is_the_jobs(pipeline: str, shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_BUDGET", "99M")
    urls = [str(path) for path in shards(1, 3)]
    outcome = measure(Measurement(urls, pipeline=pipeline, seconds=0, budget_bytes=48 << 20))
    assert outcome.stats["budget_bytes"] == 48 << 20
    if pipeline == "bytes":
        assert (outcome.samples, outcome.bytes) == (0, Path(urls[0]).stat().st_size)


def test_workers_and_decoding_weigh_the_same(shards: Any) -> None:
    pytest.importorskip("torch")
    urls = [str(path) for path in shards(2, 20)]
    outcome = measure(Measurement(urls, pipeline="decode:pil", workers=2, batch=8, seconds=0))
    assert (outcome.samples, outcome.bytes) == (40, weight(40))
    assert outcome.first_samples == 8


def test_for_some_seconds_it_starts_again_and_tells_how_it_goes(shards: Any) -> None:
    moments: list[Moment] = []
    outcome = measure(Measurement([str(path) for path in shards(1, 20)], seconds=0.7), moments.append)
    assert outcome.samples > 20
    assert outcome.wall_s - outcome.first_s >= 0.7
    assert list(outcome.moments) == moments
    assert [moment.at_s for moment in moments] == sorted(moment.at_s for moment in moments)
    assert moments[-1].samples <= outcome.samples
    assert moments[-1].budget_bytes > 0


def test_the_decisions_on_connections_come_along(shards: Any) -> None:
    paths = shards(2, 30)
    with Origin({f"/{path.name}": path.read_bytes() for path in paths}) as origin:
        outcome = measure(Measurement([origin.url(path.name) for path in paths], pipeline="bytes", seconds=0))
    at_s, text = outcome.decisions[0]
    assert 0 <= at_s <= outcome.wall_s + 1
    assert text.startswith("connections 64 → ")
    assert measure(Measurement([str(path) for path in paths], seconds=0)).decisions == ()


def test_an_error_of_the_tree_comes_back_as_itself(tmp_path: Path) -> None:
    with pytest.raises(ShardNotFound, match=r"none\.tar"):
        measure(Measurement([str(tmp_path / "none.tar")]))
    assert multiprocessing.active_children() == []


def test_other_errors_are_named(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    with pytest.raises(WdsError, match="webdataset: FileNotFoundError"):
        measure(Measurement([str(tmp_path / "none.tar")], library="webdataset"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_leaving_ends_the_process_and_its_workers(shards: Any) -> None:
    pytest.importorskip("torch")
    workers: set[int] = set()

    def stop(moment: Moment) -> None:
        (process,) = multiprocessing.active_children()
        workers.update(child.pid for child in psutil.Process(process.pid).children(recursive=True))
        if moment.samples:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(Measurement([str(path) for path in shards(2, 20, payload=50_000)], workers=2, seconds=600), stop)
    assert multiprocessing.active_children() == []
    assert len(workers) >= 2
    assert [pid for pid in workers if Path(f"/proc/{pid}/cmdline").exists()] == []


def test_figures_of_an_outcome() -> None:
    counts = {"wall_s": 12.0, "first_s": 2.0, "bytes": 1100, "samples": 11, "first_bytes": 100, "first_samples": 1}
    stats = {"connections_limit": 64, "connections_peak": 12}
    outcome = Outcome(Measurement([]), cpu_s=1.0, base_bytes=0, peak_bytes=0, stats=stats, **counts)  # type: ignore[arg-type]
    assert (outcome.rate, outcome.samples_rate) == (100.0, 1.0)  # without the start
    assert outcome.cpu_s_per_gb == pytest.approx(1e9 / 1100)
    assert outcome.connections == 64
    assert replace(outcome, stats={**stats, "connections_peak": 0}).connections == 0


SPIN = "import time\nwhile time.process_time() < 0.3: pass"


def test_children_count_alive_and_ended() -> None:
    processes = ProcessTree()
    cpu_s, resident = processes.cpu_s(), processes.resident_bytes()
    child = subprocess.Popen(
        [sys.executable, "-c", SPIN + "\nprint(flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert processes.cpu_s() - cpu_s > 0.25
        assert processes.resident_bytes() - resident > 1_000_000
    finally:
        child.communicate(b"\n", timeout=30)
    assert processes.cpu_s() - cpu_s > 0.25


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_that_of_this_program() -> None:
    """Not of the process that started it: ``ru_maxrss`` would give 300 MB here."""
    code = (
        "import subprocess, sys; fat = bytearray(b'x') * 300_000_000;"
        "sys.exit(subprocess.run([sys.executable, '-c', 'from wds_async.cli.bench.measure import peak_bytes; "
        "import sys; sys.exit(peak_bytes() > 200_000_000)']).returncode)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
