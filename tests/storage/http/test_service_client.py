"""Brief requests to services and jobs."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest

from tests.servers import Origin, Tls
from wds_async.errors import ConfigError
from wds_async.storage.base import Tls as Trusted
from wds_async.storage.http.service_client import ask_service


def ask(address: str, tls: Trusted | None = None) -> tuple[int, bytes]:
    reply = ask_service(address, "GET", "/x", timeout_s=10.0, limit_bytes=100, tls=tls)
    return reply.status, reply.body


def test_a_web_server(origin: Origin) -> None:
    origin.add("/x", b"here")
    assert ask(f"{origin.base}/ignored") == (200, b"here")


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as client:
                assert client.recv(4096).startswith(b"GET /x HTTP/1.1\r\nHost: localhost\r\n")
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhere")

        thread = threading.Thread(target=answer)
        thread.start()
        assert ask(f"unix:{path}") == (200, b"here")
        thread.join()
    with pytest.raises(ConnectionRefusedError):
        ask(f"unix:{path}")


def test_tls_is_verified(tls: Tls) -> None:
    with Origin(tls=tls.server_context()) as origin:
        origin.add("/x", b"here")
        assert ask(origin.base, Trusted(ca_file=str(tls.ca))) == (200, b"here")
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(origin.base)


@pytest.mark.parametrize("address", ["", "node:51080", "unix:", "ftp://host", "http://", "/run/s.sock"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a service or job"):
        ask(address)


def test_an_address_is_shown_without_its_secrets() -> None:
    with pytest.raises(ConfigError) as caught:
        ask("gs://user:VERYSECRET@host")
    assert "VERYSECRET" not in str(caught.value)
