"""The standard library's HTTP server, without a traceback for every client that goes away: engines that leave reset
their connections."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from typing import Any

__all__ = ["QuietServer"]


class QuietServer(ThreadingHTTPServer):
    """Says nothing of requests that break off; a fault in a handler of ours shows as an answer that never comes."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing."""
