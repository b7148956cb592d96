"""The fast lane as a whole: who is let go, who waits for whom, how it drains."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.shelf import Lane, answers, asked, dial, until
from tests.transfer.reading import MIB, data, open_fds

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


def test_who_takes_nothing_holds_up_nobody_and_is_let_go(folder: Path) -> None:
    with Lane(folder, send_s=0.5) as lane:
        stuck = [dial(lane) for _ in range(20)]
        for one in stuck:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.sendall(asked("/gs/b/big.tar") * 3)
        with dial(lane) as good:
            for _ in range(20):
                good.sendall(asked("/gs/b/big.tar"))
                assert answers(good, "GET")[0][2] == BIG
        until(lane, lambda: not lane.express.connections)
        assert lane.shelf.held["big.tar"].references == 0
        for one in stuck:
            one.close()


def test_a_head_that_stops_coming_and_idle_connections_are_let_go(folder: Path) -> None:
    with Lane(folder, header_s=0.3, idle_s=0.6) as lane, dial(lane) as half, dial(lane) as idle:
        half.sendall(b"GET /gs")
        assert half.recv(1) == b""
        assert idle.recv(1) == b""


def test_too_many_clients(folder: Path) -> None:
    with Lane(folder, clients=2) as lane, dial(lane) as one, dial(lane) as two:
        for each in (one, two):
            each.sendall(asked("/gs/b/small.tar"))
            assert answers(each, "GET")[0][2] == SMALL
        with dial(lane) as three:
            assert answers(three, "GET")[0][0] == 503
        two.close()
        until(lane, lambda: len(lane.express.connections) == 1)
        with dial(lane) as four:
            four.sendall(asked("/gs/b/small.tar"))
            assert answers(four, "GET")[0][2] == SMALL


def test_one_client_may_have_so_many_under_way(lane: Lane) -> None:
    lane.shelf.most = 1
    with dial(lane) as one, dial(lane) as two:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        one.sendall(asked("/gs/b/big.tar"))
        until(lane, lambda: any(lane.shelf.under_way.values()))
        two.sendall(asked("/gs/b/small.tar"))
        assert answers(two, "GET")[0][2].startswith(b"slow")  # which refuses it, by the same count
        assert answers(one, "GET")[0][2] == BIG
        two.sendall(asked("/gs/b/small.tar"))
        assert answers(two, "GET")[0][2] == SMALL


def test_draining_lets_answers_end(lane: Lane) -> None:
    with dial(lane) as idle, dial(lane) as busy, dial(lane) as lent:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        busy.sendall(asked("/gs/b/big.tar"))
        lent.sendall(asked("/cold"))
        assert answers(lent, "GET")[0][0] == 200
        until(lane, lambda: any(lane.shelf.under_way.values()))
        lane.on_loop(lane.express.drain)
        assert idle.recv(1) == b""
        assert lent.recv(1) == b""
        assert lane.on_loop(lane.express.gone, 0.0) is False
        assert answers(busy, "GET")[0][2] == BIG
        assert busy.recv(1) == b""
        assert lane.on_loop(lane.express.gone, 20.0) is True


def test_idle_connections_cost_one_descriptor_and_next_to_no_memory(lane: Lane) -> None:
    before = open_fds()
    idle = [dial(lane) for _ in range(200)]
    until(lane, lambda: len(lane.express.connections) == 200)
    assert open_fds() - before <= 2 * 200 + 2  # ours, and the lane's in this process
    for one in idle:
        one.close()
