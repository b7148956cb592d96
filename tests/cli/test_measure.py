"""Measured reads: both libraries count the same, errors come back, and Ctrl-C or a death leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers.origin import Origin
from tests.servers.shards import sample_fields
from wds_async.cli import usage
from wds_async.cli.measure import Job, Moment, Outcome, measure
from wds_async.errors import ShardNotFound, WdsError


def weight(count: int) -> int:
    return sum(len(data) for i in range(count) for data in sample_fields(i).values())


@pytest.mark.parametrize("library", ["wds_async", "webdataset"])
def test_one_pass_counts_every_sample_and_byte(library: str, shards: Any) -> None:
    pytest.importorskip(library)
    urls = [str(path) for path in shards(2, 50)]
    outcome = measure(Job(urls, library=library, seconds=0))
    assert (outcome.samples, outcome.bytes) == (100, weight(100))
    assert 0 < outcome.first_s <= outcome.wall_s
    assert outcome.cpu_s > 0
    assert outcome.peak_bytes >= outcome.base_bytes > 1_000_000
    assert bool(outcome.stats) == (library == "wds_async")


def test_the_engine_alone(shards: Any) -> None:
    paths = shards(2, 50)
    outcome = measure(Job([str(path) for path in paths], pipeline="bytes", seconds=0))
    assert outcome.bytes == outcome.stats["bytes"] == sum(path.stat().st_size for path in paths)
    assert outcome.samples == 0


@pytest.mark.parametrize("pipeline", ["raw", "bytes"])
def test_the_budget_is_the_jobs(pipeline: str, shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_BUDGET", "99M")
    urls = [str(path) for path in shards(1, 3)]
    outcome = measure(Job(urls, pipeline=pipeline, seconds=0, budget_bytes=48 << 20))
    assert outcome.stats["budget_bytes"] == 48 << 20


def test_workers_and_decoding_weigh_the_same(shards: Any) -> None:
    pytest.importorskip("torch")
    urls = [str(path) for path in shards(2, 20)]
    outcome = measure(Job(urls, pipeline="decode:pil", workers=2, batch=8, seconds=0))
    assert (outcome.samples, outcome.bytes) == (40, weight(40))
    assert outcome.first_samples == 8


def test_for_some_seconds_it_starts_again_and_tells_how_it_goes(shards: Any) -> None:
    moments: list[Moment] = []
    outcome = measure(Job([str(path) for path in shards(1, 20)], seconds=0.7), moments.append)
    assert outcome.samples > 20
    assert 0.7 <= outcome.wall_s - outcome.first_s < 5
    assert list(outcome.moments) == moments
    assert [moment.at_s for moment in moments] == sorted(moment.at_s for moment in moments)
    assert moments[-1].samples <= outcome.samples
    assert moments[-1].budget_bytes > 0


def test_the_decisions_on_connections_come_along(shards: Any) -> None:
    paths = shards(2, 30)
    with Origin({f"/{path.name}": path.read_bytes() for path in paths}) as origin:
        outcome = measure(Job([origin.url(path.name) for path in paths], pipeline="bytes", seconds=0))
    at_s, text = outcome.decisions[0]
    assert 0 <= at_s <= outcome.wall_s + 1
    assert text.startswith("connections 64 → ")
    assert measure(Job([str(path) for path in paths], seconds=0)).decisions == ()


def test_connections_are_those_of_a_network() -> None:
    def outcome(**stats: float) -> Outcome:
        return Outcome(Job([]), 1, 1, 1, 1, 1, 1, 1, stats=stats)

    assert outcome(connections_limit=64, connections_peak=12).connections == 64
    assert outcome(connections_limit=64, connections_peak=0).connections == 0
    assert outcome().connections == 0


def test_an_error_of_the_tree_comes_back_as_itself(tmp_path: Path) -> None:
    with pytest.raises(ShardNotFound, match=r"none\.tar"):
        measure(Job([str(tmp_path / "none.tar")]))
    assert multiprocessing.active_children() == []


def test_other_errors_are_named(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    with pytest.raises(WdsError, match="webdataset: FileNotFoundError"):
        measure(Job([str(tmp_path / "none.tar")], library="webdataset"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_leaving_ends_the_process_and_its_workers(shards: Any) -> None:
    pytest.importorskip("torch")
    workers: set[int] = set()

    def stop(moment: Moment) -> None:
        (process,) = multiprocessing.active_children()
        workers.update(usage.descendants(process.pid))
        if moment.samples:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(Job([str(path) for path in shards(2, 20, payload=50_000)], workers=2, seconds=600), stop)
    assert multiprocessing.active_children() == []
    assert len(workers) >= 2
    assert [pid for pid in workers if Path(f"/proc/{pid}/cmdline").exists()] == []


def test_rates_do_not_count_the_start() -> None:
    outcome = Outcome(
        Job([]),
        wall_s=12.0,
        first_s=2.0,
        bytes=1100,
        samples=11,
        cpu_s=1.0,
        base_bytes=0,
        peak_bytes=0,
        first_bytes=100,
        first_samples=1,
    )
    assert (outcome.rate, outcome.samples_rate) == (100.0, 1.0)
    assert outcome.cpu_s_per_gb == pytest.approx(1e9 / 1100)
