"""The table of prices, the price of an origin seen from a region, and the cost of traffic and datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import Origin, make_shard
from wds_async.errors import ConfigError
from wds_async.observe.prices import Meter, PriceTable, Range, figures, of_pipeline, region_here
from wds_async.transfer.traffic import Traffic

GB = 10**9
SHARD = make_shard({f"{i:03}": {"bin": bytes(10_000)} for i in range(20)})
ENVIRONMENT = """AWS_REGION AWS_DEFAULT_REGION AWS_EXECUTION_ENV AWS_WEB_IDENTITY_TOKEN_FILE WDS_REGION
AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE AWS_ENDPOINT_URL AWS_ENDPOINT_URL_S3 STORAGE_EMULATOR_HOST"""


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: Any) -> None:
    for name in ENVIRONMENT.split():
        monkeypatch.delenv(name, raising=False)


def gigabyte(origin: str, region: str = "", here: str = "", table: PriceTable | None = None) -> Range:
    byte = (table or PriceTable.load()).price(origin, region, here).byte
    return Range(round(byte.low * GB, 6), round(byte.high * GB, 6))


def table_of(tmp_path: Path, text: str) -> PriceTable:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    return PriceTable.load(path)


def test_ranges() -> None:
    assert Range(1, 2) + Range(0.5, 0.5) == Range(1.5, 2.5)
    assert Range(1, 2) * 3 == Range(3, 6)
    assert Range(1, 2).as_list() == [1, 2]
    assert [str(Range(*bounds)) for bounds in [(0, 0), (0, 12.5), (0.004, 0.05), (1e-6, 1e-6), (1234.5, 1234.5)]] == [
        "$0.00", "$0.00 to $12.50", "$0.004 to $0.05", "$1.0e-06", "$1,234.50",
    ]  # fmt: skip


def test_within_a_region_traffic_is_free() -> None:
    assert gigabyte("s3://b", "us-east-1", "us-east-1") == Range(0, 0)
    assert gigabyte("gs://b", "europe-west1", "europe-west1-b") == Range(0, 0)  # a zone of it
    assert gigabyte("s3://b", "eu-west-1", "eu-west-1a") == Range(0, 0)
    assert gigabyte("az://a/c", "WestEurope", "westeurope") == Range(0, 0)


def test_what_is_not_known_is_a_range() -> None:
    unknown = gigabyte("s3://b")
    assert unknown.low == 0
    assert unknown.high == gigabyte("s3://b", "us-east-1", "europe-west1").high > 0.1
    same_provider = gigabyte("s3://b", "", "us-east-1")
    assert same_provider.low == 0
    assert 0 < same_provider.high < unknown.high


def test_further_away_costs_more() -> None:
    near = gigabyte("gs://b", "us-central1", "us-east4")
    far = gigabyte("gs://b", "us-central1", "asia-east1")
    out = gigabyte("gs://b", "us-central1", "us-east-1")  # Amazon's, another provider
    assert 0 < near.low < far.low < out.low
    assert gigabyte("gs://b", "us-central1", "cellar") == out
    # A region of the right provider that the table does not know may be near or far.
    odd = gigabyte("az://a/c", "westeurope", "eastus"), gigabyte("az://a/c", "moonbase", "eastus")
    assert odd[1].low <= odd[0].low
    assert odd[1].high >= odd[0].high


def test_names_of_providers_are_told_apart() -> None:
    table = PriceTable.load()
    assert table._place("me-central-1") == ("s3", "middle-east")
    assert table._place("me-central1") == ("gs", "middle-east")
    assert table._place("us-east1") == ("gs", "north-america")
    assert table._place("us-east-2") == ("s3", "north-america")
    assert table._place("eastus2") == ("az", "north-america")
    assert table._place("ap-southeast-2") == ("s3", "oceania")
    assert table._place("") == ("", "")


@pytest.mark.parametrize("origin", ["ais://b", "file", "hf://org/data", "https://host:8080", "pipe", "memory://x"])
def test_what_costs_nothing(origin: str) -> None:
    price = PriceTable.load().price(origin)
    assert price.byte == price.request == Range(0, 0)


def test_whose_prices(monkeypatch: Any) -> None:
    table = PriceTable.load()
    assert table.store_of("https://b.s3.us-east-1.amazonaws.com") == "s3"
    assert table.store_of("https://storage.googleapis.com:443") == "gs"
    assert table.store_of("https://account.blob.core.windows.net") == "az"
    assert table.store_of("https://notamazonaws.com") == "http"
    assert table.store_of("s3://b") == "s3"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.eu-west-1.amazonaws.com")
    assert table.store_of("s3://b") == "s3"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://minio:9000")
    assert table.store_of("s3://b") == "own"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://localhost:4443")
    assert table.store_of("gs://b") == "own"


def test_the_users_table_goes_over_ours(tmp_path: Path) -> None:
    table = table_of(
        tmp_path,
        """
        date: 2030-01
        stores:
          s3: {internet: 0.05, per_1000_requests: 0}
          minio: {internet: [0, 0.01]}
        hosts: {minio.example.com: minio}
        origins:
          s3://mine: {region: us-east-1}
          s3://mine-too: {internet: 7, region: eu-west-1}
        regions: {s3: {moon: [lu-]}}
        """,
    )
    assert table.date == "2030-01"
    assert gigabyte("s3://b", "us-east-1", "cellar", table) == Range(0.05, 0.05)
    assert gigabyte("s3://b", "us-east-1", "us-east-1", table) == Range(0, 0)
    assert table.price("s3://b").request == Range(0, 0)
    assert gigabyte("https://eu.minio.example.com", table=table) == Range(0, 0.01)
    assert gigabyte("s3://mine", "", "us-east-1", table) == Range(0, 0)
    assert gigabyte("s3://mine-too", "", "cellar", table) == Range(7, 7)
    assert table._place("lu-1") == ("s3", "moon")
    assert gigabyte("gs://b", "us-central1", "us-central1", table) == Range(0, 0)  # the rest is as it was
    assert PriceTable.load("").stores == PriceTable.load().stores


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stores: [1]", "must be names with values"),
        ("stores: {s3: {intranet: 1}}", "'intranet' is no price"),
        ("stores: {s3: {internet: much}}", "'much' is no price"),
        ("stores: {s3: {internet: [2, 1]}}", "is no price"),
        ("stores: {s3: {internet: -1}}", "is no price"),
        ("stores: {s3: {internet: .nan}}", "is no price"),
        ("shops: {}", "has 'shops'; its sections are"),
        ("hosts: {a.com: shop}", "of which there are no prices"),
        ("origins: {s3://b: {color: 1}}", "'color' is no price"),
        ("{", "is no YAML"),
    ],
)
def test_a_table_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="prices") as caught:
        table_of(tmp_path, text)
    assert said in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        PriceTable.load(tmp_path / "none.yaml")


def test_the_built_in_table_says_what_it_is() -> None:
    import wds_async.observe.prices as module

    text = Path(module.__file__).with_name("prices.yaml").read_text()
    assert "to be replaced" in text
    table = PriceTable.load()
    assert table.date
    assert {"s3", "gs", "az", "hf", "http", "ais", "own"} <= set(table.stores)
    for name in ("s3", "gs", "az"):
        assert table.regions[name]
        assert table.stores[name].gigabyte("same_region") == Range(0, 0)


# ------------------------------------------------------------------ the cost of traffic


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


def test_the_cost_of_traffic() -> None:
    known = Meter(PriceTable.load(), "us-east-1").dollars(traffic_of(region="us-east-1"))
    assert (known.low, known.high) == pytest.approx((0.4, 0.7))  # of its requests
    unknown = Meter(PriceTable.load()).dollars(traffic_of())
    assert (unknown.low, unknown.high) == pytest.approx((0.4, 0.7 + 10 * 0.154))
    traffic = traffic_of("s3://b", region="eu-west-1") + traffic_of("ais://b")
    by_origin = Meter(PriceTable.load(), "eu-west-1").by_origin(traffic)
    assert by_origin["ais://b"] == Range(0, 0)
    assert (by_origin["s3://b"].low, by_origin["s3://b"].high) == pytest.approx((0.4, 0.7))


def test_figures_name_the_dearest_first() -> None:
    traffic = Traffic()
    for i in range(8):
        traffic.merge(traffic_of(f"s3://b{i}", gigabytes=i, requests=5))
    text = figures(Meter(PriceTable.load()).by_origin(traffic), traffic)
    assert text.startswith("s3://b7 (region unknown) $2.0e-06 to $1.08 for 5 requests and 7.00 GB; s3://b6")
    assert text.endswith("3 more origins $6.0e-06 to $0.46")


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
