"""Retry policy of a part: decide whether to retry, renew the request, fall back to another place, or give up.

`decide` is a pure function; `RetryController` carries its decisions out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from bisect import bisect_left
from dataclasses import dataclass, replace

from wds_async.config import RetryPolicy
from wds_async.errors import StorageError
from wds_async.redact import redact
from wds_async.storage.base import (
    Access,
    Backend,
    Contradiction,
    Fault,
    Location,
    ObjectReplaced,
    RefusedAnswer,
    Request,
    Verdict,
    error_for,
)
from wds_async.storage.options import Options
from wds_async.transfer.circuit_breaker import CircuitBreaker, FailureLog
from wds_async.transfer.concurrency import Concurrency
from wds_async.transfer.connection import PACE_BYTES, Origin
from wds_async.transfer.options import ReadOptions
from wds_async.transfer.resources import Resources
from wds_async.transfer.shard_state import ShardState, UnexpectedVersion
from wds_async.transfer.traffic import BOUNDS_S, OriginTraffic, origin_of
from wds_async.transfer.window import Part, Shard

__all__ = ["AttemptState", "Attempts", "Decision", "Fallback", "GiveUp", "Renew", "Retry", "RetryController", "decide"]

logger = logging.getLogger("wds_async")

_MAX_RENEWALS = 3
_THROTTLED_ATTEMPTS = 2  # a store that asks for fewer requests is left alone as if so many attempts more had failed
_MAX_ISOLATED = 3  # faults of a part, each among good answers, before ``Retry-After`` is kept to the letter
_UNREACHABLE_FOR_S = 60.0
_REFUSED = RetryPolicy(base_s=0.1, cap_s=5.0)
_REFUSALS = (Verdict.DENIED, Verdict.MISSING)
_CONFIRMED_FOR_S, _CONFIRMED_PATIENCE_S = 3600.0, 1.0
_MAX_BUCKETS = 1000
_WARN_EVERY_S = 60.0
_ATTEMPTS_BEFORE_FALLBACK = 2  # at a store that has never answered, or whose port is closed


@dataclass(frozen=True, slots=True)
class AttemptState:
    """Everything that the decision about a part depends on, beside the fault and the time."""

    policy: RetryPolicy
    failures: int = 1
    """Failed attempts since the last new byte, the present one included."""
    since: float = 0.0
    """Start of the time without progress: the last new byte, or the end of the store's last long outage."""
    renewals: int = 0
    """Requests that have lapsed since the last new byte."""
    origin_known: bool = True
    """The server has answered this process before."""
    restartable: bool = True
    has_fallback: bool = False
    isolated: bool = False
    """Good answers of the store came before, and faults are few."""
    once: bool = False
    """Fail at the first fault; a lapsed request is still renewed."""
    refused_at: float | None = None
    """Time of the first refusal that was retried."""
    refusal_patience_s: float = 0.0
    """Seconds for which a refusal is retried; 0 in a bucket that never answered."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again: after the back-off of attempt number ``backoff`` (0: at once), not before ``retry_after_s`` seconds,
    and at ``deadline`` decide anew."""

    backoff: int
    retry_after_s: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Renew:
    """Try again with another request: at once where the last one has lapsed, after a pause that ends at ``deadline``
    where it was refused."""

    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Fallback:
    """Read on from the same byte at the shard's other place."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Raise the error. ``confirmed``: a refusal has held as long as it was retried."""

    confirmed: bool = False


Decision = Retry | Renew | Fallback | GiveUp


