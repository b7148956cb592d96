"""Having a running service fetch shards: its plan is announced, then each is asked for, and its bytes dropped."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import threading
import urllib.parse
from collections.abc import Callable, Sequence

from wds_async.errors import TransferError
from wds_async.redact import redact
from wds_async.service.cache.upkeep import Warmed
from wds_async.storage.ais.urls import PROVIDERS, Place
from wds_async.storage.http.blocking import connection_to
from wds_async.storage.stores import usual_scheme
from wds_async.urls import scheme

__all__ = ["path_of", "through_service"]

_TIMEOUT_S = 120.0


def through_service(
    service: str, token: str, urls: Sequence[str], told: Callable[[Warmed], None], *, at_once: int = 8
) -> None:
    """Ask the service at ``service`` (``http://host:port`` or ``unix:/path``) for the objects; ``told`` of each, by any
    thread, one at a time. TransferError where there is no service; ConfigError for an address that is none."""
    headers = {"Wds-Client": f"warm-{os.getpid()}", **({"Authorization": f"Bearer {token}"} if token else {})}
    _announce(service, headers, urls)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for url in urls:
        waiting.put(url)
    lock = threading.Lock()

    def work() -> None:
        with contextlib.closing(connection_to(service, _TIMEOUT_S)) as connection, contextlib.suppress(queue.Empty):
            while True:
                found = _asked(connection, waiting.get_nowait(), headers)
                with lock:
                    told(found)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(at_once, len(urls)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def path_of(url: str) -> str:
    """Where a service is asked for the object at ``url``."""
    if usual_scheme(scheme(url)) in PROVIDERS:
        return Place.of(url).object_url("")
    return f"/url/{urllib.parse.quote(url, safe='')}"


def _announce(service: str, headers: dict[str, str], urls: Sequence[str]) -> None:
    body = json.dumps({"client": headers["Wds-Client"], "job": "warm", "shards": list(urls), "position": 0})
    with contextlib.closing(connection_to(service, _TIMEOUT_S)) as connection:
        try:
            connection.request("POST", "/v1/plan", body, {**headers, "Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read(2000)
        except (OSError, http.client.HTTPException) as exn:
            raise TransferError(f"{redact(service)}: no service answers there: {exn}") from exn
    if answer.status in (401, 403):
        said = text.decode("utf-8", "replace")
        raise TransferError(f"{redact(service)} refuses: {answer.status} {said}; --token-file names the token")


def _asked(connection: http.client.HTTPConnection, url: str, headers: dict[str, str]) -> Warmed:
    there = 0
    try:
        connection.request("GET", path_of(url), headers=headers)
        answer = connection.getresponse()
        if answer.status != 200:
            said = answer.read(500).decode("utf-8", "replace")
            connection.close()  # and opened again by the next request
            return Warmed(url, error=f"{redact(url)}: HTTP {answer.status} {said}")
        size = answer.length
        while data := answer.read(1 << 18):
            there += len(data)
        return Warmed(url, there, there if size is None else size)
    except (OSError, http.client.HTTPException) as exn:
        connection.close()
        return Warmed(url, there, error=f"{redact(url)}: {exn or type(exn).__name__}")
