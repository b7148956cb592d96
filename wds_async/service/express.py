"""The fast lane: warm requests are answered on the listening connection itself, by ``sendfile``; aiohttp has the rest.

aiohttp takes some hundred microseconds for a request, whatever it is. What lies on disk needs none of its doing: the
head is read by ``httptools`` (`heads`), judged by the functions that the slow way asks as well (`door`), and answered
by one preformatted head and the file's pages (`connection`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from wds_async.service.connection import SWEEP_EVERY_S, Connection
from wds_async.service.door import Door
from wds_async.service.heads import HEAD_LIMIT_BYTES
from wds_async.service.neighbours import Neighbours

__all__ = ["Counted", "Express"]


class Counted(Protocol):
    """What is counted (see `meters`)."""

    clients: int

    def served(self, api: str, code: int, first_byte_s: float, count: int, url: str = "", client: str = "") -> None: ...

    def refused(self, reason: str) -> None: ...


class Express:
    """The fast lane of one service. Times are in seconds.

    ``slow`` makes aiohttp's protocol (``AppRunner.server``); ``clients``: most connections; a head has to come within
    ``header_s``, a client to take a byte within ``send_s``, and a connection that has nothing to do lives ``idle_s``.
    ``left`` is called with the number of a process that has gone, of those that came by a Unix socket.
    """

    def __init__(
        self,
        door: Door,
        slow: Callable[[], asyncio.Protocol],
        meters: Counted,
        *,
        clients: int = 4096,
        header_s: float = 20.0,
        send_s: float = 60.0,
        idle_s: float = 75.0,
        left: Callable[[int], None] | None = None,
    ) -> None:
        self.door, self.slow, self.meters = door, slow, meters
        self.clients, self.header_s, self.send_s, self.idle_s = clients, header_s, send_s, idle_s
        self.draining = False
        self.neighbours = Neighbours(left)
        self.scratch = memoryview(bytearray(HEAD_LIMIT_BYTES))
        self.connections: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    def listener(self, *, local: bool = False) -> Callable[[], Connection]:
        """What ``loop.create_server`` makes protocols by. ``local``: a Unix socket, where files are handed out."""
        return lambda: Connection(self, local=local)

    def drain(self) -> None:
        """Close what has nothing to do, and the others once their answer is out."""
        self.draining = True
        for connection in list(self.connections):
            connection.drain()

    async def gone(self, within_s: float) -> bool:
        """Wait until every connection is closed; False where some are not within the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.connections:
                    self._empty.clear()
                    await self._empty.wait()
        return not self.connections

    def close(self) -> None:
        """Abort what is left."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self.neighbours.close()
        for connection in list(self.connections):
            connection.abort()

    def add(self, connection: Connection) -> bool:
        """Count a connection; False where there are too many."""
        if len(self.connections) >= self.clients:
            self.meters.refused("clients")
            return False
        self.connections.add(connection)
        self.neighbours.came(connection.process)
        self.meters.clients += 1
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._swept)
        return True

    def discard(self, connection: Connection) -> None:
        """It is closed."""
        if connection in self.connections:
            self.connections.discard(connection)
            self.neighbours.went(connection.process)
            self.meters.clients -= 1
            self._empty.set()

    def _swept(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self.connections):
            connection.look(now)
        self._sweep = loop.call_later(SWEEP_EVERY_S, self._swept) if self.connections else None
