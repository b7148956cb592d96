"""A few pages of text over HTTP, from a daemon thread that leaves no trace."""

from __future__ import annotations

import contextlib
import http.server
import logging
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Answer", "PageServer"]

logger = logging.getLogger("wds_async")

Answer = Callable[[], tuple[str, bytes]]
"""Gives a page: its type, and its text."""

_STOP_WITHIN_S = 1.0
_CLIENT_TIMEOUT_S = 10.0
_open: list[PageServer] = []


class PageServer(http.server.ThreadingHTTPServer):
    """Listens at ``where`` from the start (port 0: any that is free); answers ``pages``, by path, between `begin` and
    `end`. OSError where the address cannot be had. A forked child lets go of the port."""

    daemon_threads = True

    def __init__(self, where: tuple[str, int], pages: dict[str, Answer]) -> None:
        self.pages = pages
        self.address_family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        super().__init__(where, _Handler)
        _open.append(self)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self.server_name, self.server_port

    def server_bind(self) -> None:
        """Without a question to the name server, which the base class asks who it is."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def begin(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            self.handle_request()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """No more once it ends."""
        return not self._ended

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""
        logger.debug("metrics: a request failed", exc_info=True)

    def end(self) -> None:
        """Stop answering and free the port."""
        self._ended = True
        with contextlib.suppress(OSError), socket.create_connection(self._reach(), timeout=_STOP_WITHIN_S):
            pass  # it waits for a connection: here is one
        if self._thread.is_alive():
            self._thread.join(_STOP_WITHIN_S)
        self.server_close()
        with contextlib.suppress(ValueError):
            _open.remove(self)

    def _reach(self) -> tuple[str, int]:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.server_name, self.server_name)
        return host, self.server_port


class _Handler(http.server.BaseHTTPRequestHandler):
    server_version, sys_version = "wds-async", ""
    timeout = _CLIENT_TIMEOUT_S
    server: PageServer

    def do_GET(self) -> None:
        """The page of its path."""
        answer = self.server.pages.get(urlsplit(self.path).path)
        if answer is None:
            self.send_error(404, "there are /metrics, /v1/stats and /healthz")
            return
        try:
            kind, body = answer()
        except Exception as exn:
            logger.warning("metrics: %s failed", self.path[:80], exc_info=True)
            self.send_error(500, f"{type(exn).__name__}; the job's log has more")
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not to standard error."""
        logger.debug("metrics: " + format, *args)


def _let_go_in_child() -> None:
    # What is closed here is the child's copy; the thread that answers is not there.
    for server in _open:
        server.socket.close()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
