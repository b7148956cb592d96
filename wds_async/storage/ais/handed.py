"""Files that a service on the same host hands over on its Unix socket; they are read as local files.

A service that has the whole of an object in its cache answers a HEAD with ``Wds-Hand: 1`` by the open descriptor itself
(SCM_RIGHTS). Nothing of the cache's folder need be in reach, and what is evicted meanwhile is read to its end. After
any other answer, and any fault, the object is requested in ranges, whose errors explain what is wrong.

A file that turns out to be short, unreadable or wrong is reported by a HEAD with ``Wds-Hand: bad``: the service then
compares its copy with its checksums, and fetches again what is bad.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httptools

from wds_async.storage.base import Request
from wds_async.storage.handed_files import Descriptor, HandedFile
from wds_async.storage.http.messages import wire_url

__all__ = ["FileRequests"]

_HEAD_LIMIT_BYTES = 64 << 10
_LEAVE_ALONE_S = 60.0
_PIECE_BYTES = 4096
_FDS_AT_MOST = 4
_DISTRUSTED_AT_MOST = 4096
_BAD_AT_MOST = 3


class FileRequests:
    """Requests for files at the socket ``path``, over one connection. `ask` blocks; any thread may call it."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._bad: dict[str, int] = {}
        """Number of bad files of a URL."""
        self._unreported: dict[str, Request] = {}
        self._not_before = 0.0
        self._closed = False

    def ask(self, request: Request, identify: Callable[[Mapping[str, str], int], str]) -> HandedFile | None:
        """Return the file of the object that ``request`` names; None where the service hands none. ``identify`` gives
        the object's version by the fields of an answer and its size."""
        with self._lock:
            if time.monotonic() < self._not_before:
                return None
            try:
                self._report()
                if self._bad.get(request.url, 0) >= _BAD_AT_MOST:
                    return None
                raw, fds = self._exchange(_head(request, "1"))
            except (OSError, ValueError) as exn:
                self._drop()
                if isinstance(exn, TimeoutError):  # the reader waits for bytes, and not for a descriptor
                    self._not_before = time.monotonic() + _LEAVE_ALONE_S
                return None
        owned = [Descriptor(fd) for fd in fds]
        status, fields = _parsed(raw)
        text = fields.get("content-length", "")
        if (
            status != 200
            or fields.get("wds-handed") != "1"
            or len(owned) != 1
            or not (text.isascii() and text.isdigit())
        ):
            return None
        size = int(text)
        if os.fstat(owned[0].fd).st_size < size:
            self._distrust(request)
            with self._lock, contextlib.suppress(OSError, ValueError):
                self._report()
            return None
        return HandedFile(request.url, size, identify(fields, size), owned[0], fields, lambda: self._distrust(request))

    def close(self) -> None:
        """Close the connection; nothing is handed after that."""
        with self._lock:
            self._closed = True
            self._drop()

    def _distrust(self, request: Request) -> None:
        """Report this file as bad with the next request; after three reports it is read in ranges only."""
        if len(self._bad) < _DISTRUSTED_AT_MOST or request.url in self._bad:
            self._bad[request.url] = self._bad.get(request.url, 0) + 1
            self._unreported[request.url] = request

    def _report(self) -> None:
        """Send the reports of bad files to the service, and ignore its answers."""
        while self._unreported:
            _, request = self._unreported.popitem()
            _, fds = self._exchange(_head(request, "bad"))
            for fd in fds:
                os.close(fd)

    def _exchange(self, request: bytes) -> tuple[bytes, list[int]]:
        """Return the head of the answer and its descriptors. A kept connection may have been closed meanwhile."""
        if self._connection is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                return self._answer(self._connection, request)
            self._drop()
        if self._closed:
            raise OSError("closed")
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(self._timeout_s)
        self._connection.connect(self._path)
        return self._answer(self._connection, request)

    def _answer(self, connection: socket.socket, request: bytes) -> tuple[bytes, list[int]]:
        connection.sendall(request)
        raw = b""
        fds: list[int] = []
        try:
            while b"\r\n\r\n" not in raw:
                more, some = _received(connection)
                fds += some
                raw += more
                if not more or len(raw) > _HEAD_LIMIT_BYTES:
                    raise ConnectionResetError("the answer has no end" if more else "the service closed the connection")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        if not raw.endswith(b"\r\n\r\n") or b"\r\nconnection: close\r\n" in raw.lower():
            self._drop()
        return raw, fds

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return bytes and descriptors. Not by ``socket.recv_fds``, which drops its flags: a process started meanwhile
    would have the file open for ever."""
    room = socket.CMSG_LEN(_FDS_AT_MOST * array.array("i").itemsize)
    raw, ancillary, _, _ = connection.recvmsg(_PIECE_BYTES, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    fds = array.array("i")
    for level, kind, carried in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(carried[: len(carried) - len(carried) % fds.itemsize])
    return raw, list(fds)


class _FileHeadFields(dict[str, str]):
    """Fields of a head, filled by ``httptools``."""

    def on_header(self, name: bytes, value: bytes) -> None:
        self[name.decode("latin-1").lower()] = value.decode("latin-1").strip()


def _parsed(raw: bytes) -> tuple[int, Mapping[str, str]]:
    """Return status and fields of an answer; status 0 for what is none."""
    fields = _FileHeadFields()
    parser: Any = httptools.HttpResponseParser(fields)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserError:
        return 0, {}
    return parser.get_status_code(), fields


def _head(request: Request, hand: str) -> bytes:
    """Return the request for the descriptor of the object that ``request`` names (``hand`` is "1"), or the report that
    it is "bad". ValueError where a header would break its line."""
    target = wire_url(request.url).partition("://")[2].partition("/")[2]
    lines = [f"HEAD /{target} HTTP/1.1", "Host: localhost", f"Wds-Hand: {hand}"]
    lines += [f"{name}: {value}" for name, value in request.headers]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header contains a line break")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
