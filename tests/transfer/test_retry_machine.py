"""When a part is given up, as a state machine: whatever the order of faults, bytes and pauses, it is tried as long as
it may be, and no longer."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from wds_async.config import RetryPolicy
from wds_async.transfer.circuit_breaker import FailureLog

_TIMEOUT_S, _CONTACT_S = 300.0, 10.0


class Part(RuleBasedStateMachine):
    """One part's attempts. The model counts for itself what has happened since the last byte."""

    @initialize(most=st.none() | st.integers(1, 12), known=st.booleans(), seed=st.integers(0, 99))
    def begin(self, most: int | None, known: bool, seed: int) -> None:
        self.policy = RetryPolicy(max_attempts=most, timeout_s=_TIMEOUT_S, first_contact_s=_CONTACT_S)
        self.known, self.rng = known, random.Random(seed)
        self.now = self.moved_at = 0.0
        self.history = FailureLog(0.0)
        self.failures = 0
        self.given_up = False

    @precondition(lambda self: not self.given_up)
    @rule(contradicts=st.booleans(), told_s=st.none() | st.floats(0, 100))
    def fail(self, contradicts: bool, told_s: float | None) -> None:
        self.history.add("503" if told_s else "reset")
        self.failures += 1
        idle_s, most = self.now - self.moved_at, self.policy.max_attempts
        self.given_up = self.policy.gives_up(
            self.history.count, self.now - self.history.since, origin_known=self.known, contradicted=contradicts
        )
        limits = [limit for limit in (most, self.policy.max_contradictions if contradicts else None) if limit]
        allowed_s = _TIMEOUT_S if self.known else _CONTACT_S
        assert self.given_up == (idle_s >= allowed_s or any(self.failures >= limit for limit in limits))
        if not self.given_up:
            delay_s = self.policy.delay_s(self.history.count, self.rng, told_s)
            assert min(told_s or 0.0, self.policy.cap_s) <= delay_s <= self.policy.cap_s
            self.now += delay_s

    @precondition(lambda self: not self.given_up)
    @rule()
    def bring_bytes(self) -> None:
        self.known, self.failures = True, 0
        self.moved_at, self.history = self.now, FailureLog(self.now)

    @rule(seconds=st.floats(0, 120))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: hasattr(self, "history"))
    @invariant()
    def the_story_is_whole(self) -> None:
        assert sum(self.history.reasons.values()) == self.history.count == self.failures
        assert (f"{self.failures} attempts" in self.history.summary(self.now)) == (self.failures > 1)


Part.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPart = Part.TestCase
