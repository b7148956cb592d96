"""Byte ranges by the engine's way: right bytes of the right object, within memory and limits, and nothing left over."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.servers import BEFORE_HEAD, Nginx, Origin
from tests.servers.fakegcs import FakeGcs, clean_google, fake_gcs
from tests.servers.moto import clean_aws, moto
from tests.transfer.reading import KIB, MIB, data, quick, spans
from tests.transfer.test_retry import Leases, Register, lease, register
from wds_async.background import new_event_loop
from wds_async.config import RetryPolicy
from wds_async.errors import AccessDenied, FetchTimeout, ObjectChanged, ReaderClosed, ShardNotFound, TransferError
from wds_async.storage.options import StorageOptions
from wds_async.transfer.ranges import LARGEST_PART_BYTES, Facts, RangeFetcher, Unranged
from wds_async.transfer.rate_limits import OriginLimits
from wds_async.transfer.traffic import Traffic

__all__ = ["clean_aws", "clean_google", "fake_gcs", "moto", "register"]

T = TypeVar("T")

CONTENT = data(3 * MIB)
PART = 256 * KIB


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("WDS_REWRITE", "GOPEN_REWRITE", "WDS_SECURE", "AIS_ENDPOINT", "USE_AIS_FOR", "HTTP_PROXY", "http_proxy")
    for name in names:
        monkeypatch.delenv(name, raising=False)


def run(program: Callable[[RangeFetcher], Awaitable[T]], memory_bytes: int = 8 * MIB, **more: Any) -> T:
    """Run a program with a fetcher, within a minute, and see that nothing of it is left."""
    traffic, config, limits = more.pop("traffic", Traffic()), more.pop("config", quick()), more.pop("limits", None)

    async def main() -> T:
        fetcher = RangeFetcher(
            config, memory_bytes=memory_bytes, traffic=traffic, limits=limits and OriginLimits(*limits), **more
        )
        try:
            async with asyncio.timeout(60):
                return await program(fetcher)
        finally:
            await fetcher.close()
            assert fetcher.held_bytes == 0
            assert all(one.connections == 0 for one in traffic.origins.values())
            left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task() and not t.done()]
            await asyncio.wait(left, timeout=5) if left else None
            assert not [task for task in left if not task.done()]

    before = files()
    with asyncio.Runner() as runner:
        found = runner.run(main())
    assert files() <= before
    return found


def files() -> int:
    """Open files of this process; the sockets of the scripted server are in it too."""
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else ():
        with contextlib.suppress(OSError):
            found += not os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


async def whole(fetcher: RangeFetcher, url: str, facts: Facts, part_bytes: int = PART) -> bytes:
    """The object, all its parts at once."""
    size = facts.size or 0
    got = bytearray(size)

    async def one(start: int) -> None:
        async with fetcher.part(url, start, start + part_bytes, facts) as part:
            got[start : start + len(part.view)] = part.view

    await asyncio.gather(*(one(start) for start in range(0, size, part_bytes)))
    return bytes(got)


async def read(fetcher: RangeFetcher, url: str, start: int, stop: int, facts: Facts | None = None) -> bytes:
    async with fetcher.part(url, start, stop, facts) as part:
        return bytes(part.view)


async def in_order(fetcher: RangeFetcher, url: str) -> tuple[Facts, bytes]:
    async with fetcher.stream(url) as (facts, pieces):
        got = bytearray()
        async for piece in pieces:
            got += piece
        return facts, bytes(got)


# -- what is read ------------------------------------------------------------------------------------------------


def test_facts_are_one_request_of_a_byte_and_parts_are_those_bytes(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    traffic = Traffic()

    async def program(fetcher: RangeFetcher) -> tuple[Facts, bytes]:
        facts = await fetcher.facts(url)
        assert spans(origin.requests) == [(0, 1)]
        return facts, await whole(fetcher, url, facts)

    facts, got = run(program, traffic=traffic)
    assert got == CONTENT
    assert (facts.size, facts.ranged) == (len(CONTENT), True)
    assert facts.version == f"etag {facts.fields['etag']}"
    assert set(facts.fields) <= {"etag", "last-modified", "content-type"}
    assert sorted(spans(origin.requests)[1:]) == [(at, min(at + PART, 3 * MIB)) for at in range(0, 3 * MIB, PART)]
    assert all(request.headers["if-match"] == facts.fields["etag"] for request in origin.requests[1:])
    counted = traffic.origins[origin.base]
    assert (counted.requests, counted.bytes, counted.errors) == (13, len(CONTENT) + 1, 0)
    assert counted.seconds.count == 13
    assert 0 < counted.seconds.quantile(0.5) < 10


def test_a_small_object_is_one_request(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT[:1000])

    async def program(fetcher: RangeFetcher) -> None:
        async with fetcher.part(url, 0, MIB) as part:
            assert bytes(part.view) == CONTENT[:1000]
            assert part.facts.size == 1000
        assert await read(fetcher, url, 100, 200, part.facts) == CONTENT[100:200]

    run(program)
    assert len(origin.requests) == 2


def test_on_uvloop_too(origin: Origin) -> None:
    pytest.importorskip("uvloop")
    url = origin.add("x.tar", CONTENT)

    async def main() -> bytes:
        fetcher = RangeFetcher(quick(), memory_bytes=8 * MIB, traffic=Traffic())
        try:
            return await whole(fetcher, url, await fetcher.facts(url))
        finally:
            await fetcher.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(main()) == CONTENT


def test_ends_and_empty_objects(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "empty.tar").touch()
    urls = [origin.add("empty.tar", b""), str(tmp_path / "empty.tar")]
    some = origin.add("some.tar", b"0123456789")

    async def program(fetcher: RangeFetcher) -> None:
        for url in urls:
            facts = await fetcher.facts(url)
            assert (facts.size, facts.ranged) == (0, True)
            assert await read(fetcher, url, 0, 100, facts) == b""
            assert await read(fetcher, url, 0, 100) == b""
        facts = await fetcher.facts(some)
        assert await read(fetcher, some, 8, 100, facts) == b"89"
        assert await read(fetcher, some, 10, 20, facts) == b""
        assert await read(fetcher, some, 50, 60) == b""  # behind an end that nobody knew
        for start, stop in ((-1, 5), (5, 5), (0, LARGEST_PART_BYTES + 1)):
            with pytest.raises(ValueError, match="bytes"):
                await read(fetcher, some, start, stop)

    run(program)


def test_files_and_other_file_systems(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    (tmp_path / "x.tar").write_bytes(CONTENT)
    fsspec.filesystem("memory").pipe_file("/ranges/x.tar", CONTENT)
    urls, traffic = [str(tmp_path / "x.tar"), f"file://{tmp_path}/x.tar", "memory://ranges/x.tar"], Traffic()

    async def program(fetcher: RangeFetcher) -> None:
        for url in urls:
            facts = await fetcher.facts(url)
            assert facts.size == len(CONTENT)
            assert await whole(fetcher, url, facts) == CONTENT
            assert await in_order(fetcher, url) == (facts, CONTENT)
        (tmp_path / "x.tar").write_bytes(CONTENT[::-1])
        with pytest.raises(ObjectChanged):
            await read(fetcher, urls[0], 0, PART, await_facts[0])
        facts = await fetcher.facts(urls[0])
        assert await whole(fetcher, urls[0], facts) == CONTENT[::-1]

    await_facts = [run(lambda fetcher: fetcher.facts(urls[0]))]
    run(program, traffic=traffic)
    assert set(traffic.origins) == {"file", "memory://ranges"}
    assert traffic.origins["file"].bytes > 3 * len(CONTENT)


def test_nginx(nginx: Callable[..., Nginx], tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(CONTENT)
    server, plain = nginx(tmp_path), nginx(tmp_path, ignore_ranges=True)

    async def program(fetcher: RangeFetcher) -> None:
        url = server.url("x.tar")
        assert await whole(fetcher, url, await fetcher.facts(url)) == CONTENT
        url = plain.url("x.tar")
        facts = await fetcher.facts(url)
        assert (facts.size, facts.ranged) == (len(CONTENT), False)
        assert await in_order(fetcher, url) == (facts, CONTENT)

    run(program)


def test_google(fake_gcs: FakeGcs, clean_google: pytest.MonkeyPatch) -> None:
    clean_google.setenv("STORAGE_EMULATOR_HOST", fake_gcs.base)
    bucket, traffic = fake_gcs.bucket("bucket"), Traffic()
    fake_gcs.put(bucket, "a/x.tar", CONTENT)
    url = f"gs://{bucket}/a/x.tar"

    async def program(fetcher: RangeFetcher) -> list[str]:
        facts = await fetcher.facts(url)
        assert facts.checksum is not None
        assert await whole(fetcher, url, facts) == CONTENT
        with pytest.raises(ShardNotFound, match=r"none\.tar"):
            await fetcher.facts(f"gs://{bucket}/none.tar")
        return [entry.url async for entry in fetcher.entries(f"gs://{bucket}/a/")]

    assert run(program, traffic=traffic) == [url]
    assert list(traffic.origins) == [f"gs://{bucket}"]
    assert traffic.origins[f"gs://{bucket}"].errors == 1


# -- what cannot be cut ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "size"),
    [({"ignore_range": True}, len(CONTENT)), ({"chunked": True}, None), ({"gzip": True}, None)],
    ids=["whole", "chunked", "gzip"],
)
def test_a_server_without_ranges(origin: Origin, fault: dict[str, Any], size: int | None) -> None:
    url = origin.add("x.tar", CONTENT)
    origin.behave(**fault)

    async def program(fetcher: RangeFetcher) -> None:
        with pytest.raises(Unranged):
            await read(fetcher, url, 0, PART)
        facts = await fetcher.facts(url)
        assert (facts.size, facts.ranged) == (size, False)
        with pytest.raises(Unranged):
            await read(fetcher, url, 0, PART, facts)
        assert await in_order(fetcher, url) == (facts, CONTENT)

    run(program)


def test_a_stream_goes_on_behind_a_fault_and_waits_for_its_reader(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    origin.behave(ignore_range=True, times=3, cut_after=2 * MIB + 5)
    origin.behave(ignore_range=True)
    traffic = Traffic()

    async def program(fetcher: RangeFetcher) -> bytes:
        got = bytearray()
        async with fetcher.stream(url) as (_, pieces):
            async for piece in pieces:
                assert fetcher.held_bytes <= MIB
                got += piece
        return bytes(got)

    assert run(program, MIB, traffic=traffic) == CONTENT
    assert traffic.origins[origin.base].retries >= 1


def test_what_can_be_read_once_is_not_touched_by_a_look(tmp_path: Path) -> None:
    url = f"pipe:echo x >> {tmp_path}/ran; printf abc"

    async def program(fetcher: RangeFetcher) -> None:
        facts = await fetcher.facts(url)
        assert (facts.size, facts.ranged) == (None, False)
        with pytest.raises(Unranged):
            await read(fetcher, url, 0, 10)
        assert not (tmp_path / "ran").exists()
        assert await in_order(fetcher, url) == (facts, b"abc")
        if hasattr(os, "mkfifo"):
            os.mkfifo(tmp_path / "fifo")
            assert not (await fetcher.facts(str(tmp_path / "fifo"))).ranged
            with pytest.raises(Unranged):
                await read(fetcher, str(tmp_path / "fifo"), 0, 10)

    run(program)
    assert (tmp_path / "ran").read_text() == "x\n"


def test_a_stream_that_is_left_is_over(origin: Origin) -> None:
    url = origin.add("x.tar", bytes(32 * MIB))
    origin.behave(ignore_range=True)

    async def program(fetcher: RangeFetcher) -> None:
        async with fetcher.stream(url) as (_, pieces):
            assert len(await anext(pieces)) == MIB
        assert fetcher.held_bytes == 0
        await asyncio.to_thread(origin.wait_until, lambda server: server.in_flight == 0)

    run(program)


# -- faults ------------------------------------------------------------------------------------------------------


def test_errors_of_the_tree_with_place_and_byte(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    origin.behave(path="/denied.tar", status=403)
    traffic = Traffic()

    async def program(fetcher: RangeFetcher) -> None:
        with pytest.raises(ShardNotFound, match=r"/missing.tar at byte 0: the server answered 404"):
            await fetcher.facts(origin.url("missing.tar"))
        with pytest.raises(AccessDenied, match=r"/denied.tar at byte 0"):
            await read(fetcher, origin.url("denied.tar"), 0, 10)
        facts = await fetcher.facts(url)
        origin.behave(path="/x.tar", status=500)
        with pytest.raises(TransferError, match=rf"/x.tar at byte {PART}: .*after 3 attempts"):
            await read(fetcher, url, PART, 2 * PART, facts)
        with pytest.raises(ShardNotFound):
            await in_order(fetcher, origin.url("missing.tar"))

    run(program, traffic=traffic)
    counted = traffic.origins[origin.base]
    assert (counted.errors, counted.retries) == (4, 2)


def test_a_stall_is_seen(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    config = quick(stall_timeout_s=0.2, retry=RetryPolicy(max_attempts=1))
    origin.behave(stall_after=1000)

    async def program(fetcher: RangeFetcher) -> None:
        with pytest.raises(FetchTimeout, match="no byte arrived"):
            await read(fetcher, url, 0, PART)

    run(program, config=config)


@pytest.mark.parametrize("fault", [{"stall_after": BEFORE_HEAD}, {"status": 503}, {"cut_after": BEFORE_HEAD}])
def test_with_a_deadline_a_store_is_asked_once_and_not_at_all_while_it_is_down(
    origin: Origin, fault: dict[str, Any]
) -> None:
    url = origin.add("x.tar", CONTENT)

    async def program(fetcher: RangeFetcher) -> None:
        assert (await fetcher.facts(url, deadline_s=20)).size == len(CONTENT)
        origin.forget()
        origin.behave(**fault)
        for _ in range(20):
            with pytest.raises(TransferError):
                await fetcher.facts(url, deadline_s=0.1)
        assert not fetcher.reachable(url)
        assert len(origin.requests) <= 12  # three, some of them on a kept connection that broke, and probes
        origin.forget()
        while not fetcher.reachable(url):
            with contextlib.suppress(TransferError):  # until it is time for the next probe
                assert (await fetcher.facts(url, deadline_s=20)).size == len(CONTENT)
            await asyncio.sleep(0.01)
        assert len(origin.requests) <= 2

    run(program, config=quick(retry=RetryPolicy()))


def test_a_deadline_that_ends_before_its_turn_is_no_fault_of_the_store(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    origin.behave(path="/x.tar", when=lambda request: request.range != "bytes=0-0", stall_after=1000)

    async def program(fetcher: RangeFetcher) -> None:
        reading = asyncio.create_task(read(fetcher, url, 0, PART))
        await asyncio.to_thread(origin.wait_until, lambda one: len(one.requests) == 1)
        for _ in range(4):
            with pytest.raises(FetchTimeout, match="no answer within"):
                await fetcher.facts(url, deadline_s=0.02)
        assert len(origin.requests) == 1
        assert fetcher.reachable(url)
        origin.release()
        await reading

    run(program, limits=(1, 1))


def test_a_changed_object_is_refused_and_forgotten(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)

    async def program(fetcher: RangeFetcher) -> None:
        former = await fetcher.facts(url)
        origin.add("x.tar", CONTENT[::-1])
        for _ in range(2):
            with pytest.raises(ObjectChanged, match=r"x\.tar"):
                await read(fetcher, url, 0, PART, former)
        assert await read(fetcher, url, 0, PART) == CONTENT[::-1][:PART]  # who does not ask for the former one
        facts = await fetcher.facts(url)
        assert facts.version != former.version
        assert await whole(fetcher, url, facts) == CONTENT[::-1]

    run(program)


def test_one_that_was_replaced_is_given_to_nobody_while_others_still_read_it(tmp_path: Path) -> None:
    url = str(tmp_path / "x.tar")
    Path(url).write_bytes(CONTENT)

    async def program(fetcher: RangeFetcher) -> None:
        async with fetcher.part(url, 0, PART) as former:
            await asyncio.to_thread(Path(url).write_bytes, CONTENT[::-1])
            with pytest.raises(ObjectChanged):
                await read(fetcher, url, PART, 2 * PART)
            assert await read(fetcher, url, 0, PART) == CONTENT[::-1][:PART]
            assert bytes(former.view) == CONTENT[:PART]

    run(program)


def test_thirty_parts_ask_once_for_credentials_and_once_more_when_they_lapse(
    origin: Origin, register: Register
) -> None:
    backend = Leases(origin)
    register(s3=backend)
    origin.add("x.tar", CONTENT)

    async def program(fetcher: RangeFetcher) -> None:
        facts = await fetcher.facts("s3://bucket/x.tar")
        assert await whole(fetcher, "s3://bucket/x.tar", facts, 100 * KIB) == CONTENT
        assert (len(origin.requests), backend.given) == (32, 1)
        origin.behave(status=403, when=lambda request: lease(request) < 2)
        assert await whole(fetcher, "s3://bucket/x.tar", facts, 100 * KIB) == CONTENT
        assert backend.given == 2

    traffic = Traffic()
    run(program, traffic=traffic, config=quick(hedge_share=0))  # a hedge is a request more
    assert (traffic.origins["s3://bucket"].errors, traffic.origins["s3://bucket"].retries) == (0, 0)


def test_a_storm(origin: Origin, tmp_path: Path) -> None:
    """Everything at once: faults of every kind, readers that leave at any moment, little memory, few connections."""
    rng = random.Random(11)
    contents = {f"{number}.tar": data(rng.randrange(1, MIB), number) for number in range(8)}
    urls = {origin.add(name, content): content for name, content in contents.items()}
    (tmp_path / "x.tar").write_bytes(CONTENT)
    urls[str(tmp_path / "x.tar")] = CONTENT
    for fault in (
        {"cut_after": 9000},
        {"status": 503},
        {"cut_after": BEFORE_HEAD},
        {"hang_up": "silent"},
        {"shift": 3},
    ):
        origin.behave(probability=0.05, **fault)
    left = 0

    async def one(fetcher: RangeFetcher, facts: dict[str, Facts]) -> None:
        nonlocal left
        url, content = rng.choice(list(urls.items()))
        start = rng.randrange(len(content))
        stop = start + rng.randrange(1, 200_000)
        reading = asyncio.ensure_future(read(fetcher, url, start, stop, rng.choice([facts[url], None])))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.01)
            reading.cancel()
        try:
            assert await reading == content[start:stop]
        except asyncio.CancelledError:
            left += 1

    async def program(fetcher: RangeFetcher) -> None:
        facts = {url: await fetcher.facts(url) for url in urls}
        for _ in range(5):
            await asyncio.gather(*(one(fetcher, facts) for _ in range(60)))
        assert fetcher.held_bytes == 0

    run(program, MIB, limits=(8, 6), config=quick(retry=RetryPolicy(max_attempts=20, base_s=0.001, cap_s=0.005)))
    assert left > 0


# -- memory, limits, ends ----------------------------------------------------------------------------------------


def test_memory_is_bounded_and_lent_in_turn(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)

    async def program(fetcher: RangeFetcher) -> list[int]:
        facts = await fetcher.facts(url)
        order: list[int] = []
        most = 0

        async def one(number: int) -> None:
            nonlocal most
            async with fetcher.part(url, number * PART, (number + 1) * PART, facts) as part:
                most = max(most, fetcher.held_bytes)
                order.append(number)
                assert bytes(part.view) == CONTENT[number * PART : (number + 1) * PART]

        async with fetcher.part(url, 0, PART, facts), fetcher.part(url, 0, PART, facts):
            waiting = [asyncio.create_task(one(number)) for number in range(6)]
            await asyncio.to_thread(origin.wait_until, lambda server: len(server.requests) == 3)
            assert fetcher.held_bytes == 2 * PART
            assert not order
            waiting.pop(3).cancel()
        await asyncio.gather(*waiting)
        assert most <= 2 * PART
        return order

    order = run(program, 2 * PART)
    assert sorted(order) == [0, 1, 2, 4, 5]


def test_a_view_that_a_thread_still_reads_is_nobody_elses(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    out, into = os.pipe()

    async def program(fetcher: RangeFetcher) -> bytes:
        facts = await fetcher.facts(url)
        async with fetcher.part(url, 0, PART, facts) as part:
            writing = asyncio.get_running_loop().run_in_executor(None, os.write, into, part.view)
            got = await asyncio.to_thread(os.read, out, 1)  # it has begun, and a pipe does not take it all
        assert fetcher.held_bytes == PART
        for start in range(PART, 4 * PART, PART):
            assert await read(fetcher, url, start, start + PART, facts) == CONTENT[start : start + PART]
        while len(got) < PART:
            got += await asyncio.to_thread(os.read, out, PART)
        assert await writing == PART
        await read(fetcher, url, 0, PART, facts)
        assert fetcher.held_bytes == 0
        return got

    try:
        assert run(program, 2 * PART) == CONTENT[:PART]
    finally:
        os.close(out)
        os.close(into)


def test_no_more_connections_than_allowed_and_each_origin_in_turn(origin: Origin) -> None:
    with Origin({"/y.tar": CONTENT}, latency_s=0.005) as other:
        origin.latency_s = 0.005
        urls = [origin.add("x.tar", CONTENT), other.url("y.tar")]

        async def program(fetcher: RangeFetcher) -> None:
            facts = [await fetcher.facts(url) for url in urls]
            origin.forget()
            other.forget()
            got = await asyncio.gather(*(whole(fetcher, *each, 64 * KIB) for each in zip(urls, facts, strict=True)))
            assert got == [CONTENT, CONTENT]

        run(program, limits=(6, 4), config=quick(hedge_share=0))  # a hedge is a second request for one that is counted
        assert 2 <= origin.most_in_flight <= 4
        assert 2 <= other.most_in_flight <= 4


def test_an_origin_that_hangs_leaves_room_for_others(origin: Origin) -> None:
    with Origin({"/y.tar": CONTENT}) as other:
        url, good = origin.add("x.tar", CONTENT), other.url("y.tar")

        async def program(fetcher: RangeFetcher) -> None:
            facts = await fetcher.facts(url)
            origin.behave(stall_after=BEFORE_HEAD)
            stuck = [asyncio.create_task(read(fetcher, url, at, at + PART, facts)) for at in range(0, 3 * MIB, PART)]
            await asyncio.to_thread(origin.wait_until, lambda server: server.in_flight >= 7)
            assert await whole(fetcher, good, await fetcher.facts(good)) == CONTENT
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)

        run(program, limits=(8, 8), config=quick(stall_timeout_s=30, retry=RetryPolicy()))
        origin.release()


def test_cancelled_parts_leave_nothing(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("x.tar", CONTENT)
    (tmp_path / "x.tar").write_bytes(CONTENT)

    async def program(fetcher: RangeFetcher) -> None:
        for each in (url, str(tmp_path / "x.tar")):
            facts = await fetcher.facts(each)
            origin.behave(stall_after=1000)
            tasks = [asyncio.create_task(read(fetcher, each, at, at + PART, facts)) for at in range(0, 3 * MIB, PART)]
            if each == url:
                await asyncio.to_thread(origin.wait_until, lambda server: server.in_flight > 0)
            else:
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert fetcher.held_bytes == 0
            origin.forget()
            assert await whole(fetcher, each, facts) == CONTENT

    run(program)
    origin.release()


def test_close_ends_what_is_under_way(origin: Origin) -> None:
    url = origin.add("x.tar", CONTENT)
    origin.behave(stall_after=1000)

    async def program(fetcher: RangeFetcher) -> None:
        reads = [asyncio.create_task(read(fetcher, url, 0, PART)) for _ in range(20)]  # some wait for memory
        await asyncio.to_thread(origin.wait_until, lambda server: server.in_flight > 0)
        await fetcher.close()
        found = await asyncio.gather(*reads, return_exceptions=True)
        assert {type(one) for one in found} == {ReaderClosed}
        for ask in (fetcher.facts(url), read(fetcher, url, 0, 1), in_order(fetcher, url)):
            with pytest.raises(ReaderClosed):
                await ask

    run(program, 2 * PART)
    origin.release()


def test_many_objects_leave_nothing(origin: Origin, tmp_path: Path) -> None:
    """What a million objects would leave, seen at some thousands: no file, nothing by name, no memory that grows."""
    (tmp_path / "one").write_bytes(b"x" * 1000)
    for number in range(300):
        os.link(tmp_path / "one", tmp_path / f"{number}.tar")
    origin.add("one", b"x" * 1000)
    origin.behave(when=lambda request: origin.files.setdefault(request.path, b"x" * 1000) is None)

    async def some(fetcher: RangeFetcher, first: int, last: int) -> None:
        for number in range(first, last):
            url = str(tmp_path / f"{number % 300}.tar") if number % 4 == 0 else origin.url(f"{number}.tar?s={number}")
            await read(fetcher, url, 0, 1000)
        origin.files.clear()
        origin.forget()
        origin.behave(when=lambda request: origin.files.setdefault(request.path, b"x" * 1000) is None)
        gc.collect()

    async def program(fetcher: RangeFetcher) -> int:
        tracemalloc.start()
        try:
            await some(fetcher, 0, 400)  # a few hundred are remembered
            before = tracemalloc.get_traced_memory()[0]
            await some(fetcher, 400, 900)
            return tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()

    grown = run(program)
    assert grown < 50_000, f"{grown / 500:.0f} bytes an object"


def test_folders(origin: Origin, tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).write_bytes(b"xyz")
    page = b'<html><a href="a.tar">a</a> <a href="b/">b</a></html>'
    origin.behave(path="/d/", status=503, times=2)
    origin.behave(path="/d/", status=200, body=page, headers={"content-type": "text/html"})

    async def program(fetcher: RangeFetcher) -> None:
        found = [(entry.url, entry.size) async for entry in fetcher.entries(f"{tmp_path}/")]
        assert found == [(f"{tmp_path}/a.tar", 3), (f"{tmp_path}/b.tar", 3)]
        assert [entry.url async for entry in fetcher.entries(origin.url("d/"))] == [
            origin.url("d/a.tar"),
            origin.url("d/b/"),
        ]
        with pytest.raises(ShardNotFound, match="cannot be listed"):
            [entry async for entry in fetcher.entries(f"{tmp_path}/none/")]

    run(program)


def test_rewritten_as_everywhere_and_with_options(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    origin.add("b/x.tar", CONTENT)
    monkeypatch.setenv("WDS_REWRITE", f"gs://={origin.base}/")
    options = StorageOptions({"http": {"headers": {"X-Mine": "yes"}}})

    async def program(fetcher: RangeFetcher) -> bytes:
        return await read(fetcher, "gs://b/x.tar", 0, 100)

    assert run(program, options=options) == CONTENT[:100]
    assert origin.requests[0].headers["x-mine"] == "yes"


def test_a_guard_is_asked(origin: Origin) -> None:
    class Nowhere:
        def why_not(self, host: str, address: str) -> str:
            return f"{address} is none of ours"

        def leads(self, start: str, target: str) -> None:
            raise AssertionError("nothing was answered")

    url = origin.add("x.tar", CONTENT)

    async def program(fetcher: RangeFetcher) -> None:
        with pytest.raises(AccessDenied, match="none of ours"):
            await fetcher.facts(url)

    run(program, guard=Nowhere())
    assert not origin.requests
