"""What is late is asked for twice: the stream stays equal, a slab has one writer, and it costs next to nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.servers import BEFORE_HEAD, Origin, Tls
from tests.transfer.reading import KIB, MIB, bytes_of, data, open_fds, quick, snapshot
from wds_async.retry import RetryPolicy
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters

PART = 256 * KIB
SHARE = 0.03


def _shards(origin: Origin, count: int, parts: int = 16) -> tuple[list[str], list[bytes]]:
    contents = [data(parts * PART, i) for i in range(count)]
    return [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)], contents


def _read(urls: list[str], **overrides: Any) -> tuple[list[bytes], Any]:
    counters = Counters()
    return bytes_of(urls, quick(**overrides), counters), snapshot(counters)


def _each(nth: int) -> Any:
    """Every ``nth`` request, once the reader knows what is usual; only the first one for a part."""
    seen: set[tuple[str, str]] = set()

    def late(request: Any) -> bool:
        part = request.path, str(request.range).partition("-")[2]
        first = part not in seen
        seen.add(part)
        return first and request.number % nth == 7 and request.number > 30

    return late


def _at_a_part(request: Any) -> bool:
    return request.range is not None and int(request.range[6:].split("-")[0]) % (64 * KIB) == 0


@pytest.mark.parametrize(
    "slow",
    [{"stall_after": BEFORE_HEAD}, {"stall_after": 0}, {"stall_after": 100_000}, {"rate_bytes_s": 50_000}],
    ids=["no head", "no body", "half a body", "trickle"],
)
def test_the_slow_tail_is_asked_for_twice(origin: Origin, slow: dict[str, Any]) -> None:
    urls, contents = _shards(origin, 4)
    origin.behave(when=_each(12), **slow)
    got, stats = _read(urls)
    origin.release()
    assert got == contents
    assert stats.hedges >= 2
    assert stats.retries == 0  # nothing had to be given up as stalled
    assert stats.hedged_bytes <= SHARE * stats.bytes
    assert stats.wire_bytes == stats.bytes + stats.hedged_bytes


def test_over_tls(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
    with Origin(tls=tls.server_context()) as origin:
        urls, contents = _shards(origin, 3)
        origin.behave(when=_each(20), stall_after=100_000)
        got, stats = _read(urls)
        origin.release()
    assert got == contents
    assert stats.hedges >= 1
    assert stats.retries == 0


def test_the_first_writes_nothing_more_once_it_is_replaced(origin: Origin) -> None:
    """Its answer goes on with wrong bytes, slowly: none may be seen."""
    urls, contents = _shards(origin, 3, parts=32)
    victim = 20 * PART
    first = {"path": "/2.tar", "when": lambda request: str(request.range).startswith(f"bytes={victim}-")}
    origin.behave(times=1, rate_bytes_s=100_000, corrupt_at=victim + 200_000, **first)
    got, stats = _read(urls)
    assert got == contents
    assert stats.hedges == 1
    assert 0 <= stats.hedged_bytes < 100_000


def _in_the_middle(request: Any) -> bool:
    """What a hedge asks for, or an attempt after one that broke."""
    return request.range is not None and not _at_a_part(request)


def test_a_hedge_that_breaks_is_followed_by_an_ordinary_attempt(origin: Origin) -> None:
    urls, contents = _shards(origin, 4)
    origin.behave(when=_each(50), stall_after=10_000, times=1)
    origin.behave(when=_in_the_middle, cut_after=50_000, times=1)
    got, stats = _read(urls)
    origin.release()
    assert got == contents
    assert (stats.hedges, stats.retries) == (1, 1)


@pytest.mark.parametrize("answer", [{"status": 503}, {"etag": '"another"'}, {"cut_after": BEFORE_HEAD}])
def test_a_hedge_that_is_refused_changes_nothing(origin: Origin, answer: dict[str, Any]) -> None:
    urls, contents = _shards(origin, 4)
    origin.behave(when=_each(50), rate_bytes_s=300_000, times=1)
    origin.behave(when=_in_the_middle, **answer)
    got, stats = _read(urls)
    assert got == contents
    assert stats.hedges >= 1
    assert (stats.retries, stats.bad_shards, stats.hedged_bytes) == (0, 0, 0)


def test_none_where_it_is_turned_off(origin: Origin) -> None:
    urls, contents = _shards(origin, 4)
    origin.behave(when=_each(20), stall_after=100_000, times=1)
    got, stats = _read(urls, hedge_share=0.0, stall_timeout_s=0.5)
    origin.release()
    assert got == contents
    assert (stats.hedges, stats.retries) == (0, 1)


def test_a_server_that_is_slow_altogether_is_not_asked_for_more(origin: Origin) -> None:
    urls, contents = _shards(origin, 4)
    origin.behave(delay_s=0.1, skip=40)
    origin.behave(rate_bytes_s=8e6)
    got, stats = _read(urls)
    assert got == contents
    assert stats.hedged_bytes <= SHARE * stats.bytes
    assert stats.requests - stats.hedges <= 4 * 16 + 20


def test_leaving_while_a_hedge_is_under_way(origin: Origin) -> None:
    urls, contents = _shards(origin, 4)
    bytes_of(urls[:1], quick())
    before = open_fds()
    origin.forget()
    origin.behave(when=lambda request: request.number > 40, stall_after=50_000)
    with open_shards(urls, config=quick()) as reader:
        for content in contents[:2]:
            shard, got = next(reader), bytearray()
            while len(got) < len(content):
                got += shard.read() or b""
            assert got == content
        origin.wait_until(lambda server: any(_in_the_middle(request) for request in server.requests))
    origin.release()
    origin.wait_until(lambda server: server.open_connections == 0)
    assert open_fds() <= before


@pytest.mark.parametrize("seed", range(2))
def test_random_stalls_trickles_and_resets(seed: int) -> None:
    with Origin(seed=seed) as origin:
        urls, contents = _shards(origin, 8, parts=10)
        rng = random.Random(seed)
        late = {"when": lambda request: request.number > 40}
        for _ in range(3):
            origin.behave(probability=0.012, stall_after=rng.randrange(PART), **late)
            origin.behave(probability=0.012, rate_bytes_s=rng.randrange(20_000, 400_000), **late)
            origin.behave(probability=0.012, cut_after=rng.randrange(PART), **late)
        origin.behave(probability=0.012, stall_after=BEFORE_HEAD, **late)
        origin.behave(probability=0.012, status=503, **late)
        patient = RetryPolicy(timeout_s=60.0, base_s=0.001, cap_s=0.02)
        got, stats = _read(urls, retry=patient, stall_timeout_s=0.7, budget_bytes=4 * MIB)
        origin.release()
    assert got == contents
    assert stats.wire_bytes - stats.bytes <= max(SHARE * stats.bytes, stats.hedged_bytes)
    assert stats.hedged_bytes <= SHARE * stats.bytes
