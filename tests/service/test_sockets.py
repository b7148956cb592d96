"""What a service manager is told."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from wds_async.service.sockets import notify, watchdog_s


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
