"""Descriptors over the Unix socket: what is handed, to whom, and what it can be used for."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.service.serving import Inside, Process, answers, ask, asked, dial, until
from tests.transfer.reading import data, open_fds
from wds_async.errors import ConfigError
from wds_async.service.cache.disk import INDEX
from wds_async.service.cache.index import CHUNK_BYTES
from wds_async.service.config import load_config
from wds_async.service.http_server import SERVER, credentials
from wds_async.service.send_fd import ReadOnlyFolder

BYTES = data(100_000)
ASK = asked("/ais/b/x.tar", "HEAD", Wds_Hand="1")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "x.tar").write_bytes(BYTES)
    return tmp_path / "files"


@pytest.fixture
def service(files: Path, tmp_path: Path) -> Iterator[Inside]:
    with Inside(buckets={"b": f"{files}/"}, folder=tmp_path / "c", socket=tmp_path / "s") as running:
        assert ask(f"{running.base}/ais/b/x.tar")[2] == BYTES
        running.stored()
        yield running


def taken(connection: socket.socket, request: bytes = ASK) -> tuple[bytes, list[int]]:
    connection.sendall(request)
    raw, fds, _, _ = socket.recv_fds(connection, 4096, 4, socket.MSG_CMSG_CLOEXEC)
    return raw, fds


def test_a_file_of_its_own_for_reading_only(service: Inside) -> None:
    before = service.context.cache.statistics().hit_bytes
    with dial(service, local=True) as one:
        raw, [fd] = taken(one)
        assert raw.startswith(b"HTTP/1.1 200 OK\r\n")
        for line in (
            b"Wds-Handed: 1\r\n",
            b"ETag: ",
            b"Server: " + SERVER.encode(),
            b"Content-Length: 100000\r\n",
            b"Date: ",
        ):
            assert b"\r\n" + line in raw
        assert os.pread(fd, 1 << 20, 0) == BYTES
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        raw, [other] = taken(one)
        os.lseek(fd, 7, os.SEEK_SET)  # no position is shared between readers
        assert os.lseek(other, 0, os.SEEK_CUR) == 0
        os.close(fd)
        os.close(other)
        one.sendall(asked("/ais/b/x.tar"))
        assert answers(one, "GET")[0][2] == BYTES
    service.quiet()
    assert service.context.cache.statistics().hit_bytes - before == 3 * len(BYTES)
    assert b'wds_requests_total{api="handed",code="200"} 2.0' in ask(f"{service.base}/metrics")[2]
    assert b'wds_client_bytes_total{api="handed"} 200000.0' in ask(f"{service.base}/metrics")[2]


@pytest.mark.parametrize("close", [False, True])
def test_the_connection_goes_on_as_asked(service: Inside, close: bool) -> None:
    with dial(service, local=True) as one:
        _, fds = taken(one, asked("/ais/b/x.tar", "HEAD", Wds_Hand="1", **({"Connection": "close"} if close else {})))
        assert len(fds) == (0 if close else 1), "an older client that closes asks for a head"
        for fd in fds:
            os.close(fd)
        if close:
            assert one.recv(1) == b""


def test_not_what_is_unknown_or_nowhere(service: Inside, files: Path) -> None:
    (files / "y.tar").write_bytes(BYTES)
    with dial(service, local=True) as one:
        for path in ("/ais/b/y.tar", "/ais/b/nothing.tar", "/ais/b/x.tar?archpath=x"):
            raw, fds = taken(one, ASK.replace(b"/ais/b/x.tar", path.encode()))
            assert raw.startswith(b"HTTP/1.1 204 ")
            assert fds == []
        one.sendall(asked("/ais/b/y.tar"))
        assert answers(one, "GET")[0][2] == BYTES
        service.stored()
        raw, [fd] = taken(one, ASK.replace(b"x.tar", b"y.tar"))
        os.close(fd)
    service.quiet()
    assert service.context.cache.statistics().readers == 0


def test_a_file_that_a_reader_reports_is_compared_before_it_is_handed_again(service: Inside, tmp_path: Path) -> None:
    with dial(service, local=True) as one:
        [fd] = taken(one)[1]
        with next(path for path in (tmp_path / "c").rglob("*") if path.stat().st_size == len(BYTES)).open(
            "r+b"
        ) as file:
            file.write(b"not what was fetched")
        assert os.pread(fd, 20, 0) == b"not what was fetched"
        os.close(fd)
        assert taken(one, ASK.replace(b"Hand: 1", b"Hand: bad"))[0].startswith(b"HTTP/1.1 204 ")
        assert taken(one)[0].startswith(b"HTTP/1.1 204 ")
        one.sendall(asked("/ais/b/x.tar"))
        assert answers(one, "GET")[0][2] == BYTES
        service.stored()
        [fd] = taken(one)[1]
        assert os.pread(fd, 1 << 20, 0) == BYTES
        os.close(fd)


def test_not_to_whom_it_is_forbidden(files: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("good\n")
    given = {"buckets": {"b": f"{files}/"}, "folder": tmp_path / "c", "socket": tmp_path / "s", "tokens": tokens}
    with Inside(**given) as service:
        assert ask(f"{service.base}/ais/b/x.tar", Authorization="Bearer good")[2] == BYTES
        service.stored()
        with dial(service, local=True) as one:
            assert taken(one)[0].startswith(b"HTTP/1.1 401 ")
            _, [fd] = taken(one, asked("/ais/b/x.tar", "HEAD", Wds_Hand="1", Authorization="Bearer good"))
            os.close(fd)


def test_not_over_tcp_nor_by_another_method(service: Inside) -> None:
    with dial(service) as one, dial(service, local=True) as two:
        for connection, request in (
            (one, ASK),
            (two, ASK.replace(b"HEAD", b"GET")),
            (two, ASK.replace(b": 1", b": 0")),
        ):
            connection.sendall(request)
            raw, fds, _, _ = socket.recv_fds(connection, 1 << 20, 4)
            assert b"Wds-Handed" not in raw
            assert fds == []
            if request.startswith(b"GET"):
                while not raw.endswith(BYTES):
                    raw += connection.recv(1 << 20)


def test_a_reader_keeps_its_bytes_when_the_service_is_killed_and_another_takes_the_folder(
    files: Path, tmp_path: Path
) -> None:
    """The index is written twice a second: what it misses after a kill is given back to the disk by the next service,
    and must not be where a reader has the file open."""
    large, folder, path = data(3 * CHUNK_BYTES), tmp_path / "c", tmp_path / "s"
    (files / "x.tar").write_bytes(large)
    given = {"buckets": {"b": f"{files}/"}, "folder": folder, "freshness_s": float("inf"), "socket": path}
    fds: list[int] = []
    with Process(tmp_path / "p", **given) as killed:
        assert ask(f"{killed.base}/ais/b/x.tar")[2] == large
        with closing(socket.socket(socket.AF_UNIX)) as one, closing(sqlite3.connect(folder / INDEX)) as index:
            one.settimeout(20)
            one.connect(str(path))
            until(lambda: bool(fds.extend(taken(one)[1]) or fds))
            until(lambda: index.execute("SELECT held FROM entries").fetchall() == [(len(large),)])
        killed.signal(signal.SIGKILL)
        killed.wait()
    with closing(sqlite3.connect(folder / INDEX)) as index, index:  # as it was before the last chunks were written
        index.execute("UPDATE chunks SET crcs = substr(crcs, 1, length(crcs) / 3)")
        index.execute("UPDATE entries SET held = ?", (CHUNK_BYTES,))
    with Inside(**given) as service:
        assert ask(f"{service.base}/ais/b/x.tar", Range="bytes=0-99")[2] == large[:100]
        assert os.pread(fds[0], len(large), 0) == large
        assert ask(f"{service.base}/ais/b/x.tar")[2] == large
        assert os.pread(fds[0], len(large), 0) == large
    os.close(fds[0])


def test_what_cannot_be_locked_comes_in_ranges(service: Inside) -> None:
    with dial(service, local=True) as one:
        [fd] = taken(one)[1]
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert taken(one)[0].startswith(b"HTTP/1.1 204 ")
        one.sendall(asked("/ais/b/x.tar"))
        assert answers(one, "GET")[0][2] == BYTES
        os.close(fd)
        [fd] = taken(one)[1]
        assert os.pread(fd, 1 << 20, 0) == BYTES
        os.close(fd)


def test_thousands_of_them_leave_nothing_open(service: Inside) -> None:
    with dial(service, local=True) as one:
        os.close(taken(one)[1][0])
        before = open_fds()
        for _ in range(1000):
            os.close(taken(one)[1][0])
        until(lambda: open_fds() <= before)  # what the service's threads have open for a moment is closed soon


def test_a_client_that_reads_no_answer_is_dropped(service: Inside) -> None:
    one = dial(service, local=True)
    one.settimeout(0.2)
    try:
        while True:
            one.sendall(ASK * 100)
    except OSError:
        pass
    with dial(service, local=True) as other:
        os.close(taken(other)[1][0])
    one.close()


def test_a_client_that_is_root_is_warned_of_once(service: Inside, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with dial(service, local=True) as one:
            one.sendall(asked("/healthz"))
            assert answers(one, "GET")[0][0] == 200
    warned = [record for record in caplog.records if "runs as root" in record.getMessage()]
    assert len(warned) == (os.geteuid() == 0)


WITH_A_READ_ONLY_MOUNT = """
import ctypes, os, runpy, subprocess
if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS
    raise OSError(ctypes.get_errno(), "unshare")