def decide(fault: Fault, state: AttemptState, now: float) -> Decision:
    """Return what follows a failed attempt. Pure: jitter, waiting and counting are the caller's."""
    policy = state.policy
    if fault.verdict is Verdict.EXPIRED:
        return Renew() if state.renewals < _MAX_RENEWALS else GiveUp()
    if state.once or not state.restartable:
        return GiveUp()
    if fault.verdict in _REFUSALS:
        return _decide_refusal(state, now)
    if not fault.verdict.retryable:
        return GiveUp()
    deadline = state.since + policy.allowed_s(origin_known=state.origin_known)
    impatient = state.has_fallback and (not state.origin_known or fault.connection_refused)
    over = impatient and state.failures >= _ATTEMPTS_BEFORE_FALLBACK
    if over or now >= deadline or policy.exhausted(state.failures, contradicted=fault.contradicts):
        return Fallback() if state.has_fallback else GiveUp()
    if state.isolated and state.failures <= _MAX_ISOLATED:
        # Good answers came before, and faults are few: the store takes requests, and there is nothing to wait for.
        return Retry(state.failures if fault.throttled or state.failures > 1 else 0, 0.0, deadline)
    backoff = state.failures + _THROTTLED_ATTEMPTS * fault.throttled
    return Retry(backoff, min(fault.retry_after_s or 0.0, policy.cap_s), deadline)


def _decide_refusal(state: AttemptState, now: float) -> Decision:
    """Decide about a 403 or 404: retry for a while if its bucket has answered the same credentials before."""
    most = state.policy.max_attempts
    if state.refusal_patience_s <= 0 or (most is not None and state.failures >= most):
        return GiveUp()
    deadline = (now if state.refused_at is None else state.refused_at) + state.refusal_patience_s
    return Renew(deadline) if now < deadline else GiveUp(confirmed=True)


Bucket = tuple[str, Options, str]
"""Kind of store, options for it (credentials among them), and scheme and bucket (or host)."""


def bucket_of(location: Location) -> Bucket:
    """Return the bucket whose permissions the object at ``location`` shares."""
    return location.kind, location.options, location.server


class _Refusals:
    """Buckets that have answered this process, and refusals that held until patience ran out. It outlives engines (an
    epoch has one), so that a later epoch uses what an earlier one has learned."""

    def __init__(self) -> None:
        self.answered_at: dict[Bucket, float] = {}
        """Time of the last object of each bucket (``time.monotonic``)."""
        self._confirmed: dict[tuple[Bucket, Verdict], float] = {}
        self._warned: dict[Bucket, float] = {}

    def record_answer(self, bucket: Bucket) -> None:
        """Record a good answer of ``bucket``."""
        if bucket not in self.answered_at and len(self.answered_at) >= _MAX_BUCKETS:
            self.answered_at.clear()
        self.answered_at[bucket] = time.monotonic()

    def confirm(self, bucket: Bucket, verdict: Verdict) -> None:
        """Record that a refusal held: the next ones of its kind are retried for a second only, for an hour."""
        if len(self._confirmed) >= _MAX_BUCKETS:
            self._confirmed.clear()
        self._confirmed[bucket, verdict] = time.monotonic()

    def patience_s(self, bucket: Bucket, verdict: Verdict, full_s: float) -> float:
        """Return the seconds for which a refusal is retried."""
        if bucket not in self.answered_at:
            return 0.0
        confirmed_at = self._confirmed.get((bucket, verdict), -math.inf)
        return min(full_s, _CONFIRMED_PATIENCE_S) if time.monotonic() - confirmed_at < _CONFIRMED_FOR_S else full_s

    def log_level(self, bucket: Bucket) -> int:
        """Return the level for a refusal: a warning for the first of a bucket, and then one a minute."""
        now = time.monotonic()
        if now - self._warned.get(bucket, -math.inf) < _WARN_EVERY_S:
            return logging.INFO
        self._warned[bucket] = now
        return logging.WARNING


_refusals = _Refusals()


