"""Brief requests to a service or job of wds_async: over TCP, TLS or a Unix socket, never through a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.storage.base import Tls
from wds_async.storage.deadlines import call_with_deadline
from wds_async.storage.http.auth import tls_context
from wds_async.storage.http.messages import fields_of

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Reply", "ask_service", "service_session"]


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of a service, with the beginning of its body."""

    status: int
    reason: str
    fields: Mapping[str, str]
    """Of its head, in lower case."""
    body: bytes


@contextlib.asynccontextmanager
async def service_session(
    address: str, timeout_s: float, tls: Tls | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a session for the paths of ``http://host:port``, ``https://host:port`` or ``unix:/path``; the path of a web
    address is ignored. ``timeout_s`` limits each wait for the service.

    Raise ConfigError for an address of another form. Within the block, every error of the connection is an OSError.
    """
    import aiohttp  # noqa: PLC0415 (slow)

    parts = urllib.parse.urlsplit(address)
    connector: aiohttp.BaseConnector
    if parts.scheme == "unix" and parts.path:
        base, connector = "http://localhost", aiohttp.UnixConnector(parts.path)
    elif parts.scheme in ("http", "https") and parts.hostname:
        base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        connector = aiohttp.TCPConnector(ssl=tls_context(tls or Tls()) if parts.scheme == "https" else True)
    else:
        raise ConfigError(f"{redact(address)} is no address of a service or job; write http://host:port or unix:/path")
    timeout = aiohttp.ClientTimeout(total=None, connect=timeout_s, sock_read=timeout_s)
    try:
        async with aiohttp.ClientSession(base, connector=connector, timeout=timeout) as session:
            yield session
    except aiohttp.ClientConnectorCertificateError as exn:
        raise exn.certificate_error from None
    except aiohttp.ClientConnectorError as exn:
        raise exn.os_error from None
    except aiohttp.ClientError as exn:
        raise exn if isinstance(exn, OSError) else ConnectionError(str(exn) or type(exn).__name__) from exn


def ask_service(
    address: str,
    method: str,
    path: str,
    *,
    timeout_s: float,
    limit_bytes: int,
    headers: Mapping[str, str] = {},
    body: Any = None,
    tls: Tls | None = None,
) -> Reply:
    """Send one request, with ``body`` as JSON, and return the answer with up to ``limit_bytes`` of its body. Raise
    ConfigError or OSError as `service_session` does. Blocks; a running event loop of the caller does not matter."""

    async def exchange() -> Reply:
        async with (
            service_session(address, timeout_s, tls) as session,
            session.request(method, path, headers=headers, json=body, allow_redirects=False) as response,
        ):
            pieces = bytearray()
            while len(pieces) < limit_bytes and (piece := await response.content.read(limit_bytes - len(pieces))):
                pieces += piece
            return Reply(response.status, response.reason or "", fields_of(response.headers), bytes(pieces))

    return call_with_deadline(10 * timeout_s, lambda: asyncio.run(exchange()))
