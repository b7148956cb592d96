"""Bodies on their way, by each of their ways: slow clients hold up no other, and get every byte."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.service.serving import Inside, ask, asked, dial
from tests.transfer.reading import KIB, MIB, data
from wds_async.service.cache.disk import DataFile
from wds_async.service.cache.fetching import DiskPiece
from wds_async.service.delivery import Delivery, SpillFile
from wds_async.service.http_server import ClientConnections, HttpRequest, HttpResponse
from wds_async.service.metrics import Meters

BODY = data(3 * MIB + 17)


async def on_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(function, *args)


async def exchanged(
    send: Callable[[Delivery], Awaitable[None]],
    take: Callable[[asyncio.StreamReader], Awaitable[bytes]],
    *,
    length: int | None = len(BODY),
    **options: Any,
) -> tuple[bytes, BaseException | None, Delivery]:
    """What a client takes of what ``send`` does, and what ended that."""
    outcome: list[Any] = []
    over = asyncio.Event()

    async def answer(request: HttpRequest) -> None:
        delivery = Delivery(request, 200, {}, length, call=on_thread, **{"timeout_s": 30, **options})
        outcome.extend((delivery, None))
        try:
            await send(delivery)
            delivery.finish()
        except Exception as exn:
            outcome[1] = exn
            request.connection.cut()
        delivery.close()
        over.set()

    connections = ClientConnections(
        answer, lambda *_: HttpResponse(400), Meters(), clients=9, of_address=9, header_s=20, send_s=20
    )
    listening = await asyncio.get_running_loop().create_server(connections.listener(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname(), limit=64 * KIB)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    got = await take(reader)
    await over.wait()
    writer.close()
    listening.close()
    connections.close()
    await connections.gone(20)
    return got, outcome[1], outcome[0]


async def everything(reader: asyncio.StreamReader) -> bytes:
    got = b""
    while part := await reader.read(1 << 20):
        got += part
    return got


@pytest.fixture
def filed(tmp_path: Path) -> Any:
    path = tmp_path / "chunks"
    path.write_bytes(b"-" * 1000 + BODY)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def pieces_of(fd: int, cut: int) -> list[DiskPiece | memoryview]:
    return [
        DiskPiece(fd, 1000 + at, min(cut, len(BODY) - at)) if at // cut % 2 else memoryview(BODY)[at : at + cut]
        for at in range(0, len(BODY), cut)
    ]


@pytest.mark.parametrize("cut", [50 * KIB, 200 * KIB, MIB, 16 * MIB])
def test_memory_and_files_in_turn(filed: int, cut: int) -> None:
    async def send(delivery: Delivery) -> None:
        for piece in pieces_of(filed, cut):
            await delivery.send(piece)

    got, failed, delivery = asyncio.run(exchanged(send, everything))
    assert failed is None
    assert got.partition(b"\r\n\r\n")[2] == BODY
    assert delivery.sent == len(BODY)


def test_a_file_alone_and_in_chunks(filed: int) -> None:
    async def send(delivery: Delivery) -> None:
        await delivery.send(DiskPiece(filed, 1000, len(BODY)))

    got, failed, _ = asyncio.run(exchanged(send, everything))
    assert (failed, got.endswith(BODY)) == (None, True)
    got, failed, delivery = asyncio.run(exchanged(send, everything, length=None))
    assert (failed, delivery.sent, got.endswith(b"0\r\n\r\n")) == (None, len(BODY), True)


def test_a_file_that_ends_early_breaks_it_off(filed: int) -> None:
    async def send(delivery: Delivery) -> None:
        await delivery.send(DiskPiece(filed, 2000, len(BODY)))

    for length in (len(BODY), None):
        _, failed, _ = asyncio.run(exchanged(send, everything, length=length))
        assert isinstance(failed, ConnectionAbortedError)


def test_what_is_punched_after_it_was_sent_arrives_whole(tmp_path: Path) -> None:
    """What lies in a socket's queue are the file's own pages: the cache may drop them, but not write to them."""
    file, sent = DataFile(tmp_path / "data", create=True), asyncio.Event()
    body = BODY[: MIB + 17]
    os.pwrite(file.fd, body, 0)

    async def send(delivery: Delivery) -> None:
        await delivery.send(DiskPiece(file.fd, 0, len(body)))
        file.punch(0, len(body))
        sent.set()

    async def late(reader: asyncio.StreamReader) -> bytes:
        await sent.wait()
        return await everything(reader)

    got, failed, _ = asyncio.run(exchanged(send, late, length=len(body)))
    file.close()
    assert failed is None
    assert got.endswith(body)


def test_what_is_offered_is_taken_or_not_and_its_memory_may_go(filed: int) -> None:
    taken: list[int] = []
    go_on = asyncio.Event()

    async def send(delivery: Delivery) -> None:
        memory = bytearray(BODY * 8)  # more than sockets hold
        taken.append(await delivery.offer(memoryview(memory)))
        memory[:] = bytes(len(memory))  # what was not taken is no concern of the delivery's any more
        go_on.set()
        for _ in range(8):
            await delivery.copy(DiskPiece(filed, 1000, len(BODY)))

    async def late(reader: asyncio.StreamReader) -> bytes:
        await go_on.wait()
        return await everything(reader)

    got, failed, delivery = asyncio.run(exchanged(send, late, length=1 << 40))
    assert failed is None
    assert 0 < taken[0] < 8 * len(BODY)
    assert got.partition(b"\r\n\r\n")[2] == (BODY * 8)[: taken[0]] + BODY * 8
    assert delivery.sent == taken[0] + 8 * len(BODY)


@pytest.mark.parametrize("by_file", [True, False])
def test_who_takes_nothing_ends_it(filed: int, by_file: bool) -> None:
    async def nothing(reader: asyncio.StreamReader) -> bytes:
        return await reader.read(1)

    async def send(delivery: Delivery) -> None:
        for _ in range(50):
            await delivery.send(DiskPiece(filed, 1000, len(BODY)) if by_file else memoryview(BODY))

    _, failed, _ = asyncio.run(exchanged(send, nothing, timeout_s=0.2, length=50 * len(BODY)))
    assert isinstance(failed, TimeoutError)


def test_slices_wait_for_their_pace(filed: int) -> None:
    asked: list[int] = []

    async def pace(count: int) -> None:
        asked.append(count)

    async def send(delivery: Delivery) -> None:
        await delivery.send(DiskPiece(filed, 1000, len(BODY)))

    got, _, _ = asyncio.run(exchanged(send, everything, pace=pace))
    assert got.endswith(BODY)
    assert sum(asked) == len(BODY)
    assert max(asked) <= 256 * KIB, "an even flow, however quickly they are taken"


SLOW = 8
BODIES = [data(9 * MIB + n, n) for n in range(2)]


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
@pytest.mark.parametrize("kept", [False, True], ids=["none", "small"])
def test_who_is_slow_holds_up_nobody_and_gets_all(
    serve: Callable[..., Inside], origin: Origin, monkeypatch: pytest.MonkeyPatch, kept: bool, full: bool
) -> None:
    """There is memory for four pieces, and no cache, or one that holds next to nothing. ``full``: what a slow client
    has not taken has no place, and is fetched again."""
    tried = []

    def refuse(self: SpillFile, view: memoryview) -> None:
        tried.append(view.nbytes)
        raise OSError(28, "No space left on device")

    if full:
        monkeypatch.setattr(SpillFile, "put", refuse)
    for n in range(SLOW):
        origin.add(f"/d/{n}", BODIES[n % 2])
    origin.add("/d/other", BODIES[0])
    cache = {"folder": "cache", "cache_size": "12M"} if kept else {}
    service = serve(memory_bytes=8 * MIB, transfer={"part_bytes": MIB}, **cache)
    clients = [dial(service, receive_bytes=8192) for _ in range(SLOW)]
    for n, client in enumerate(clients):
        client.sendall(asked(f"/ais/b/{n}", Connection="close"))
    assert [client.recv(12) for client in clients] == [b"HTTP/1.1 200"] * SLOW
    # Each of them wants memory, and all together want more than there is: none has it for long.
    assert ask(f"{service.base}/ais/b/other")[::2] == (200, BODIES[0])
    for n, client in enumerate(clients):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MIB)
        got = b"".join(iter(lambda: client.recv(4 * MIB), b""))  # noqa: B023 (read at once)
        client.close()
        assert got.partition(b"\r\n\r\n")[2] == BODIES[n % 2]
    service.quiet()
    service.stored()
    assert service.context.fetcher.held_bytes == 0
    if not full:
        fetched = sum(sent.body_bytes for sent in origin.sent)
        assert fetched <= 1.6 * sum(len(BODIES[n % 2]) for n in range(SLOW)) + 2 * len(BODIES[0])
    elif not kept:  # else most of them took from the disk
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
    serve: Callable[..., Inside], origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is memory for four chunks, and what one of them is written to does not answer."""
    body, gate, write = data(40 * MIB + 5, 1), threading.Event(), os.pwrite
    origin.add("/d/x", body)

    def hang(*args: Any) -> int:
        gate.wait()
        return write(*args)

    monkeypatch.setattr(os, "pwrite", hang)
    service = serve(folder="cache", memory_bytes=8 * MIB, transfer={"part_bytes": MIB})
    try:
        assert ask(f"{service.base}/ais/b/x")[::2] == (200, body)
        assert ask(f"{service.base}/ais/b/x", Range="bytes=5-9")[::2] == (206, body[5:10])
        assert service.context.cache.statistics().passed_bytes >= 32 * MIB
    finally:
        gate.set()
