"""The limit on connections, on simulated links: it fills them, is fair, spares who refuses, and recovers."""

from __future__ import annotations

import logging
import random

import pytest

from tests.transfer.links import MIB, Link, Process
from wds_async.transfer.concurrency import Concurrency

ALONE_S = 0.05 + 2 * MIB / 50e6
"""What a part takes on the default link with nobody else on it."""


def needed(total: float) -> float:
    """How many parts in flight fill the default link."""
    return total * ALONE_S / (2 * MIB)


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_a_distant_store_has_all_of_them_within_half_a_second(noise: float) -> None:
    link = Link(noise=noise)
    process = Process(link)
    link.run(20)
    assert max(process.limits(0, 0.5)) == 64
    assert process.speed(1, 20) >= 0.95 * 64 * 2 * MIB / ALONE_S


@pytest.mark.parametrize("noise", [0.1, 0.5])
@pytest.mark.parametrize("total", [200e6, 400e6, 800e6])
def test_a_link_that_is_full_gets_what_fills_it(total: float, noise: float) -> None:
    link = Link(total=total, noise=noise, seed=3)
    process = Process(link)
    link.run(40)
    assert process.speed(2, 10) >= 0.95 * total
    assert process.speed(10, 40) >= 0.95 * total


def test_shards_of_all_sizes() -> None:
    link = Link(total=400e6, noise=0.3)
    process = Process(link, sizes=lambda rng: rng.choice([100_000, 300_000, 1 * MIB, 2 * MIB]))
    link.run(20)
    assert process.speed(2, 20) >= 0.95 * 400e6


def test_a_near_server_gets_a_handful() -> None:
    link = Link(latency_s=0.001, one=2e9, total=2.5e9)
    process = Process(link)
    link.run(5)
    assert set(process.limits(0.01, 5)) == {8}
    assert process.speed(0, 5) >= 0.95 * 2.5e9


def test_what_the_consumer_does_not_take_is_not_the_links_fault() -> None:
    link = Link(noise=0.3)
    process = Process(link, consumer=50e6)
    link.run(20)
    assert process.speed(5, 20) == pytest.approx(50e6, rel=0.05)
    process.consumer = None
    link.run(24)
    assert process.speed(22, 24) >= 0.95 * 64 * 2 * MIB / ALONE_S


@pytest.mark.parametrize("storm_s", [2, 20])
@pytest.mark.parametrize("refused", [0.7, 1.0])
def test_after_a_storm_it_is_back_within_ten_seconds(
    storm_s: int, refused: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "wds_async.control")
    end = 5.0 + storm_s
    link = Link(refuses=lambda now, rng: 5 <= now < end and rng.random() < refused)
    process = Process(link)
    link.run(end + 14)
    during = process.limits(6, end + 0.3)
    assert not during or min(during) <= 16
    assert process.speed(end + 10, end + 14) >= 0.95 * process.speed(2, 5)
    assert any("refused" in message for message in caplog.messages)


@pytest.mark.parametrize("one", [50e6, 2e6])
@pytest.mark.parametrize("cap", [4, 16])
def test_a_store_that_allows_so_many_is_asked_for_so_many(cap: int, one: float) -> None:
    link = Link(one=one, cap=cap)
    process = Process(link)
    link.run(20)
    refused, requests = link.refused, link.requests
    link.run(120)
    assert (link.refused - refused) / (link.requests - requests) < 0.1
    assert process.speed(20, 120) >= 0.9 * cap * 2 * MIB / (0.05 + 2 * MIB / one)
    late = process.limits(20, 120)
    assert sum(late) / len(late) <= 2.25 * cap  # with those that wait for their next attempt


@pytest.mark.parametrize(("share", "least"), [(0.01, 0.95), (0.05, 0.9), (0.1, 0.75)])
def test_refusals_by_chance_cost_little(share: float, least: float) -> None:
    link = Link(refuses=lambda now, rng: rng.random() < share)
    process = Process(link)
    link.run(60)
    assert process.speed(1, 60) >= least * 64 * 2 * MIB / ALONE_S


@pytest.mark.parametrize("noise", [0.1, 0.5])
@pytest.mark.parametrize("total", [300e6, 1e9])
def test_processes_of_a_host_have_similar_shares(total: float, noise: float) -> None:
    link = Link(total=total, noise=noise)
    processes = [Process(link, processes=8, seed=seed) for seed in range(8)]
    link.run(30)
    speeds = [process.speed(5, 30) for process in processes]
    assert sum(speeds) >= 0.95 * total
    assert max(speeds) <= 2.5 * min(speeds)
    assert sum(process.control.limit for process in processes) <= 1.5 * max(64, needed(total))


def test_it_begins_at_the_most() -> None:
    """Files and other clients' ranges tell nothing, and need nothing."""
    assert Concurrency(64).limit == 64


def test_what_took_no_time_or_brought_nothing_says_nothing() -> None:
    control = Concurrency(64)
    control.observe(0, 0.001, now=0.1)
    control.observe(2 * MIB, 0.0, now=0.1)
    assert control.limit == 64


@pytest.mark.parametrize("most", [1, 3])
def test_fewer_than_the_least_are_respected(most: int) -> None:
    link = Link()
    process = Process(link, most=most)
    link.run(5)
    assert set(process.limits(0, 5)) == {most}


def test_a_store_that_became_slow_gets_more_after_a_while() -> None:
    link = Link(latency_s=0.001, one=2e9, total=2.5e9)
    process = Process(link)
    link.run(2)
    assert process.control.limit == 8
    link.latency_s, link.one = 0.05, 50e6
    link.run(30)
    assert process.control.limit == 64


@pytest.mark.parametrize("processes", [1, 8])
def test_whatever_comes_the_limit_stays_within_its_bounds(processes: int) -> None:
    rng = random.Random(4)
    for _ in range(20):
        control, now = Concurrency(rng.choice([1, 2, 16, 64]), processes), 0.0
        for _ in range(500):
            now += rng.choice([0.0, 1e-3, 0.1, 30.0])
            control.flying = rng.randint(0, 70)
            if rng.random() < 0.3:
                control.throttled(now)
            else:
                control.observe(rng.randint(1, 2 * MIB), rng.choice([1e-4, 0.05, 1.0, 40.0]), now)
            assert 1 <= control.limit <= control.most


def test_each_decision_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "wds_async.control")
    link = Link(latency_s=0.001, one=2e9, total=2.5e9)
    process = Process(link)
    link.run(1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("connections 64 → 8: ")
    assert lines[-1].split(": ")[0].endswith(f"→ {process.control.limit}")