@dataclass(slots=True)
class Attempts:
    """Attempts at one part since its last new byte; the last one was made at ``location`` with ``access``."""

    part: Part
    location: Location
    history: FailureLog
    began: float
    """Start of the last attempt."""
    bytes: int = 0
    renewals: int = 0
    access: Access | None = None
    traffic: OriginTraffic | None = None
    refused_at: float | None = None
    once: bool = False

    @classmethod
    def of(cls, part: Part, *, once: bool = False) -> Attempts:
        """Return those of a part that is requested now."""
        now = asyncio.get_running_loop().time()
        return cls(part, part.shard.state.location, FailureLog(now), now, part.filled, once=once)

    @property
    def state(self) -> ShardState:
        """State of the part's shard."""
        state: ShardState = self.part.shard.state
        return state

    @property
    def position(self) -> int:
        """The next byte of the shard."""
        return self.part.start + self.part.filled

    def begin(self, traffic: OriginTraffic) -> None:
        """Start the next attempt."""
        self.access, self.location, self.traffic = None, self.state.location, traffic
        self.began = asyncio.get_running_loop().time()

    def progress(self, now: float, *, stalled: bool) -> bool:
        """Start counting again if bytes have come since the last call. A trickle does not count: less than 16 KiB in
        an attempt that stalled."""
        gained, self.bytes = self.part.filled - self.bytes, self.part.filled
        if gained <= 0 or (stalled and gained < PACE_BYTES):
            return False
        self.reset(now)
        return True

    def reset(self, now: float) -> None:
        """Start counting again: bytes have come, or the next attempt is at another store."""
        self.renewals, self.history, self.refused_at = 0, FailureLog(now), None

    def heals(self, fault: Fault) -> bool:
        """Return whether time may end ``fault``, and another attempt can be made then."""
        return fault.verdict.retryable and fault.verdict is not Verdict.EXPIRED and self.state.restartable


