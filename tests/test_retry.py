"""wds_async.config: how long to wait, when to give up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.config import RetryPolicy

_SECONDS = st.floats(0.001, 100.0)


@given(_SECONDS, _SECONDS, st.integers(1, 2000), st.integers())
def test_the_wait_is_within_its_bounds(base: float, cap: float, attempt: int, seed: int) -> None:
    policy = RetryPolicy(base_s=base, cap_s=cap)
    delay = policy.delay_s(attempt, random.Random(seed))
    assert 0 <= delay <= cap
    assert attempt > 40 or delay <= base * 2 ** (attempt - 1)


@given(st.integers(1, 50), _SECONDS, st.integers())
def test_retry_after_is_a_least_wait_up_to_the_cap(attempt: int, after: float, seed: int) -> None:
    policy = RetryPolicy()
    delay = policy.delay_s(attempt, random.Random(seed), retry_after_s=after)
    assert min(after, policy.cap_s) <= delay <= policy.cap_s


def test_jitter_is_full_and_comes_from_the_generator() -> None:
    policy = RetryPolicy(base_s=1.0, cap_s=8.0)
    rng = random.Random(0)
    delays = [policy.delay_s(3, rng) for _ in range(2000)]
    assert min(delays) < 0.1
    assert 3.9 < max(delays) <= 4.0
    assert 1.8 < sum(delays) / len(delays) < 2.2
    assert policy.delay_s(3, random.Random(5)) == policy.delay_s(3, random.Random(5))


@pytest.mark.parametrize(
    ("attempt", "idle_s", "known", "stops"),
    [
        (1, 0.0, True, False),
        (5, 0.0, True, False),
        (6, 0.0, True, True),
        (7, 0.0, True, True),
        (1, 299.0, True, False),
        (1, 300.0, True, True),
        (1, 9.9, False, False),
        (1, 10.0, False, True),
    ],
)
def test_giving_up(attempt: int, idle_s: float, known: bool, stops: bool) -> None:
    policy = RetryPolicy(max_attempts=6, timeout_s=300.0, first_contact_s=10.0)
    assert policy.gives_up(attempt, idle_s, origin_known=known) is stops
