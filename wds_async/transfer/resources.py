"""What an engine is made of but for its plan and its memory: a loop's threads, connections and backends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat

from wds_async.background import BlockingThreads
from wds_async.config import TransferConfig
from wds_async.storage.base import Guard
from wds_async.storage.registry import Backends, Location
from wds_async.transfer.connection_pool import ConnectionPool

__all__ = ["Equipment", "why_unread"]

_LOOK_EVERY_S = 1.0
_UNREAD = {
    "pipe": "running a command is no check",
    "stdin": "standard input can be read only once",
    "opener": "the program's own opener reads it",
}


class Equipment:
    """Made for ``loop``, on any thread; every method runs on the loop. ``guard`` judges where requests go."""

    def __init__(self, config: TransferConfig, loop: asyncio.AbstractEventLoop, guard: Guard | None = None) -> None:
        self.config = config
        self.threads = BlockingThreads(loop)
        self.connections = ConnectionPool(loop, self.threads, config, guard)
        self.backends = Backends(
            self.threads.call,
            direct=config.direct,
            connect_timeout_s=config.connect_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            guard=guard,
        )
        self._loop = loop

    async def watch(self) -> None:
        """Look for stalled connections, once a second or more often; without end."""
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, self.config.stall_timeout_s / 4))
            self.look()

    def look(self) -> None:
        """End what stalls, and close what was idle for long."""
        self.connections.expire(self._loop.time())

    async def close_backends(self, within_s: float) -> None:
        """A server that does not answer holds a daemon thread, and not the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.backends.close()

    async def close(self) -> None:
        """Drop every connection, let the idle threads end, and return once the loop has let go; backends come first."""
        self.connections.close()
        self.threads.stop()
        await self.connections.gone()


async def why_unread(threads: BlockingThreads, location: Location) -> str:
    """Why what is at ``location`` cannot be looked at without taking something of it away; "" where it can."""
    if (path := location.path) is not None:
        # Only what was seen to be there is no file: what a look at it raises, the read will raise and explain.
        with contextlib.suppress(OSError, ValueError):
            mode = (await threads.call(os.stat, path)).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                return "it is no regular file, and could be read only once"
    return _UNREAD.get(location.kind, "")
