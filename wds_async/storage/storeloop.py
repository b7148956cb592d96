"""Calls of stores from plain code: an event loop on a thread of its own, with backends of its own.

Also for code within a running event loop (notebooks). The thread ends with the call, so that a program that forks later
inherits nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from wds_async.background import BlockingThreads, LoopThread
from wds_async.config import transfer_config
from wds_async.storage.registry import Backends

__all__ = ["StoreLoop"]

_STOP_WITHIN_S = 2.0


class StoreLoop:
    """A loop (`run`) and its ``backends`` for the length of a ``with`` block. ``name`` is that of its thread."""

    def __init__(self, name: str = "wds-async-store") -> None:
        config = transfer_config()
        self._thread = LoopThread(name, at_end=self._end)
        self._blocking = BlockingThreads(self._thread.loop)
        self.backends = Backends(
            self._blocking.call,
            direct=config.direct,
            connect_timeout_s=config.connect_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
        )
        self.run = self._thread.run

    def __enter__(self) -> StoreLoop:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exn: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.stop()
        self._thread.join(_STOP_WITHIN_S)

    async def _end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_WITHIN_S * 0.75):
                await self.backends.close()
        self._blocking.stop()
