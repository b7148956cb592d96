"""The limit on connections: Little's law at the best pace seen."""

from __future__ import annotations

from wds_async.transfer.control import Concurrency

MIB = 1 << 20


def test_it_begins_at_the_most_and_stays_there_for_a_distant_store() -> None:
    control = Concurrency(64)
    assert control.limit == 64
    control.observe(2 * MIB, 0.092, now=0.1)  # 50 ms to the first byte, 50 MB/s: 175 would be wanted
    assert control.limit == 64


def test_a_near_server_gets_a_handful() -> None:
    control = Concurrency(64)
    control.observe(2 * MIB, 0.007, now=0.1)
    assert control.limit == int(4e9 * 0.007 / (2 * MIB)) + 1 == 14
    control.observe(2 * MIB, 0.0005, now=0.2)
    assert control.limit == 8


def test_parts_that_waited_behind_ours_do_not_raise_it() -> None:
    control = Concurrency(64)
    control.observe(2 * MIB, 0.001, now=0.1)
    for i in range(100):
        control.observe(2 * MIB, 0.08, now=0.2 + i / 1000)
    assert control.limit == 8


def test_a_store_that_became_slow_gets_more_after_a_while() -> None:
    control = Concurrency(64)
    control.observe(2 * MIB, 0.001, now=0.1)
    for i in range(200):
        control.observe(2 * MIB, 0.1, now=1.0 + i / 10)
    assert control.limit == 64


def test_what_took_no_time_or_brought_nothing_says_nothing() -> None:
    control = Concurrency(64)
    control.observe(0, 0.001, now=0.1)
    control.observe(2 * MIB, 0.0, now=0.1)
    assert control.limit == 64


def test_fewer_than_the_least_are_respected() -> None:
    control = Concurrency(3)
    control.observe(2 * MIB, 0.0005, now=0.1)
    assert control.limit == 3
