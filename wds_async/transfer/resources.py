"""Resources of one loop: threads, connections and backends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable

from wds_async.background import BlockingThreads
from wds_async.config import TransferConfig
from wds_async.storage.base import Guard, Location
from wds_async.storage.registry import Backends
from wds_async.transfer.connection_pool import ConnectionPool

__all__ = ["Resources", "why_unread"]

_CHECK_EVERY_S = 1.0
_UNREAD = {
    "pipe": "running a command is no check",
    "stdin": "standard input can be read only once",
    "opener": "the program's own opener reads it",
}


class Resources:
    """Threads, connections and backends of ``loop``; all methods but the constructor run there. ``guard`` judges where
    requests go."""

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

    async def watch(self, *also: Callable[[], None]) -> None:
        """Once a second or more often, end what stalls, close what was idle for long, and call ``also``; without
        end."""
        while True:
            await asyncio.sleep(min(_CHECK_EVERY_S, self.config.stall_timeout_s / 4))
            self.connections.expire(self._loop.time())
            for function in also:
                function()

    async def close_backends(self, within_s: float) -> None:
        """Close the backends; a server that does not answer holds a daemon thread, and not the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.backends.close()

    async def close(self) -> None:
        """Drop every connection, end the idle threads, and return once the loop has let go; backends come first."""
        self.connections.close()
        self.threads.stop()
        await self.connections.gone()


async def why_unread(threads: BlockingThreads, location: Location) -> str:
    """Return why reading the first bytes at ``location`` would take them from the real read; "" where it would not."""
    if (path := location.path) is not None:
        # Only what was seen to be there is no file: what a look at it raises, the read will raise and explain.
        with contextlib.suppress(OSError, ValueError):
            mode = (await threads.call(os.stat, path)).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                return "it is no regular file, and could be read only once"
    return _UNREAD.get(location.kind, "")
