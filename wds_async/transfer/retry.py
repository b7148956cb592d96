"""What comes between the attempts of a part: another request, a pause, another place to read from, or the end with the
whole story."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from wds_async.config import RetryPolicy, TransferConfig
from wds_async.redact import redact
from wds_async.storage.base import Access, Backend, Fault, LocalFile, RefusedAnswer, Request, Verdict, error_for
from wds_async.storage.options import Options
from wds_async.storage.registry import Backends, Location
from wds_async.transfer.circuit_breaker import CircuitBreaker, FailureLog
from wds_async.transfer.concurrency import Concurrency
from wds_async.transfer.connection import PACE_BYTES, Origin
from wds_async.transfer.connection_pool import ConnectionPool
from wds_async.transfer.files import FileReader, FileReplaced
from wds_async.transfer.part_request import VersionChanged, WrongAnswer
from wds_async.transfer.stats import Counters
from wds_async.transfer.streams import StreamReader
from wds_async.transfer.traffic import BOUNDS_S, OriginTraffic, origin_of, region_of
from wds_async.transfer.window import Part, Shard

__all__ = ["Attempts", "RetryController", "ShardState", "ignore_result"]

logger = logging.getLogger("wds_async")

Observe = Callable[[int, float, float], None]
"""Bytes, seconds, and when."""

_RENEWALS_AT_MOST = 3
_SOFTLY = 2  # a store that asks for fewer requests is left alone as if so many attempts more had failed
_ISOLATED_AT_MOST = 3  # faults of a part, each among good answers, before ``Retry-After`` is kept to the letter
_UNREACHABLE_FOR_S = 60.0
_REFUSED = RetryPolicy(base_s=0.1, cap_s=5.0)
_CONFIRMED_FOR_S, _CONFIRMED_PATIENCE_S = 3600.0, 1.0
_BUCKETS_KEPT = 1000
_WARN_EVERY_S = 60.0
_BEFORE_THE_FALLBACK = 2  # attempts at a store that has never answered, where there is another place to read from


Bucket = tuple[str, Options, str]
"""Kind of store, what the program gave for it (credentials among that), and scheme and bucket (or host)."""


class _Refusals:
    """Which buckets have answered this process, and which refusals held until patience ran out. It outlives engines
    (an epoch has one), so that a later epoch knows what an earlier one read."""

    def __init__(self) -> None:
        self._answered: dict[Bucket, float] = {}
        self._confirmed: dict[tuple[Bucket, Verdict], float] = {}
        self._warned: dict[Bucket, float] = {}

    def answered(self, bucket: Bucket, now: float) -> None:
        """Record a good answer of ``bucket``."""
        if bucket not in self._answered and len(self._answered) >= _BUCKETS_KEPT:
            self._answered.clear()
        self._answered[bucket] = now

    def confirm(self, bucket: Bucket, verdict: Verdict, now: float) -> None:
        """Record that a refusal held: the next ones of its kind are waited for a second only, for an hour."""
        if len(self._confirmed) >= _BUCKETS_KEPT:
            self._confirmed.clear()
        self._confirmed[bucket, verdict] = now

    def last_answer(self, bucket: Bucket) -> float | None:
        """When ``bucket`` last gave an object (``time.monotonic``); None where it never did."""
        return self._answered.get(bucket)

    def patience_s(self, bucket: Bucket, verdict: Verdict, now: float, full_s: float) -> float:
        """Seconds for which a refusal is asked again."""
        if bucket not in self._answered:
            return 0.0
        confirmed = now - self._confirmed.get((bucket, verdict), -math.inf) < _CONFIRMED_FOR_S
        return min(full_s, _CONFIRMED_PATIENCE_S) if confirmed else full_s

    def warns(self, bucket: Bucket, now: float) -> bool:
        """Whether a refusal is worth a warning: the first of a bucket, and then one a minute."""
        if now - self._warned.get(bucket, -math.inf) < _WARN_EVERY_S:
            return False
        self._warned[bucket] = now
        return True


_refusals = _Refusals()


@dataclass(slots=True, eq=False)
class ShardState:
    """What fetching remembers of a shard between its parts."""

    location: Location
    access: asyncio.Future[Access] | None = None
    moved: Request | None = None
    files: dict[LocalFile, FileReader] = field(default_factory=dict)
    stream: StreamReader | None = None
    rangeless: bool = False
    """Its server was seen to ignore ranges."""
    unframed: bool = False
    """Its server frames the whole of it in a way that only aiohttp reads."""
    etag: str = ""
    fault: Fault | None = None
    """What was wrong last, for who gives up before the attempts do."""
    traffic: OriginTraffic | None = None
    """Where what is asked is counted; None until the first part is, and after a move."""
    observe: Observe | None = None
    """Who is told how long a good answer took; with ``traffic``."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Of the head of the first answer that had any, in lower case."""
    breaker: CircuitBreaker | None = None
    """The state of its store; None until the first part is asked for, and where there is no server."""

    def known(self) -> Access | None:
        """The access that is there, None where it is asked for still (or could not be had)."""
        future = self.access
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()

    def drop(self, access: Access | None) -> None:
        """Forget ``access``, unless it was renewed meanwhile."""
        if access is not None and self.known() is access:
            self.access = self.moved = None


