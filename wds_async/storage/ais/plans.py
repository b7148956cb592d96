"""Plans for our own service: the shards that will be read soon, which it fetches ahead (``POST /v1/plan``), and with
them the order of the epoch, where it is known (`storage.order`).

A hint, and never more: at most one message is in flight, nothing waits for it, and errors are ignored. After an error
the service gets no hint for some time. AIStore gets none at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from wds_async import environment
from wds_async.storage.base import Request
from wds_async.storage.deadlines import with_deadline
from wds_async.storage.order import ShardOrder, announced

__all__ = ["Announcer"]

logger = logging.getLogger("wds_async")

_SHARDS_AT_MOST = 512
_GATHER_S = (0.1, 1.0)  # before the first message, and between two: what is taken meanwhile goes along
_LEAVE_ALONE_S = 60.0
_TIMEOUT_S = 2.0
_GOOD_BYE_S = 0.5
_JOBS = ("SLURM_JOB_ID", "JOB_NAME", "TORCHELASTIC_RUN_ID")

_numbers = itertools.count()


class Announcer:
    """The plans of one engine at one service. ``send`` is `HttpBackend.send` of a client for that service."""

    def __init__(self, send: Callable[..., Awaitable[Any]]) -> None:
        self.client = ""
        """Our name for the service: host, process, and a number from the second engine of a process on. "" until the
        other side has shown that it is our own service."""
        self._send = send
        self._ahead: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._request: Request | None = None
        self._not_before = 0.0
        self._order: ShardOrder | None = None
        self._changed = self._sent = self._closed = False

    def expect(self, urls: Iterable[str]) -> None:
        """Append ``urls`` to the plan."""
        if len(self._ahead) < _SHARDS_AT_MOST:
            self._ahead.update(dict.fromkeys(urls))
            self._changed = True

    def greet(self) -> None:
        """Start to send plans: the server is our own service."""
        if not self.client:
            number = next(_numbers)
            self.client = f"{socket.gethostname()}:{os.getpid()}{f'.{number}' if number else ''}"

    def begun(self, url: str) -> None:
        """Take ``url`` out of the plan: it is being read."""
        self._ahead.pop(url, None)

    def tell(self, request: Request) -> None:
        """Send the plan soon; ``request`` is one for the service, with its credentials."""
        self._request = request
        idle = self._task is None and not self._closed
        if idle and self._changed and self.client and time.monotonic() >= self._not_before:
            self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Withdraw the plan."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        if self._sent and self._request is not None:
            path = f"/v1/plan/{urllib.parse.quote(self.client, safe='')}"
            with contextlib.suppress(Exception):
                await self._exchange("DELETE", path, None, _GOOD_BYE_S)

    async def _run(self) -> None:
        try:
            await asyncio.sleep(_GATHER_S[0])
            while self._changed and self._request is not None:
                self._changed, self._sent = False, True
                shards = list(self._ahead)
                job = next(filter(None, map(environment.variable, _JOBS)), "")
                plan = {"client": self.client, "job": job, "shards": shards, "ahead": len(shards), "position": 0}
                order = announced()
                if order is not None and order is not self._order and (message := order.message()):
                    plan["order"] = message
                status = await self._exchange("POST", "/v1/plan", plan, _TIMEOUT_S)
                if not 200 <= status < 300:
                    raise OSError(f"status {status}")
                self._order = order
                await asyncio.sleep(_GATHER_S[1])
        except Exception as exn:
            self._not_before = time.monotonic() + _LEAVE_ALONE_S
            logger.debug("no plan was sent to the service: %r", exn)
        finally:
            self._task = None

    async def _exchange(self, method: str, path: str, body: Any, timeout_s: float) -> int:
        """Return the status of the answer."""
        assert self._request is not None
        request = replace(self._request, url=urllib.parse.urljoin(self._request.url, path))
        response = await with_deadline(self._send(request, {}, body, method), timeout_s)
        response.close()
        return int(response.status)
