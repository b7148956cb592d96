"""One connection to the fast lane: bytes, their order, who has which request, and clients that behave badly."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Tls
from tests.service.shelf import Lane, answers, asked, dial, until
from tests.transfer.reading import MIB, data, open_fds
from wds_async.service.heads import HEAD_LIMIT_BYTES

BIG = data(5 * MIB + 17)
SMALL = data(1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("shelf")
    (found / "big.tar").write_bytes(BIG)
    (found / "small.tar").write_bytes(SMALL)
    (found / "none.tar").write_bytes(b"")
    return found


@pytest.fixture
def lane(folder: Path, tmp_path: Path) -> Iterator[Lane]:
    with Lane(folder, tmp_path) as found:
        yield found


@pytest.mark.parametrize("local", [False, True])
def test_bytes_of_all_kinds(lane: Lane, local: bool) -> None:
    with dial(lane, local=local) as one:
        for _ in range(2):
            one.sendall(asked("/gs/b/big.tar"))
            assert answers(one, "GET")[0][2] == BIG
        one.sendall(asked("/gs/b/big.tar", Range="bytes=1000000-4999999"))
        [(status, fields, body)] = answers(one, "GET")
        assert (status, fields["content-range"]) == (206, f"bytes 1000000-4999999/{len(BIG)}")
        assert body == BIG[1_000_000:5_000_000]
        one.sendall(asked("/gs/b/none.tar"))
        assert answers(one, "GET")[0][::2] == (200, b"")
        one.sendall(asked("/gs/b/big.tar", "HEAD"))
        [(status, fields, body)] = answers(one, "HEAD")
        assert (status, fields["content-length"]) == (200, str(len(BIG)))
    assert lane.slow == []
    until(lane, lambda: lane.shelf.held["big.tar"].references == 0)
    assert lane.shelf.held["big.tar"].counted == 2 * len(BIG) + 4_000_000


def test_pipelined_requests_are_answered_in_order(lane: Lane) -> None:
    rng = random.Random(3)
    spans = [(at := rng.randrange(len(BIG) - 400_000), at + rng.randrange(1, 400_000)) for _ in range(40)]
    raw = b"".join(asked("/gs/b/big.tar", Range=f"bytes={start}-{stop - 1}") for start, stop in spans)
    with dial(lane) as one:
        writer = threading.Thread(target=one.sendall, args=(raw,))
        writer.start()
        got = answers(one, *["GET"] * 40)
        writer.join()
    assert [body for _, _, body in got] == [BIG[start:stop] for start, stop in spans]
    assert lane.slow == []


def test_more_is_pipelined_than_is_kept(lane: Lane) -> None:
    many = 4 * HEAD_LIMIT_BYTES // len(asked("/gs/b/small.tar"))
    with dial(lane) as one:
        one.sendall(asked("/gs/b/big.tar"))
        writer = threading.Thread(target=one.sendall, args=(asked("/gs/b/small.tar") * many,))
        writer.start()
        got = answers(one, *["GET"] * (many + 1))
        writer.join()
    assert got[0][2] == BIG
    assert {body for _, _, body in got[1:]} == {SMALL}


def test_a_connection_is_lent_and_comes_back(lane: Lane) -> None:
    with dial(lane) as one:
        for i in range(5):
            one.sendall(asked(f"/cold?{i}"))
            assert answers(one, "GET")[0][2] == f"slow GET /cold?{i} 0".encode()
            one.sendall(asked("/gs/b/big.tar"))
            assert answers(one, "GET")[0][2] == BIG
        one.sendall(asked("/gs/b/small.tar", If_None_Match="*"))
        assert answers(one, "GET")[0][2].startswith(b"slow")
        one.sendall(asked("/gs/b/small.tar"))
        assert answers(one, "GET")[0][2] == SMALL
    assert [path for _, path, _ in lane.slow] == [*(f"/cold?{i}" for i in range(5)), "/gs/b/small.tar"]


def test_what_came_back_is_not_closed_by_aiohttps_clock(folder: Path) -> None:
    with Lane(folder, patience_s=0.05) as lane, dial(lane) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        one.sendall(asked("/cold"))
        assert answers(one, "GET")[0][0] == 200
        one.sendall(asked("/gs/b/big.tar"))
        lane.on_loop(asyncio.sleep, 0.2)  # four times what aiohttp would wait
        assert answers(one, "GET")[0][2] == BIG
        one.sendall(asked("/cold"))
        assert answers(one, "GET")[0][0] == 200
        assert one.recv(1) == b""  # and while it is lent the clock goes


def test_with_a_body_or_pipelined_behind_a_slow_one_aiohttp_keeps_it(lane: Lane) -> None:
    with dial(lane) as one:
        one.sendall(asked("/v1/plan", "POST", Content_Length="5") + b"12")
        one.sendall(b"345" + asked("/gs/b/small.tar"))
        assert [body for _, _, body in answers(one, "POST", "GET")] == [
            b"slow POST /v1/plan 5",
            b"slow GET /gs/b/small.tar 0",
        ]
    with dial(lane) as one:
        one.sendall(asked("/cold") + asked("/gs/b/small.tar"))
        assert [body for _, _, body in answers(one, "GET", "GET")] == [
            b"slow GET /cold 0",
            b"slow GET /gs/b/small.tar 0",
        ]


@pytest.mark.parametrize("fields", [{"Range": "bytes=0-1,5-6"}, {"If_None_Match": "*"}, {"Expect": "100-continue"}])
def test_doubts_are_aiohttps(lane: Lane, fields: dict[str, str]) -> None:
    with dial(lane) as one:
        one.sendall(asked("/gs/b/small.tar", **fields))
        got = answers(one, "GET")[0]
        if got[0] == 100:
            got = answers(one, "GET")[0]
        assert got[2] == b"slow GET /gs/b/small.tar 0"


def test_over_tls_aiohttp_has_it_all(folder: Path, tls: Tls) -> None:
    with Lane(folder, tls=tls.server_context()) as lane, dial(lane) as plain:
        with tls.client_context().wrap_socket(plain, server_hostname="localhost") as one:
            for _ in range(3):
                one.sendall(asked("/gs/b/small.tar"))
                assert answers(one, "GET")[0][2] == b"slow GET /gs/b/small.tar 0"
            assert lane.meters.clients == 1
            lane.on_loop(lane.express.drain)
        assert lane.on_loop(lane.express.gone, 20.0) is True


@pytest.mark.parametrize("said", [b"\x16\x03\x01\x02\x00\x01", b"get /gs"])
def test_what_is_no_head_is_answered_at_once(lane: Lane, said: bytes) -> None:
    with dial(lane) as one:
        one.sendall(said)
        assert answers(one, "GET")[0][0] == 400


def test_a_head_that_comes_byte_by_byte(lane: Lane) -> None:
    with dial(lane) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in asked("/gs/b/small.tar"):
            one.sendall(bytes([byte]))
        assert answers(one, "GET")[0][2] == SMALL


def test_a_head_without_end(lane: Lane) -> None:
    with dial(lane) as one:
        one.sendall(b"GET /gs/b/small.tar HTTP/1.1\r\nHost: h\r\nX: " + b"a" * HEAD_LIMIT_BYTES)
        assert answers(one, "GET")[0][0] == 431
        assert one.recv(1) == b""
    until(lane, lambda: not lane.express.connections)


def test_it_closes_where_the_client_wants_that(lane: Lane) -> None:
    with dial(lane) as one:
        one.sendall(asked("/gs/b/big.tar", Connection="close"))
        [(_, fields, body)] = answers(one, "GET")
        assert (fields["connection"], body) == ("close", BIG)
        assert one.recv(1) == b""
    with dial(lane) as one:  # or shuts its side down
        one.sendall(asked("/gs/b/big.tar"))
        one.shutdown(socket.SHUT_WR)
        assert answers(one, "GET")[0][2] == BIG
        assert one.recv(1) == b""


def test_a_client_that_leaves_in_the_middle(lane: Lane) -> None:
    gc.collect()
    before = open_fds()
    for i in range(20):
        one = dial(lane)
        one.sendall(asked("/gs/b/big.tar"))
        one.recv(1 + 1000 * i)
        if i % 2:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        one.close()
    until(lane, lambda: not lane.express.connections)
    assert lane.shelf.held["big.tar"].references == 0
    assert not any(lane.shelf.under_way.values())
    assert lane.meters.clients == 0
    assert open_fds() <= before


def test_a_file_that_ends_early_breaks_the_connection(lane: Lane, folder: Path) -> None:
    (folder / "short.tar").write_bytes(BIG)
    with Lane(folder) as other, dial(other) as one:
        os.truncate(folder / "short.tar", 3 * MIB)
        one.sendall(asked("/gs/b/short.tar"))
        with pytest.raises((ConnectionError, EOFError)):
            answers(one, "GET")
    (folder / "short.tar").unlink()


def test_random_clients_get_what_they_ask_for(lane: Lane) -> None:
    """Warm and cold, whole and ranges, in pieces of any size, on kept connections: all in order, all right."""

    def client(seed: int, failures: list[BaseException]) -> None:
        rng = random.Random(seed)
        try:
            with dial(lane, local=bool(seed % 2)) as one:
                for _ in range(25):
                    kind = rng.choice(["range", "small", "cold", "head", "post"])
                    start = rng.randrange(len(BIG) - 1)
                    stop = min(len(BIG), start + rng.choice([1, 1000, 70_000, 1 << 20]))
                    raw, method, wanted = {
                        "range": (asked("/gs/b/big.tar", Range=f"bytes={start}-{stop - 1}"), "GET", BIG[start:stop]),
                        "small": (asked("/gs/b/small.tar"), "GET", SMALL),
                        "cold": (asked("/cold"), "GET", b"slow GET /cold 0"),
                        "head": (asked("/gs/b/big.tar", "HEAD"), "HEAD", b""),
                        "post": (asked("/p", "POST", Content_Length="3") + b"abc", "POST", b"slow POST /p 3"),
                    }[kind]
                    cut = rng.randrange(len(raw) + 1)
                    one.sendall(raw[:cut])
                    if rng.random() < 0.3:
                        select.select([one], [], [], 0.002)
                    one.sendall(raw[cut:])
                    body = answers(one, method)[0][2]
                    # behind a body the connection stays aiohttp's
                    assert body == wanted or body.startswith(b"slow")
                    assert body == wanted or kind != "cold"
        except BaseException as exn:
            failures.append(exn)

    failures: list[BaseException] = []
    threads = [threading.Thread(target=client, args=(seed, failures)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
