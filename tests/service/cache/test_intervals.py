"""How long it takes until something is used again."""

from __future__ import annotations

import json
import random

from wds_async.service.cache.policy import Intervals


def test_little_is_nothing() -> None:
    intervals = Intervals(1e9)
    for _ in range(15):
        intervals.observe(100, 10, 0)
    assert intervals.patience(0) is None
    intervals.observe(100, 10, 0)
    assert intervals.patience(0) is not None
    assert intervals.patience(1000) is None


def test_the_longest_usual_interval_counts() -> None:
    rng, intervals = random.Random(1), Intervals(1e12)
    for now in range(1000):
        intervals.observe(int(rng.triangular(0, 2e6)), 10, now)
    patience = intervals.patience(0)
    assert patience is not None
    assert 2e6 < patience < 3e6
    intervals.observe(1 << 50, 10, 1000)  # one that is not usual
    assert intervals.patience(0) == patience


def test_it_forgets_and_remembers() -> None:
    intervals = Intervals(1000)
    for now in range(20):
        intervals.observe(1_000_000, 100, now)
    again = Intervals(1000, json.loads(json.dumps(intervals.state())))
    assert again.patience(0) == intervals.patience(0)
    for now in range(10_000, 10_020):
        again.observe(50, 100, now)
    patience = again.patience(0)
    assert patience is not None
    assert patience < 100