@dataclass(slots=True)
class Attempts:
    """The attempts of one part since its last new bytes, the last one with ``access``, at ``location``, counted in
    ``traffic``."""

    history: FailureLog
    began: float
    """When the last one began."""
    bytes: int = 0
    renewals: int = 0
    access: Access | None = None
    location: Location | None = None
    traffic: OriginTraffic | None = None
    refused_at: float | None = None
    """When the first refusal came that is asked again."""
    once: bool = False
    """Fail after the first fault: no retry and no fallback. A lapsed request is still renewed."""

    @classmethod
    def of(cls, part: Part, *, once: bool = False) -> Attempts:
        """Those of a part that is to be asked for now."""
        now = asyncio.get_running_loop().time()
        return cls(FailureLog(now), now, part.filled, once=once)

    def progress(self, filled: int, now: float, *, stalled: bool) -> bool:
        """Count anew where bytes have come since the last look. A trickle is none: less than 16 KiB in an attempt that
        was given up as stalled."""
        gained, self.bytes = filled - self.bytes, filled
        if gained <= 0 or (stalled and gained < PACE_BYTES):
            return False
        self.anew(now)
        return True

    def anew(self, now: float) -> None:
        """Count anew: bytes have come, or another store has the next attempt."""
        self.renewals, self.history, self.refused_at = 0, FailureLog(now), None


