"""The demo's object server: a folder over HTTP on a free loopback port, in a process of its own.

Like an object store it answers ranges with ``Content-Range`` and ``ETag``, honours ``If-Match``, and takes
50 ms to the first byte.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from aiohttp import web

__all__ = ["serving"]

_START_TIMEOUT_S = 30.0


@contextmanager
def serving(folder: Path, first_byte_s: float = 0.05) -> Iterator[str]:
    """Serve the files of ``folder`` while the context is open; gives the base URL, without a final slash."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(str(folder), first_byte_s, there), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(_START_TIMEOUT_S):
            raise TimeoutError(f"the demo's server did not start within {_START_TIMEOUT_S:.0f} s")
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()
        here.close()


def _main(folder: str, first_byte_s: float, report: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends this process
    asyncio.run(_serve(folder, first_byte_s, report))


async def _serve(folder: str, first_byte_s: float, report: Connection) -> None:
    @web.middleware
    async def slow(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        await asyncio.sleep(first_byte_s)
        return await handler(request)

    app = web.Application(middlewares=[slow])
    app.router.add_static("/", folder)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    report.send(runner.addresses[0][1])
    await asyncio.Event().wait()
