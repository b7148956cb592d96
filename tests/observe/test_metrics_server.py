"""The server of a few pages: what it answers, that it ends, and what a fork does to it."""

from __future__ import annotations

import os
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from wds_async.observe.metrics_server import PageServer


def served(**pages: Any) -> PageServer:
    server = PageServer(("127.0.0.1", 0), {f"/{name}": page for name, page in pages.items()})
    return server


def get(server: PageServer, path: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen("http://{}:{}{}".format(*server.address, path), timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as exn:
        with exn:
            return exn.code, exn.headers["Content-Type"], exn.read()


def fails() -> tuple[str, bytes]:
    raise LookupError("geheim")


def test_pages() -> None:
    server = served(a=lambda: ("text/x", b"1"), broken=fails)
    try:
        assert get(server, "/a") == (200, "text/x", b"1")
        assert get(server, "/a?x=1")[0] == 200
        assert get(server, "/b")[0] == 404
        status, _, body = get(server, "/broken")
        assert (status, b"LookupError" in body, b"geheim" in body) == (500, True, False)
        assert get(server, "/a")[0] == 200
    finally:
        server.end()


def test_it_ends_and_the_port_is_free() -> None:
    server = served(a=lambda: ("text/x", b"1"))
    address = server.address
    held = socket.create_connection(address)  # somebody who says nothing
    server.end()
    held.close()
    assert not [thread for thread in threading.enumerate() if thread is server.thread]
    with socket.create_server(address):
        pass
    server.end()  # again


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        PageServer(taken.getsockname(), {})


def test_a_forked_child_lets_go_of_the_port() -> None:
    server = served(a=lambda: ("text/x", b"1"))
    asking, answering = os.pipe()
    child = os.fork()
    if not child:
        os.close(asking)
        os.write(answering, b"1" if server.socket.fileno() == -1 else b"0")
        os._exit(0)
    os.close(answering)
    try:
        assert os.read(asking, 1) == b"1"
        assert get(server, "/a")[0] == 200
    finally:
        os.waitpid(child, 0)
        os.close(asking)
        server.end()
