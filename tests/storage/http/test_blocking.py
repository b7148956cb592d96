"""Small questions to services and jobs."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from pathlib import Path

import pytest

from tests.servers import Origin, Tls
from wds_async.errors import ConfigError
from wds_async.storage.base import Tls as Trusted
from wds_async.storage.http.blocking import OverSocket, connection_to


def asked(connection: http.client.HTTPConnection) -> tuple[int, bytes]:
    with contextlib.closing(connection):
        connection.request("GET", "/x")
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_a_web_server(origin: Origin) -> None:
    origin.add("/x", b"here")
    assert asked(connection_to(f"{origin.base}/passed/over", 10.0)) == (200, b"here")


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
        assert asked(connection_to(f"unix:{path}", 10.0)) == (200, b"here")
        thread.join()
    with pytest.raises(ConnectionRefusedError):
        asked(OverSocket(path, 10.0))


def test_tls_is_verified(tls: Tls) -> None:
    with Origin(tls=tls.server_context()) as origin:
        origin.add("/x", b"here")
        assert asked(connection_to(origin.base, 10.0, Trusted(ca_file=str(tls.ca)))) == (200, b"here")
        with pytest.raises(ssl.SSLCertVerificationError):
            asked(connection_to(origin.base, 10.0))


@pytest.mark.parametrize("address", ["", "node:51080", "unix:", "ftp://host", "http://", "/run/s.sock"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a service or job"):
        connection_to(address, 1.0)


def test_an_address_is_shown_without_its_secrets() -> None:
    with pytest.raises(ConfigError) as caught:
        connection_to("gs://user:VERYSECRET@host", 1.0)
    assert "VERYSECRET" not in str(caught.value)
