"""The retry policy of a part as a table, and as a state machine over any order of faults, bytes and pauses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from wds_async.config import RetryPolicy
from wds_async.storage.base import Fault, Verdict
from wds_async.transfer.circuit_breaker import FailureLog
from wds_async.transfer.retry import AttemptState, Decision, Fallback, GiveUp, Renew, Retry, decide

POLICY = RetryPolicy(timeout_s=300.0, first_contact_s=10.0, cap_s=20.0, max_contradictions=8)
CAPPED = replace(POLICY, max_attempts=3)
RESET = Fault(Verdict.TRANSIENT, "the connection was reset")
STALLED = Fault(Verdict.STALLED, "no byte arrived")
BUSY = Fault(Verdict.TRANSIENT, "the server answered 503", retry_after_s=5.0, throttled=True)
SLEEPY = replace(BUSY, retry_after_s=500.0)
REFUSED = Fault(Verdict.TRANSIENT, "the connection was refused", connection_refused=True)
WRONG = Fault(Verdict.TRANSIENT, "another range", contradicts=True)
LAPSED = Fault(Verdict.EXPIRED, "the signature has expired")
DENIED = Fault(Verdict.DENIED, "403")
MISSING = Fault(Verdict.MISSING, "404")
UNKNOWN = {"origin_known": False}
ELSEWHERE = {"has_fallback": True}
ISOLATED = {"isolated": True}
PATIENT = {"refusal_patience_s": 30.0}


@pytest.mark.parametrize(
    ("fault", "state", "now", "decision"),
    [
        # What heals is retried until the time without progress is over.
        (RESET, {}, 0.0, Retry(1, 0.0, 300.0)),
        (STALLED, {"failures": 9}, 299.9, Retry(9, 0.0, 300.0)),
        (RESET, {"failures": 9}, 300.0, GiveUp()),
        (RESET, {"since": 100.0}, 300.0, Retry(1, 0.0, 400.0)),
        # An origin that has never answered gets less time: a typo must not look like a hang.
        (RESET, UNKNOWN, 9.0, Retry(1, 0.0, 10.0)),
        (RESET, UNKNOWN, 10.0, GiveUp()),
        # Attempts by number.
        (RESET, {"policy": CAPPED, "failures": 2}, 0.0, Retry(2, 0.0, 300.0)),
        (RESET, {"policy": CAPPED, "failures": 3}, 0.0, GiveUp()),
        (WRONG, {"failures": 7}, 0.0, Retry(7, 0.0, 300.0)),
        (WRONG, {"failures": 8}, 0.0, GiveUp()),
        # A store that asks for fewer requests gets a longer back-off, and Retry-After is kept up to the cap.
        (BUSY, {"failures": 4}, 0.0, Retry(6, 5.0, 300.0)),
        (SLEEPY, {"failures": 4}, 0.0, Retry(6, 20.0, 300.0)),
        # Among good answers a fault is retried at once, and a 503 without its Retry-After, three times.
        (RESET, ISOLATED, 0.0, Retry(0, 0.0, 300.0)),
        (RESET, {**ISOLATED, "failures": 2}, 0.0, Retry(2, 0.0, 300.0)),
        (BUSY, {**ISOLATED, "failures": 3}, 0.0, Retry(3, 0.0, 300.0)),
        (BUSY, {**ISOLATED, "failures": 4}, 0.0, Retry(6, 5.0, 300.0)),
        # With another place to read from: after two attempts where the first is closed or unknown, else after all.
        (REFUSED, ELSEWHERE, 0.0, Retry(1, 0.0, 300.0)),
        (REFUSED, {**ELSEWHERE, "failures": 2}, 0.0, Fallback()),
        (RESET, {**ELSEWHERE, **UNKNOWN, "failures": 2}, 0.0, Fallback()),
        (RESET, {**ELSEWHERE, "failures": 2}, 0.0, Retry(2, 0.0, 300.0)),
        (RESET, {**ELSEWHERE, "failures": 2}, 300.0, Fallback()),
        (REFUSED, {"failures": 2}, 0.0, Retry(2, 0.0, 300.0)),
        (DENIED, {**ELSEWHERE, "failures": 2}, 0.0, GiveUp()),
        # A request that has lapsed is renewed three times without a new byte, also for a single attempt.
        (LAPSED, {"renewals": 2}, 1e6, Renew()),
        (LAPSED, {"once": True}, 0.0, Renew()),
        (LAPSED, {"renewals": 3}, 0.0, GiveUp()),
        (LAPSED, {**ELSEWHERE, "renewals": 3}, 0.0, GiveUp()),
        # A refusal is final, but for a bucket that has answered before: then for a while, with another request.
        (DENIED, {}, 0.0, GiveUp()),
        (DENIED, PATIENT, 50.0, Renew(80.0)),
        (MISSING, {**PATIENT, "refused_at": 40.0}, 50.0, Renew(70.0)),
        (MISSING, {**PATIENT, "refused_at": 20.0}, 50.0, GiveUp(confirmed=True)),
        (DENIED, {**PATIENT, "policy": CAPPED, "failures": 3}, 0.0, GiveUp()),
        # Never again: other verdicts, a single attempt, a stream that cannot begin again.
        (Fault(Verdict.FATAL, "TLS"), PATIENT, 0.0, GiveUp()),
        (Fault(Verdict.CHANGED, "replaced"), ELSEWHERE, 0.0, GiveUp()),
        (RESET, {"once": True, **ELSEWHERE}, 0.0, GiveUp()),
        (DENIED, {"once": True, **PATIENT}, 0.0, GiveUp()),
        (RESET, {"restartable": False, **ELSEWHERE}, 0.0, GiveUp()),
    ],
)
def test_what_follows_a_failed_attempt(fault: Fault, state: dict[str, Any], now: float, decision: Decision) -> None:
    assert decide(fault, AttemptState(**{"policy": POLICY, **state}), now) == decision


class Part(RuleBasedStateMachine):
    """One part's attempts. The model counts for itself what has happened since the last byte."""

    @initialize(most=st.none() | st.integers(1, 12), known=st.booleans())
    def begin(self, most: int | None, known: bool) -> None:
        self.policy = replace(POLICY, max_attempts=most)
        self.known = known
        self.now = self.moved_at = 0.0
        self.history = FailureLog(0.0)
        self.failures = 0
        self.given_up = False

    @precondition(lambda self: not self.given_up)
    @rule(contradicts=st.booleans(), retry_after_s=st.none() | st.integers(0, 100))
    def fail(self, contradicts: bool, retry_after_s: int | None) -> None:
        self.history.add("503" if retry_after_s else "reset")
        self.failures += 1
        state = AttemptState(self.policy, self.history.count, self.history.since, origin_known=self.known)
        fault = Fault(Verdict.TRANSIENT, "503", retry_after_s=retry_after_s, contradicts=contradicts)
        decision = decide(fault, state, self.now)
        self.given_up = decision == GiveUp()
        limits = [self.policy.max_attempts, self.policy.max_contradictions if contradicts else None]
        allowed_s = self.policy.timeout_s if self.known else self.policy.first_contact_s
        over = self.now - self.moved_at >= allowed_s
        assert self.given_up == (over or any(self.failures >= limit for limit in limits if limit))
        if isinstance(decision, Retry):
            assert decision.retry_after_s == min(retry_after_s or 0.0, self.policy.cap_s)
            assert decision.deadline == self.moved_at + allowed_s
            self.now += decision.retry_after_s

    @precondition(lambda self: not self.given_up)
    @rule()
    def bring_bytes(self) -> None:
        self.known, self.failures = True, 0
        self.moved_at, self.history = self.now, FailureLog(self.now)

    @rule(seconds=st.integers(0, 120))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: hasattr(self, "history"))
    @invariant()
    def the_story_is_whole(self) -> None:
        assert sum(self.history.reasons.values()) == self.history.count == self.failures
        assert (f"{self.failures} attempts" in self.history.summary(self.now)) == (self.failures > 1)


Part.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPart = Part.TestCase
