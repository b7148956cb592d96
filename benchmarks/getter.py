"""A client of few instructions, for the scenario ``service``: GETs over kept connections, bodies into one buffer each.

``python -m benchmarks.getter``: a job is a JSON object on standard input (``host``, ``port``, ``paths`` for each of the
connections, ``seconds`` or one pass), what came of it one on standard output. ``idle`` connections ask for one byte and
stay; ``slow`` ones ask for a whole shard and take 4 KB of it a second.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from typing import Any

__all__ = ["get", "main"]

_BUFFER_BYTES = 1 << 20
_SLOW_BYTES = 4096
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)


def get(connection: socket.socket, path: str, buffer: memoryview) -> int:
    """The body's length, once all of it has come. RuntimeError for an answer that is not good."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
    received = 0
    while (end := bytes(buffer[:received]).find(b"\r\n\r\n")) < 0:
        count = connection.recv_into(buffer[received : received + 65536])
        if not count:
            raise RuntimeError(f"{path}: closed before its head was complete")
        received += count
    head = bytes(buffer[:end])
    found = _LENGTH.search(head)
    if not head.startswith(b"HTTP/1.1 20") or found is None:
        raise RuntimeError(f"{path}: {head[:200]!r}")
    size, have = int(found[1]), received - end - 4
    while have < size:
        count = connection.recv_into(buffer[: min(len(buffer), size - have)])
        if not count:
            raise RuntimeError(f"{path}: closed after {have} of {size} bytes")
        have += count
    return size


def _fast(job: dict[str, Any], paths: list[str], totals: list[int], failures: list[str]) -> None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    deadline = time.monotonic() + job.get("seconds", 1e9)
    try:
        with socket.create_connection((job["host"], job["port"])) as connection:
            while True:
                for path in paths:
                    totals.append(get(connection, path, buffer))
                    if time.monotonic() > deadline:
                        return
                if "seconds" not in job:
                    return
    except (OSError, RuntimeError) as exn:
        failures.append(str(exn))


def _hold(job: dict[str, Any]) -> list[socket.socket]:
    """The idle and the slow connections; a thread takes a little of the slow ones each second."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    idle, slow = [], []
    for _ in range(job.get("idle", 0)):
        idle.append(socket.create_connection((job["host"], job["port"])))
        get(idle[-1], job["tiny"], buffer)
    for number in range(job.get("slow", 0)):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BYTES)
        connection.connect((job["host"], job["port"]))
        path = job["large"][number % len(job["large"])]
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
        slow.append(connection)

    def sip() -> None:
        while True:
            for connection in slow:
                connection.recv(_SLOW_BYTES)
            time.sleep(1)

    if slow:
        threading.Thread(target=sip, daemon=True).start()
    return [*idle, *slow]


def main() -> None:
    """Do the job of standard input."""
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    held = _hold(job)
    if held and not job["paths"]:  # stay until standard input ends
        print(json.dumps({"held": len(held)}), flush=True)
        sys.stdin.read()
        return
    totals: list[int] = []
    failures: list[str] = []
    threads = [threading.Thread(target=_fast, args=(job, paths, totals, failures)) for paths in job["paths"]]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.monotonic() - began
    print(json.dumps({"bytes": sum(totals), "requests": len(totals), "wall_s": wall_s, "failures": failures}))


if __name__ == "__main__":
    main()
