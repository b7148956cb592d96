"""What a service counts and shows: every name that dashboards and alerts are made of moves when it should."""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.servers import Origin
from tests.service.serving import Inside, ask
from tests.transfer.reading import data
from wds_async.service.cache.origin import Client
from wds_async.service.metrics import BOUNDS_S, Meters

NAMES = {
    "wds_requests_total": ("api", "code"),
    "wds_client_bytes_total": ("api",),
    "wds_request_seconds_bucket": ("api", "le"),
    "wds_refusals_total": ("reason",),
    "wds_clients": (),
    "wds_origin_requests_total": ("origin",),
    "wds_origin_bytes_total": ("origin",),
    "wds_origin_retries_total": ("origin",),
    "wds_origin_throttled_total": ("origin",),
    "wds_origin_hedges_total": ("origin",),
    "wds_origin_errors_total": ("origin",),
    "wds_origin_connections": ("origin",),
    "wds_origin_seconds_bucket": ("le", "origin"),
    "wds_cache_hit_bytes_total": (),
    "wds_cache_ahead_bytes_total": (),
    "wds_cache_miss_bytes_total": (),
    "wds_cache_bytes": (),
    "wds_cache_limit_bytes": (),
    "wds_cache_entries": (),
    "wds_cache_evictions_total": (),
    "wds_cache_evicted_bytes_total": (),
    "wds_cache_disk_errors_total": (),
    "wds_cache_bad_chunks_total": (),
    "wds_window_bytes": (),
    "wds_window_limit_bytes": (),
    "wds_plans": (),
    "wds_orders": (),
    "wds_order_bytes_total": (),
    "wds_plan_bytes_total": (),
    "wds_cost_dollars": ("bound", "origin"),
    "wds_cost_limit_dollars": (),
    "wds_ready": (),
    "wds_build_info": ("version",),
}


"""The names that the dashboard, the alerts and `wds-async top` go by, and their labels."""


CONTENT = data(300_000)


@pytest.fixture
def service(origin: Origin, tmp_path: Path) -> Iterator[Inside]:
    """With a cache on disk, a dollar a GB, and leave to read ``origin``."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("origins: {'http://127.0.0.1': {internet: [0.5, 1]}}")
    with Inside(
        folder=tmp_path / "cache",
        cache_size="64M",
        allow=(f"{origin.base}/",),
        private=True,
        prices=prices,
        cost_limit=5.0,
        buckets={"own": f"{origin.base}/"},
    ) as running:
        yield running


def scraped(service: Inside) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Each sample of ``/metrics``: name, labels, value."""
    status, fields, body = ask(f"{service.base}/metrics")
    assert status == 200
    assert fields["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def sums(service: Inside) -> dict[str, float]:
    return {name: sum(rows.values()) for name, rows in scraped(service).items()}


def read(service: Inside, name: str, **headers: str) -> tuple[int, bytes]:
    status, _, body = ask(f"{service.base}/ais/own/{name}", **headers)
    return status, body


def test_every_name_is_there_with_its_labels(service: Inside, origin: Origin) -> None:
    origin.add("a.tar", CONTENT)
    assert read(service, "a.tar") == (200, CONTENT)
    assert ask(f"{service.base}/v1/objects/own/a.tar", "PUT")[0] == 405
    found = scraped(service)
    for name, labels in NAMES.items():
        assert name in found, name
        assert {tuple(label for label, _ in row) for row in found[name]} == {labels}, name


def test_requests_and_bytes(service: Inside, origin: Origin) -> None:
    origin.add("a.tar", CONTENT)
    before = sums(service)
    read(service, "a.tar")
    assert read(service, "a.tar", Range="bytes=0-99")[0] == 206
    assert read(service, "none.tar")[0] == 404
    after = scraped(service)
    requests = after["wds_requests_total"]
    assert {code: requests[("api", "short"), ("code", code)] for code in ("200", "206", "404")} == {
        "200": 1, "206": 1, "404": 1,
    }  # fmt: skip
    assert after["wds_client_bytes_total"][(("api", "short"),)] >= len(CONTENT) + 100
    assert after["wds_request_seconds_count"][(("api", "short"),)] == 3
    assert sum(after["wds_refusals_total"].values()) > before.get("wds_refusals_total", 0)


def test_origins_and_what_they_cost(service: Inside, origin: Origin) -> None:
    origin.add("a.tar", CONTENT)
    origin.behave(path="/a.tar", status=503, times=1)
    read(service, "a.tar")
    found = scraped(service)
    label = (("origin", origin.base),)
    assert found["wds_origin_requests_total"][label] >= 2
    assert found["wds_origin_bytes_total"][label] >= len(CONTENT)
    assert found["wds_origin_retries_total"][label] >= 1
    assert found["wds_origin_throttled_total"][label] >= 1
    assert found["wds_origin_seconds_count"][label] >= 1
    low, high = (found["wds_cost_dollars"][("bound", bound), *label] for bound in ("low", "high"))
    assert high == pytest.approx(found["wds_origin_bytes_total"][label] / 1e9)
    assert low == pytest.approx(high / 2)
    assert found["wds_cost_limit_dollars"][()] == 5


def test_the_cache(service: Inside, origin: Origin) -> None:
    origin.add("a.tar", CONTENT)
    read(service, "a.tar")
    cold = sums(service)
    assert cold["wds_cache_miss_bytes_total"] >= len(CONTENT)
    deadline = time.monotonic() + 20
    while (warm := sums(service))["wds_cache_hit_bytes_total"] < len(CONTENT) and time.monotonic() < deadline:
        read(service, "a.tar")
    assert warm["wds_cache_hit_bytes_total"] >= len(CONTENT)
    assert warm["wds_cache_entries"] == 1
    assert warm["wds_cache_bytes"] >= len(CONTENT)
    assert warm["wds_cache_limit_bytes"] == 64 << 20
    assert warm["wds_origin_bytes_total"] == cold["wds_origin_bytes_total"]
    # What no test here can bring about is read from where it is counted.
    fetching = service.context.cache.fetching
    fetching.policy.evictions, fetching.policy.evicted_bytes = 1, 2
    fetching.stats.disk_errors, fetching.stats.bad_chunks = 3, 4
    service.context.traffic.of(origin.base).hedges = 5
    seen = sums(service)
    names = ("cache_evictions", "cache_evicted_bytes", "cache_disk_errors", "cache_bad_chunks", "origin_hedges")
    assert [seen[f"wds_{name}_total"] for name in names] == [1, 2, 3, 4, 5]


def test_clients_plans_and_readiness(service: Inside, origin: Origin) -> None:
    url = origin.add("a.tar", CONTENT)
    before = sums(service)
    assert before["wds_ready"] == 1
    held = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
    held.request("GET", "/healthz")
    assert held.getresponse().read()
    assert sums(service)["wds_clients"] == before["wds_clients"] + 1
    held.close()
    plan = {"client": "job", "job": "train", "shards": [url], "ahead": 1, "position": 0}
    status, _, body = ask(f"{service.base}/v1/plan", "POST", plan)
    assert status == 200, body
    deadline = time.monotonic() + 20
    while (found := sums(service))["wds_plan_bytes_total"] < len(CONTENT) and time.monotonic() < deadline:
        pass
    assert found["wds_plan_bytes_total"] == len(CONTENT)
    assert found["wds_plans"] == 1
    assert ask(f"{service.base}/v1/plan/job", "DELETE")[0] in (200, 204)
    assert sums(service)["wds_plans"] == 0
    service.context.readiness.why_not = "draining"
    assert sums(service)["wds_ready"] == 0


# -- without a service ---------------------------------------------------------------------------------


def test_labels_are_few() -> None:
    meters = Meters()
    for i in range(500):
        meters.served(f"api{i}", 200, 0.1, 1)
        meters.refused(f"reason{i}")
    assert len(meters._answers) <= 65
    assert len(meters._refusals) <= 65
    assert (meters.requests, meters.client_bytes, meters.refusals) == (500, 500, 500)


def test_the_slowest() -> None:
    now = [0.0]
    meters = Meters(lambda: now[0])
    for i in range(50):
        meters.served("ais", 200, i / 10, i, f"https://h/{i % 25}?sig=geheim")
    meters.served("ais", 200, 99.0, 1)  # nobody knows of what
    meters.served("ais", 404, 99.0, 1, "https://h/none")
    slowest = meters.slowest()
    assert [slow.seconds for slow in slowest] == pytest.approx([4.9 - i / 10 for i in range(10)])
    assert slowest[0].url == "https://h/24?sig=***"
    assert len({slow.url for slow in slowest}) == 10
    now[0] = 700.0
    for _ in range(300):  # a quicker one counts again once the slow ones are long ago
        meters.served("ais", 200, 0.01, 1, "s3://b/x")
    assert [(slow.url, slow.seconds) for slow in meters.slowest()] == [("s3://b/x", 0.01)]


def test_a_tenants_noise_hides_nothing_of_anothers() -> None:
    meters, quiet, noisy = Meters(), Client("quiet", "a"), Client("noisy", "b")
    meters.served("ais", 200, 0.5, 1, "s3://quiet/x", quiet)
    meters.failed("s3://quiet/y", "503", quiet)
    for i in range(50):
        meters.served("ais", 200, 1.0 + i, 1, f"s3://noisy/{i}", noisy)
        meters.failed(f"s3://noisy/{i}", "503", noisy)
    assert [slow.url for slow in meters.slowest("quiet")] == ["s3://quiet/x"]
    assert [error.url for error in meters.last_errors("quiet")] == ["s3://quiet/y"]
    assert {slow.url.rpartition("/")[0] for slow in meters.slowest()} == {"s3://noisy"}
    assert (len(meters.slowest()), len(meters.last_errors())) == (10, 20)


def test_access_lines(caplog: Any) -> None:
    meters = Meters()
    meters.served("ais", 200, 0.0015, 7, "s3://b/x")
    with caplog.at_level(logging.DEBUG, "wds_async.access"):
        meters.served("ais", 200, 0.0015, 7, "s3://b/x", Client("", "job"))
        meters.served("admin", 200, 0.0, 7)
    first, second = caplog.records
    said = {name: vars(first)[name] for name in ("api", "status", "bytes", "first_byte_ms", "url", "client")}
    assert said == {"api": "ais", "status": 200, "bytes": 7, "first_byte_ms": 1.5, "url": "s3://b/x", "client": "job"}
    assert not hasattr(second, "url")


def test_errors_are_few_and_keep_no_secret() -> None:
    meters = Meters()
    for i in range(30):
        meters.failed(f"https://me:geheim@h/{i}", f"{i}: https://h/?token=geheim " + "x" * 1000)
    assert meters.failures == 30
    assert len(meters.last_errors()) == 20
    last = meters.last_errors()[-1]
    assert last.url == "https://me:***@h/29"
    assert last.error.startswith("29: https://h/?token=***")
    assert len(last.error) <= 300


def test_each_answer_is_counted_in_one_of_the_buckets() -> None:
    meters = Meters()
    for _ in range(20_000):
        meters.served("ais", 200, 0.0001, 65536, "s3://b/x")
    assert sum(meters._answers["ais", 200].seconds) == 20_000
    assert len(meters._answers["ais", 200].seconds) == len(BOUNDS_S) + 1


FORM = {
    "counters": "client_bytes client_requests origin_bytes origin_requests origin_retries hedges hit_bytes miss_bytes "
    "ahead_bytes evictions errors refusals",
    "gauges": "clients connections window_bytes window_limit_bytes cache_bytes cache_limit_bytes entries",
    "cost": "dollars limit spent",
}


def test_form_and_figures_of_the_stats(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("a.tar", CONTENT)
    secret = f"{url}?sig=geheim"
    origin.behave(path="/broken.tar", status=403)
    with Inside(folder=tmp_path / "cache", allow=(f"{origin.base}/",), private=True, cost_limit=5.0) as service:
        for _ in range(2):
            assert ask(f"{service.base}/url/{secret.replace('/', '%2F').replace('?', '%3F')}")[0] == 200
        assert ask(f"{service.base}/url/{origin.url('broken.tar').replace('/', '%2F')}%3Ftoken=geheim")[0] >= 400
        status, fields, body = ask(f"{service.base}/v1/stats")
        plan = {"client": "job", "shards": [url], "ahead": 1}
        ask(f"{service.base}/v1/plan", "POST", plan)
        planned = json.loads(ask(f"{service.base}/v1/stats")[2])
    assert status == 200
    assert fields["content-type"].startswith("application/json")
    assert b"geheim" not in body
    said = json.loads(body)
    assert " ".join(said) == ("kind name version time uptime_s ready counters gauges slowest errors plans origins cost")
    assert {name: " ".join(said[name]) for name in FORM} == FORM
    assert (said["kind"], said["ready"]) == ("service", True)
    counters = said["counters"]
    assert counters["client_requests"] >= 3
    assert counters["client_bytes"] >= 2 * len(CONTENT)
    assert counters["origin_bytes"] >= len(CONTENT)
    assert counters["hit_bytes"] + counters["miss_bytes"] >= 2 * len(CONTENT)
    assert counters["refusals"] >= 1
    row = said["origins"][origin.base]
    assert row["requests"] == counters["origin_requests"]
    assert row["dollars"] == [0, 0]
    assert said["cost"] == {"dollars": [0, 0], "limit": 5.0, "spent": [0, 0]}
    assert {"url", "seconds", "bytes"} == set(said["slowest"][0])
    assert said["slowest"][0]["url"].startswith(origin.base)
    assert said["gauges"]["window_limit_bytes"] > 0
    (known,) = planned["plans"]
    assert {"client", "shards", "done", "ahead_bytes"} <= set(known)
    assert known["shards"] == 1
