"""Shards whose servers tell no length: a body that ends too early is tried again, and never gives half a sample."""

from __future__ import annotations

import contextlib
import gzip
import http.client
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import wds_async as wds
from tests.servers import Origin, Tls, make_shard
from tests.servers.quiet import QuietServer
from tests.service.serving import Inside, ask
from tests.transfer.reading import QUICK, data
from wds_async.errors import TransferError, TruncatedShard
from wds_async.tariterators import group_by_keys, tar_file_expander, url_opener

COUNT = 6
MEMBER = 1024  # bytes of one: a header and a block
CONTENT = COUNT * 2 * MEMBER
GOOD = make_shard({f"{i:03}": {"cls": b"%d" % i, "txt": b"x%d" % i} for i in range(COUNT)})
CUTS = range(MEMBER, CONTENT + 1, MEMBER)
ENDLESS = {"ignore_range": True, "no_length": True}


@pytest.fixture(params=["http", "https"])
def server(request: pytest.FixtureRequest, tls: Tls) -> Iterator[Origin]:
    with Origin(tls=tls.server_context() if request.param == "https" else None) as running:
        yield running


def dataset(urls: Any, tls: Tls | None = None, **options: Any) -> wds.WebDataset:
    """Read by aiohttp, unless ``direct``: the engine itself ends up there after more requests."""
    given: dict[str, Any] = {"storage_options": {"https": {"ca_file": str(tls.ca)}}} if tls is not None else {}
    transfer = {"retry": QUICK, "stall_timeout_s": 5.0, "direct": options.pop("direct", False)}
    given |= {"shardshuffle": False, "empty_check": False, "transfer": transfer}
    return wds.WebDataset(urls, **{**given, **options})


def keys(samples: Any) -> list[int]:
    """The numbers of the samples, each of which is whole."""
    found = []
    for sample in samples:
        number = int(sample["__key__"])
        assert (sample["cls"], sample["txt"]) == (b"%d" % number, b"x%d" % number)
        found.append(number)
    return found


def test_a_cut_between_any_two_members_heals(server: Origin, tls: Tls) -> None:
    urls = [server.add(f"{at}.tar", GOOD) for at in CUTS]
    for at in CUTS:
        server.behave(path=f"/{at}.tar", times=2, cut_after=at, cut="fin", **ENDLESS)
    server.behave(**ENDLESS)
    assert keys(dataset(urls, tls)) == list(range(COUNT)) * len(urls)
    server.wait_until(lambda _: len(server.sent) == 3 * len(urls))
    for at in CUTS:
        sent = [one.body_bytes for one in server.sent if one.request.path == f"/{at}.tar"]
        assert sorted(sent) == [at, at, len(GOOD)]  # the first was asked for one byte


@pytest.mark.parametrize("at", [3 * MEMBER, 4 * MEMBER])
def test_so_it_does_by_the_engines_own_requests(server: Origin, tls: Tls, at: int) -> None:
    url = server.add("x.tar", GOOD)
    server.behave(when=lambda request: request.range is None, times=2, cut_after=at, cut="fin", **ENDLESS)
    server.behave(**ENDLESS)
    assert keys(dataset([url], tls, direct=True)) == list(range(COUNT))
    assert sum(request.range is None for request in server.requests) == 3  # by the engine, by aiohttp, and again