folder, mount = os.environ["FOLDER"], os.environ["MOUNT"]
for line in (["--make-rprivate", "/"], ["--bind", folder, mount], ["-o", "remount,bind,ro", mount]):
    subprocess.run(["mount", *line], check=True)
runpy.run_module("wds_async", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def mounting(tmp_path: Path) -> dict[str, Any]:
    """What starts a `Process` in a mount namespace of its own, where the folder ``ro`` is the cache's, read-only."""
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounts need root, and a mount namespace of one's own")
    for name in ("c", "ro"):
        (tmp_path / name).mkdir()
    script = tmp_path / "mounting.py"
    script.write_text(WITH_A_READ_ONLY_MOUNT)
    return {"script": script, "environ": {"FOLDER": str(tmp_path / "c"), "MOUNT": str(tmp_path / "ro")}}


def handed(path: Path) -> int:
    """The descriptor that the service at the socket ``path`` hands over, once the file is whole on its disk."""
    fds: list[int] = []

    def came() -> bool:
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(20)
            one.connect(str(path))
            fds.extend(taken(one)[1])
        return bool(fds)

    until(came)
    return fds[0]


def test_root_cannot_open_for_writing_what_comes_from_a_read_only_mount(
    files: Path, tmp_path: Path, mounting: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"buckets": {"b": f"{files}/"}, "folder": tmp_path / "c", "socket": tmp_path / "s"}
    for hand_from in (tmp_path / "ro", ""):
        with Process(tmp_path / "p", **mounting, **settings, hand_from=hand_from) as service:
            assert ask(f"{service.base}/ais/b/x.tar")[2] == BYTES
            fd = handed(tmp_path / "s")
            assert os.pread(fd, 1 << 20, 0) == BYTES
            if hand_from:
                with pytest.raises(OSError, match="Read-only file system"):
                    os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            else:  # as it warns
                os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
            os.close(fd)
            assert ("runs as root" in service.said) is not bool(hand_from)
            service.signal()
            assert service.wait() == 0


def test_hand_from_has_to_be_the_folder_and_read_only(tmp_path: Path, mounting: dict[str, Any]) -> None:
    for path, words in (
        (tmp_path / "c", "can be written to"),
        (tmp_path / "none", "No such file"),
        (tmp_path, "is another folder than the cache's"),
    ):
        service = Process(tmp_path / "p", **mounting, folder=tmp_path / "c", hand_from=path)
        assert service.launch().wait(30) == 2
        assert words in service.said
        assert "mount --bind" in service.said
    with pytest.raises(ConfigError, match="there is no folder"):
        load_config(None, hand_from="/x")


def test_a_file_that_is_gone_from_the_folder_is_not_opened_there(tmp_path: Path) -> None:
    ours, others = (tmp_path / name for name in ("ours", "others"))
    for path in (ours, others):
        path.write_bytes(BYTES)
    folder = object.__new__(ReadOnlyFolder)  # without a mount, which needs root
    folder._fd = os.open(tmp_path, os.O_RDONLY)
    held: Any = SimpleNamespace(fd=os.open(ours, os.O_RDONLY), path=Path("ours"))
    os.close(folder.open(held))
    before = open_fds()
    others.replace(ours)
    with pytest.raises(FileNotFoundError, match="replaced"):
        folder.open(held)
    ours.unlink()
    with pytest.raises(FileNotFoundError):
        folder.open(held)
    assert open_fds() == before
    folder.close()
    os.close(held.fd)


def test_who_it_was_is_in_the_audit_log(service: Inside, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "wds_async.audit")
    with dial(service, local=True) as one:
        for _ in range(2):
            os.close(taken(one)[1][0])
        assert credentials(one) == (os.getpid(), os.getuid(), os.getgid())
        one.sendall(asked("/ais/b/x.tar"))
        answers(one, "GET")  # by then the line was written
    who = f"process {os.getpid()} of user {os.getuid()}"
    assert caplog.text.count(f"{who}, group {os.getgid()} asks for files") == 1
    assert caplog.text.count(f"handed to {who}") == 2
    assert "files/x.tar" in caplog.text
