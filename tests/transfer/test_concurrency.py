"""The cut after refusals and the way back; whole links are in `test_control`."""

from __future__ import annotations

import itertools
import math

from wds_async.transfer.concurrency import Throttle


def refuse(throttle: Throttle, now: float, limit: int, count: int = 100) -> list[str]:
    return [said for _ in range(count) if (said := throttle.refused(now, limit))]


def test_a_storm_is_one_cut_for_the_requests_that_were_in_flight() -> None:
    throttle = Throttle()
    assert refuse(throttle, 1.0, 64) == ["the store refused 100% of the requests"]
    assert throttle.cap == 32
    assert refuse(throttle, 1.05, 32) == []
    assert refuse(throttle, 3.0, 32)
    assert throttle.cap == 16


def test_the_cap_never_falls_below_one() -> None:
    throttle, limit = Throttle(), 64
    for second in range(20):
        refuse(throttle, 2.0 * second, limit)
        limit = int(throttle.cap)
    assert limit == 1


def test_a_refusal_among_hundreds_is_none() -> None:
    throttle = Throttle()
    for i in range(5000):
        now = i / 500
        throttle.landed(0.1, now, 64, 64)
        if i % 100 == 0:
            assert throttle.refused(now, 64) == ""
    assert throttle.cap == math.inf


def test_it_is_back_five_seconds_after_the_first_part_that_came() -> None:
    throttle = Throttle()
    for second in range(6):
        refuse(throttle, 2.0 * second, max(1, int(min(64, throttle.cap))))
    caps, said = [], ""
    for i in range(1, 100):  # while nothing came, time healed nothing
        now = 60 + i / 16
        said = throttle.landed(0.1, now, max(1, int(min(64, throttle.cap))), 64)
        caps.append(throttle.cap)
        if said:
            break
    assert said == "the store has refused little for 5.0 s"
    assert caps == sorted(caps)
    assert caps[16] < 4
    assert not throttle.active


def test_the_same_number_refused_again_is_asked_for_less_often() -> None:
    throttle, limit, now, cuts = Throttle(), 5, 0.0, []
    for _ in range(40_000):
        now += 1 / 40
        said = throttle.landed(0.1, now, limit, 16)
        limit = int(min(16, throttle.cap))
        if limit > 4:
            said += throttle.refused(now, limit)
        limit = int(min(16, throttle.cap))
        if said:
            cuts.append(now)
    waits = [after - before for before, after in itertools.pairwise(cuts)]
    assert len([wait for wait in waits if wait > 5]) > 5
    assert 20 < waits[-1] < 60


def test_refusals_by_chance_do_not_go_on_cutting() -> None:
    throttle, limit, now, lowest = Throttle(), 64, 0.0, 64
    for i in range(60_000):
        now += 1 / 600
        throttle.landed(0.1, now, limit, 64)
        if i % 10 == 0:
            throttle.refused(now, limit)
        limit = int(min(64, throttle.cap))
        lowest = min(lowest, limit)
    assert lowest >= 36
