"""The limit of a job's cost: kept by all of its processes together, whatever the handlers are."""

from __future__ import annotations

import copy
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
from wds_async.observe import cost_limit as purses
from wds_async.observe.cost_limit import Purse, purse, spend
from wds_async.reading.records import cbors_to_samples
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters

SHARD = make_shard({f"{i:03}": {"bin": bytes(10_000)} for i in range(100)})
"""A megabyte: a tenth of a cent by the table of `prices`."""


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Each test begins with a purse that is full."""
    purses._purse = None
    yield
    purses._purse = None


@pytest.fixture(autouse=True)
def prices(tmp_path: Path, monkeypatch: Any) -> None:
    """A dollar for each GB of loopback, and no region known."""
    path = tmp_path / "prices.yaml"
    path.write_text("origins: {'http://127.0.0.1': {internet: [0, 1]}}")
    monkeypatch.setenv("WDS_PRICES", str(path))
    monkeypatch.delenv("WDS_REGION", raising=False)
    monkeypatch.setenv("WDS_BUDGET", "1M")
    monkeypatch.setenv("WDS_PART_SIZE", "256K")


def limit(monkeypatch: Any, dollars: float) -> None:
    monkeypatch.setenv("WDS_COST_LIMIT", f"${dollars}")


def spent(megabytes: float) -> Counters:
    counters = Counters()
    counters.traffic.of("http://127.0.0.1:1").bytes = int(megabytes * 1e6)
    return counters


def shards(origin: Origin, count: int) -> list[str]:
    return [origin.add(f"{i}.tar", SHARD) for i in range(count)]


def test_without_a_limit_nothing_is_counted(origin: Origin) -> None:
    assert purse() is None
    with open_shards(shards(origin, 1)) as reader:
        spend(reader)
        assert reader.limit is None


def test_one_a_process(monkeypatch: Any) -> None:
    limit(monkeypatch, 3)
    assert purse() is purse() is not None
    assert purse().limit == 3  # type: ignore[union-attr]


def test_the_high_end_counts_and_all_counters_together(monkeypatch: Any) -> None:
    now = [0.0]
    money = Purse(0.01, clock=lambda: now[0])
    first, second = spent(4), spent(5)
    for counters in (first, second, second):
        money.watch(counters)
    money.check()  # 0.009, and the low end is nothing
    second.traffic.of("http://127.0.0.1:1").bytes += 1_000_000
    money.check()  # looked at a moment ago
    now[0] += 1
    with pytest.raises(
        CostLimitReached, match=r"\$0.01 is spent: up to \$0.01 .*unknown region: set WDS_REGION"
    ) as caught:
        money.check()
    assert "http://127.0.0.1:1 (region unknown) $0.00 to $0.01 for 0 requests and 0.01 GB" in str(caught.value)
    with pytest.raises(CostLimitReached):  # it stays so
        money.check()
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), CostLimitReached)


def test_much_that_comes_at_once_is_looked_at_at_once() -> None:
    money, counters = Purse(0.01, clock=lambda: 0.0), spent(5)
    money.watch(counters)
    money.check()
    counters.traffic.of("http://127.0.0.1:1").bytes += 20_000_000
    money.check()
    counters.add("wire_bytes", 20_000_000)
    with pytest.raises(CostLimitReached):
        money.check()


def test_each_rank_has_its_share(monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    money = Purse(0.04)
    money.watch(spent(11))
    with pytest.raises(CostLimitReached, match=r"\$0.04: the share of rank 1 of 4, \$0.01, is spent"):
        money.check()


def _spends(money: Purse, megabytes: float) -> None:
    money.watch(spent(megabytes))
    money.check()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_know_of_each_other(method: str) -> None:
    money = Purse(0.01)
    _spends(money, 3)
    context = multiprocessing.get_context(method)
    for _ in range(2):
        worker = context.Process(target=_spends, args=(money, 3))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
    with pytest.raises(CostLimitReached, match=r"up to \$0.0105 "):  # two workers, this one, and a copy
        _spends(copy.copy(money), 1.5)


def test_where_no_file_can_be_had_each_has_its_own_share(monkeypatch: Any, caplog: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKER", "0")
    monkeypatch.setenv("NUM_WORKERS", "4")
    money = Purse(0.04)
    (tmp_path / "a file").write_text("")
    money._board.folder = tmp_path / "a file" / "folder"
    money.watch(counters := spent(9))
    with caplog.at_level(logging.WARNING, "wds_async"):
        money.check()
    assert "stops at its share of it, $0.01" in caplog.text
    counters.traffic.of("http://127.0.0.1:1").bytes += 2_000_000
    money._look_at = 0
    with pytest.raises(CostLimitReached):
        money.check()


@pytest.mark.parametrize("handler", [ignore_and_continue, ignore_and_stop])
def test_a_run_stops_whatever_the_handler_is(origin: Origin, monkeypatch: Any, handler: Any) -> None:
    limit(monkeypatch, 0.003)
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


def test_records_too(origin: Origin, monkeypatch: Any) -> None:
    limit(monkeypatch, 0)
    dataset = wds.DataPipeline([{"url": origin.add("a.cbors", b"\x01")}], cbors_to_samples(handler=ignore_and_continue))
    with pytest.raises(CostLimitReached):
        next(iter(dataset))


def test_random_access_too(origin: Origin, monkeypatch: Any, tmp_path: Path) -> None:
    limit(monkeypatch, 0)
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "cache"))
    shard = {"url": origin.add("0.tar", SHARD), "nsamples": 100}
    with pytest.raises(CostLimitReached):
        ShardListDataset([shard])[0]
    files = FileCache(cache_dir=str(tmp_path / "other"), handler=ignore_and_continue)
    with pytest.raises(CostLimitReached):
        next(files([shard]))


def test_workers_stop_too(origin: Origin, monkeypatch: Any) -> None:
    limit(monkeypatch, 0.003)
    dataset = wds.WebDataset(shards(origin, 80), shardshuffle=False, handler=ignore_and_continue)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
    with pytest.raises(CostLimitReached, match="WDS_COST_LIMIT="):
        list(loader)
    assert dataset.cost().high >= 0.003


def test_a_pickled_dataset_does_not_take_its_purse_along(origin: Origin, monkeypatch: Any) -> None:
    limit(monkeypatch, 3)
    dataset = wds.WebDataset(shards(origin, 1), shardshuffle=False)
    stored = pickle.dumps(dataset)
    purses._purse = None
    other = pickle.loads(stored)
    (stage,) = [stage for stage in other.pipeline if hasattr(stage, "purse")]
    assert stage.purse is purse()


def test_a_table_that_is_none_is_told_when_the_dataset_is_made(monkeypatch: Any) -> None:
    limit(monkeypatch, 1)
    monkeypatch.setenv("WDS_PRICES", os.devnull + "/x")
    with pytest.raises(ConfigError, match="WDS_PRICES"):
        wds.WebDataset("x.tar", shardshuffle=False)


def test_threads_share_one_cell() -> None:
    money = Purse(1000.0)
    money.watch(spent(1000))

    def look() -> None:
        for _ in range(200):
            money.over()

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (money._board.folder / "spent.cells").stat().st_size == 8
    assert money._together(1.0) == 1.0
