"""What traffic costs, forecasts, where this machine is, and the service's limit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import Origin, make_shard
from wds_async.errors import ConfigError, CostLimitReached
from wds_async.observe.costs import Meter, Spending, figures, of_pipeline, region_here, total
from wds_async.observe.prices import PriceTable, Range
from wds_async.transfer.traffic import Traffic

GB = 10**9
SHARD = make_shard({f"{i:03}": {"bin": bytes(10_000)} for i in range(20)})
ABOUT_AWS = [
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_EXECUTION_ENV",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "WDS_REGION",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
]


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: Any) -> None:
    for name in ABOUT_AWS:
        monkeypatch.delenv(name, raising=False)


def traffic_of(origin: str = "s3://b", gigabytes: float = 10, requests: int = 1_000_000, region: str = "") -> Traffic:
    traffic = Traffic()
    counted = traffic.of(origin)
    counted.bytes, counted.requests, counted.region = int(gigabytes * GB), requests, region
    return traffic


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    """A dollar for each GB of loopback."""
    path = tmp_path / "prices.yaml"
    path.write_text("origins: {'http://127.0.0.1': {internet: [0.5, 1]}}")
    return path


def test_a_known_region_is_free_but_for_requests() -> None:
    meter = Meter(PriceTable.load(), "us-east-1")
    cost = meter.dollars(traffic_of(region="us-east-1"))
    assert (cost.low, cost.high) == pytest.approx((0.4, 0.7))


def test_an_unknown_one_is_a_range() -> None:
    cost = Meter(PriceTable.load()).dollars(traffic_of())
    assert cost.low == pytest.approx(0.4)
    assert cost.high == pytest.approx(0.7 + 10 * 0.154)


def test_by_origin() -> None:
    traffic = traffic_of("s3://b", region="eu-west-1")
    traffic.merge(traffic_of("ais://b"))
    by_origin = Meter(PriceTable.load(), "eu-west-1").by_origin(traffic)
    assert by_origin["ais://b"] == Range(0, 0)
    assert by_origin["s3://b"].low == pytest.approx(0.4)
    assert total(by_origin.values()).high == pytest.approx(0.7)


def test_forecast() -> None:
    meter, traffic = Meter(PriceTable.load(), "us-east-1"), traffic_of(region="us-east-1")
    assert meter.forecast(traffic, done=10, whole=1000).low == pytest.approx(40)
    with pytest.raises(ValueError, match="nothing was read"):
        meter.forecast(traffic, done=0, whole=10)


def test_figures_name_the_dearest_first() -> None:
    traffic = Traffic()
    for i in range(8):
        traffic.merge(traffic_of(f"s3://b{i}", gigabytes=i, requests=5))
    said = figures(Meter(PriceTable.load()).by_origin(traffic), traffic)
    assert said.startswith("s3://b7 (region unknown) $2.0e-06 to $1.08 for 5 requests and 7.00 GB; s3://b6")
    assert said.endswith("3 more origins $6.0e-06 to $0.46")


def test_where_this_machine_is(monkeypatch: Any) -> None:
    assert region_here() == ""
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert region_here() == ""  # anybody's laptop has that
    monkeypatch.setenv("AWS_EXECUTION_ENV", "AWS_ECS_FARGATE")
    assert region_here() == "us-west-2"
    monkeypatch.delenv("AWS_EXECUTION_ENV")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/secrets/eks.amazonaws.com/serviceaccount/token")
    assert region_here() == "us-west-2"
    monkeypatch.setenv("WDS_REGION", " europe-west1 ")
    assert region_here() == "europe-west1"
    assert region_here("cellar") == "cellar"


def test_a_limit(caplog: Any) -> None:
    now = [0.0]
    traffic = traffic_of(gigabytes=0, requests=0)
    spending = Spending(traffic, PriceTable.load(), limit=1.0, clock=lambda: now[0])
    spending.check()
    traffic.of("s3://b").bytes = 7 * GB  # 0 to 1.078 dollars: the high end counts
    spending.check()  # it was looked at a moment ago
    now[0] += 1
    with caplog.at_level(logging.ERROR, "wds_async"):
        for _ in range(3):
            with pytest.raises(CostLimitReached, match=r"cost_limit of \$1 is reached: \$0.00 to \$1.08 .*s3://b "):
                spending.check()
    assert spending.reached
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_limit_for_a_day(caplog: Any) -> None:
    now, wall = [0.0], [20_000 * 86400.0 + 3600]
    traffic = traffic_of(gigabytes=0, requests=0)
    spending = Spending(traffic, PriceTable.load(), limit=1.0, per_day=True, clock=lambda: now[0], wall=lambda: wall[0])
    traffic.of("s3://b").bytes = 7 * GB
    for _ in range(2):
        with pytest.raises(CostLimitReached, match=r"cost_limit of \$1 a day is reached: .* wait until 00:00 UTC"):
            spending.check()
        now[0] += 1
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    wall[0] += 86400
    spending.check()
    assert spending.spent() == Range(0, 0)
    assert spending.dollars().high > 1
    traffic.of("s3://b").bytes = 10 * GB
    assert spending.spent().high == pytest.approx(3 / 7 * 1.078, rel=0.01)
    now[0] += 1
    spending.check()
    traffic.of("s3://b").bytes = 14 * GB
    now[0] += 1
    with pytest.raises(CostLimitReached):
        spending.check()


@pytest.mark.parametrize("per_day", [False, True])
def test_what_was_spent_before_counts(per_day: bool) -> None:
    wall = [20_000 * 86400.0 + 3600]
    how: dict[str, Any] = {"limit": 1.5, "per_day": per_day, "wall": lambda: wall[0]}
    first = Spending(traffic_of(gigabytes=7, requests=0), PriceTable.load(), **how)
    first.check()
    state = json.loads(json.dumps(first.state()))
    second = Spending(traffic_of(gigabytes=7, requests=0), PriceTable.load(), **how)
    second.restore(state)
    assert second.spent().high == pytest.approx(2 * first.spent().high)
    assert second.state()["total"] == second.state()["today"]
    with pytest.raises(CostLimitReached):
        second.check()
    wall[0] += 86400  # the next start is on another day
    third = Spending(Traffic(), PriceTable.load(), **how)
    third.restore(second.state())
    assert third.reached is False
    assert third.spent() == (Range(0, 0) if per_day else second._before + second.dollars())


@pytest.mark.parametrize("state", [{}, {"total": [1, 2]}, {"total": [2, 1], "today": [0, 0], "day": "x"}, []])
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(ValueError, match=": "):
        Spending(Traffic(), PriceTable.load()).restore(state)


def test_no_limit_and_no_traffic() -> None:
    spending = Spending(traffic_of(), PriceTable.load(), region="us-east-1")
    spending.check()
    assert not spending.reached
    assert spending.region == "us-east-1"
    assert spending.dollars().low == pytest.approx(0.4)
    nothing = Spending(Traffic(), PriceTable.load(), limit=0.0)
    with pytest.raises(CostLimitReached):  # nothing may be fetched from anywhere
        nothing.check()


def test_what_a_dataset_costs(origin: Origin, prices: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WDS_PRICES", str(prices))
    urls = [origin.add(f"{i}.tar", SHARD) for i in range(3)]
    dataset = wds.WebDataset(urls, shardshuffle=False)
    assert dataset.cost() == Range(0, 0)
    with pytest.raises(ValueError, match="nothing was read"):
        dataset.cost(samples=60)
    assert sum(1 for _ in dataset) == 60
    cost = dataset.cost()
    size = 3 * len(SHARD) / GB
    assert (cost.low, cost.high) == pytest.approx((size / 2, size), rel=0.01)
    assert dataset.cost(samples=600).high == pytest.approx(10 * cost.high)
    assert dataset.batched(4).cost() == cost
    loader = wds.WebLoader(dataset, batch_size=None)
    assert loader.cost() == cost
    assert of_pipeline(wds.DataPipeline([1])) is None


def test_the_summary_of_an_epoch_says_it(origin: Origin, prices: Path, monkeypatch: Any, capsys: Any) -> None:
    urls = [origin.add("0.tar", SHARD)]
    list(wds.WebDataset(urls, shardshuffle=False, progress=True))
    assert "prices" not in capsys.readouterr().err
    monkeypatch.setenv("WDS_PRICES", str(prices))
    dataset = wds.WebDataset(urls, shardshuffle=False, progress=True)
    cost = Range(len(SHARD) / GB / 2, len(SHARD) / GB)
    for _ in range(2):  # each epoch its own
        list(dataset)
        assert capsys.readouterr().err.endswith(f"; {cost} by the table of prices\n")


def test_a_table_that_is_none_is_found_before_anything_is_read(origin: Origin, monkeypatch: Any) -> None:
    monkeypatch.setenv("WDS_PRICES", "/nowhere.yaml")
    dataset = wds.WebDataset([origin.add("0.tar", SHARD)], shardshuffle=False, progress=True)
    with pytest.raises(ConfigError, match="WDS_PRICES"):
        next(iter(dataset))
    assert not origin.requests
