"""Listening sockets, limits of descriptors, and notifications of a service manager (systemd's ``sd_notify``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Callable
from typing import Any

from wds_async import environment
from wds_async.errors import WdsError

__all__ = [
    "CannotServe", "bear_exhaustion", "listen_at", "listen_at_path", "notify", "raise_descriptor_limit", "watchdog_s",
]  # fmt: skip

logger = logging.getLogger("wds_async")
_BACKLOG, _SAY_EVERY_S = 1024, 10.0
Factory = Callable[[], asyncio.BaseProtocol]


class CannotServe(WdsError):
    """The service cannot start: its port is taken, or its folder cannot be used."""


def notify(state: str) -> bool:
    """Send ``READY=1``, ``STOPPING=1``, ``WATCHDOG=1`` or ``STATUS=…`` to ``NOTIFY_SOCKET``; return whether a manager
    took it. Errors are ignored."""
    path = environment.variable("NOTIFY_SOCKET") or ""
    if not path.startswith(("/", "@")):
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.setblocking(False)
        there.sendto(state.encode(), address)
        return True
    return False


def watchdog_s() -> float | None:
    """Return how often the manager wants ``WATCHDOG=1``: half of the time after which it restarts the service."""
    text = environment.variable("WATCHDOG_USEC") or ""
    return int(text) / 2e6 if text.isascii() and text.isdigit() and int(text) > 0 else None


async def listen_at(factory: Factory, host: str, port: int) -> asyncio.Server:
    """Listen for TCP. CannotServe if the address cannot be bound."""
    try:
        loop = asyncio.get_running_loop()
        return await loop.create_server(factory, host, port, backlog=_BACKLOG, start_serving=False)
    except OSError as exn:
        advice = "another process listens there: stop it, or give another --port (0: any)"
        why = advice if "address already in use" in str(exn).lower() else "--host and --port say where"
        raise CannotServe(f"cannot listen at {host} port {port}: {exn.strerror or exn}; {why}") from exn


async def listen_at_path(factory: Factory, path: str) -> asyncio.Server:
    """Listen at a Unix socket, replacing one that a dead service left. CannotServe if another process listens there,
    the path is no socket, or it cannot be made."""
    try:
        if _taken(path):
            raise CannotServe(f"cannot listen at {path}: another process does; stop it, or give another --socket")
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(factory, path, backlog=_BACKLOG, start_serving=False)
        os.chmod(path, 0o666)  # its folder restricts access: pods have users of their own
        return server
    except (OSError, ValueError) as exn:
        raise CannotServe(f"cannot listen at {path}: {exn}; --socket names a path in a folder of its own") from exn


def _taken(path: str) -> bool:
    """Return whether a process listens at ``path``. OSError if it is no socket."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} is there, and no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def bear_exhaustion(loop: asyncio.AbstractEventLoop) -> None:
    """Log now and then that there are no descriptors for connections. asyncio itself would log a traceback for each
    place of the backlog, each second."""
    logged_at = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_at
        exn = context.get("exception")
        if isinstance(exn, OSError) and "accept()" in context.get("message", ""):
            if loop.time() - logged_at >= _SAY_EVERY_S:
                logged_at = loop.time()
                logger.error("no connection can be taken: %s; tried again each second (see ulimit -n)", exn.strerror)
        elif not (isinstance(exn, ValueError) and "_start_serving" in context.get("message", "")):
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors to the maximum and return it (0 if unknown)."""
    try:
        import resource  # noqa: PLC0415 (POSIX only)
    except ImportError:
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft
