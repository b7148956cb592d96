"""Connections by origin: name resolution, TLS, keep-alive, and the watch over those that stall."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from wds_async.background import BlockingThreads
from wds_async.config import TransferConfig
from wds_async.errors import AccessDenied
from wds_async.storage.base import Guard, Tls
from wds_async.storage.http.auth import tls_context
from wds_async.transfer.circuit_breaker import CircuitBreaker
from wds_async.transfer.connection import Connection, Origin, open_connection

__all__ = ["ConnectionPool"]

logger = logging.getLogger("wds_async")

_ADDRESS_LIFETIME_S = 60.0
_RESOLVE_AGAIN_S = 5.0
_RENEWAL_WITHIN_S = 1.0
_IDLE_LIFETIME_S = 55.0
_RANGELESS_S = 60.0
_GONE_WITHIN_S = 0.5
_LOOK_AGAIN_S = 0.001
_TURNS_TO_CLOSE = 3


@dataclass(slots=True)
class _OriginState:
    idle: deque[Connection] = field(default_factory=deque)
    addresses: list[str] = field(default_factory=list)
    resolve_at: float = 0.0
    resolving: asyncio.Future[list[str]] | None = None
    turn: int = 0
    answered: bool = False
    rangeless_until: float = 0.0
    ranged: bool = False


class ConnectionPool:
    """Connections kept open between parts. Their number is the window's: one per part in flight."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads: BlockingThreads,
        config: TransferConfig,
        guard: Guard | None = None,
    ) -> None:
        self._loop = loop
        self._threads = threads
        self._config = config
        self._guard = guard
        self._origins: dict[Origin, _OriginState] = {}
        self._busy: set[Connection] = set()
        self._contexts: dict[Tls, ssl.SSLContext] = {}
        self._held: set[Connection] = set()
        self.peak = 0
        self._breakers: dict[str, CircuitBreaker] = {}

    def breaker(self, store: str) -> CircuitBreaker:
        """Return the circuit breaker of ``store`` (scheme and host), which all readers of the process share."""
        if store not in self._breakers:
            self._breakers[store] = CircuitBreaker(store, self._loop)
        return self._breakers[store]

    @property
    def busy(self) -> int:
        """Connections with an exchange under way."""
        return len(self._busy)

    @property
    def open(self) -> int:
        """Connections that are open now, busy or idle."""
        return len(self._busy) + sum(len(state.idle) for state in self._origins.values())

    def answered(self, origin: Origin) -> bool:
        """Return whether this origin has ever answered: until then a fault is more likely a typo than an outage."""
        return self._state(origin).answered

    def rangeless(self, origin: Origin) -> bool:
        """Return whether this origin has ignored ranges lately."""
        return self._state(origin).rangeless_until > self._loop.time()

    def ranged(self, origin: Origin) -> bool:
        """Return whether this origin has given a range that did not begin at the start."""
        return self._state(origin).ranged

    def mark_ranged(self, origin: Origin) -> None:
        """Note that this origin gives ranges, so that one answer without does not change how it is read."""
        self._state(origin).ranged = True

    def mark_rangeless(self, origin: Origin) -> None:
        """Note that this origin ignores ranges, so that its shards of the next minute are streamed at once."""
        self._state(origin).rangeless_until = self._loop.time() + _RANGELESS_S

    @contextlib.asynccontextmanager
    async def connection(self, origin: Origin, *, fresh: bool = False) -> AsyncIterator[Connection]:
        """Give a connection for one exchange; it is kept for the next if that ended well, and aborted otherwise."""
        state = self._state(origin)
        connection = None if fresh else self._idle(state)
        if connection is None:
            allowed_s = self._config.connect_timeout_s
            try:
                async with asyncio.timeout(allowed_s):
                    connection = await self._connect(origin, state)
            except TimeoutError:
                raise TimeoutError(f"no connection to {origin.place} within {allowed_s:g} s") from None
        self._busy.add(connection)
        self.peak = max(self.peak, self.open)
        keep = False
        try:
            yield connection
            keep = connection.reusable()
            state.answered = True
        finally:
            self._busy.discard(connection)
            if keep:
                state.idle.append(connection)
            else:
                connection.abort()

    def expire(self, now: float) -> None:
        """End the exchanges that bring next to nothing within the stall timeout; close what has been idle for long."""
        for connection in list(self._busy):
            if reason := connection.too_slow(now, self._config.stall_timeout_s):
                connection.stall(reason)
                idle = self._state(connection.origin).idle
                while connection.exchanges > 1 and not connection.received and idle:
                    idle.pop().abort()  # a middlebox that forgot this flow has forgotten theirs too
        for state in self._origins.values():
            while state.idle and now - state.idle[0].moved_at > _IDLE_LIFETIME_S:
                state.idle.popleft().abort()

    def close(self) -> None:
        """Abort every connection."""
        for state in self._origins.values():
            while state.idle:
                state.idle.pop().abort()
        for connection in list(self._busy):
            connection.abort()

    async def gone(self) -> None:
        """Wait until the loop has let go of every connection, which takes some turns after `close` and after a failed
        handshake: a loop that is closed before that leaks them, or (uvloop) cannot be closed. 0.5 s at most."""
        deadline = self._loop.time() + _GONE_WITHIN_S
        while self._held and self._loop.time() < deadline:  # noqa: ASYNC110 (what it waits for are turns of the loop)
            await asyncio.sleep(_LOOK_AGAIN_S)
        for _ in range(_TURNS_TO_CLOSE):
            await asyncio.sleep(0)

    def _state(self, origin: Origin) -> _OriginState:
        return self._origins.setdefault(origin, _OriginState())

    def _idle(self, state: _OriginState) -> Connection | None:
        while state.idle:
            connection = state.idle.pop()
            if connection.reusable():
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin, state: _OriginState) -> Connection:
        if origin.socket:
            return await open_connection(self._loop, origin, origin.socket, None, self._held)
        addresses = await self._resolve(origin, state)
        state.turn += 1
        failure: OSError | None = None
        for i in range(len(addresses)):
            address = addresses[(state.turn + i) % len(addresses)]
            if self._guard is not None and (why := self._guard.why_not(origin.host, address)):
                raise AccessDenied(f"no connection is made: {why}")
            try:
                return await open_connection(self._loop, origin, address, self._context(origin), self._held)
            except ssl.SSLCertVerificationError:
                raise
            except OSError as exn:
                failure = exn
                self._refused(state, address)
        raise failure or OSError(f"{origin.host} has no address")

    def _refused(self, state: _OriginState, address: str) -> None:
        """Leave the address out, as long as there are others; the last one stays, and the name is resolved again."""
        state.addresses = [other for other in state.addresses if other != address] or [address]
        if state.addresses == [address]:
            state.resolve_at = min(state.resolve_at, self._loop.time())

    async def _resolve(self, origin: Origin, state: _OriginState) -> list[str]:
        """Return the addresses of the host, resolved once for all connections that wait. The former ones are used on
        where the name service fails, or takes longer than a second."""
        if state.addresses and self._loop.time() < state.resolve_at:
            return state.addresses
        if state.resolving is None:
            state.resolving = asyncio.ensure_future(self._look_up(origin, state))
            state.resolving.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, or logged
        try:
            async with asyncio.timeout(_RENEWAL_WITHIN_S if state.addresses else None):
                return await asyncio.shield(state.resolving)
        except OSError as exn:  # and its TimeoutError, and socket.gaierror
            if not state.addresses:
                raise
            state.resolve_at = max(state.resolve_at, self._loop.time() + _RESOLVE_AGAIN_S)
            logger.info("%s is not resolved again: %r; going on with %s", origin.host, exn, ", ".join(state.addresses))
            return state.addresses

    async def _look_up(self, origin: Origin, state: _OriginState) -> list[str]:
        try:
            infos = await self._threads.call(socket.getaddrinfo, origin.host, origin.port, type=socket.SOCK_STREAM)
            state.addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
            state.resolve_at = self._loop.time() + _ADDRESS_LIFETIME_S
        except OSError:
            state.resolve_at = self._loop.time() + _RESOLVE_AGAIN_S
            raise
        finally:
            state.resolving = None
        return state.addresses

    def _context(self, origin: Origin) -> ssl.SSLContext | None:
        if origin.scheme == "http":
            return None
        if origin.tls not in self._contexts:
            self._contexts[origin.tls] = tls_context(origin.tls)
        return self._contexts[origin.tls]
