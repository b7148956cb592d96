"""Our own service as the loader sees it: over TCP, over its Unix socket, by its files; and when it is gone."""

# ruff: noqa: F811 - fixtures that are imported

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.ais import no_settings  # noqa: F401 - fixtures
from tests.servers.moto import moto  # noqa: F401 - a fixture
from tests.servers.origin import Origin
from tests.servers.shards import make_tar
from tests.service.serving import Inside, Process, ask
from tests.storage.locations import location_of
from tests.transfer.reading import MIB, bytes_of, data, open_fds, outcomes, quick, snapshot
from wds_async.errors import ShardNotFound, TransferError, TruncatedShard
from wds_async.shardcache.cache import DiskCache
from wds_async.storage.ais.backend import AisBackend
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Board

BODIES = {f"x-{i}.tar": data(700_000 + i, seed=i) for i in range(6)}
URLS = [f"ais://b/{name}" for name in BODIES]


@pytest.fixture
def origin() -> Iterator[Origin]:
    with Origin({f"/d/{name}": body for name, body in BODIES.items()}) as found:
        yield found


@pytest.fixture
def service(origin: Origin, no_settings: None, tmp_path: Path) -> Iterator[Inside]:
    buckets = {"b": origin.url("d/")}
    with Inside(folder=tmp_path / "cache", socket=tmp_path / "s", buckets=buckets, private=True) as found:
        yield found


def at(service: Inside, monkeypatch: pytest.MonkeyPatch, *, tcp: bool = False) -> None:
    """Point ``AIS_ENDPOINT`` to the service."""
    monkeypatch.setenv("AIS_ENDPOINT", service.base if tcp else f"unix:{service.config.socket}")


def read(urls: list[str], **config: Any) -> Any:
    """What was counted while ``urls`` were read, which all came as they are."""
    counters = Board().counters()
    got = bytes_of(urls, quick(**config), counters)
    assert got == [BODIES[url.rpartition("/")[2]] for url in urls]
    return snapshot(counters)


def answers(service: Inside) -> dict[str, int]:
    """How many answers there were, by the label of the way."""
    found: dict[str, int] = {}
    for (api, _), one in service.context.meters._answers.items():
        found[api] = found.get(api, 0) + one.count
    return found


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("direct", [True, False])
def test_every_way_gives_the_same_bytes(
    service: Inside, origin: Origin, monkeypatch: pytest.MonkeyPatch, tcp: bool, direct: bool
) -> None:
    at(service, monkeypatch, tcp=tcp)
    read(URLS, direct=direct)  # cold
    service.stored()
    asked = len(origin.requests)
    again = read(URLS, direct=direct)  # warm: from the disk, or by descriptors
    assert len(origin.requests) == asked
    assert (again.requests == 0) == (direct and not tcp)
    assert ("handed" in answers(service)) == (direct and not tcp)


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("direct", [True, False])
def test_spans_by_every_way(service: Inside, monkeypatch: pytest.MonkeyPatch, tcp: bool, direct: bool) -> None:
    at(service, monkeypatch, tcp=tcp)
    body = BODIES["x-0.tar"]
    asked = [(5, 6), (1000, None), (300_000, 400_000), (len(body), None), (len(body) - 1, len(body) + 1)]
    shards: list[dict[str, Any]] = [{"url": URLS[0], "start": start, "stop": stop} for start, stop in asked]
    with open_shards(shards, config=quick(direct=direct)) as reader:
        first = next(reader)
        assert first.read() == body[5:6]
        version = first.version
    for _ in ("cold", "warm"):
        assert bytes_of([{**shard, "version": version} for shard in shards], quick(direct=direct)) == [
            body[start:stop] for start, stop in asked
        ]
        ((_, error),) = outcomes([{"url": URLS[0], "start": len(body) + 1}], quick(direct=direct))
        assert isinstance(error, TruncatedShard)
        read(URLS[:1], direct=direct)
        service.stored()
    assert ("handed" in answers(service)) == (direct and not tcp)


@pytest.mark.parametrize("path", ["/v1/objects/b/x-0.tar?provider=ais", "/ais/b/x-0.tar"])
@pytest.mark.parametrize(
    ("method", "span"),
    [("HEAD", ""), ("GET", ""), ("GET", "bytes=0-99"), ("GET", "bytes=699990-"), ("GET", "bytes=5-4000000")],
)
def test_cold_and_warm_answers_say_the_same(service: Inside, path: str, span: str, method: str) -> None:
    asked = {"Range": span} if span else {}
    cold, again = ask(service.base + path, method, **asked), ask(service.base + path)
    service.stored()
    assert again[2] == BODIES["x-0.tar"]
    warm = ask(service.base + path, method, **asked)
    for _, fields, _ in (cold, warm):
        del fields["date"]
        fields.pop("ais-present", None)  # whether all of it is on the disk
    assert warm == cold


