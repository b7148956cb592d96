"""The fast lane over a folder of files: rules that give everybody all of them, and a slow way that says its name."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from wds_async.service.door import Door, Pass
from wds_async.service.express import Express
from wds_async.service.meters import Meters

__all__ = ["Held", "Lane", "Shelf", "answers", "asked", "dial", "until"]

_WITHIN_S = 20.0


class Held:
    """One file. ``ready_to``: how much of it is there."""

    def __init__(self, path: Path) -> None:
        self.url = f"gs://b/{path.name}"
        self.fd = os.open(path, os.O_RDWR)
        self.size: int | None = path.stat().st_size
        self.facts = object()
        self.ready_to = path.stat().st_size
        self.references = self.counted = 0

    @property
    def whole(self) -> bool:
        return self.ready_to == self.size

    def ready(self, start: int, stop: int) -> int:
        return max(start, min(stop, self.ready_to))

    def served(self, count: int) -> None:
        self.counted += count

    def release(self) -> None:
        self.references -= 1
        assert self.references >= 0


class Shelf:
    """`door.Rules` over ``held``, by the last part of the path. ``token``: what has to be given; ``most``: requests."""

    def __init__(self, folder: Path) -> None:
        self.held = {path.name: Held(path) for path in folder.iterdir() if path.is_file()}
        self.token, self.most = b"", 100
        self.under_way: dict[str, int] = {}
        self.heard_of: list[tuple[str, str]] = []

    def close(self) -> None:
        for one in self.held.values():
            os.close(one.fd)

    def name(self, target: str) -> Pass | None:
        name = target.partition("?")[0].rpartition("/")[2]
        return Pass(self.held[name].url, "ais") if name in self.held else None

    def who(self, fields: Mapping[bytes, bytes], peer: str, *, local: bool) -> tuple[str, str] | None:
        if self.token and fields.get(b"authorization") != self.token:
            return None
        return ("local" if local else fields.get(b"wds-client", b"somebody").decode()), ""

    def peek(self, url: str, tenant: str) -> Held | None:
        found = self.held[url.rpartition("/")[2]]
        found.references += 1
        return found

    def fields(self, found: Any, api: str) -> Mapping[str, str]:
        return {"Server": "wds-async/0", "ETag": f'"{found.size}"', "Accept-Ranges": "bytes"}

    def enter(self, client: str) -> bool:
        if self.under_way.get(client, 0) >= self.most:
            return False
        self.under_way[client] = self.under_way.get(client, 0) + 1
        return True

    def leave(self, client: str) -> None:
        self.under_way[client] -= 1

    def heard(self, client: str, url: str) -> None:
        self.heard_of.append((client, url))


class Lane:
    """An `Express` over a `Shelf`, on a loop and thread of its own; ``settings`` are `Express`'s. ``patience_s``:
    how long aiohttp keeps a connection that is lent to it and idle."""

    def __init__(
        self,
        folder: Path,
        sockets: Path | None = None,
        *,
        patience_s: float = 75.0,
        tls: ssl.SSLContext | None = None,
        **settings: Any,
    ) -> None:
        self.shelf, self.meters = Shelf(folder), Meters()
        self.slow: list[tuple[str, str, bytes]] = []
        self.port = 0
        self.path = "" if sockets is None else str(sockets / "s")
        self.express: Express
        self.loop: asyncio.AbstractEventLoop
        self._settings, self._patience_s, self._tls = settings, patience_s, tls
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Lane:
        self._thread.start()
        assert self._ready.wait(_WITHIN_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(_WITHIN_S)
        assert not self._thread.is_alive()
        self.shelf.close()

    def on_loop(self, function: Any, *args: Any) -> Any:
        """What ``function`` gives on the loop; it may be a coroutine function."""

        async def run() -> Any:
            found = function(*args)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(_WITHIN_S)

    async def _run(self) -> None:
        self.loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        server = web.Server(
            self._answer, access_log=None, handler_cancellation=True, keepalive_timeout=self._patience_s
        )
        self.express = Express(Door(self.shelf), server, self.meters, **self._settings)
        tcp = await self.loop.create_server(self.express.listener(), "127.0.0.1", 0, ssl=self._tls)
        self.port = tcp.sockets[0].getsockname()[1]
        listening = [tcp]
        if self.path:
            listening.append(await self.loop.create_unix_server(self.express.listener(local=True), self.path))
        self._ready.set()
        await self._ending.wait()
        for one in listening:
            one.close()
        self.express.close()
        await self.express.gone(_WITHIN_S)
        await server.shutdown(0)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.slow.append((request.method, request.path_qs, body))
        return web.Response(text=f"slow {request.method} {request.path_qs} {len(body)}")


def dial(lane: Lane, *, local: bool = False) -> socket.socket:
    """A connection to ``lane``, that waits for nothing longer than 20 s."""
    if local:
        found = socket.socket(socket.AF_UNIX)
        found.connect(lane.path)
    else:
        found = socket.create_connection(("127.0.0.1", lane.port))
    found.settimeout(_WITHIN_S)
    return found


def answers(connection: socket.socket, *methods: str) -> list[tuple[int, dict[str, str], bytes]]:
    """As many answers as requests were sent by ``methods``, in order: status, fields (lower case), body."""
    found, left = [], bytearray()

    def more() -> None:
        got = connection.recv(1 << 20)
        if not got:
            raise EOFError(f"closed after {bytes(left[:200])!r}")
        left.extend(got)

    for method in methods:
        while b"\r\n\r\n" not in left:
            more()
        head, _, rest = bytes(left).partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
        left = bytearray(rest)
        length = 0 if method == "HEAD" else int(fields.get("content-length", "0"))
        while len(left) < length:
            more()
        found.append((int(line.split()[1]), fields, bytes(left[:length])))
        del left[:length]
    assert not left, left[:200]
    return found


def asked(path: str, method: str = "GET", **fields: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\nHost: h\r\n{lines}\r\n".encode()


def until(lane: Lane, what: Any, within_s: float = 20.0) -> None:
    """Wait until ``what()`` is true on the loop."""

    async def look() -> None:
        async with asyncio.timeout(within_s):
            while not what():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    lane.on_loop(look)
