"""Ranges of many objects by one request to AIStore 5.0 or later: GetBatch (``GET /v1/ml/moss/BUCKET``).

The request has a body, JSON with an entry for each range. The proxy redirects it (307) to a target, which gathers the
ranges of all targets and answers with a tar of one member for each, in that order. Missing objects are empty members
below ``__404__/``. The answer has no versions of objects.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wds_async.logs import warn_once
from wds_async.redact import redact
from wds_async.storage.ais.urls import AisObject, Cluster
from wds_async.storage.base import Contradiction, Request
from wds_async.storage.http.backend import HttpBackend

__all__ = ["BatchRequests", "WantedBytes"]

logger = logging.getLogger("wds_async")

WantedBytes = tuple[AisObject, int, int]
"""Bytes from the first number to before the second of an object."""

_UNKNOWN = (400, 404, 405, 501)
"""Statuses of a cluster without this request."""
_MEMBER_BYTES = 5 * tarfile.BLOCKSIZE
"""Header of a member with the extension header of a long name, and what fills up its last block."""
_MISSING = "__404__/"


class BatchRequests:
    """Requests for batches to one cluster. ``refused``: why it gets no more of them, "" while it does."""

    def __init__(self, http: HttpBackend) -> None:
        self._http = http
        self.refused = ""

    def takes(self, wanted: Sequence[WantedBytes]) -> bool:
        """Return whether ``wanted`` may be requested: entries can name neither namespaces nor parameters of a URL."""
        return not self.refused and not any(place.namespace or place.query for place, *_ in wanted)

    async def read(
        self, cluster: Cluster, request: Request, wanted: Sequence[WantedBytes]
    ) -> Sequence[memoryview | None]:
        """Return the bytes of each range, None for one that did not come. ``request`` has the headers. A cluster that
        knows no batches, or not of ranges, gets no more of them, with one warning."""
        request = replace(request, url=wanted[0][0].batch_url(cluster.base))
        try:
            return _members(await self._answer(request, wanted), wanted)
        except Contradiction as exn:
            self.refused = str(exn)
            text = "AIStore at %s gives no batches of ranges (%s): each range is a request of its own"
            warn_once(logger, ("batches", cluster.endpoint), text, redact(cluster.endpoint), exn)
        except Exception as exn:  # whatever it is: the single ranges have retries, and errors that advise
            logger.debug("a batch of %d ranges did not come from %s: %r", len(wanted), redact(cluster.endpoint), exn)
        return [None] * len(wanted)

    async def _answer(self, request: Request, wanted: Sequence[WantedBytes]) -> bytes:
        """Return the tar. Contradiction where it is longer than that of the ranges can be."""
        body = {"in": [_entry(*one) for one in wanted], "mime": ".tar", "coer": True, "onob": False, "strm": True}
        most = sum(_MEMBER_BYTES + stop - start for _, start, stop in wanted) + tarfile.RECORDSIZE
        response, _ = await self._http.get(request, body)
        with contextlib.closing(response):
            if response.status in _UNKNOWN:
                raise Contradiction(f"it answered {response.status}")
            response.raise_for_status()
            pieces, size = [], 0
            async for piece in response.content.iter_any():
                pieces.append(piece)
                size += len(piece)
                if size > most:
                    raise Contradiction("it sends whole objects; ranges need AIStore 5.0")
            return b"".join(pieces)


def _entry(place: AisObject, start: int, stop: int) -> dict[str, Any]:
    named = {"objname": place.name, "bucket": place.bucket, "provider": place.provider}
    return {**named, "start": start, "length": stop - start}


def _members(data: bytes, wanted: Sequence[WantedBytes]) -> list[memoryview | None]:
    """Return the members of the answer. TarError for what is no whole tar of them, Contradiction for other members."""
    view = memoryview(data)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        found = [(info.name, info.offset_data, info.size) for info in tar]
    if len(found) < len(wanted):
        raise tarfile.ReadError(f"it ends with member {len(found)} of {len(wanted)}")
    members: list[memoryview | None] = []
    for (name, offset, size), (place, start, stop) in zip(found, wanted, strict=False):
        own = f"{place.bucket}/{place.name}"
        if name not in (own, _MISSING + own):
            raise Contradiction(f"it sends {name!r:.200} for {own!r:.200}")
        if name == own and size != stop - start:
            raise Contradiction(f"it sends {size:,} bytes for {stop - start:,}; ranges need AIStore 5.0")
        members.append(view[offset : offset + size] if name == own else None)
    return members