class RetryController:
    """Decides, for the parts of one reader, what follows a failed attempt."""

    def __init__(
        self,
        backends: Backends,
        pool: ConnectionPool,
        config: TransferConfig,
        counters: Counters,
        concurrency: Concurrency,
    ) -> None:
        self._backends = backends
        self._pool = pool
        self._retry = config.retry
        self._counters = counters
        self._concurrency = concurrency
        self._rng = random.Random()
        self._unreachable_until: dict[str, float] = {}
        self._reached: set[str] = set()

    def breaker(self, location: Location) -> CircuitBreaker | None:
        """The state of the store of ``location``; None where there is no server."""
        return self._pool.breakers.of(location.server) if location.spec.has_server else None

    def traffic(self, notes: ShardState) -> OriginTraffic:
        """Where what is asked for a shard is counted, as long as it is read where it is now."""
        if notes.traffic is None:
            traffic = notes.traffic = self._counters.traffic.of(origin_of(notes.location))
            told, seconds, counts = self._concurrency.observe, traffic.seconds, traffic.seconds.counts

            def observe(received_bytes: int, took_s: float, now: float) -> None:
                told(received_bytes, took_s, now)
                counts[bisect_left(BOUNDS_S, took_s)] += 1  # `Histogram.add`, without a call
                seconds.total += took_s

            notes.observe = observe
        return notes.traffic

    def record_success(self, shard: Shard) -> None:
        """Its store gave what it was asked for."""
        notes: ShardState = shard.notes
        if notes.breaker is None:
            notes.breaker = self.breaker(notes.location)
        if notes.breaker is not None:
            notes.breaker.record_success()
            _refusals.answered(bucket_of(notes.location), time.monotonic())

    def healthy(self, shard: Shard) -> bool:
        """Whether its store may be asked for more than is needed."""
        notes: ShardState = shard.notes
        return notes.breaker is not None and notes.breaker.healthy

    async def wait_until_up(self, shard: Shard) -> None:
        """Return when a part may be asked for the first time: at once, unless its store is down."""
        notes: ShardState = shard.notes
        if notes.breaker is None:
            notes.breaker = self.breaker(notes.location)
        if notes.breaker is not None and notes.breaker.is_open and notes.location.fallback is None:
            now = asyncio.get_running_loop().time()
            await notes.breaker.wait(0.0, now + self._retry.timeout_s, cap_s=self._retry.cap_s)

    def backend(self, shard: Shard) -> Backend:
        """Of where the shard is read now: a store that could not be reached a moment ago is not asked again."""
        notes: ShardState = shard.notes
        unreachable = self._unreachable_until.get(notes.location.kind, 0.0) > time.monotonic()
        if unreachable and notes.access is None and notes.stream is None:
            _move(shard)
        return self._backends.of(notes.location)

    async def access(self, backend: Backend, shard: Shard) -> Access:
        """The shard's way of access, asked for once however many parts wait for it. One that is past its
        ``renew_after`` is asked for again; what comes then is used, whatever it says of itself."""
        notes: ShardState = shard.notes
        known = notes.known()
        if isinstance(known, Request) and known.renew_after <= time.monotonic():
            notes.drop(known)
        if notes.access is None:
            notes.access = asyncio.ensure_future(backend.access(notes.location.target))
            notes.access.add_done_callback(functools.partial(_located, notes.traffic))
        future = notes.access
        try:
            return await asyncio.shield(future)
        except Exception:
            if notes.access is future:  # the next attempt asks again
                notes.access = None
            raise

    def record_contact(self, location: Location) -> None:
        """The server of ``location`` has answered: what fails from now on is a bad day, and no typo."""
        if location.spec.has_server:
            self._reached.add(location.server)

    async def recover(self, part: Part, attempts: Attempts, backend: Backend, exn: Exception) -> None:
        """Return when the next attempt may begin, or raise what the last one means, with all that was tried."""
        shard, now = part.shard, asyncio.get_running_loop().time()
        location = attempts.location or shard.notes.location
        fault, breaker = _explain(backend, exn, location), self.breaker(location)
        traffic = attempts.traffic or self.traffic(shard.notes)
        progressed = attempts.progress(part.filled, now, stalled=fault.verdict is Verdict.STALLED)
        if breaker is not None and progressed:
            breaker.record_success()
        if self._renew(shard, attempts, fault):
            return
        attempts.history.add(fault.reason)
        self._concurrency.stumbled()
        shard.notes.fault = fault
        if fault.throttled:
            self._counters.add("throttled")
            traffic.throttled += 1
            self._concurrency.throttled(now)
        again = fault.verdict.retryable and fault.verdict is not Verdict.EXPIRED and _restartable(shard)
        if breaker is not None and again:
            breaker.record_failure(fault.reason, attempts.began, throttled=fault.throttled)
        elif breaker is not None and isinstance(exn, RefusedAnswer):
            breaker.record_success()  # it answers, if not as one would like
        retried = again and not attempts.once
        if retried and await self._pause(part, attempts, fault, breaker):
            return
        if not attempts.once and await self._ask_again_though_refused(part, attempts, backend, fault):
            return
        now = asyncio.get_running_loop().time()
        if retried and await self._leave(shard, attempts.location, fault):
            attempts.anew(now)
            return
        history, others = attempts.history, ""
        by_time = self._retry.max_attempts is None and not fault.contradicts
        if again and by_time and breaker is not None and breaker.is_open and breaker.failures is not None:
            history, others = breaker.failures, ", those of other parts among them"  # it was mostly they that asked
        tried = _contradicted(attempts, location, fault) + history.summary(now) + others
        if breaker is not None and not attempts.once:
            breaker.probe_soon()
        traffic.errors += 1
        url = shard.notes.location.shown
        raise error_for(replace(fault, reason=fault.reason + tried), url, part.start + part.filled, 1) from exn

    async def _pause(self, part: Part, attempts: Attempts, fault: Fault, breaker: CircuitBreaker | None) -> bool:
        """Wait for the next attempt; False where there shall be none, at this store."""
        now, retry, count = asyncio.get_running_loop().time(), self._retry, attempts.history.count
        location = attempts.location or part.shard.notes.location
        known = self._origin_known(location, attempts.access)
        since = attempts.history.since if breaker is None else max(attempts.history.since, breaker.recovered_at)
        impatient = (
            location.fallback is not None and (not known or fault.connection_refused) and count >= _BEFORE_THE_FALLBACK
        )
        if impatient or retry.gives_up(count, now - since, origin_known=known, contradicted=fault.contradicts):
            return False
        self._counters.add("retries")
        if attempts.traffic is not None:
            attempts.traffic.retries += 1
        url, at = redact(part.shard.url), part.start + part.filled
        logger.info("%s at byte %d: %s; attempt %d follows", url, at, fault.reason, count + 1)
        allowed_s = retry.timeout_s if known else min(retry.first_contact_s, retry.timeout_s)
        retry_after_s = min(fault.retry_after_s or 0.0, retry.cap_s)
        delay_s = retry.delay_s(count + _SOFTLY * fault.throttled, self._rng)
        if breaker is not None and breaker.failure_is_isolated and count <= _ISOLATED_AT_MOST:
            # Good answers came before, and faults are few: the store takes requests, and there is nothing to wait for.
            retry_after_s, delay_s = 0.0, retry.delay_s(count, self._rng) if fault.throttled or count > 1 else 0.0
        if breaker is None:
            await asyncio.sleep(min(max(delay_s, retry_after_s), since + allowed_s - now))
            return True
        breaker.warn_of_outage(url, fault.reason, allowed_s)
        return await breaker.wait(delay_s, since + allowed_s, retry_after_s=retry_after_s, cap_s=retry.cap_s)

    async def _ask_again_though_refused(self, part: Part, attempts: Attempts, backend: Backend, fault: Fault) -> bool:
        """Wait, and return True, where a 403 or 404 is to be asked again: the same version was answered for the same
        bucket before. Credentials are read anew once. False where it is not, or was for long enough."""
        location, now = attempts.location or part.shard.notes.location, time.monotonic()
        if fault.verdict not in (Verdict.DENIED, Verdict.MISSING) or not _restartable(part.shard):
            return False
        bucket, count, most = bucket_of(location), attempts.history.count, self._retry.max_attempts
        full_s = min(self._retry.refusal_timeout_s, self._retry.timeout_s)
        patience_s = _refusals.patience_s(bucket, fault.verdict, now, full_s)
        if patience_s <= 0 or (most is not None and count >= most):
            return False
        url, at = redact(part.shard.url), part.start + part.filled
        if attempts.refused_at is None:
            attempts.refused_at = now
            if fault.verdict is Verdict.DENIED:
                backend.renew(location.target)
            level = logging.WARNING if _refusals.warns(bucket, now) else logging.INFO
            logger.log(
                level,
                "%s at byte %d: %s, although others of its bucket were read; asking again for %.0f s"
                " (WDS_REFUSAL_TIMEOUT)",
                url,
                at,
                fault.reason,
                patience_s,
            )
        left_s = attempts.refused_at + patience_s - now
        if left_s <= 0:
            _refusals.confirm(bucket, fault.verdict, now)
            return False
        part.shard.notes.drop(attempts.access)
        self._counters.add("retries")
        if attempts.traffic is not None:
            attempts.traffic.retries += 1
        await asyncio.sleep(min(_REFUSED.delay_s(count, self._rng), left_s))
        return True

    def _renew(self, shard: Shard, attempts: Attempts, fault: Fault) -> bool:
        """Whether the backend has another request to try, now that this one has lapsed."""
        if fault.verdict is not Verdict.EXPIRED or attempts.renewals >= _RENEWALS_AT_MOST:
            return False
        attempts.renewals += 1
        shard.notes.drop(attempts.access)
        logger.info("%s: %s; asked for another request", redact(shard.url), fault.reason)
        return True

    async def _leave(self, shard: Shard, left: Location | None, fault: Fault) -> bool:
        """Go on from the same byte at the place that the shard comes from, where there is one."""
        location: Location = shard.notes.location
        if location is not left:  # another part of the shard has left it meanwhile
            return True
        if location.fallback is None:
            return False
        if location.kind not in self._unreachable_until:
            logger.warning("%s: %s; reading from its own store instead", redact(shard.url), fault.reason)
        self._unreachable_until[location.kind] = time.monotonic() + _UNREACHABLE_FOR_S
        stream = _move(shard)
        if stream is not None:
            await stream.close()
        return True

    def _origin_known(self, location: Location, access: Access | None) -> bool:
        if not location.spec.has_server or location.server in self._reached:
            return True
        if isinstance(access, Request):
            return self._pool.answered(Origin.of(access.url, access.tls, access.socket))
        return location.kind == "http" and self._pool.answered(Origin.of(location.target))