@pytest.mark.parametrize("at", [3 * MEMBER, 4 * MEMBER, CONTENT])
def test_a_shard_that_always_ends_there_loses_its_last_sample(server: Origin, tls: Tls, at: int) -> None:
    """Also one that is whole: nothing shows that."""
    url = server.add("x.tar", GOOD)
    server.behave(cut_after=at, cut="fin", **ENDLESS)
    errors: list[Exception] = []
    data = dataset([url], tls, handler=lambda exn: errors.append(exn) or True)
    assert keys(data) == list(range((at - 1) // (2 * MEMBER)))
    (error,) = errors
    assert isinstance(error, TruncatedShard)
    assert f"{url}: the shard ends at byte {at}, without the two blocks of zeros" in str(error)
    assert "have it sent with its length" in str(error)
    (entry,) = data.ledger
    assert (entry.offset, entry.key) == (at, f"{(at - 1) // (2 * MEMBER):03}")
    assert len(server.requests) == 3  # the first byte, the shard, and again


def test_the_parts_between_shards_and_samples_hold_it_back_too(origin: Origin) -> None:
    url = origin.add("x.tar", GOOD)
    origin.behave(cut_after=3 * MEMBER, cut="fin", **ENDLESS)
    errors: list[Exception] = []
    handler = lambda exn: errors.append(exn) or True  # noqa: E731
    members = tar_file_expander(url_opener([{"url": url}]), handler=handler)
    assert keys(group_by_keys(members)) == [0]
    assert [type(exn) for exn in errors] == [TruncatedShard]


def test_a_cut_that_moves_is_tried_on(origin: Origin) -> None:
    url = origin.add("x.tar", GOOD)
    for at in (3, 3, 5, 4, 9):
        origin.behave(times=1, cut_after=at * MEMBER, cut="fin", **ENDLESS)
    origin.behave(**ENDLESS)
    assert keys(dataset([url])) == list(range(COUNT))
    assert len(origin.requests) == 6


@pytest.mark.parametrize("cut_after", [5 * MEMBER, None], ids=["cut", "whole"])
def test_a_connection_that_ends_without_an_end_of_tls_is_a_reset(tls: Tls, cut_after: int | None) -> None:
    with Origin(tls=tls.server_context()) as server:
        url = server.add("x.tar", GOOD)
        ragged = {**ENDLESS, "cut_after": cut_after or len(GOOD), "cut": "ragged"}
        server.behave(times=2, **ragged)
        server.behave(times=1, **ENDLESS)
        server.behave(**ragged)
        assert keys(dataset([url], tls)) == list(range(COUNT))
        with pytest.raises(TransferError, match="no close_notify") as info:
            list(dataset([url], tls))
        assert f"{url} at byte " in str(info.value)


def test_small_bodies_with_a_proper_end_of_tls(tls: Tls) -> None:
    """Head, body and end may arrive at once."""
    with Origin(tls=tls.server_context()) as server:
        urls = [
            server.add(f"{i}.tar", make_shard({f"{i:03}": {"cls": b"%d" % i, "txt": b"x%d" % i}})) for i in range(9)
        ]
        server.behave(**ENDLESS)
        assert keys(dataset(urls, tls)) == list(range(9))
        assert len(server.requests) == 2 * len(urls)


@pytest.mark.parametrize("form", ["members", "one"])
def test_compressed_shards(origin: Origin, form: str) -> None:
    """The end of a compressed stream is known by itself; but some programs write many streams."""
    halves = [gzip.compress(GOOD[: 5 * MEMBER]), gzip.compress(GOOD[5 * MEMBER :])]
    packed = b"".join(halves) if form == "members" else gzip.compress(GOOD)
    url = origin.add("x.tar.gz", packed)
    origin.behave(path="/x.tar.gz", **ENDLESS)
    assert keys(dataset([url])) == list(range(COUNT))
    origin.forget()
    origin.behave(cut_after=len(halves[0]), cut="fin", **ENDLESS)
    got: list[int] = []
    with pytest.raises(TruncatedShard):
        got += keys(sample for sample in dataset([url]) if got.append(int(sample["__key__"])) is None)
    assert 2 not in got


@pytest.mark.parametrize("end", [bytes(1024), bytes(10240), bytes(1024) + b"left behind by a tape drive"])
def test_ends_of_archives(origin: Origin, end: bytes) -> None:
    url = origin.add("x.tar", GOOD[:CONTENT] + end)
    origin.behave(**ENDLESS)
    assert keys(dataset([url])) == list(range(COUNT))


class Old(BaseHTTPRequestHandler):
    """A server of HTTP/1.0 that ends its answers with the connection; ``cut`` of ``content`` is sent."""

    content = GOOD
    cut: int | None = None

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.content[: self.cut])

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def old() -> Iterator[str]:
    server = QuietServer(("127.0.0.1", 0), Old)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/x.tar"
    Old.cut = None
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_of_http_1_0(old: str) -> None:
    assert keys(dataset([old] * 2)) == list(range(COUNT)) * 2
    Old.cut = 7 * MEMBER
    samples = iter(dataset([old]))
    assert [keys([next(samples)]) for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(TruncatedShard):
        next(samples)


def test_the_disk_cache_keeps_no_cut_shard(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("x.tar", GOOD)
    origin.behave(times=3, cut_after=5 * MEMBER, cut="fin", **ENDLESS)
    origin.behave(**ENDLESS)
    with pytest.raises(TruncatedShard):
        list(dataset([url], cache_dir=tmp_path))
    assert keys(dataset([url], cache_dir=tmp_path)) == list(range(COUNT))
    seen = len(origin.requests)
    assert keys(dataset([url], cache_dir=tmp_path)) == list(range(COUNT))
    assert len(origin.requests) == seen


def test_the_service_passes_on_no_cut_shard(origin: Origin, tmp_path: Path) -> None:
    """With a length of its own it would look whole."""
    origin.add("/d/x.tar", GOOD)
    other = data(5000)
    origin.add("/d/other", other)
    origin.behave(path="/d/x.tar", cut_after=5 * MEMBER, cut="fin", **ENDLESS)
    origin.behave(**ENDLESS)
    place = {"allow": (origin.base,), "buckets": {"b": f"{origin.base}/d/"}, "private": True, "folder": tmp_path / "c"}
    with Inside(**place) as service:
        assert ask(f"{service.base}/ais/b/other")[2] == other
        for _ in range(2):
            status = 0
            with contextlib.suppress(http.client.HTTPException, ConnectionError):
                status, _, _ = ask(f"{service.base}/ais/b/x.tar")
            assert status != 200
        origin.forget()
        origin.behave(**ENDLESS)
        assert ask(f"{service.base}/ais/b/x.tar")[2] == GOOD
