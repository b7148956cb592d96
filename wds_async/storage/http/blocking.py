"""Connections for a few small questions to a service or job, which block: for threads that are not an engine's."""

from __future__ import annotations

import http.client
import socket
import urllib.parse

from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.storage.base import Tls

__all__ = ["OverSocket", "connection_to"]


class OverSocket(http.client.HTTPConnection):
    """HTTP over the Unix socket at ``path``."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """OSError where nobody listens there."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def connection_to(address: str, timeout_s: float, tls: Tls | None = None) -> http.client.HTTPConnection:
    """A connection, not opened yet, to ``http://host:port``, ``https://host:port`` or ``unix:/path``; what a web
    address has behind its host is passed over. ConfigError for an address of another form."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "unix" and parts.path:
        return OverSocket(parts.path, timeout_s)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{redact(address)} is no address of a service or job; write http://host:port or unix:/path")
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    from wds_async.storage.http.backend import tls_context  # noqa: PLC0415 (only where it is needed: a slow import)

    return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=tls_context(tls or Tls()))
