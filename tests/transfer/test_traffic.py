"""What is counted by origin: names without secrets, quantiles, sums, and every way of reading."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin, Request
from tests.transfer.reading import KIB, MIB, bytes_of, data, outcomes, quick, snapshot
from wds_async.errors import ChecksumMismatch
from wds_async.storage.options import StorageOptions
from wds_async.storage.registry import locate
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters
from wds_async.transfer.traffic import BOUNDS_S, OTHERS, Histogram, Traffic, origin_of, region_of


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("s3://bucket/a/b.tar", "s3://bucket"),
        ("s3a://bucket/a/b.tar?versionId=3", "s3://bucket"),
        ("gs://bucket/a.tar", "gs://bucket"),
        ("gcs://bucket/a.tar", "gs://bucket"),
        ("az://container/a.tar", "az://mine/container"),
        ("abfss://container@theirs.dfs.core.windows.net/a.tar", "az://theirs/container"),
        ("https://theirs.blob.core.windows.net/container/a.tar?sig=SECRET", "https://theirs.blob.core.windows.net"),
        ("https://user:SECRET@Host.example:8443/a.tar?token=SECRET", "https://host.example:8443"),
        ("http://host.example?token=SECRET", "http://host.example"),
        ("hf://datasets/org/name@main/a.tar", "hf://datasets/org/name"),
        ("hf://org/model/a.tar", "hf://org/model"),
        ("sftp://user:SECRET@host/a.tar", "sftp://host"),
        ("memory://x/a.tar", "memory://x"),
        ("/data/a.tar", "file"),
        ("file:///data/a.tar", "file"),
        ("pipe:curl -H SECRET", "pipe"),
        ("-", "stdin"),
    ],
)
def test_names(url: str, origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WDS_REWRITE", "GOPEN_REWRITE", "AIS_ENDPOINT", "USE_AIS_FOR", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    assert origin_of(locate(url)) == origin


def test_the_origin_is_the_store_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIS_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("USE_AIS_FOR", "s3")
    place = locate("s3://bucket/a.tar")
    assert origin_of(place) == "ais://bucket"
    assert place.fallback is None or origin_of(place.fallback) == "s3://bucket"


@pytest.mark.parametrize(
    ("url", "region"),
    [
        ("https://bucket.s3.eu-central-1.amazonaws.com/x?X-Amz-Signature=y", "eu-central-1"),
        ("https://s3.us-west-2.amazonaws.com/bucket/x", "us-west-2"),
        ("https://s3-us-west-2.amazonaws.com/bucket/x", "us-west-2"),
        ("https://b.s3.dualstack.us-gov-west-1.amazonaws.com/x", "us-gov-west-1"),
        ("https://b.s3.cn-north-1.amazonaws.com.cn/x", "cn-north-1"),
        ("https://b--use1-az5--x-s3.s3express-use1-az5.us-east-1.amazonaws.com/x", "us-east-1"),
        ("https://bucket.s3.amazonaws.com/x", ""),
        ("https://bucket.s3.eu-central-1.amazonaws.com.evil.example/x", ""),
        ("http://127.0.0.1:9000/bucket/x", ""),
    ],
)
def test_regions_that_a_host_tells(url: str, region: str) -> None:
    assert region_of(url) == region


def test_a_region_is_learnt_from_the_request(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    there = socket.getaddrinfo

    def here(host: str, *more: Any, **named: Any) -> Any:
        return there("127.0.0.1" if host.endswith("amazonaws.com") else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", here)
    origin.add("x.tar", b"x" * 1000)
    host, counters = f"http://b.s3.eu-central-1.amazonaws.com:{origin.port}", Counters()
    assert bytes_of([f"{host}/x.tar"], quick(), counters) == [b"x" * 1000]
    assert counters.traffic.origins[host].region == "eu-central-1"


def test_quantiles_are_within_their_class() -> None:
    rng, histogram = random.Random(3), Histogram()
    assert histogram.quantile(0.5) == 0.0
    values = sorted(rng.lognormvariate(-3, 1) for _ in range(5000))
    for value in values:
        histogram.add(value)
    assert histogram.count == 5000
    assert histogram.total == pytest.approx(sum(values))
    for q in (0.01, 0.5, 0.9, 0.99):
        exact, found = values[int(q * 4999)], histogram.quantile(q)
        low = max([0.0, *(bound for bound in BOUNDS_S if bound < exact)])
        high = min(bound for bound in BOUNDS_S if bound >= exact)
        assert low <= found <= high
    assert histogram.quantile(0.1) < histogram.quantile(0.5) < histogram.quantile(0.99)
    slow = Histogram()
    slow.add(1000.0)
    assert slow.quantile(0.5) == BOUNDS_S[-1]


def test_sums_and_back_from_json() -> None:
    one, two = Traffic(), Traffic()
    for traffic, count in ((one, 1), (two, 10)):
        found = traffic.of("s3://b")
        found.requests, found.bytes, found.retries, found.connections = count, 2 * count, 3 * count, count
        found.seconds.add(0.1 * count)
    two.of("s3://b").region, two.of("file").bytes = "us-east-1", 7
    again = Traffic.of_dict(json.loads(json.dumps(two.as_dict())))
    assert again.as_dict() == two.as_dict()
    total = one + again
    assert total.origins["s3://b"].requests == 11
    assert total.origins["s3://b"].seconds.count == 2
    assert total.origins["s3://b"].seconds.total == pytest.approx(1.1)
    assert (total.origins["s3://b"].region, total.origins["file"].bytes) == ("us-east-1", 7)
    assert one.origins["s3://b"].requests == 1  # a sum changes nothing
    total.hang_up()
    assert total.origins["s3://b"].connections == 0
    for wrong in ({"x": {}}, {"x": {**two.as_dict()["file"], "counts": [1]}}):
        with pytest.raises((KeyError, TypeError)):
            Traffic.of_dict(wrong)


def test_names_without_end_are_counted_together() -> None:
    traffic = Traffic()
    for number in range(1500):
        traffic.of(f"https://h{number}").requests += 1
    assert len(traffic.origins) <= 1001
    assert traffic.origins[OTHERS].requests == 500
    assert traffic.of("https://h1").name == "https://h1"


def test_a_reader_counts_by_origin(origin: Origin, tmp_path: Path) -> None:
    contents = [data(MIB, seed) for seed in range(3)]
    (tmp_path / "x.tar").write_bytes(contents[2])
    origin.behave(path="/1.tar", status=503, times=2)
    counters = Counters()
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents[:2])]
    assert bytes_of([*urls, str(tmp_path / "x.tar"), "pipe:printf abc"], quick(), counters) == [*contents, b"abc"]
    stats, found = snapshot(counters), counters.traffic.origins
    assert set(found) == {origin.base, "file", "pipe"}
    assert sum(one.bytes for one in found.values()) == stats.wire_bytes == stats.bytes
    http = found[origin.base]
    assert (http.bytes, http.retries, http.throttled, http.errors) == (2 * MIB, 2, 2, 0)
    assert http.requests == len(origin.requests)
    assert http.seconds.count == len(origin.requests) - 2
    assert found["file"].requests == found["file"].seconds.count > 1
    assert (found["pipe"].requests, found["pipe"].bytes) == (1, 3)
    assert all(one.connections == 0 for one in found.values())


def test_errors_count_where_they_were(origin: Origin) -> None:
    counters = Counters()
    found = outcomes([origin.url("none.tar"), origin.add("x.tar", b"x")], quick(), counters)
    assert found[0][1] is not None
    assert counters.traffic.origins[origin.base].errors == 1


def test_a_stream_counts_its_requests(origin: Origin) -> None:
    content, counters = data(MIB), Counters()
    origin.behave(ignore_range=True)
    assert bytes_of([origin.add("x.tar", content)], quick(), counters) == [content]
    found = counters.traffic.origins[origin.base]
    assert (found.requests, found.bytes) == (len(origin.requests), MIB)


def test_second_attempts_count_where_they_went(origin: Origin) -> None:
    content, counters = data(16 * MIB), Counters()
    middle, met = 8 * MIB, []

    def late(request: Request) -> bool:
        """The first request for the part in the middle: by then it is known how long a part takes."""
        start, stop = map(int, str(request.range).removeprefix("bytes=").split("-"))
        met.extend([request] if start <= middle <= stop else [])
        return met == [request]

    origin.behave(when=late, rate_bytes_s=60_000)  # it goes on while the second one is asked for
    origin.latency_s = 0.02
    assert bytes_of([origin.add("x.tar", content)], quick(), counters) == [content]
    stats, found = snapshot(counters), counters.traffic.origins[origin.base]
    assert stats.hedges >= 1
    assert stats.hedged_bytes > 0
    assert (found.hedges, found.hedged_bytes, found.bytes) == (stats.hedges, stats.hedged_bytes, stats.wire_bytes)
    assert found.connections == 0


def test_what_is_read_to_verify_counts_too(origin: Origin) -> None:
    content = data(300 * KIB)
    origin.add("x.tar", content)
    origin.add("x.tar.md5", b"0" * 32)
    counters = Counters()
    config = quick(verify="always")
    with open_shards([origin.url("x.tar")], config=config, stats=counters, options=StorageOptions()) as reader:
        shard = next(iter(reader))
        with pytest.raises(ChecksumMismatch):
            shard.read()
    assert counters.traffic.origins[origin.base].bytes >= 3 * len(content) + 32
