"""Between two attempts: requests that lapse, stores that are left for another, and the end with the whole story."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.servers import BEFORE_HEAD, Origin
from tests.servers.process import free_port
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick, snapshot
from wds_async.config import RetryPolicy
from wds_async.errors import AccessDenied, ShardNotFound, TransferError
from wds_async.storage.base import (
    Access,
    Answer,
    Backend,
    Description,
    Fault,
    Location,
    RefusedAnswer,
    Request,
    Stream,
    Verdict,
)
from wds_async.storage.http.backend import HttpBackend, explain_exception, explain_status
from wds_async.storage.registry import Backends
from wds_async.transfer import retry as attempts
from wds_async.transfer.stats import Counters

PART = 256 * KIB
CONTENT = data(6 * PART + 17)


class Leases(Backend):
    """Each request that it gives bears the number of a lease; the server says 403 to one that has lapsed."""

    def __init__(self, origin: Origin, *, lasts_s: float = math.inf, follows: bool = True) -> None:
        self.origin = origin
        self.lasts_s = lasts_s
        self.follows = follows
        self.given = 0
        self._http = HttpBackend()

    async def access(self, location: Location) -> Access:
        await asyncio.sleep(0.001)  # as one that has to ask for it
        self.given += 1
        path = location.target.rpartition("/")[2]
        return Request(
            self.origin.url(path),
            (("lease", str(self.given)),),
            follows=self.follows,
            renew_after=time.monotonic() + self.lasts_s,
        )

    async def describe(self, location: Location) -> Description:
        return Description("leases", self.origin.base, "nobody", True)

    def streamed(self, request: Request) -> Stream:
        return self._http.streamed(request)

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        if isinstance(outcome, RefusedAnswer):
            outcome = outcome.answer
        if not isinstance(outcome, Answer):
            return explain_exception(outcome)
        if outcome.status == 403:
            return Fault(Verdict.EXPIRED, f"the store said 403 ({outcome.excerpt.decode()})", "Look at the clock.")
        return explain_status(outcome)

    async def close(self) -> None:
        await self._http.close()


Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """``register(s3=backend)``: what engines use for a kind."""
    make = Backends._make

    def put(**made: Any) -> None:
        monkeypatch.setattr(Backends, "_make", lambda *args: made.get(args[1].kind) or make(*args))

    return put


def lease(request: Any) -> int:
    """The number of the lease that a request came with."""
    return int(request.headers.get("lease", 0))


def leases(origin: Origin) -> list[int]:
    return [lease(request) for request in origin.requests]


def test_a_request_is_renewed_in_time(origin: Origin, register: Register) -> None:
    backend = Leases(origin, lasts_s=0.15)
    register(s3=backend)
    origin.add("x.tar", CONTENT)
    origin.behave(delay_s=0.1)
    assert bytes_of(["s3://bucket/x.tar"], quick(connections=1)) == [CONTENT]
    assert 2 <= backend.given < len(origin.requests)
    assert leases(origin) == sorted(leases(origin))


def test_one_that_is_given_too_late_is_tried_as_it_is(origin: Origin, register: Register) -> None:
    backend = Leases(origin, lasts_s=-1)
    register(s3=backend)
    origin.add("x.tar", CONTENT)
    assert bytes_of(["s3://bucket/x.tar"]) == [CONTENT]
    assert backend.given <= len(origin.requests)


def test_a_lapsed_request_is_renewed_once_for_all_parts(origin: Origin, register: Register) -> None:
    backend = Leases(origin)
    register(s3=backend)
    origin.add("x.tar", CONTENT)
    # The first part goes well; then all that are in flight with the first lease are refused at the same time.
    origin.behave(when=lambda request: lease(request) == 1, skip=1, status=403, delay_s=0.05)
    assert bytes_of(["s3://bucket/x.tar"], quick(part_bytes=64 * KIB)) == [CONTENT]
    assert leases(origin).count(1) > 2
    assert backend.given == 2


def test_what_stays_refused_is_denied_with_what_the_store_said(origin: Origin, register: Register) -> None:
    backend = Leases(origin)
    register(s3=backend)
    origin.add("x.tar", CONTENT)
    origin.add("good.tar", b"good")
    origin.behave(path="/x.tar", status=403, body=b"<Code>ExpiredToken</Code>")
    (got, error), good = outcomes(["s3://bucket/x.tar", "s3://bucket/good.tar"], quick(connections=1))
    assert isinstance(error, AccessDenied)
    assert "at byte 0: the store said 403 (<Code>ExpiredToken</Code>). Look at the clock." in str(error)
    assert (got, good) == (b"", (b"good", None))
    assert backend.given <= 4 + 1  # three renewals, and the other shard's
    assert len(origin.requests) <= 4 + 2


def test_a_stream_is_begun_again_with_the_renewed_request(origin: Origin, register: Register) -> None:
    backend = Leases(origin)
    register(s3=backend)
    origin.add("x.tar", CONTENT)
    first = {"when": lambda request: lease(request) == 1 and request.range is None}
    origin.behave(ignore_range=True, cut_after=3 * PART, times=1, **first)
    origin.behave(status=403, **first)
    origin.behave(ignore_range=True)
    assert bytes_of(["s3://bucket/x.tar"]) == [CONTENT]
    assert [lease(request) for request in origin.requests if request.range is None] == [1, 1, 2]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_stream_that_is_refused_says_why(origin: Origin, register: Register, chunked: bool) -> None:
    register(s3=Leases(origin))
    origin.add("x.tar", CONTENT)
    origin.behave(when=lambda request: request.range is not None, ignore_range=True)
    origin.behave(status=403, body=b"<Code>Lapsed</Code>", chunked=chunked)
    ((_, error),) = outcomes(["s3://bucket/x.tar"])
    assert isinstance(error, AccessDenied)
    assert "<Code>Lapsed</Code>" in str(error)


def test_a_store_is_asked_for_ranges_of_the_next_object(origin: Origin, register: Register) -> None:
    register(s3=Leases(origin))
    contents = [data(3 * PART, i) for i in range(2)]
    for number, content in enumerate(contents):
        origin.add(f"{number}.tar", content)
    origin.behave(path="/0.tar", gzip=True)
    assert bytes_of([f"s3://bucket/{i}.tar" for i in range(2)], quick(connections=1)) == contents
    assert all(request.range for request in origin.requests if request.path == "/1.tar")


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_whole_answer_that_fits_the_part_is_taken(origin: Origin, register: Register, size: int) -> None:
    register(s3=Leases(origin))
    origin.add("x.tar", data(size))
    origin.behave(ignore_range=True)
    assert bytes_of(["s3://bucket/x.tar"], quick(connections=1)) == [data(size)]
    assert all(request.range for request in origin.requests)


def test_a_redirect_that_is_not_followed_is_an_answer_for_every_part(origin: Origin, register: Register) -> None:
    register(s3=Leases(origin, follows=False))
    origin.add("x.tar", CONTENT)
    origin.behave(redirect="/elsewhere.tar", status=307, skip=1)
    ((got, error),) = outcomes(["s3://bucket/x.tar"], quick(part_bytes=64 * KIB))
    assert isinstance(error, TransferError)
    assert "307" in str(error)
    assert got == CONTENT[: len(got)]
    assert {request.path for request in origin.requests} == {"/x.tar"}


# -- another place to read from ------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, register: Register, origin: Origin) -> Any:
    """AIStore before a bucket: ``origin`` is the bucket's server, this is the cluster's."""
    for name, value in (("AIS_ENDPOINT", "http://127.0.0.1:1"), ("USE_AIS_FOR", "s3"), ("WDS_AIS_FALLBACK", "1")):
        monkeypatch.setenv(name, value)
    with Origin() as server:
        register(ais=Leases(server), s3=Leases(origin))
        yield server


def test_a_store_is_left_with_several_parts_in_flight(
    origin: Origin, cluster: Origin, caplog: pytest.LogCaptureFixture
) -> None:
    for server in (origin, cluster):
        server.add("x.tar", CONTENT)
    cluster.behave(etag='"the cluster\'s"', times=1)
    cluster.behave(cut_after=BEFORE_HEAD, delay_s=0.02)
    counters = Counters()
    with caplog.at_level(logging.WARNING, "wds_async"):
        assert bytes_of(["s3://bucket/x.tar"], quick(part_bytes=64 * KIB), counters) == [CONTENT]
    assert len(cluster.requests) > 3
    left, went = (counters.traffic.origins[f"{name}://bucket"] for name in ("ais", "s3"))  # who was really asked
    assert went.requests == len(origin.requests)
    assert 0 < left.bytes < went.bytes
    assert left.bytes + went.bytes == snapshot(counters).wire_bytes
    assert left.retries > 0
    assert (left.errors, went.errors, left.connections, went.connections) == (0, 0, 0, 0)
    assert len([record for record in caplog.records if "its own store" in record.getMessage()]) == 1
    assert all(request.headers.get("if-match") != '"the cluster\'s"' for request in origin.requests)


def test_a_store_is_left_in_the_middle_of_a_stream(origin: Origin, cluster: Origin) -> None:
    for server in (origin, cluster):
        server.add("x.tar", CONTENT)
    whole = {"when": lambda request: request.range is None}
    cluster.behave(ignore_range=True, etag='"the cluster\'s"', cut_after=2 * PART, times=1, **whole)
    cluster.behave(cut_after=BEFORE_HEAD, **whole)
    cluster.behave(ignore_range=True)
    assert bytes_of(["s3://bucket/x.tar"]) == [CONTENT]
    assert origin.requests
    assert cluster.requests


def test_what_a_store_that_was_left_answers_late_is_not_mixed_in(origin: Origin, cluster: Origin) -> None:
    for server in (origin, cluster):
        server.add("x.tar", CONTENT)
    early = {"when": lambda request: str(request.range).startswith("bytes=0-")}
    cluster.behave(cut_after=BEFORE_HEAD, **early)
    cluster.behave(delay_s=0.3, etag='"the cluster\'s"')
    origin.behave(etag='"the bucket\'s"')
    assert bytes_of(["s3://bucket/x.tar"], quick(part_bytes=64 * KIB)) == [CONTENT]


def test_a_store_that_was_left_is_not_asked_by_the_next_shards(origin: Origin, cluster: Origin) -> None:
    contents = [data(1000, i) for i in range(3)]
    for number, content in enumerate(contents):
        origin.add(f"{number}.tar", content)
    cluster.behave(cut_after=BEFORE_HEAD)
    assert bytes_of([f"s3://bucket/{i}.tar" for i in range(3)], quick(connections=1)) == contents
    assert {request.path for request in cluster.requests} == {"/0.tar"}


@pytest.mark.parametrize("direct", [True, False])
def test_a_server_that_never_answered_is_given_up_soon_however_it_is_read(direct: bool) -> None:
    """What was reached of another server, or is no server at all, says nothing of this one."""
    patient = RetryPolicy(max_attempts=500, timeout_s=300.0, first_contact_s=0.3, cap_s=0.05)
    missing = f"http://127.0.0.1:{free_port()}/x.tar"
    first, last = outcomes(["pipe:printf x", missing], config=quick(direct=direct, retry=patient))
    assert first == (b"x", None)
    assert isinstance(last[1], TransferError)
    assert "refused" in str(last[1])


# -- refusals where the same bucket was read before ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_bucket_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: no bucket has answered, and no refusal was confirmed."""
    monkeypatch.setattr(attempts, "_refusals", attempts._Refusals())