def _move(shard: Shard) -> StreamReader | None:
    """Make the shard's next access that of its fallback, where it has one. What was learnt of the store that is left
    says nothing of the other, but for the size of the object. Returns the stream that has to be closed."""
    notes: ShardState = shard.notes
    if notes.location.fallback is None:
        return None
    notes.location, notes.access, notes.moved = notes.location.fallback, None, None
    notes.rangeless, notes.unframed, notes.breaker = False, False, None
    notes.traffic, notes.observe, notes.fields = None, None, {}
    shard.version = notes.etag = ""
    stream, notes.stream = notes.stream, None
    return stream


def _explain(backend: Backend, exn: Exception, location: Location) -> Fault:
    if isinstance(exn, VersionChanged | FileReplaced):
        return Fault(Verdict.CHANGED, f"the object was replaced while it was being read: {exn}", "Read it again.")
    fault = backend.classify(exn, location.target)
    return replace(fault, contradicts=True) if isinstance(exn, WrongAnswer) else fault


def bucket_of(location: Location) -> Bucket:
    """What shards share their permissions by: the store, what the program gave for it, and scheme and bucket."""
    return location.kind, location.options, location.server


def _contradicted(attempts: Attempts, location: Location, fault: Fault) -> str:
    """The other fact, where a refusal was asked again: that its bucket was read before; "" otherwise."""
    last = _refusals.last_answer(bucket_of(location))
    if attempts.refused_at is None or last is None:
        return ""
    now = time.monotonic()
    return (
        f"; others of this bucket were read with the same credentials until {now - last:.0f} s ago, and this was"
        f" refused for {now - attempts.refused_at:.0f} s"
    )


def _restartable(shard: Shard) -> bool:
    stream: StreamReader | None = shard.notes.stream
    return stream is None or stream.restartable


def _located(traffic: OriginTraffic | None, future: asyncio.Future[Access]) -> None:
    """A request tells where it goes."""
    ignore_result(future)
    if traffic is None or future.cancelled() or future.exception() is not None:
        return
    access = future.result()
    if isinstance(access, Request):
        traffic.region = region_of(access.url) or traffic.region


def ignore_result(future: asyncio.Future[Any]) -> None:
    """An access or read that nobody waits for any more may fail: that is not worth a line in the log."""
    if not future.cancelled():
        future.exception()
