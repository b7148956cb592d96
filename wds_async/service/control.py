"""The control socket: commands for a running service, at ``control.sock`` in its cache's folder.

Its mode lets only the service's user (and root) connect, so it needs no token: ``GET /v1/stats``, and ``POST`` of JSON
to ``/rm``, ``/verify`` (a line for each object), ``/pin`` and ``/quotas``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.service.cache.index import key_of
from wds_async.service.config import check_quotas
from wds_async.service.context import Context
from wds_async.service.delivery import Delivery
from wds_async.service.http_server import ClientConnections, HttpRequest, HttpResponse, json_response
from wds_async.service.metrics import Meters
from wds_async.service.pages import snapshot
from wds_async.service.refusals import Refusal

__all__ = ["chooser", "keys_of", "serve_control", "socket_path"]

logger = logging.getLogger("wds_async")

_NAME = "control.sock"
_PATH_BYTES = 100  # longest path that is bound as it is: a Unix socket's may have 107
_BODY_BYTES, _CONNECTIONS, _TIMEOUT_S = 64 << 20, 64, 20.0


@contextlib.contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """Yield a path of the folder's control socket that is short enough to bind or connect to. OSError without the
    folder."""
    path = str(folder / _NAME)
    if len(os.fsencode(path)) <= _PATH_BYTES:
        yield path
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_NAME}"
    finally:
        os.close(fd)


@contextlib.asynccontextmanager
async def serve_control(folder: Path, context: Callable[[], Context]) -> AsyncIterator[None]:
    """Answer commands for the cache in ``folder``, which belongs to this process. OSError if the socket cannot be
    made."""

    async def answer(request: HttpRequest) -> None:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # the client has gone
            await request.send(await _answer(context(), request))

    clients = ClientConnections(
        answer,
        lambda connection, status, why: json_response({"error": why}, status),
        Meters(),
        clients=_CONNECTIONS,
        of_address=_CONNECTIONS,
        header_s=_TIMEOUT_S,
        send_s=_TIMEOUT_S,
        body_limit_bytes=_BODY_BYTES,
        warns_of_root=False,
    )
    with contextlib.ExitStack() as ends:
        path = ends.enter_context(socket_path(folder))
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # it, also where its path leads elsewhere
        ends.callback(os.close, at)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_NAME, dir_fd=at)  # of a process that was killed: the lock says that there is no other
            listening = ends.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(path)
            os.chmod(path, 0o600)  # before it listens
            server = await asyncio.get_running_loop().create_unix_server(clients.listener(local=True), sock=listening)
            ends.callback(clients.close)
            ends.callback(server.close)
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(_NAME, dir_fd=at)


def chooser(urls: Iterable[str], *, everything: bool = False) -> Callable[[str], bool]:
    """Return the predicate that selects objects by the ``urls`` of their keys, or by prefixes that end with "/"."""
    names = keys_of(urls)
    whole, prefixes = frozenset(names), tuple(name for name in names if name.endswith("/"))
    return lambda key: everything or key in whole or key.startswith(prefixes)


def keys_of(urls: Iterable[str]) -> list[str]:
    """Return URLs and prefixes as the cache's index has them, without secrets."""
    return [url if url.endswith("/") else key_of(url) for url in urls]


async def _answer(context: Context, request: HttpRequest) -> HttpResponse:
    path = request.target.partition("?")[0]
    if path == "/v1/stats" and request.method == "GET":
        return json_response(snapshot(context))
    command = _COMMANDS.get(path)
    if command is None or request.method != "POST":
        return json_response({"error": f"{request.method} {path[:100]}: there is no such command"}, 404)
    try:
        message = json.loads(await request.read(_TIMEOUT_S) or b"{}")
        if not isinstance(message, dict):
            raise ValueError("a JSON object is expected")
        return await command(context, request, message)
    except Refusal as exn:
        return json_response({"error": exn.message}, exn.status)
    except (ConfigError, ValueError, KeyError, TypeError) as exn:
        return json_response({"error": str(exn)}, 400)
    except OSError:
        raise
    except Exception:
        logger.exception("the command %s failed", path)
        return json_response({"error": "the service itself failed; its log says how"}, 500)


async def _rm(context: Context, request: HttpRequest, message: Mapping[str, Any]) -> HttpResponse:
    rows = await context.cache.evict(chooser(message.get("urls", ()), everything=bool(message.get("all"))))
    logger.info("cache: %d objects were removed by command", len(rows))
    return json_response({"objects": len(rows), "bytes": sum(row.held for row in rows)})


async def _verify(context: Context, request: HttpRequest, message: Mapping[str, Any]) -> HttpResponse:
    results = context.cache.verify(str(message.get("prefix", "")))
    fields = {"Content-Type": "application/x-ndjson"}
    delivery = Delivery(request, 200, fields, None, call=context.call, timeout_s=_TIMEOUT_S)
    try:
        async for result in results:
            await delivery.send(memoryview(json.dumps(asdict(result)).encode() + b"\n"))
        delivery.finish()
    except BaseException as exn:
        request.connection.cut()
        if not isinstance(exn, Exception):
            raise
        logger.warning("cache: the comparison with checksums was broken off: %r", exn)
    finally:
        delivery.close()
    return HttpResponse(sent=True)


async def _pin(context: Context, request: HttpRequest, message: Mapping[str, Any]) -> HttpResponse:
    names, pinned = keys_of(message.get("urls", ())), bool(message.get("pinned", True))
    for name in names:
        logger.info("cache: %s is %s by command", redact(name), "pinned" if pinned else "no longer pinned")
    return json_response({"pins": await context.cache.pin(names, pinned=pinned)})


async def _quotas(context: Context, request: HttpRequest, message: Mapping[str, Any]) -> HttpResponse:
    cache = context.cache
    if "quotas" in message:
        changed = {**cache.quotas, **{str(name): float(share) for name, share in message["quotas"].items()}}
        quotas = {name: share for name, share in changed.items() if share > 0}
        check_quotas(quotas)
        cache.set_quotas(quotas)
        logger.info("cache: the quotas are %s by command, until the next start or reload", quotas)
    return json_response({"quotas": dict(cache.quotas), "held": cache.held_by_tenant()})


_COMMANDS: dict[str, Callable[[Context, HttpRequest, Mapping[str, Any]], Awaitable[HttpResponse]]] = {
    "/rm": _rm,
    "/verify": _verify,
    "/pin": _pin,
    "/quotas": _quotas,
}
