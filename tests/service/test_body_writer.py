"""Bodies for clients that take their time: they hold up nobody, and get every byte."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.service.serving import Inside, ask
from tests.transfer.reading import MIB, data
from wds_async.service.delivery import SpillFile

SLOW = 8
BODIES = [data(9 * MIB + n, n) for n in range(2)]


@pytest.fixture(params=["none", "small"])
def service(request: pytest.FixtureRequest, origin: Origin, tmp_path: Path) -> Iterator[Inside]:
    """One with memory for four pieces: without a cache, or with one that holds next to nothing. What is fetched ahead
    of a reader, and has no place on disk, waits in that memory."""
    for n in range(SLOW):
        origin.add(f"/d/{n}", BODIES[n % 2])
    origin.add("/d/other", BODIES[0])
    cache: dict[str, Any] = {"memory_bytes": 8 * MIB}
    if request.param == "small":
        cache |= {"folder": tmp_path / "cache", "cache_size": "12M"}
    given = {"allow": (origin.base,), "buckets": {"b": f"{origin.base}/d/"}, "private": True}
    with Inside(**given, **cache, transfer={"part_bytes": MIB}) as running:
        yield running


def slow_clients(service: Inside) -> list[socket.socket]:
    found = []
    for n in range(SLOW):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.settimeout(15)
        client.connect(("127.0.0.1", service.port))
        client.sendall(f"GET /ais/b/{n} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        found.append(client)
    return found


def test_who_is_slow_holds_up_nobody_and_gets_all(service: Inside, origin: Origin) -> None:
    clients = slow_clients(service)
    assert [client.recv(12) for client in clients] == [b"HTTP/1.1 200"] * SLOW
    # Each of them wants memory, and all together want more than there is: none has it for long.
    assert ask(f"{service.base}/ais/b/other")[::2] == (200, BODIES[0])
    for n, client in enumerate(clients):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MIB)
        got = bytearray()
        while part := client.recv(4 * MIB):
            got += part
        client.close()
        assert bytes(got).partition(b"\r\n\r\n")[2] == BODIES[n % 2]
    service.quiet()
    service.stored()
    assert service.context.fetcher.held_bytes == 0
    fetched = sum(sent.body_bytes for sent in origin.sent)
    assert fetched <= 1.6 * sum(len(BODIES[n % 2]) for n in range(SLOW)) + 2 * len(BODIES[0])


def test_a_rest_without_a_place_is_fetched_again(service: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def full(self: SpillFile, view: memoryview) -> None:
        tried.append(view.nbytes)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SpillFile, "put", full)
    clients = slow_clients(service)
    assert [client.recv(12) for client in clients] == [b"HTTP/1.1 200"] * SLOW
    assert ask(f"{service.base}/ais/b/other")[::2] == (200, BODIES[0])  # and those have neither memory nor file
    for n, client in enumerate(clients):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MIB)
        got = bytearray()
        while part := client.recv(4 * MIB):
            got += part
        client.close()
        assert bytes(got).partition(b"\r\n\r\n")[2] == BODIES[n % 2]
    service.quiet()
    service.stored()
    assert service.context.fetcher.held_bytes == 0
    if not service.config.folder:  # else most of them took from the disk
        assert tried


def test_a_spill_is_one_file_without_a_name(tmp_path: Path) -> None:
    spill = SpillFile(str(tmp_path))
    for body in (BODIES[0][:1000], BODIES[1][:10]):
        rest = spill.put(memoryview(body))
        assert os.pread(rest.fd, rest.count, rest.offset) == body
    assert list(tmp_path.iterdir()) == []
    spill.close()
    spill.close()
    with pytest.raises(OSError, match="No such file"):
        SpillFile(str(tmp_path / "nowhere")).put(memoryview(b"x"))


def test_a_disk_that_hangs_keeps_no_client_waiting(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is memory for four chunks, and what one of them is written to does not answer."""
    body, gate, write = data(40 * MIB + 5, 1), threading.Event(), os.pwrite
    origin.add("/d/x", body)

    def hang(*args: Any) -> int:
        gate.wait()
        return write(*args)

    monkeypatch.setattr(os, "pwrite", hang)
    given = {"allow": (origin.base,), "buckets": {"b": f"{origin.base}/d/"}, "private": True}
    with Inside(**given, folder=tmp_path / "cache", memory_bytes=8 * MIB, transfer={"part_bytes": MIB}) as service:
        try:
            assert ask(f"{service.base}/ais/b/x")[::2] == (200, body)
            assert ask(f"{service.base}/ais/b/x", Range="bytes=5-9")[::2] == (206, body[5:10])
            assert service.context.cache.statistics().passed_bytes >= 32 * MIB
        finally:
            gate.set()
