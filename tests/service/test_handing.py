"""Descriptors over the Unix socket: what is handed, to whom, and what it can be used for."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.shelf import Lane, answers, dial
from tests.transfer.reading import data, open_fds
from wds_async.service.handing import credentials, wants_file
from wds_async.service.heads import read_head

BYTES = data(100_000)
ASK = b"HEAD /gs/b/x.tar HTTP/1.1\r\nHost: localhost\r\nWds-Hand: 1\r\n"


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "x.tar").write_bytes(BYTES)
    with Lane(tmp_path / "files", tmp_path) as found:
        yield found


def taken(connection: socket.socket, request: bytes = ASK + b"\r\n") -> tuple[bytes, list[int]]:
    connection.sendall(request)
    raw, fds, _, _ = socket.recv_fds(connection, 4096, 4, socket.MSG_CMSG_CLOEXEC)
    return raw, fds


def test_a_file_of_its_own_for_reading_only(lane: Lane) -> None:
    with dial(lane, local=True) as one:
        raw, [fd] = taken(one)
        assert raw.startswith(b"HTTP/1.1 200 OK\r\nWds-Handed: 1\r\n")
        assert b'ETag: "100000"\r\n' in raw
        assert b"Content-Length: 100000\r\n" in raw
        assert os.pread(fd, 1 << 20, 0) == BYTES
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        raw, [other] = taken(one)
        os.lseek(fd, 7, os.SEEK_SET)  # no position is shared, neither with another reader nor with the cache
        assert os.lseek(other, 0, os.SEEK_CUR) == 0
        assert os.lseek(lane.shelf.held["x.tar"].fd, 0, os.SEEK_CUR) == 0
        os.close(fd)
        os.close(other)
        one.sendall(b"GET /gs/b/x.tar HTTP/1.1\r\nHost: h\r\n\r\n")
        assert answers(one, "GET")[0][2] == BYTES
    lane.on_loop(lambda: None)  # by now the last answer is accounted for
    assert lane.shelf.heard_of == [("local", "gs://b/x.tar")] * 3
    assert lane.shelf.held["x.tar"].counted == 3 * len(BYTES)


def test_not_where_it_is_not_whole_unknown_or_forbidden(lane: Lane) -> None:
    with dial(lane, local=True) as one:
        lane.shelf.held["x.tar"].ready_to -= 1
        assert taken(one) == (b"HTTP/1.1 204 No Content\r\n\r\n", [])
        lane.shelf.held["x.tar"].ready_to += 1
        assert taken(one, ASK.replace(b"x.tar", b"y.tar") + b"\r\n")[0].startswith(b"HTTP/1.1 204 ")
        lane.shelf.token = b"Bearer good"
        assert taken(one)[0].startswith(b"HTTP/1.1 204 ")
        raw, [fd] = taken(one, ASK + b"Authorization: Bearer good\r\n\r\n")
        os.close(fd)
        assert raw.startswith(b"HTTP/1.1 200 ")
    lane.on_loop(lambda: None)  # by now the last answer is accounted for
    assert lane.shelf.held["x.tar"].references == 0


def test_not_over_tcp(lane: Lane) -> None:
    with dial(lane) as one:
        raw, fds = taken(one)
        assert b"Wds-Handed" not in raw
        assert fds == []


def test_what_asks_for_a_file() -> None:
    def asks(raw: bytes) -> bool:
        head = read_head(raw)
        assert head is not None
        return wants_file(head)

    assert asks(ASK + b"\r\n")
    assert not asks(ASK.replace(b"HEAD", b"GET") + b"\r\n")
    assert not asks(ASK.replace(b"1\r\n", b"0\r\n").replace(b"/1.0", b"/1.1") + b"\r\n")
    assert not asks(ASK + b"Connection: close\r\n\r\n")


def test_thousands_of_them_leave_nothing_open(lane: Lane) -> None:
    with dial(lane, local=True) as one:
        os.close(taken(one)[1][0])
        before = open_fds()
        for _ in range(2000):
            os.close(taken(one)[1][0])
        assert open_fds() <= before + 1  # the lane closes its own a moment after it was sent


def test_a_client_that_reads_no_answer_is_dropped(lane: Lane) -> None:
    one = dial(lane, local=True)
    one.setblocking(False)
    try:
        while True:
            one.send(ASK + b"\r\n")
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        pass
    with dial(lane, local=True) as other:
        os.close(taken(other)[1][0])
    one.close()


def test_who_it_was_is_in_the_audit_log(lane: Lane, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "wds_async.audit")
    with dial(lane, local=True) as one:
        os.close(taken(one)[1][0])
        assert credentials(one) == (os.getpid(), os.getuid(), os.getgid())
        one.sendall(b"GET /gs/b/x.tar HTTP/1.1\r\nHost: h\r\n\r\n")
        answers(one, "GET")  # by then the line was written
    assert f"handed to process {os.getpid()} of user {os.getuid()}" in caplog.text
    assert "gs://b/x.tar" in caplog.text