class RetryController:
    """Carries out, for the parts of one reader, what `decide` returns."""

    def __init__(self, resources: Resources, options: ReadOptions, concurrency: Concurrency) -> None:
        self._backends, self._pool = resources.backends, resources.connections
        self._policy, self._counters = options.config.retry, options.counters
        self._concurrency = concurrency
        self._rng = random.Random()
        self._unreachable_until: dict[str, float] = {}
        self._reached: set[str] = set()

    def breaker(self, location: Location) -> CircuitBreaker | None:
        """Return the circuit breaker of the store of ``location``; None without a server."""
        return self._pool.breaker(location.server) if location.spec.has_server else None

    def bind(self, state: ShardState) -> OriginTraffic:
        """Return the counters of the place where a shard is read; they and its circuit breaker are looked up once."""
        if state.traffic is not None:
            return state.traffic
        traffic, learn = self._counters.traffic.of(origin_of(state.location)), self._concurrency.observe
        seconds, counts = traffic.seconds, traffic.seconds.counts

        def observe(received_bytes: int, took_s: float, now: float) -> None:
            learn(received_bytes, took_s, now)
            counts[bisect_left(BOUNDS_S, took_s)] += 1  # `Histogram.add`, without a call
            seconds.total += took_s

        state.bind(traffic, observe, self.breaker(state.location))
        return traffic

    def record_success(self, shard: Shard) -> None:
        """Record that the store of ``shard`` gave the bytes that were requested."""
        state: ShardState = shard.state
        self.bind(state)
        if state.breaker is not None:
            state.breaker.record_success()
            _refusals.record_answer(bucket_of(state.location))

    def record_contact(self, location: Location) -> None:
        """Record that the server of ``location`` answers: later failures are outages, and not a mistyped host."""
        if location.spec.has_server:
            self._reached.add(location.server)

    def healthy(self, shard: Shard) -> bool:
        """Return whether the store may get more requests than are needed."""
        breaker: CircuitBreaker | None = shard.state.breaker
        return breaker is not None and breaker.healthy

    async def wait_until_up(self, shard: Shard) -> None:
        """Return when a part may be requested for the first time: at once, unless the store's circuit is open."""
        state: ShardState = shard.state
        breaker = state.breaker or self.breaker(state.location)
        if breaker is not None and breaker.is_open and state.location.fallback is None:
            now = asyncio.get_running_loop().time()
            await breaker.wait(0.0, now + self._policy.timeout_s, cap_s=self._policy.cap_s)

    def backend(self, shard: Shard) -> Backend:
        """Return the backend of the place where ``shard`` is read now; its fallback's while the first was unreachable
        a moment ago."""
        state: ShardState = shard.state
        unreachable = self._unreachable_until.get(state.location.kind, 0.0) > time.monotonic()
        if unreachable and state.access is None and state.stream is None:
            state.move_to_fallback()
        return self._backends.of(state.location)

    async def recover(self, attempts: Attempts, backend: Backend, exn: Exception) -> None:
        """Return when the next attempt may begin, or raise the error that the attempts end with."""
        fault, clock = _explain(backend, exn, attempts.location), asyncio.get_running_loop().time
        breaker = self.breaker(attempts.location)
        moved = attempts.progress(clock(), stalled=fault.verdict is Verdict.STALLED)
        if moved and breaker is not None:
            breaker.record_success()
        if fault.verdict is not Verdict.EXPIRED or attempts.renewals >= _MAX_RENEWALS:  # else it is no failure
            self._record_failure(attempts, fault, breaker, answered=isinstance(exn, RefusedAnswer))
        while True:
            decision = decide(fault, self._state_of(attempts, fault, breaker), clock())
            match decision:
                case Retry():
                    if await self._pause(attempts, fault, decision, breaker):
                        return
                case Renew(deadline=None):
                    attempts.renewals += 1
                    attempts.state.drop(attempts.access)
                    logger.info("%s: %s; requesting another", redact(attempts.part.shard.url), fault.reason)
                    return
                case Renew(deadline=float(deadline)):
                    return await self._renew_refused(attempts, fault, backend, deadline)
                case Fallback():
                    await self._fall_back(attempts, fault)
                    return attempts.reset(clock())
                case GiveUp():
                    if decision.confirmed:
                        _refusals.confirm(bucket_of(attempts.location), fault.verdict)
                    raise self._error(attempts, fault, breaker) from exn

    def _record_failure(
        self, attempts: Attempts, fault: Fault, breaker: CircuitBreaker | None, *, answered: bool
    ) -> None:
        attempts.history.add(fault.reason)
        attempts.state.record_fault(fault)
        self._concurrency.stumbled()
        if fault.throttled:
            self._counters.add("throttled")
            (attempts.traffic or self.bind(attempts.state)).throttled += 1
            self._concurrency.throttled(asyncio.get_running_loop().time())
        if breaker is not None and attempts.heals(fault):
            breaker.record_failure(fault.reason, attempts.began, throttled=fault.throttled)
        elif breaker is not None and answered:
            breaker.record_success()  # it answers, if not as one would like

    def _state_of(self, attempts: Attempts, fault: Fault, breaker: CircuitBreaker | None) -> AttemptState:
        history, policy, patience_s = attempts.history, self._policy, 0.0
        if fault.verdict in _REFUSALS:
            full_s = min(policy.refusal_timeout_s, policy.timeout_s)
            patience_s = _refusals.patience_s(bucket_of(attempts.location), fault.verdict, full_s)
        return AttemptState(
            policy,
            failures=history.count,
            since=history.since if breaker is None else max(history.since, breaker.recovered_at),
            renewals=attempts.renewals,
            origin_known=self._origin_known(attempts),
            restartable=attempts.state.restartable,
            has_fallback=attempts.location.fallback is not None,
            isolated=breaker is not None and breaker.failure_is_isolated,
            once=attempts.once,
            refused_at=attempts.refused_at,
            refusal_patience_s=patience_s,
        )

    def _count_retry(self, attempts: Attempts) -> None:
        self._counters.add("retries")
        if attempts.traffic is not None:
            attempts.traffic.retries += 1

    async def _pause(self, attempts: Attempts, fault: Fault, retry: Retry, breaker: CircuitBreaker | None) -> bool:
        """Wait for the next attempt. False: the deadline has come, and the store is down."""
        url, policy, count = redact(attempts.part.shard.url), self._policy, attempts.history.count
        self._count_retry(attempts)
        logger.info("%s at byte %d: %s; attempt %d follows", url, attempts.position, fault.reason, count + 1)
        delay_s = policy.delay_s(retry.backoff, self._rng) if retry.backoff else 0.0
        if breaker is None:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(min(max(delay_s, retry.retry_after_s), retry.deadline - now))
            return True
        breaker.warn_of_outage(url, fault.reason, policy.allowed_s(origin_known=self._origin_known(attempts)))
        return await breaker.wait(delay_s, retry.deadline, retry_after_s=retry.retry_after_s, cap_s=policy.cap_s)

    async def _renew_refused(self, attempts: Attempts, fault: Fault, backend: Backend, deadline: float) -> None:
        """Wait, and have the next attempt make another request; credentials are read again once."""
        now, location = asyncio.get_running_loop().time(), attempts.location
        if attempts.refused_at is None:
            attempts.refused_at = now
            if fault.verdict is Verdict.DENIED:
                backend.renew(location)
            logger.log(
                _refusals.log_level(bucket_of(location)),
                "%s at byte %d: %s, although others of its bucket were read; retrying for %.0f s (WDS_REFUSAL_TIMEOUT)",
                redact(attempts.part.shard.url),
                attempts.position,
                fault.reason,
                deadline - now,
            )
        attempts.state.drop(attempts.access)
        self._count_retry(attempts)
        await asyncio.sleep(min(_REFUSED.delay_s(attempts.history.count, self._rng), max(0.0, deadline - now)))

    async def _fall_back(self, attempts: Attempts, fault: Fault) -> None:
        """Have the shard read at its fallback, unless another of its parts has moved it there."""
        state, left = attempts.state, attempts.location
        if state.location is not left:
            return
        if left.kind not in self._unreachable_until:
            url = redact(attempts.part.shard.url)
            logger.warning("%s: %s; reading from its own store instead", url, fault.reason)
        self._unreachable_until[left.kind] = time.monotonic() + _UNREACHABLE_FOR_S
        stream = state.move_to_fallback()
        if stream is not None:
            await stream.close()

    def _error(self, attempts: Attempts, fault: Fault, breaker: CircuitBreaker | None) -> StorageError:
        """Return the error of the tree for a part that is given up, with everything that was tried."""
        now, history, others, state = asyncio.get_running_loop().time(), attempts.history, "", attempts.state
        by_time = self._policy.max_attempts is None and not fault.contradicts
        outage = breaker.failures if breaker is not None and breaker.is_open else None
        if outage is not None and by_time and attempts.heals(fault):
            history, others = outage, ", those of other parts among them"  # it was mostly they that tried
        tried, last = history.summary(now) + others, _refusals.answered_at.get(bucket_of(attempts.location))
        if attempts.refused_at is not None and last is not None:
            tried = (
                f"; others of this bucket were read with the same credentials until {time.monotonic() - last:.0f} s"
                f" ago, and this was refused for {now - attempts.refused_at:.0f} s{tried}"
            )
        if breaker is not None and not attempts.once:
            breaker.probe_soon()
        (attempts.traffic or self.bind(state)).errors += 1
        return error_for(replace(fault, reason=fault.reason + tried), state.location.shown, attempts.position, 1)

    def _origin_known(self, attempts: Attempts) -> bool:
        location, access = attempts.location, attempts.access
        if not location.spec.has_server or location.server in self._reached:
            return True
        if isinstance(access, Request):
            return self._pool.answered(Origin.of(access.url, access.tls, access.socket))
        return location.kind == "http" and self._pool.answered(Origin.of(location.target))


def _explain(backend: Backend, exn: Exception, location: Location) -> Fault:
    if isinstance(exn, UnexpectedVersion):
        advice = "Put the former shard back, or begin without that state; give a job another name."
        reason = f"the shard was replaced since the state was saved or the job was planned: {exn}"
        return Fault(Verdict.CHANGED, reason, advice)
    if isinstance(exn, ObjectReplaced):
        return Fault(Verdict.CHANGED, f"the object was replaced while it was being read: {exn}", "Read it again.")
    fault = backend.classify(exn, location)
    return replace(fault, contradicts=True) if isinstance(exn, Contradiction) else fault