def test_files_are_handed_for_whole_objects_only(service: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    at(service, monkeypatch)
    read(URLS[:1])
    service.stored()
    counted = read(URLS[:2])
    assert answers(service)["handed"] == 1
    assert counted.requests >= 1  # the other one's ranges
    assert counted.wire_bytes >= sum(map(len, (BODIES["x-0.tar"], BODIES["x-1.tar"])))


def test_what_is_evicted_while_it_is_read_is_read_to_its_end(service: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    at(service, monkeypatch)
    read(URLS[:1])
    service.stored()
    with open_shards(URLS[:1], config=quick()) as shards:
        [shard] = list_first(shards)
        got = bytes(shard.read())

        async def evict() -> None:
            keys = [entry.key for entry in service.context.cache._open_entries._entries.values()]
            assert [service.context.cache.remove(key) for key in keys] == [True]

        service.call(evict())
        while (piece := shard.read()) is not None:
            got += piece
    assert got == BODIES["x-0.tar"]


def list_first(shards: Any) -> list[Any]:
    return [next(shards)]


def test_an_object_that_was_replaced_is_not_mixed(
    service: Inside, origin: Origin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at(service, monkeypatch)
    read(URLS[:1])
    service.stored()
    other = data(700_000, seed=99)
    origin.add("d/x-0.tar", other)
    assert bytes_of(URLS[:1], quick()) == [BODIES["x-0.tar"]]  # fresh for five minutes, as its configuration says
    with Inside(folder="", socket=tmp_path / "s2", buckets={"b": origin.url("d/")}, private=True) as second:
        at(second, monkeypatch)
        assert bytes_of(URLS[:1], quick()) == [other]


def test_hundreds_of_shards_leave_no_descriptor(service: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    at(service, monkeypatch)
    read(URLS)
    service.stored()
    gc.collect()
    before, most = open_fds(), 0
    with open_shards(URLS * 100, config=quick(part_bytes=64 * 1024, budget_bytes=2 * MIB)) as shards:
        for shard in shards:
            shard.read()  # and leave the rest of it
            most = max(most, open_fds())
    gc.collect()
    deadline = time.monotonic() + 10
    while open_fds() > before + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_fds() <= before + 2
    assert most <= before + 150
    assert answers(service)["handed"] >= 600


@pytest.mark.parametrize("verify", ["always", "never"])
def test_files_pass_through_a_cache_of_ones_own_and_are_verified(
    service: Inside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verify: str
) -> None:
    at(service, monkeypatch)
    read(URLS)
    service.stored()
    own = DiskCache(tmp_path / "own")
    for _ in range(2):
        with open_shards(URLS, config=quick(verify=verify), cache=own) as shards:
            got = [b"".join(bytes(piece) for piece in iter(shard.read, None)) for shard in shards]
        assert got == list(BODIES.values())
    assert answers(service)["handed"] == len(URLS)  # and the second time nobody was asked
    assert all(own.find(url) is not None for url in URLS)


def test_a_token_is_needed_for_files_too(
    origin: Origin, no_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens").write_text("secret-token team\n")
    settings: dict[str, Any] = {"buckets": {"b": origin.url("d/")}, "private": True, "tokens": tmp_path / "tokens"}
    with Inside(folder=tmp_path / "cache", socket=tmp_path / "s", **settings) as service:
        at(service, monkeypatch)
        monkeypatch.setenv("AIS_AUTHN_TOKEN", "secret-token")
        read(URLS[:1])
        service.stored()
        read(URLS[:1])
        assert answers(service)["handed"] == 1
        monkeypatch.setenv("AIS_AUTHN_TOKEN", "another-token")
        [(got, error)] = outcomes(URLS[:1], quick())
        assert got == b""
        assert "401" in str(error)
        assert answers(service)["handed"] == 1


def test_what_is_missing(service: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    at(service, monkeypatch)
    [(_, error)] = outcomes(["ais://b/none.tar"], quick())
    assert isinstance(error, ShardNotFound)
    assert "unix:" in str(error)


def test_nobody_listens(no_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIS_ENDPOINT", f"unix:{tmp_path}/none.sock")
    [(_, error)] = outcomes(["ais://b/x.tar"], quick())
    assert isinstance(error, TransferError)
    assert f"no connection to the service at unix:{tmp_path}/none.sock: nothing listens there" in str(error)
    assert f"wds-async serve --socket {tmp_path}/none.sock" in str(error)


@pytest.mark.parametrize("tcp", [False, True])
def test_it_is_told_who_reads_and_what_comes(
    service: Inside, origin: Origin, monkeypatch: pytest.MonkeyPatch, tcp: bool
) -> None:
    at(service, monkeypatch, tcp=tcp)
    seen: list[Any] = []
    with open_shards(URLS * 3, config=quick(part_bytes=64 * 1024, budget_bytes=1 * MIB)) as shards:
        stream = next(shards)
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            seen = service.context.plans.as_list()
            stream.read()
            time.sleep(0.005)
        assert [plan["client"].split(":")[1].split(".")[0] for plan in seen] == [str(os.getpid())]
        assert seen[0]["shards"] >= 3
    deadline = time.monotonic() + 10
    while service.context.plans.as_list() and time.monotonic() < deadline:  # taken back when the loader closes
        time.sleep(0.005)
    assert service.context.plans.as_list() == []


def test_what_aiohttp_asks_goes_over_the_socket(service: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    at(service, monkeypatch)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # is not asked for a socket, whatever its URLs are
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")  # where the service's origin is

    async def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    async def described() -> Any:
        backend = AisBackend(call)
        try:
            return await backend.describe(location_of("ais://b/x-0.tar")), await backend.remote_checksum(
                location_of("ais://b/x-0.tar")
            )
        finally:
            await backend.close()

    found, _ = asyncio.run(described())
    assert (found.store, found.endpoint) == ("wds-async's service", f"unix:{service.config.socket}")
    assert found.direct


_TRAIN = """\
import sys, torch, wds_async as wds
sys.path.insert(0, {root!r})
count = {count}
def rows():
    data = wds.WebDataset([f"ais://b/x-{{i}}.tar" for i in range(count)], shardshuffle=False, nodesplitter=None)
    loader = wds.WebLoader(data.decode().map(lambda s: s["__key__"]), batch_size=None, num_workers=2,
                           multiprocessing_context={context!r})
    return sorted(loader)
first = list(wds.WebDataset("ais://b/x-0.tar", shardshuffle=False))  # an engine of the parent, before the fork
for epoch in range(2):
    found = rows()
    print(len(found), len(set(found)))
"""


def test_forked_workers_read_by_the_socket(no_settings: None, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    files = {f"/d/x-{i}.tar": make_tar([(f"{i}-{k}.txt", b"x" * 3000) for k in range(50)]) for i in range(6)}
    with (
        Origin(files) as origin,
        Inside(folder=tmp_path / "c", socket=tmp_path / "s", buckets={"b": origin.url("d/")}, private=True) as service,
    ):
        script = textwrap.dedent(_TRAIN).format(root=str(Path(__file__).parents[3]), count=6, context="fork")
        environ = {**os.environ, "AIS_ENDPOINT": f"unix:{tmp_path}/s", "PYTHONPATH": str(Path(__file__).parents[3])}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env=environ,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (done.stdout.split("\n")[:2], done.returncode) == (["300 300"] * 2, 0), done.stderr
        assert answers(service)["handed"] >= 6


def say(endpoint: str, method: str, path: str, body: bytes = b"") -> None:
    with contextlib.closing(http.client.HTTPConnection(endpoint.removeprefix("http://"))) as connection:
        connection.request(method, path, body)
        assert connection.getresponse().status == 200


@pytest.mark.parametrize("tcp", [False, True])
def test_a_service_that_is_killed_in_the_middle_of_an_epoch(
    moto: str, no_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tcp: bool
) -> None:
    """With ``WDS_AIS_FALLBACK=1`` the epoch goes on from the bucket, and not after minutes."""
    keys = {"ENDPOINT_URL": moto, "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "DEFAULT_REGION": "us-east-1"}
    for name, value in keys.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    bucket = f"killed-service-{tcp}".lower()
    say(moto, "PUT", f"/{bucket}")
    for name, body in BODIES.items():
        say(moto, "PUT", f"/{bucket}/{name}", body)
    with Process(tmp_path / "p", folder=tmp_path / "cache", socket=tmp_path / "s") as service:
        monkeypatch.setenv("AIS_ENDPOINT", service.base if tcp else f"unix:{tmp_path}/s")
        monkeypatch.setenv("USE_AIS_FOR", "s3")
        monkeypatch.setenv("WDS_AIS_FALLBACK", "1")
        urls = [f"s3://{bucket}/{name}" for name in BODIES] * 3
        got, began = [], 0.0
        config = quick(part_bytes=64 * 1024, budget_bytes=1 * MIB, retry=type(quick().retry)())
        with open_shards(urls, config=config) as shards:
            for number, shard in enumerate(shards):
                pieces = bytearray()
                while (piece := shard.read()) is not None:
                    pieces += piece
                    if number == 4 and not began:
                        service.signal(signal.SIGKILL)
                        service.wait()
                        began = time.monotonic()
                got.append(bytes(pieces))
        assert got == [BODIES[url.rpartition("/")[2]] for url in urls]
