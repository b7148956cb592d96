"""A quick HTTP server that fails on purpose: ``python -m benchmarks.faultserver FOLDER``.

It prints its port and obeys standard input, a command a line: ``faults SHARE``, ``kinds KIND, KIND`` (those of the
faults; default: all of `KINDS`), ``storm`` and ``calm`` (503 to all),
``down`` and ``up`` (connections are refused), ``pace BYTES_S`` (of each connection; 0: none), ``latency S`` (before a
head), ``seed N``, ``told`` (prints what was done, as JSON).

A thread a connection and ``sendfile``, so that it is not what is measured; `tests.servers.Origin` can do more, slowly.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TextIO

__all__ = ["KINDS", "FaultServer"]

KINDS = (
    "reset before the head",
    "reset in the body",
    "end in the body",
    "stall",
    "trickle",
    "length too long",
    "length too short",
    "range shifted",
    "range ignored",
    "429",
    "503 with Retry-After",
    "500",
    "no answer",
    "dropped keep-alive",
)
"""Every way of the matrix that a part can heal from; `tests/faults` has the others."""

_STEP = 256 << 10
_WHOLE = (0, sys.maxsize)
_TRICKLE_BYTES_S = 20_000
_STATUS = {"429": "429 Too Many Requests", "503 with Retry-After": "503 Service Unavailable", "500": "500 Oops"}


class FaultServer:
    """Serves the files of ``folder`` with ranges; a ``share`` of the requests fails, each in one of ``kinds``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.share = 0.0
        self.kinds = KINDS
        self.storm = False
        self.pace_bytes_s = 0.0
        self.latency_s = 0.0
        self.done: Counter[str] = Counter()
        self._rng = random.Random(0)
        self._lock = threading.Lock()
        self._identity = {path.name: f'"{path.stat().st_ino:x}-{path.stat().st_size:x}"' for path in folder.iterdir()}
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listening.getsockname()[1]
        self._open: set[socket.socket] = set()
        self.up()

    def up(self) -> None:
        """Listen, on the same port as ever."""
        if self._listening.fileno() < 0:
            self._listening = socket.create_server(("127.0.0.1", self.port), backlog=512)
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def down(self) -> None:
        """Refuse connections, and break those that there are."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for one in list(self._open):
            _reset(one)

    def obey(self, commands: TextIO) -> None:
        """Until the commands end."""
        for line in commands:
            word, _, value = line.strip().partition(" ")
            if word == "faults":
                self.share = float(value)
            elif word == "kinds":
                self.kinds = tuple(value.split(", "))
            elif word == "pace":
                self.pace_bytes_s = float(value)
            elif word == "latency":
                self.latency_s = float(value)
            elif word == "seed":
                self._rng = random.Random(int(value))
            elif word in ("storm", "calm"):
                self.storm = word == "storm"
            elif word == "told":
                print(json.dumps(self.done), flush=True)
            elif word in ("up", "down"):
                getattr(self, word)()

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._open.add(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            early = b""
            while (head := _head(connection, early)) is not None:
                early = head.partition(b"\r\n\r\n")[2]
                if not self._answer(connection, head):
                    break
        except OSError:
            pass  # the client has left
        finally:
            self._open.discard(connection)
            with contextlib.suppress(OSError):
                connection.close()

    def _fault(self) -> str:
        with self._lock:
            self.done["requests"] += 1
            if self.storm:
                return "503 with Retry-After" if self._rng.random() < 0.5 else "503"
            kind = self._rng.choice(self.kinds) if self._rng.random() < self.share else ""
            self.done[kind or "good"] += 1
            return kind

    def _answer(self, connection: socket.socket, head: bytes) -> bool:
        kind = self._fault()
        if self.latency_s:
            time.sleep(self.latency_s)
        if kind == "reset before the head":
            _reset(connection)
            return False
        if kind == "no answer":
            return _held(connection)
        if kind in _STATUS or kind == "503":
            wait = "Retry-After: 1\r\n" if "Retry" in kind else ""
            status = _STATUS.get(kind, _STATUS["503 with Retry-After"])
            connection.sendall(f"HTTP/1.1 {status}\r\n{wait}Content-Length: 0\r\n\r\n".encode())
            return True
        name = head.split(b" ", 2)[1].decode().rpartition("/")[2]
        with open(self.folder / name, "rb") as file:
            if head.startswith(b"HEAD "):
                fields = f"ETag: {self._identity[name]}\r\nAccept-Ranges: bytes\r\n"
                size = os.fstat(file.fileno()).st_size
                connection.sendall(f"HTTP/1.1 200 OK\r\n{fields}Content-Length: {size}\r\n\r\n".encode())
                return True
            return self._send(connection, kind, file.fileno(), name, _range(head))

    def _send(self, connection: socket.socket, kind: str, file: int, name: str, span: tuple[int, int]) -> bool:
        size = os.fstat(file).st_size
        start, stop = span[0], min(span[1], size)
        if kind == "range shifted":
            start, stop = min(start + 512, size - 1), min(stop + 512, size)
        whole = kind == "range ignored" or span == _WHOLE
        start, stop = (0, size) if whole else (start, stop)
        length = stop - start + {"length too long": 100, "length too short": -100}.get(kind, 0)
        status = "200 OK" if whole else "206 Partial Content"
        shown = "" if whole else f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n"
        fields = f"ETag: {self._identity[name]}\r\n{shown}Content-Length: {length}\r\n"
        connection.sendall(f"HTTP/1.1 {status}\r\n{fields}\r\n".encode())
        cut = self._rng.randrange(stop - start)
        if kind in ("reset in the body", "end in the body", "stall", "trickle"):
            self._body(connection, file, start, start + cut, self.pace_bytes_s)
        if kind == "reset in the body":
            _reset(connection)
            return False
        if kind == "stall":
            return _held(connection)
        if kind == "trickle":
            self._body(connection, file, start + cut, stop, _TRICKLE_BYTES_S)
        elif kind != "end in the body":
            self._body(connection, file, start, stop, self.pace_bytes_s)
        return kind == ""

    def _body(self, connection: socket.socket, file: int, start: int, stop: int, pace_bytes_s: float) -> None:
        step = min(_STEP, max(1024, int(pace_bytes_s / 50))) if pace_bytes_s else _STEP * 8
        began, first = time.monotonic(), start
        while start < stop:
            start += os.sendfile(connection.fileno(), file, start, min(step, stop - start))
            if pace_bytes_s:
                time.sleep(max(0.0, (start - first) / pace_bytes_s - (time.monotonic() - began)))


def _head(connection: socket.socket, early: bytes) -> bytes | None:
    received = early
    while b"\r\n\r\n" not in received:
        more = connection.recv(65536)
        if not more:
            return None
        received += more
    return received


def _range(head: bytes) -> tuple[int, int]:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"range: bytes="):
            first, _, last = line[13:].partition(b"-")
            return int(first), int(last) + 1 if last else sys.maxsize
    return _WHOLE


def _held(connection: socket.socket) -> bool:
    """Say nothing more until the client leaves."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    return False


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()


if __name__ == "__main__":
    server = FaultServer(Path(sys.argv[1]))
    print(server.port, flush=True)
    server.obey(sys.stdin)
