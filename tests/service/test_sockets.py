"""Where a service listens, and what a service manager is told."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from wds_async.service.running import (
    CannotServe,
    listen_at,
    listen_at_path,
    notify,
    raise_descriptor_limit,
    watchdog_s,
)


async def test_a_port_and_a_path(tmp_path: Path) -> None:
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


async def test_what_is_taken(tmp_path: Path) -> None:
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


def test_a_manager_hears_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(path)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        assert notify("READY=1")
        assert there.recv(100) == b"READY=1"
    assert not notify("READY=1")  # nobody listens any more


def test_abstract_sockets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind("")  # the kernel chooses an abstract name
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + there.getsockname()[1:].decode())
        assert notify("STOPPING=1")
        assert there.recv(100) == b"STOPPING=1"


def test_without_one_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "vsock:2:9999")
    assert not notify("READY=1")


@pytest.mark.parametrize(("text", "seconds"), [("30000000", 15.0), ("0", None), ("soon", None), ("", None)])
def test_how_often(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float | None) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", text)
    assert watchdog_s() == seconds
