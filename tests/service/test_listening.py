"""Where a service listens."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from wds_async.service.sockets import CannotServe, listen_at, listen_at_path, raise_descriptor_limit


def test_a_port_and_a_path(tmp_path: Path) -> None:
    async def main() -> None:
        path = str(tmp_path / "s")
        for server in (
            await listen_at(asyncio.Protocol, "127.0.0.1", 0),
            await listen_at_path(asyncio.Protocol, path),
        ):
            await server.start_serving()
            address = server.sockets[0].getsockname()
            with socket.socket(server.sockets[0].family) as client:
                client.connect(address)
            server.close()
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o666

    asyncio.run(main())


def test_what_is_taken(tmp_path: Path) -> None:
    async def main() -> None:
        taken = socket.create_server(("127.0.0.1", 0))
        with taken, pytest.raises(CannotServe, match="another process listens there"):
            await listen_at(asyncio.Protocol, *taken.getsockname())
        with pytest.raises(CannotServe, match=r"cannot listen at 192\.0\.2\.1"):
            await listen_at(asyncio.Protocol, "192.0.2.1", 0)
        path = tmp_path / "s"
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            with pytest.raises(CannotServe, match="another process does"):
                await listen_at_path(asyncio.Protocol, str(path))
        server = await listen_at_path(asyncio.Protocol, str(path))  # what the dead left is replaced
        server.close()

    asyncio.run(main())


def test_a_path_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    for one in (str(path), str(tmp_path / "no" / "folder"), str(tmp_path / ("x" * 200))):
        with pytest.raises(CannotServe, match="--socket"):
            asyncio.run(listen_at_path(asyncio.Protocol, one))
    assert path.read_text() == "precious"


def test_descriptors() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(500, before[1]), before[1]))
        assert raise_descriptor_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
