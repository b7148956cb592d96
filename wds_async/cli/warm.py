"""Client that has a running service fetch shards: it sends a plan, then requests each shard and drops its bytes."""

from __future__ import annotations

import asyncio
import os
import urllib.parse
from collections.abc import Callable, Sequence

import aiohttp
import yarl

from wds_async.errors import TransferError
from wds_async.redact import redact
from wds_async.service.cache.upkeep import Warmed
from wds_async.storage.ais.urls import PROVIDERS, AisObject
from wds_async.storage.http.service_client import ask_service, service_session
from wds_async.storage.stores import usual_scheme
from wds_async.urls import scheme

__all__ = ["path_of", "through_service"]

_TIMEOUT_S = 120.0


def through_service(
    service: str, token: str, urls: Sequence[str], report: Callable[[Warmed], None], *, at_once: int = 8
) -> None:
    """Request the objects from the service at ``service`` (``http://host:port`` or ``unix:/path``), and call ``report``
    after each. TransferError without a service; ConfigError for an address of another form."""
    headers = {"Wds-Client": f"warm-{os.getpid()}", **({"Authorization": f"Bearer {token}"} if token else {})}
    _announce(service, headers, urls)
    asyncio.run(_read_all(service, headers, urls, report, at_once))


async def _read_all(
    service: str, headers: dict[str, str], urls: Sequence[str], report: Callable[[Warmed], None], at_once: int
) -> None:
    waiting = iter(urls)

    async def work() -> None:
        for url in waiting:
            size: list[int] = []
            try:
                async with service_session(service, _TIMEOUT_S) as session:
                    warmed = await _read(session, url, headers, size)
            except OSError as exn:
                warmed = Warmed(url, sum(size), error=f"{redact(url)}: {exn or type(exn).__name__}")
            report(warmed)

    await asyncio.gather(*(work() for _ in range(min(at_once, len(urls)))))


def path_of(url: str) -> str:
    """Return the path of the object at ``url`` in a service."""
    if usual_scheme(scheme(url)) in PROVIDERS:
        return AisObject.of(url).object_url("")
    return f"/url/{urllib.parse.quote(url, safe='')}"


def _announce(service: str, headers: dict[str, str], urls: Sequence[str]) -> None:
    plan = {"client": headers["Wds-Client"], "job": "warm", "shards": list(urls), "position": 0}
    try:
        answer = ask_service(
            service, "POST", "/v1/plan", timeout_s=_TIMEOUT_S, limit_bytes=2000, headers=headers, body=plan
        )
    except OSError as exn:
        raise TransferError(f"{redact(service)}: no service answers there: {exn}") from exn
    if answer.status in (401, 403):
        text = answer.body.decode("utf-8", "replace")
        raise TransferError(f"{redact(service)} refuses: {answer.status} {text}; --token-file names the token")


async def _read(session: aiohttp.ClientSession, url: str, headers: dict[str, str], read: list[int]) -> Warmed:
    """Read the object and drop its bytes; their number is appended to ``read`` piece by piece."""
    target = yarl.URL(path_of(url), encoded=True)
    async with session.get(target, headers=headers, allow_redirects=False) as answer:
        if answer.status != 200:
            text = (await answer.content.read(500)).decode("utf-8", "replace")
            return Warmed(url, error=f"{redact(url)}: HTTP {answer.status} {text}")
        async for piece in answer.content.iter_any():
            read.append(len(piece))
        size = sum(read)
        return Warmed(url, size, size if answer.content_length is None else answer.content_length)
