"""GETs of ranges by aiohttp: where a proxy is in the way, and with ``WDS_DIRECT=0``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from wds_async.storage.base import Answer, RefusedAnswer, Request
from wds_async.storage.http.messages import REDIRECTS, answer_of, redirected

if TYPE_CHECKING:
    from wds_async.storage.http.backend import HttpBackend

__all__ = ["RangeRequests"]

_MOVED_AWAY = frozenset({401, 403, 404, 410})
"""Answers of the place that a redirect led to, which may have expired."""


class RangeRequests:
    """A `checked.RangeGet`. ``request`` gives the GET that is good now; where it ``keeps_redirect``, later ranges are
    asked of where it led, until that refuses."""

    def __init__(self, client: HttpBackend, request: Callable[[], Awaitable[Request]]) -> None:
        self._client = client
        self._request = request
        self._moved: Request | None = None

    @contextlib.asynccontextmanager
    async def __call__(self, start: int, stop: int, etag: str) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        more = {"Range": f"bytes={start}-{stop - 1}", **({"If-Match": etag} if etag else {})}
        kept, request = self._moved, await self._request()
        response = await self._client.send(kept or request, more)
        if kept is not None and response.status in (*_MOVED_AWAY, *REDIRECTS):
            response.close()
            if self._moved is kept:
                self._moved = None
            response = await self._client.send(request, more)
        try:
            while response.status in REDIRECTS and "location" in response.headers:
                response.close()
                request = redirected(request, response.headers["location"])
                response = await self._client.send(request, more)
                if request.keeps_redirect and response.status == 206:
                    self._moved = replace(request, hops=())
            answer = await answer_of(response)
            if answer.status >= 300 and answer.status != 416:
                raise RefusedAnswer(answer)
            yield answer, response.content.iter_any()
        finally:
            response.close()  # of an answer that was read to its end the connection is kept
