"""The control socket: commands for a running service, at ``control.sock`` in its cache's folder.

Only the user that the service runs as (and root) may connect, so it asks for no token. ``wds-async cache`` uses it
wherever it answers, and works on the folder itself where no service has it open.

=================  ==============================================  =================================================
``GET /v1/stats``                                                  the figures of all tenants
``POST /rm``       ``{"urls": [URL or prefix, …], "all": false}``  ``{"objects": 2, "bytes": 4096}``
``POST /verify``   ``{"prefix": ""}``                              a line ``{"key", "good", "bad"}`` for each object
``POST /pin``      ``{"urls": […], "pinned": true}``               ``{"pins": […]}``
``POST /quotas``   ``{"quotas": {"vision": 0.5}}`` or ``{}``       ``{"quotas": {…}, "held": {"vision": 4096}}``
=================  ==============================================  =================================================
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.service.cache.index import key_of
from wds_async.service.config import Quota, check_quotas

if TYPE_CHECKING:
    from wds_async.service.cache.cache import ChunkCache

__all__ = ["chooser", "keys_of", "serve_control", "socket_path"]

logger = logging.getLogger("wds_async")
_NAME = "control.sock"
_PATH_BYTES = 100
"""A path of a Unix socket may have 107."""
_BODY_BYTES = 64 << 20


@contextlib.contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """A path of the folder's control socket that is short enough to bind or connect to. OSError without the folder."""
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
async def serve_control(folder: Path, cache: ChunkCache, stats: Callable[[], dict[str, Any]]) -> Any:
    """Answer commands for ``cache``, whose folder is this process's own, and show ``stats``. OSError where the socket
    cannot be made."""
    runner = web.AppRunner(_app(cache, stats), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
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
            await web.SockSite(runner, listening).start()
            yield
        finally:
            await runner.cleanup()
            with contextlib.suppress(OSError):
                os.unlink(_NAME, dir_fd=at)


def chooser(urls: Iterable[str], *, everything: bool = False) -> Callable[[str], bool]:
    """What tells whether an object is meant by ``urls``: by its key, or by a prefix that ends with "/"."""
    names = keys_of(urls)
    whole, prefixes = frozenset(names), tuple(name for name in names if name.endswith("/"))
    return lambda key: everything or key in whole or key.startswith(prefixes)


def keys_of(urls: Iterable[str]) -> list[str]:
    """URLs and prefixes as the cache has them: secrets are not written down."""
    return [url if url.endswith("/") else key_of(url) for url in urls]


def _app(cache: ChunkCache, stats: Callable[[], dict[str, Any]]) -> web.Application:
    app = web.Application(client_max_size=_BODY_BYTES)

    def route(path: str, answer: Callable[[web.Request, Mapping[str, Any]], Awaitable[web.StreamResponse]]) -> None:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                said = json.loads(await request.text() or "{}")
                if not isinstance(said, dict):
                    raise ValueError("a JSON object is expected")
                return await answer(request, said)
            except (ConfigError, ValueError, KeyError, TypeError) as exn:
                return web.json_response({"error": str(exn)}, status=400)

        app.router.add_post(path, handle)

    async def show(request: web.Request) -> web.Response:
        return web.json_response(stats())

    async def rm(request: web.Request, said: Mapping[str, Any]) -> web.Response:
        gone = await cache.evict(chooser(said.get("urls", ()), everything=bool(said.get("all"))))
        logger.info("cache: %d objects were removed by command", len(gone))
        return web.json_response({"objects": len(gone), "bytes": sum(row.held for row in gone)})

    async def verify(request: web.Request, said: Mapping[str, Any]) -> web.StreamResponse:
        found = cache.verify(str(said.get("prefix", "")))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        async for one in found:
            await response.write(json.dumps(asdict(one)).encode() + b"\n")
        await response.write_eof()
        return response

    async def pin(request: web.Request, said: Mapping[str, Any]) -> web.Response:
        names, pinned = keys_of(said.get("urls", ())), bool(said.get("pinned", True))
        for name in names:
            logger.info("cache: %s is %s by command", redact(name), "pinned" if pinned else "no longer pinned")
        return web.json_response({"pins": await cache.pin(names, pinned=pinned)})

    async def quotas(request: web.Request, said: Mapping[str, Any]) -> web.Response:
        if "quotas" in said:
            changed = {**cache.quotas, **{str(name): float(share) for name, share in said["quotas"].items()}}
            kept = {name: share for name, share in changed.items() if share > 0}
            check_quotas(Quota(name, share) for name, share in kept.items())
            cache.set_quotas(kept)
            logger.info("cache: the quotas are %s by command, until the next start or reload", kept)
        return web.json_response({"quotas": dict(cache.quotas), "held": cache.held_by_tenant()})

    for path, answer in (("/rm", rm), ("/verify", verify), ("/pin", pin), ("/quotas", quotas)):
        route(path, answer)
    app.router.add_get("/v1/stats", show)
    return app