PATIENT = quick(connections=1, retry=RetryPolicy(refusal_timeout_s=20.0, base_s=0.001, cap_s=0.01))


@pytest.mark.parametrize("status", [403, 404])
@pytest.mark.parametrize("direct", [True, False])
def test_a_refusal_in_a_bucket_that_was_read_is_asked_again(
    origin: Origin, status: int, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    urls = [origin.add(f"{number}.tar", data(1000, number)) for number in range(3)]
    origin.behave(path="/1.tar", status=status, times=2)
    counters = Counters()
    with caplog.at_level(logging.WARNING, "wds_async"):
        assert bytes_of(urls, replace(PATIENT, direct=direct), counters) == [data(1000, i) for i in range(3)]
    assert snapshot(counters).retries == 2
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "others of its bucket were read; retrying for 20 s (WDS_REFUSAL_TIMEOUT)" in warnings[0]


def test_a_refusal_within_a_shard_is_asked_again_from_that_byte(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    origin.behave(status=403, skip=3, times=1)
    assert bytes_of([url], replace(PATIENT, part_bytes=64 * KIB)) == [CONTENT]


def test_a_refusal_by_a_store_that_never_answered_ends_at_once(origin: Origin) -> None:
    origin.behave(status=403)
    ((_, error),) = outcomes([origin.url("x.tar")], PATIENT)
    assert isinstance(error, AccessDenied)
    assert len(origin.requests) == 1


def test_a_refusal_that_holds_is_raised_with_both_facts_and_the_next_is_believed_sooner(origin: Origin) -> None:
    origin.add("good.tar", b"good")
    urls = [origin.url(name) for name in ("good.tar", "gone.tar", "gone-too.tar")]
    config = replace(PATIENT, retry=replace(PATIENT.retry, refusal_timeout_s=3.0))
    good, (_, first), (_, second) = outcomes(urls, config)
    assert good == (b"good", None)
    assert isinstance(first, ShardNotFound)
    assert "; others of this bucket were read with the same credentials until" in str(first)
    assert "this was refused for 3 s after" in str(first)
    assert isinstance(second, ShardNotFound)
    assert "refused for 1 s" in str(second)


@pytest.mark.parametrize(
    "retry", [replace(PATIENT.retry, refusal_timeout_s=0.0), replace(PATIENT.retry, max_attempts=1)]
)
def test_refusals_can_be_taken_at_once(origin: Origin, retry: RetryPolicy) -> None:
    origin.add("good.tar", b"good")
    outcome = outcomes([origin.url("good.tar"), origin.url("gone.tar")], replace(PATIENT, retry=retry))[1]
    assert isinstance(outcome[1], ShardNotFound)
    assert [request.path for request in origin.requests].count("/gone.tar") == 1


def test_credentials_are_read_anew_once_for_a_refusal(origin: Origin, register: Register) -> None:
    renewed: list[str] = []

    class Rotating(Leases):
        def renew(self, location: Location) -> None:
            renewed.append(location.target)

        def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
            outcome = outcome.answer if isinstance(outcome, RefusedAnswer) else outcome
            return explain_status(outcome) if isinstance(outcome, Answer) else explain_exception(outcome)

    backend = Rotating(origin)
    register(s3=backend)
    for number in range(2):
        origin.add(f"{number}.tar", data(1000, number))
    origin.behave(path="/1.tar", status=403, times=3)
    assert bytes_of([f"s3://bucket/{i}.tar" for i in range(2)], PATIENT) == [data(1000, i) for i in range(2)]
    assert renewed == ["s3://bucket/1.tar"]
    assert backend.given == 1 + 4  # each attempt asks for its request again


def test_another_bucket_proves_nothing(origin: Origin, register: Register) -> None:
    register(s3=Leases(origin))
    origin.add("good.tar", b"good")
    outcome = outcomes(["s3://bucket/good.tar", "s3://another/gone.tar"], PATIENT)[1]
    assert isinstance(outcome[1], ShardNotFound)
    assert [request.path for request in origin.requests].count("/gone.tar") == 1
