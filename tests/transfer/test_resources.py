"""What an engine is made of: it looks for what stalls, and ends with nothing left."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from tests.servers import BEFORE_HEAD, Origin
from tests.transfer.reading import quick
from wds_async.storage.registry import locate
from wds_async.transfer.connection import Origin as Place
from wds_async.transfer.connection import request_bytes
from wds_async.transfer.resources import Resources, why_unread


def test_a_stalled_connection_is_seen_and_all_is_closed(origin: Origin) -> None:
    url = origin.add("x", b"x")
    origin.behave(stall_after=BEFORE_HEAD)

    async def main() -> None:
        equipment = Resources(quick(stall_timeout_s=0.2), asyncio.get_running_loop())
        watch = asyncio.ensure_future(equipment.watch())
        with pytest.raises(TimeoutError, match="no byte arrived"):
            async with equipment.connections.connection(Place.of(url)) as connection:
                await connection.exchange(request_bytes(url, []), lambda head: memoryview(b""))
        watch.cancel()
        await equipment.close_backends(1.0)
        await equipment.close()
        assert equipment.connections.open == 0

    before = set(threading.enumerate())
    asyncio.run(main())
    origin.release()
    origin.wait_until(lambda server: server.open_connections == 0)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_a_backend_that_does_not_close_holds_nobody_up() -> None:
    class Hangs:
        async def close(self) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        equipment = Resources(quick(), asyncio.get_running_loop())
        equipment.backends = Hangs()  # type: ignore[assignment]
        async with asyncio.timeout(20):
            await equipment.close_backends(0.05)
            await equipment.close()

    asyncio.run(main())


def test_what_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    names = {
        str(tmp_path / "x"): False,
        str(tmp_path): False,
        str(tmp_path / "none"): False,
        "pipe:true": True,
        "-": True,
    }
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo")
        names[str(tmp_path / "fifo")] = True

    async def main() -> None:
        equipment = Resources(quick(), asyncio.get_running_loop())
        for name, unread in names.items():
            assert bool(await why_unread(equipment.threads, locate(name))) is unread, name
        await equipment.close()

    asyncio.run(main())
