"""A narrow line: a relay in front of a server on loopback, through which so many bytes a second come and no more,
however many connections they come over."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

__all__ = ["narrow"]

_PIECE = 16 << 10


@contextlib.contextmanager
def narrow(port: int, bytes_per_s: float) -> Iterator[int]:
    """The port of a relay to ``port`` of loopback."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []
    transports: list[asyncio.WriteTransport] = []
    stop = asyncio.Event()
    free_at = 0.0

    async def down(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal free_at
        while piece := await reader.read(_PIECE):
            free_at = max(free_at, loop.time()) + len(piece) / bytes_per_s
            await asyncio.sleep(free_at - loop.time())
            writer.write(piece)
            await writer.drain()

    async def up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transports.append(writer.transport)
        try:
            here, there = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        transports.append(there.transport)
        ways = [asyncio.ensure_future(up(reader, there)), asyncio.ensure_future(down(here, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.transport.abort()
        there.transport.abort()

    async def serve() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        started.set()
        await stop.wait()
        server.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # one that has just begun opens what it needs
            for transport in transports:
                transport.abort()
            await asyncio.wait(tasks, timeout=0.01)
        await asyncio.sleep(0)  # aborted transports close their sockets in a later turn

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run, name="narrow", daemon=True)
    thread.start()
    started.wait()
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
