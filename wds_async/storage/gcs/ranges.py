"""GETs of ranges by gcsfs's session: where a proxy is in the way, with ``session_kwargs`` and client certificates, and
with ``WDS_DIRECT=0``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from wds_async.storage.base import Answer, RefusedAnswer
from wds_async.storage.http.messages import answer_of, identity_of

__all__ = ["MediaGet", "pinned_by"]


def pinned_by(fields: Mapping[str, str], total: int | None) -> str:
    """See `checked.Identify`. The generation counts too: an emulator may give no ETag."""
    generation = fields.get("x-goog-generation", "")
    return f"{identity_of(fields, total)}{f', generation {generation}' if generation else ''}"


class MediaGet:
    """A `checked.RangeGet` of one object; raises `RefusedAnswer`, or what aiohttp does. ``find`` gives gcsfs's
    filesystem, with credentials that hold now, and the path in it. Its session is asked, and not its methods, which
    drop status and head, and try six times."""

    def __init__(self, find: Callable[[], Awaitable[tuple[Any, str]]]) -> None:
        self._find = find

    @contextlib.asynccontextmanager
    async def __call__(self, start: int, stop: int, etag: str) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        filesystem, path = await self._find()
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        await filesystem._set_session()
        response = await filesystem.session.get(
            filesystem.url(path),
            params=filesystem._get_params({}),
            headers=filesystem._get_headers({**headers, **({"If-Match": etag} if etag else {})}),
            timeout=filesystem.requests_timeout,
        )
        try:
            answer = await answer_of(response)
            if answer.status >= 300 and answer.status != 416:
                raise RefusedAnswer(answer)
            yield answer, response.content.iter_any()
        finally:
            response.close()
