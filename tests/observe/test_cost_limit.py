"""Cost limits: of a job, kept by all of its processes together whatever the handlers are, and of a service."""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import Origin, make_shard
from wds_async.cache import FileCache
from wds_async.errors import ConfigError, CostLimitReached
from wds_async.handlers import ignore_and_continue, ignore_and_stop
from wds_async.indexed.dataset import ShardListDataset
from wds_async.observe import cost_limit
from wds_async.observe.cost_limit import CostLimit, ServiceCostLimit, enforce, limit_of_job
from wds_async.observe.prices import PriceTable, Range
from wds_async.reading.records import cbors_to_samples
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters
from wds_async.transfer.traffic import Traffic

GB = 10**9
SHARD = make_shard({f"{i:03}": {"bin": bytes(10_000)} for i in range(100)})
"""A megabyte: a tenth of a cent by the table of `prices`."""


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Each test begins with nothing spent."""
    cost_limit._limit = None
    yield
    cost_limit._limit = None


@pytest.fixture(autouse=True)
def prices(tmp_path: Path, monkeypatch: Any) -> None:
    """A dollar for each GB of loopback, and no region known."""
    path = tmp_path / "prices.yaml"
    path.write_text("origins: {'http://127.0.0.1': {internet: [0, 1]}}")
    monkeypatch.setenv("WDS_PRICES", str(path))
    monkeypatch.delenv("WDS_REGION", raising=False)
    monkeypatch.setenv("WDS_BUDGET", "1M")
    monkeypatch.setenv("WDS_PART_SIZE", "256K")


def set_limit(monkeypatch: Any, dollars: float) -> None:
    monkeypatch.setenv("WDS_COST_LIMIT", f"${dollars}")


def spent(megabytes: float) -> Counters:
    counters = Counters()
    counters.traffic.of("http://127.0.0.1:1").bytes = int(megabytes * 1e6)
    return counters


def shards(origin: Origin, count: int) -> list[str]:
    return [origin.add(f"{i}.tar", SHARD) for i in range(count)]


def test_one_limit_a_process_and_none_unless_set(origin: Origin, monkeypatch: Any) -> None:
    assert limit_of_job() is None
    with open_shards(shards(origin, 1)) as reader:
        enforce(reader)
        assert reader.limit is None
    set_limit(monkeypatch, 3)
    assert limit_of_job() is limit_of_job() is not None
    assert limit_of_job().limit == 3  # type: ignore[union-attr]


def test_the_high_end_counts_and_all_counters_together() -> None:
    now = [0.0]
    limit = CostLimit(0.01, clock=lambda: now[0])
    first, second = spent(4), spent(5)
    for counters in (first, second, second):
        limit.watch(counters)
    limit.check()  # 0.009, and the low end is nothing
    second.traffic.of("http://127.0.0.1:1").bytes += 1_000_000
    limit.check()  # looked at a moment ago
    now[0] += 1
    with pytest.raises(
        CostLimitReached, match=r"\$0.01 is spent: up to \$0.01 .*unknown region: set WDS_REGION"
    ) as caught:
        limit.check()
    assert "http://127.0.0.1:1 (region unknown) $0.00 to $0.01 for 0 requests and 0.01 GB" in str(caught.value)
    with pytest.raises(CostLimitReached):  # it stays so
        limit.check()
    assert limit.exhausted
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), CostLimitReached)


def test_much_that_comes_at_once_is_looked_at_at_once() -> None:
    limit, counters = CostLimit(0.01, clock=lambda: 0.0), spent(5)
    limit.watch(counters)
    limit.check()
    counters.traffic.of("http://127.0.0.1:1").bytes += 20_000_000
    limit.check()
    counters.add("wire_bytes", 20_000_000)
    with pytest.raises(CostLimitReached):
        limit.check()


def test_each_rank_has_its_share(monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    limit = CostLimit(0.04)
    limit.watch(spent(11))
    with pytest.raises(CostLimitReached, match=r"\$0.04: the share of rank 1 of 4, \$0.01, is spent"):
        limit.check()


def _spends(limit: CostLimit, megabytes: float) -> None:
    limit.watch(spent(megabytes))
    limit.check()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_know_of_each_other(method: str) -> None:
    limit = CostLimit(0.01)
    _spends(limit, 3)
    context = multiprocessing.get_context(method)
    for _ in range(2):
        worker = context.Process(target=_spends, args=(limit, 3))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
    with pytest.raises(CostLimitReached, match=r"up to \$0.0105 "):  # two workers, this one, and a copy
        _spends(copy.copy(limit), 1.5)


def test_threads_share_one_cell() -> None:
    limit = CostLimit(1000.0)
    limit.watch(spent(1000))
    threads = [threading.Thread(target=lambda: [limit.over() for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (limit._board.folder / "spent.cells").stat().st_size == 8
    assert limit.spent() == 1.0


def test_where_no_file_can_be_written_each_process_has_its_own_share(
    monkeypatch: Any, caplog: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORKER", "0")
    monkeypatch.setenv("NUM_WORKERS", "4")
    limit = CostLimit(0.04)
    (tmp_path / "a file").write_text("")
    limit._board.folder = tmp_path / "a file" / "folder"
    limit.watch(counters := spent(9))
    with caplog.at_level(logging.WARNING, "wds_async"):
        limit.check()
    assert "stops at its share of the limit, $0.01" in caplog.text
    counters.traffic.of("http://127.0.0.1:1").bytes += 2_000_000
    limit._look_at = 0
    with pytest.raises(CostLimitReached):
        limit.check()


@pytest.mark.parametrize("handler", [ignore_and_continue, ignore_and_stop])
def test_a_run_stops_whatever_the_handler_is(origin: Origin, monkeypatch: Any, handler: Any) -> None:
    set_limit(monkeypatch, 0.003)
    dataset = wds.WebDataset(shards(origin, 40), shardshuffle=False, handler=handler).map(dict, handler=handler)
    read: list[Any] = []
    with pytest.raises(CostLimitReached, match="WDS_COST_LIMIT="):
        read.extend(dataset)
    # Behind the limit come what was in flight, and 16 MiB between two looks. (What came before it is in the list.)
    assert 0 < len(read) < 40 * 100 - 1000
    with pytest.raises(CostLimitReached):
        next(iter(dataset))
    with pytest.raises(CostLimitReached):  # another dataset of the same job
        next(iter(wds.WebDataset(shards(origin, 1), shardshuffle=False, handler=handler)))


def test_records_and_random_access_too(origin: Origin, monkeypatch: Any, tmp_path: Path) -> None:
    set_limit(monkeypatch, 0)
    dataset = wds.DataPipeline([{"url": origin.add("a.cbors", b"\x01")}], cbors_to_samples(handler=ignore_and_continue))
    with pytest.raises(CostLimitReached):
        next(iter(dataset))
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "cache"))
    shard = {"url": origin.add("0.tar", SHARD), "nsamples": 100}
    with pytest.raises(CostLimitReached):
        ShardListDataset([shard])[0]
    files = FileCache(cache_dir=str(tmp_path / "other"), handler=ignore_and_continue)
    with pytest.raises(CostLimitReached):
        next(files([shard]))


def test_workers_stop_too(origin: Origin, monkeypatch: Any) -> None:
    set_limit(monkeypatch, 0.003)
    dataset = wds.WebDataset(shards(origin, 80), shardshuffle=False, handler=ignore_and_continue)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
    with pytest.raises(CostLimitReached, match="WDS_COST_LIMIT="):
        list(loader)
    assert dataset.cost().high >= 0.003


def test_workers_of_every_epoch_count(origin: Origin, monkeypatch: Any) -> None:
    """Workers that are started anew for each epoch, each of which spends less than its part of the limit."""
    set_limit(monkeypatch, 0.007)
    dataset = wds.WebDataset(shards(origin, 2), shardshuffle=False)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=1)
    for _ in range(3):  # of two megabytes each
        assert len(list(loader)) == 200
    with pytest.raises(CostLimitReached):
        [list(loader) for _ in range(2)]
    assert 0.007 <= dataset.cost().high <= 0.011


def test_a_pickled_dataset_does_not_take_its_limit_along(origin: Origin, monkeypatch: Any) -> None:
    set_limit(monkeypatch, 3)
    stored = pickle.dumps(wds.WebDataset(shards(origin, 1), shardshuffle=False))
    cost_limit._limit = None
    (stage,) = [stage for stage in pickle.loads(stored).pipeline if hasattr(stage, "cost_limit")]
    assert stage.cost_limit is limit_of_job()


def test_an_invalid_table_is_an_error_when_the_dataset_is_made(monkeypatch: Any) -> None:
    set_limit(monkeypatch, 1)
    monkeypatch.setenv("WDS_PRICES", os.devnull + "/x")
    with pytest.raises(ConfigError, match="WDS_PRICES"):
        wds.WebDataset("x.tar", shardshuffle=False)


# ------------------------------------------------------------------ of a service


def traffic_of(gigabytes: float) -> Traffic:
    traffic = Traffic()
    traffic.of("s3://b").bytes = int(gigabytes * GB)
    return traffic


def service_limit(traffic: Traffic, **how: Any) -> ServiceCostLimit:
    return ServiceCostLimit(traffic, PriceTable.load(), **how)


def test_a_limit_of_a_service(caplog: Any) -> None:
    now = [0.0]
    traffic = traffic_of(0)
    limit = service_limit(traffic, limit=1.0, clock=lambda: now[0])
    limit.check()
    traffic.of("s3://b").bytes = 7 * GB  # 0 to 1.078 dollars: the high end counts
    limit.check()  # it was looked at a moment ago
    now[0] += 1
    with caplog.at_level(logging.ERROR, "wds_async"):
        for _ in range(3):
            with pytest.raises(CostLimitReached, match=r"cost_limit of \$1 is reached: \$0.00 to \$1.08 .*s3://b "):
                limit.check()
    assert limit.exhausted
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_limit_for_a_day(caplog: Any) -> None:
    now, wall = [0.0], [20_000 * 86400.0 + 3600]
    traffic = traffic_of(0)
    limit = service_limit(traffic, limit=1.0, per_day=True, clock=lambda: now[0], wall=lambda: wall[0])
    traffic.of("s3://b").bytes = 7 * GB
    for _ in range(2):
        with pytest.raises(CostLimitReached, match=r"cost_limit of \$1 a day is reached: .* wait until 00:00 UTC"):
            limit.check()
        now[0] += 1
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    wall[0] += 86400
    limit.check()
    assert limit.spent() == Range(0, 0)
    assert limit.dollars().high > 1
    traffic.of("s3://b").bytes = 10 * GB
    assert limit.spent().high == pytest.approx(3 / 7 * 1.078, rel=0.01)
    now[0] += 1
    limit.check()
    traffic.of("s3://b").bytes = 14 * GB
    now[0] += 1
    with pytest.raises(CostLimitReached):
        limit.check()


@pytest.mark.parametrize("per_day", [False, True])
def test_what_was_spent_before_a_restart_counts(per_day: bool) -> None:
    wall = [20_000 * 86400.0 + 3600]
    how: dict[str, Any] = {"limit": 1.5, "per_day": per_day, "wall": lambda: wall[0]}
    first = service_limit(traffic_of(7), **how)
    first.check()
    state = json.loads(json.dumps(first.state()))
    second = service_limit(traffic_of(7), **how)
    second.restore(state)
    assert second.spent().high == pytest.approx(2 * first.spent().high)
    assert second.state()["total"] == second.state()["today"]
    with pytest.raises(CostLimitReached):
        second.check()
    wall[0] += 86400  # the next start is on another day
    third = service_limit(Traffic(), **how)
    third.restore(second.state())
    assert third.exhausted is False
    assert third.spent() == (Range(0, 0) if per_day else second._before + second.dollars())


@pytest.mark.parametrize("state", [{}, {"total": [1, 2]}, {"total": [2, 1], "today": [0, 0], "day": "x"}, []])
def test_an_invalid_state(state: Any) -> None:
    with pytest.raises(ValueError, match=": "):
        service_limit(Traffic()).restore(state)


def test_no_limit_and_no_traffic() -> None:
    limit = service_limit(traffic_of(10), region="us-east-1")
    limit.check()
    assert not limit.exhausted
    assert limit.meter.region == "us-east-1"
    nothing = service_limit(Traffic(), limit=0.0)
    with pytest.raises(CostLimitReached):  # nothing may be fetched from anywhere
        nothing.check()
