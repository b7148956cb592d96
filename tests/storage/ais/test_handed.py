"""Asking for an open file: what is taken for one, and what never is."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.transfer.reading import data, open_fds
from wds_async.storage.ais.handed import FileRequests
from wds_async.storage.base import Request
from wds_async.storage.handed_files import HandedFile
from wds_async.transfer.files import FileReader, FileReplaced

BYTES = data(10_000)
NOT_WHOLE = (b"HTTP/1.1 204 No Content\r\n\r\n", 0)
GOOD = b'HTTP/1.1 200 OK\r\nWds-Handed: 1\r\nETag: "e"\r\nContent-Length: 10000\r\n\r\n'


class Giver:
    """Answers each request at ``path`` with the next of ``answers``: bytes and how many descriptors go with them; None
    closes the connection. A new connection goes on with the next one."""

    def __init__(self, path: str, file: Path, answers: list[tuple[bytes, int] | None]) -> None:
        self.requests: list[bytes] = []
        self._answers, self._file = answers, file
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; what it had open is closed then."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(5)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        while True:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                got = client.recv(4096)
                if not got:
                    return
                request += got
            self.requests.append(request)
            answer = self._answers.pop(0)
            if answer is None:
                return
            raw, count = answer
            fds = [os.open(self._file, os.O_RDONLY) for _ in range(count)]
            socket.send_fds(client, [raw], fds)
            for fd in fds:
                os.close(fd)


@pytest.fixture
def giving(tmp_path: Path) -> Iterator[Callable[..., tuple[FileRequests, Giver]]]:
    made: list[tuple[FileRequests, Giver]] = []

    def make(*answers: tuple[bytes, int] | None) -> tuple[FileRequests, Giver]:
        (tmp_path / "x").write_bytes(BYTES)
        path = str(tmp_path / f"s{len(made)}")
        giver = Giver(path, tmp_path / "x", list(answers))
        made.append((FileRequests(path, 5.0), giver))
        return made[-1]

    yield make
    for hands, giver in made:
        hands.close()
        giver.close()


def name(fields: Mapping[str, str], size: int) -> str:
    return f"{fields.get('etag')} {size}"


def ask(hands: FileRequests, *headers: tuple[str, str]) -> HandedFile | None:
    return hands.ask(Request("http://localhost/v1/objects/b/x y?provider=ais", headers, socket="s"), name)


def test_a_file_is_read_by_its_descriptor(giving: Callable[..., tuple[FileRequests, Giver]], tmp_path: Path) -> None:
    gc.collect()
    hands, giver = giving((GOOD, 1))
    before = open_fds()
    found = ask(hands, ("Authorization", "Bearer t"))
    assert found is not None
    assert (found.size, found.version, found.fields["etag"]) == (10_000, '"e" 10000', '"e"')
    assert giver.requests == [
        b"HEAD /v1/objects/b/x%20y?provider=ais HTTP/1.1\r\nHost: localhost\r\nWds-Hand: 1\r\n"
        b"Authorization: Bearer t\r\n\r\n"
    ]
    assert not os.get_inheritable(found.descriptor.fd)
    (tmp_path / "x").unlink()
    reader, into = FileReader(found), bytearray(9_000)
    reader.read(memoryview(into), 1_000)
    assert into == BYTES[1_000:]
    reader.close()
    reader.close()
    del found, reader
    hands.close()
    giver.close()
    assert open_fds() < before  # nor does it listen any more


def test_it_is_closed_with_its_last_reference(giving: Callable[..., tuple[FileRequests, Giver]]) -> None:
    hands, giver = giving(*[(GOOD, 1)] * 50)
    before = open_fds()
    for _ in range(50):
        ask(hands)
    hands.close()
    giver.close()
    assert open_fds() < before


def test_a_file_that_is_shorter_than_was_said(
    giving: Callable[..., tuple[FileRequests, Giver]], tmp_path: Path
) -> None:
    hands, giver = giving((GOOD, 1), NOT_WHOLE, NOT_WHOLE)
    found = ask(hands, ("Authorization", "Bearer t"))
    assert found is not None
    os.truncate(tmp_path / "x", 100)
    with pytest.raises(FileReplaced, match="ended at byte 100"):
        FileReader(found).read(memoryview(bytearray(200)), 0)
    found.lose()
    assert ask(hands) is None
    assert giver.requests[1] == giver.requests[0].replace(b"Wds-Hand: 1", b"Wds-Hand: bad")
    assert b"Wds-Hand: 1" in giver.requests[2]  # it may have been healed


def test_each_bad_file_is_reported_and_after_some_no_more_is_asked_for(
    giving: Callable[..., tuple[FileRequests, Giver]], tmp_path: Path
) -> None:
    hands, giver = giving(*[(GOOD, 1)] * 20)  # a service that knows of no reports, and gives the same file
    before = open_fds()
    for _ in range(3):
        found = ask(hands)
        assert found is not None
        found.lose()
    del found
    for _ in range(3):
        assert ask(hands) is None
    assert [b"bad" in request for request in giver.requests] == [False, True, False, True, False, True]
    os.truncate(tmp_path / "x", 100)
    other = Request("http://localhost/v1/objects/b/y", (), socket="s")
    assert hands.ask(other, name) is None  # shorter than the answer says: that is reported at once
    assert b"/b/y" in giver.requests[-1]
    assert b"bad" in giver.requests[-1]
    hands.close()
    giver.close()
    assert open_fds() < before


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", 0),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\n", 0),
        (GOOD, 0),
        (GOOD, 2),
        (GOOD.replace(b"Wds-Handed: 1\r\n", b""), 1),
        (GOOD.replace(b"200 OK", b"206 Partial"), 1),
        (GOOD.replace(b"10000", b"10001"), 1),  # longer than the file
        (GOOD.replace(b"10000", b"-1"), 1),
        (GOOD.replace(b"10000", b"many"), 1),
        (GOOD.replace(b"Content-Length: 10000\r\n", b""), 1),
        (b"SSH-2.0-x\r\n\r\n", 1),
        (b"a" * (70 << 10), 1),
        (GOOD[:20], 1),
    ],
)
def test_what_is_no_such_answer(giving: Callable[..., tuple[FileRequests, Giver]], raw: bytes, count: int) -> None:
    hands, giver = giving((raw, count), None, None)  # which a report of a file that is too short gets
    hands._timeout_s = 0.2
    before = open_fds()
    assert ask(hands) is None
    hands.close()
    giver.close()
    assert open_fds() < before


def test_a_kept_connection_that_was_closed_meanwhile(giving: Callable[..., tuple[FileRequests, Giver]]) -> None:
    hands, giver = giving((GOOD, 1), None, (GOOD, 1))
    assert ask(hands) is not None
    assert ask(hands) is not None
    assert len(giver.requests) == 3


def test_a_new_connection_that_is_closed(giving: Callable[..., tuple[FileRequests, Giver]]) -> None:
    hands, giver = giving(None, (GOOD, 1))
    assert ask(hands) is None
    assert ask(hands) is not None
    assert len(giver.requests) == 2


def test_a_service_that_says_nothing_is_left_alone(giving: Callable[..., tuple[FileRequests, Giver]]) -> None:
    hands, giver = giving((b"HTTP", 0), (GOOD, 1))
    hands._timeout_s = 0.1
    assert ask(hands) is None
    assert ask(hands) is None
    assert len(giver.requests) == 1


def test_nobody_listens_or_it_is_closed(tmp_path: Path, giving: Callable[..., tuple[FileRequests, Giver]]) -> None:
    assert ask(FileRequests(str(tmp_path / "none"), 1.0)) is None
    hands, giver = giving((GOOD, 1))
    hands.close()
    assert ask(hands) is None
    assert giver.requests == []


def test_a_header_that_would_break_its_line(giving: Callable[..., tuple[FileRequests, Giver]]) -> None:
    hands, giver = giving((GOOD, 1))
    assert ask(hands, ("A", "b\r\nC: d")) is None
    assert giver.requests == []


def test_many_threads_share_it(giving: Callable[..., tuple[FileRequests, Giver]]) -> None:
    hands, _ = giving(*[(GOOD, 1)] * 80)
    found: list[HandedFile | None] = []
    threads = [threading.Thread(target=lambda: found.extend(ask(hands) for _ in range(10))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert len({one.descriptor.fd for one in found if one is not None}) == 80
