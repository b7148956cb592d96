"""What is late is asked for twice: the stream stays equal, a slab has one writer, and it costs next to nothing."""

from __future__ import annotations

import math
import multiprocessing
import random
import time
from typing import Any

import pytest

from tests.servers import BEFORE_HEAD, Origin, Tls
from tests.transfer.reading import KIB, MIB, bytes_of, data, open_fds, quick, snapshot
from wds_async.config import RetryPolicy, TransferConfig
from wds_async.errors import WdsError
from wds_async.transfer import connection, part_request
from wds_async.transfer.hedging import OriginHistory, history_of
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
    assert stats.wire_bytes == stats.bytes + stats.hedged_bytes


def test_late_parts_of_spans_are_asked_for_twice(origin: Origin) -> None:
    urls, contents = _shards(origin, 4)
    origin.behave(when=_each(12), stall_after=100_000)
    start, stop = 100_001, 15 * PART + 3
    counters = Counters()
    got = bytes_of([{"url": url, "start": start, "stop": stop} for url in urls], quick(), counters)
    origin.release()
    assert got == [content[start:stop] for content in contents]
    stats = snapshot(counters)
    assert stats.hedges >= 2
    assert stats.retries == 0


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


@pytest.mark.parametrize("silent", [{"stall_after": BEFORE_HEAD}, {"stall_after": 100_000}], ids=["head", "body"])
def test_silence_does_not_wait_for_the_stall_timeout_from_the_first_byte_on(
    origin: Origin, silent: dict[str, Any]
) -> None:
    """Every 20th part, the very first one among them, in the first and in the second epoch of a small data set."""
    contents = [data(15_000_000, i) for i in range(4)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    asked: set[tuple[str, str]] = set()

    def late(request: Any) -> bool:  # never the second request for a part: with both silent, the stall timeout is next
        part = request.path, str(request.range).partition("-")[2]
        first = part not in asked
        asked.add(part)
        return first and len(asked) % 20 == 1

    origin.behave(when=late, **silent)
    for _ in range(2):
        asked.clear()
        counters = Counters()
        assert bytes_of(urls, TransferConfig(), counters) == contents
        stats = snapshot(counters)
        assert stats.hedges >= 1
        assert stats.retries == 0
    origin.release()


def test_what_is_learned_of_an_origin_outlives_the_reader(origin: Origin) -> None:
    place = connection.Origin.of(origin.base)
    urls, _ = _shards(origin, 2)
    _read(urls)
    history = history_of(place)
    typical = history.typical
    assert typical.whole_s(PART) < math.inf
    _read(urls)
    assert history_of(place) is history
    other = history_of(connection.Origin.of("http://127.0.0.1:1"))
    assert other is not history
    assert other.typical.whole_s(PART) == math.inf


def _starts_anew(place: connection.Origin) -> None:
    assert history_of(place).typical == OriginHistory().typical
    assert history_of(place).tokens == OriginHistory().tokens


def test_a_forked_child_starts_anew() -> None:
    place = connection.Origin.of("http://127.0.0.1:2")
    history_of(place).add(PART, 0.1, 0.1, 0.1)
    history_of(place).tokens = 0.0
    child = multiprocessing.get_context("fork").Process(target=_starts_anew, args=(place,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert history_of(place).tokens == 0.0


def test_the_number_of_origins_is_bounded() -> None:
    first = history_of(connection.Origin.of("http://h:1"))
    for port in range(2, 1000):
        history_of(connection.Origin.of(f"http://h:{port}"))
    assert history_of(connection.Origin.of("http://h:999")) is history_of(connection.Origin.of("http://h:999"))
    assert history_of(connection.Origin.of("http://h:1")) is not first


def test_a_store_that_falls_silent_is_asked_for_little_more(origin: Origin) -> None:
    """Nothing is answered any more: hedges end, each part waits for its own timeout."""
    urls, contents = _shards(origin, 4)
    assert bytes_of(urls, quick()) == contents
    origin.forget()
    origin.behave(stall_after=BEFORE_HEAD, skip=20)
    counters, retry = Counters(), RetryPolicy(timeout_s=1.5, base_s=0.001, cap_s=0.02)
    with pytest.raises(WdsError):
        bytes_of(urls, quick(stall_timeout_s=0.5, retry=retry), counters)
    origin.release()
    assert 1 <= snapshot(counters).hedges <= 20


def test_the_first_writes_nothing_more_once_it_is_replaced(origin: Origin) -> None:
    """Its answer goes on with wrong bytes, slowly: none may be seen."""
    urls, contents = _shards(origin, 3, parts=32)
    victim = 20 * PART
    first = {"path": "/2.tar", "when": lambda request: str(request.range).startswith(f"bytes={victim}-")}
    origin.behave(times=1, rate_bytes_s=100_000, corrupt_at=victim + 200_000, **first)
    got, stats = _read(urls)
    assert got == contents
    assert stats.hedges >= 1


def _in_the_middle(request: Any) -> bool:
    """What a hedge asks for, or an attempt after one that broke."""
    return request.range is not None and not _at_a_part(request)


def test_a_hedge_that_breaks_is_followed_by_an_ordinary_attempt(origin: Origin) -> None:
    urls, contents = _shards(origin, 4)
    for _ in range(5):  # beside busy processes another hedge may come before the one that is meant
        origin.forget()
        origin.behave(when=_each(50), stall_after=10_000, times=1)
        origin.behave(when=_in_the_middle, cut_after=50_000, times=1)
        got, _ = _read(urls)
        assert got == contents
        if broken := [one.request for one in origin.sent if one.behaviour.cut_after == 50_000]:
            break
    origin.release()
    part = str(broken[0].range).partition("-")[2]
    assert sum(str(one.range).endswith(f"-{part}") and one.path == broken[0].path for one in origin.requests) >= 3


@pytest.mark.parametrize("answer", [{"status": 503}, {"etag": '"another"'}, {"cut_after": BEFORE_HEAD}])
def test_a_hedge_that_is_refused_changes_nothing(origin: Origin, answer: dict[str, Any]) -> None:
    urls, contents = _shards(origin, 4)
    origin.behave(when=_each(50), rate_bytes_s=300_000, times=1)
    origin.behave(when=_in_the_middle, **answer)
    got, stats = _read(urls)
    assert got == contents
    assert stats.hedges >= 1
    assert (stats.retries, stats.bad_shards) == (0, 0)


def test_none_where_it_is_turned_off(origin: Origin) -> None:
    urls, contents = _shards(origin, 4)
    origin.behave(when=_each(20), stall_after=100_000, times=1)
    got, stats = _read(urls, hedge_share=0.0, stall_timeout_s=0.5)
    origin.release()
    assert got == contents
    assert stats.hedges == 0
    assert stats.retries >= 1  # of the one that stalled, and of what a busy machine takes for it


def test_a_server_that_is_slow_altogether_is_not_asked_for_more(origin: Origin) -> None:
    urls, contents = _shards(origin, 4)
    origin.behave(delay_s=0.1, skip=40)
    origin.behave(rate_bytes_s=8e6)
    got, stats = _read(urls)
    assert got == contents
    assert stats.hedges <= 4 * 16 / 4
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
    assert stats.hedged_bytes <= OriginHistory().tokens + SHARE * stats.bytes


def _asked_for(path: str, start: int) -> Any:
    return {"path": path, "when": lambda request: str(request.range).startswith(f"bytes={start}-"), "times": 1}


_STALL_S = 1.5
"""Longer than a busy machine delays an answer, and shorter than a body is left unread (2 s)."""


def _held_up(origin: Origin) -> tuple[list[str], list[bytes], int]:
    """Four shards, and the head that stalls, with all memory full behind it. What is more than 8 MiB behind it can be
    requested ahead of its memory only, because a fault came before."""
    urls, contents = _shards(origin, 4, parts=32)
    head = 10 * PART
    origin.behave(stall_after=0, **_asked_for("/0.tar", 20 * PART))
    origin.behave(stall_after=0, **_asked_for("/2.tar", head))
    return urls, contents, head


def test_a_line_that_a_fault_holds_up_is_asked_for_ahead_of_its_memory(origin: Origin) -> None:
    """Connections that end while their parts wait for memory count as no faults."""
    urls, contents, head = _held_up(origin)
    origin.behave(cut_after=1000, **_asked_for("/3.tar", 11 * PART))
    origin.behave(cut_after=0, **_asked_for("/3.tar", 12 * PART))
    got, stats = _read(urls, hedge_share=0.0, stall_timeout_s=_STALL_S)
    origin.release()
    assert got == contents
    again = max(one.number for one in origin.requests if one.path == "/2.tar" and _start_of(one) == head)
    ahead = [one for one in origin.requests if one.path == "/3.tar" and _start_of(one) >= 11 * PART]
    assert min(one.number for one in ahead) < again
    assert stats.window_peak_bytes <= 8 * MIB
    assert stats.retries == 2  # those of the two that stalled


def test_the_wait_for_memory_is_no_time_without_an_answer(origin: Origin) -> None:
    """The consumer pauses for longer than a part may go without a byte, while parts wait for its memory; the first
    attempt after that fails."""
    urls, contents, head = _held_up(origin)
    origin.behave(cut_after=0, **_asked_for("/3.tar", 11 * PART))
    origin.behave(status=503, **_asked_for("/3.tar", 11 * PART))
    patient = RetryPolicy(timeout_s=3.5, base_s=0.001, cap_s=0.02)
    got = bytearray()
    with open_shards(urls, config=quick(hedge_share=0.0, stall_timeout_s=_STALL_S, retry=patient)) as reader:
        for shard in reader:
            while (piece := shard.read()) is not None:
                if shard.number == 2 and head <= len(got) - 2 * 32 * PART < head + PART:
                    time.sleep(2.5)
                got += piece
    origin.release()
    assert got == b"".join(contents)
    assert [one.request.path for one in origin.sent if one.behaviour.status == 503] == ["/3.tar"]


def test_a_connection_is_not_left_unread_for_long(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers so many requests at once may have no place for the one that memory waits for."""
    monkeypatch.setattr(part_request, "_UNREAD_S", 0.2)
    urls, contents, _ = _held_up(origin)
    got, stats = _read(urls, hedge_share=0.0, stall_timeout_s=_STALL_S)
    origin.release()
    assert got == contents
    assert sum(one.path == "/3.tar" and str(one.range).endswith(f"-{12 * PART - 1}") for one in origin.requests) == 2
    assert stats.retries == 2


def _start_of(request: Any) -> int:
    return int(str(request.range).removeprefix("bytes=").partition("-")[0])


@pytest.mark.parametrize("way", ["tls", "streamed"])
def test_what_waits_for_memory_comes_whole(tls: Tls, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Over TLS, and where an answer shows that its shard can be read in order only."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
    with Origin(tls=tls.server_context() if way == "tls" else None) as origin:
        urls, contents, _ = _held_up(origin)
        if way == "streamed":
            origin.behave(path="/3.tar", ignore_range=True)
        got, stats = _read(urls, hedge_share=0.0, stall_timeout_s=_STALL_S)
        origin.release()
    assert got == contents
    assert stats.window_peak_bytes <= 8 * MIB


def test_a_part_without_memory_is_hedged(origin: Origin) -> None:
    """The head of the line is a stream, which is not hedged, and stalls; a request that is more than 8 MiB behind it
    stays without an answer."""
    urls, contents = _shards(origin, 5, parts=32)
    in_order = {"path": "/2.tar", "when": lambda request: request.range is None, "times": 1}
    origin.behave(stall_after=20 * PART, **in_order)
    origin.behave(path="/2.tar", ignore_range=True)
    origin.behave(stall_after=BEFORE_HEAD, **_asked_for("/4.tar", PART))
    got, stats = _read(urls, stall_timeout_s=_STALL_S)
    origin.release()
    assert got == contents
    again = max(one.number for one in origin.requests if one.path == "/2.tar")
    waits = [one.number for one in origin.requests if one.path == "/4.tar" and _start_of(one) == PART]
    assert len(waits) == 2
    assert max(waits) < again
    assert stats.window_peak_bytes <= 8 * MIB
