"""GETs of ranges by botocore's client: where a proxy is in the way, with customers' own keys, with ``WDS_DIRECT=0``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from wds_async.storage.base import Answer
from wds_async.storage.http.messages import fields_of
from wds_async.storage.s3.client import S3Client
from wds_async.storage.s3.names import S3Name

__all__ = ["ObjectGet"]

_PIECE_BYTES = 1 << 20


class ObjectGet:
    """A `checked.RangeGet` of one object; raises what botocore does. Its client is asked, and not s3fs's methods, which
    give the body only, and try five times."""

    def __init__(self, client: S3Client, name: S3Name) -> None:
        self._client, self._name = client, name

    @contextlib.asynccontextmanager
    async def __call__(self, start: int, stop: int, etag: str) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        more = {"IfMatch": etag} if etag else {}
        try:
            found = await self._client.get(self._name, Range=f"bytes={start}-{stop - 1}", **more)
        except Exception as exn:
            if (unsatisfied := _unsatisfied(exn)) is None:
                raise
            if not unsatisfied.fields.get("content-range"):  # some stores leave the size out
                size = await self._client.size(self._name)
                unsatisfied = Answer(416, {**unsatisfied.fields, "content-range": f"bytes */{size}"})
            yield unsatisfied, _pieces(None)
            return
        meta = found["ResponseMetadata"]
        try:
            yield Answer(meta["HTTPStatusCode"], fields_of(meta["HTTPHeaders"])), _pieces(found["Body"])
        finally:
            found["Body"].close()


async def _pieces(body: Any) -> AsyncIterator[bytes]:
    while body is not None and (piece := await body.read(_PIECE_BYTES)):
        yield bytes(piece)


def _unsatisfied(exn: Exception) -> Answer | None:
    """The 416 that botocore makes an exception of: an object may be empty."""
    meta = (getattr(exn, "response", None) or {}).get("ResponseMetadata") or {}
    return Answer(416, fields_of(meta.get("HTTPHeaders") or {})) if meta.get("HTTPStatusCode") == 416 else None
