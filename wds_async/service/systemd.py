"""What a service manager is told (systemd's ``sd_notify``): ready, stopping, still alive. Without one, nothing."""

from __future__ import annotations

import contextlib
import socket

from wds_async import environment

__all__ = ["notify", "watchdog_s"]


def notify(state: str) -> bool:
    """Send ``READY=1``, ``STOPPING=1``, ``WATCHDOG=1`` or ``STATUS=…`` to ``NOTIFY_SOCKET``; whether there was one that
    took it. Nobody's work fails because its manager does not listen."""
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
    """How often the manager wants to hear ``WATCHDOG=1``: half of the time after which it would restart the service."""
    text = environment.variable("WATCHDOG_USEC") or ""
    return int(text) / 2e6 if text.isascii() and text.isdigit() and int(text) > 0 else None
