"""Pages as Prometheus reads them, and the figures of origins that services and jobs have in common."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from wds_async.observe.metrics import MOST_ORIGINS, Labels, MetricsPage, add_origins, origin_rows
from wds_async.observe.prices import Meter, PriceTable
from wds_async.transfer.traffic import OTHERS, Traffic

METER = Meter(PriceTable.load(), "us-east-1")


def samples(page: MetricsPage) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Each value of the page, by name and labels."""
    families = text_string_to_metric_families(page.text().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_page() -> None:
    page = MetricsPage()
    page.counter("wds_a", "Counts.", 3)
    page.gauge("wds_b", 'Has "quotes"\nand lines.', [(('x"\n\\y',), 1.5), (("z",), float("inf"))], ("name",))
    page.histogram("wds_c", "Times.", (0.1, 1.0), [(("k",), (1, 2, 3), 9.5)], ("name",))
    found = samples(page)
    k = ("name", "k")
    assert found == {
        ("wds_a_total", ()): 3,
        ("wds_b", (("name", 'x"\n\\y'),)): 1.5,
        ("wds_b", (("name", "z"),)): float("inf"),
        ("wds_c_bucket", (("le", "0.1"), k)): 1,
        ("wds_c_bucket", (("le", "1.0"), k)): 3,
        ("wds_c_bucket", (("le", "+Inf"), k)): 6,
        ("wds_c_count", (k,)): 6,
        ("wds_c_sum", (k,)): 9.5,
    }
    assert page.text() == page.text()


def test_labels_are_few_and_keep_no_secret() -> None:
    labels = Labels(2)
    assert [labels("https://me:geheim@a"), labels("b"), labels("c"), labels("b")] == [
        "https://me:***@a",
        "b",
        OTHERS,
        "b",
    ]


def test_origins_beyond_the_most_are_one() -> None:
    traffic, labels = Traffic(), Labels()
    for i in range(MOST_ORIGINS + 50):
        one = traffic.of(f"s3://b{i}")
        one.requests, one.bytes = 1000, 10**9
        one.seconds.add(0.02)
    page = MetricsPage()
    add_origins(page, traffic, labels, METER)
    found = samples(page)
    requests = {labels: value for (name, labels), value in found.items() if name == "wds_origin_requests_total"}
    assert len(requests) == MOST_ORIGINS + 1
    assert requests[(("origin", OTHERS),)] == 50_000
    assert found["wds_origin_seconds_count", (("origin", OTHERS),)] == 50
    one, rest = (found["wds_cost_dollars", (("bound", "high"), ("origin", name))] for name in ("s3://b0", OTHERS))
    assert rest == pytest.approx(50 * one)
    rows = origin_rows(traffic, labels, METER)
    assert len(rows) == MOST_ORIGINS + 1
    assert rows[OTHERS]["requests"] == 50_000
    assert rows[OTHERS]["dollars"][1] == pytest.approx(50 * rows["s3://b0"]["dollars"][1])


def test_rows_of_origins() -> None:
    traffic = Traffic()
    counted = traffic.of("s3://b")
    counted.requests, counted.bytes, counted.retries, counted.throttled = 1_000_000, 5, 1, 2
    counted.hedges, counted.errors, counted.connections, counted.region = 3, 4, 5, "us-east-1"
    for _ in range(100):
        counted.seconds.add(0.15)
    (row,) = origin_rows(traffic, Labels(), METER).values()
    assert row.pop("dollars") == pytest.approx([0.4, 0.7])
    assert 0.1 < row.pop("p50_s") <= row.pop("p99_s") <= 0.15
    assert row == {
        "requests": 1_000_000, "bytes": 5, "retries": 1, "throttled": 2, "hedges": 3, "errors": 4, "connections": 5,
        "region": "us-east-1",
    }  # fmt: skip
