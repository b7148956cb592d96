"""Options of s3fs, and the names of S3 objects."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wds_async.environment import variable

__all__ = ["S3Name", "s3fs_options", "with_limits", "with_region"]


def s3fs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` for s3fs: with the region of ``AWS_REGION`` where they name none, and a client that follows no
    redirects, because it would send the session token wherever they lead."""
    options = with_region(options)
    return {**options, "config_kwargs": {"http_session_cls": _session_class(), **(options.get("config_kwargs") or {})}}


def with_limits(options: Mapping[str, Any], connect_timeout_s: float, stall_timeout_s: float) -> dict[str, Any]:
    """Return ``options`` with a client that tries each request once, because the engine retries itself, and waits as
    long as the engine for a connection and for bytes. Settings of ``options`` themselves prevail."""
    config = {
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": connect_timeout_s,
        "read_timeout": stall_timeout_s,
        **(options.get("config_kwargs") or {}),
    }
    return {**options, "config_kwargs": config}


@functools.cache
def _session_class() -> Any:
    from aiobotocore.httpsession import AIOHTTPSession  # noqa: PLC0415 (slow)

    class SessionWithoutRedirects(AIOHTTPSession):  # type: ignore[misc]
        """Session that returns answers 3xx: botocore explains them."""

        async def _get_session(self, proxy_url: Any) -> Any:
            session = await super()._get_session(proxy_url)
            return types.SimpleNamespace(request=functools.partial(session.request, allow_redirects=False))

    return SessionWithoutRedirects


def with_region(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with the region of ``AWS_REGION`` where they name none. Amazon's other tools read it; botocore
    reads ``AWS_DEFAULT_REGION`` only, which therefore comes before it here."""
    region = variable("AWS_REGION")
    places = (options, options.get("client_kwargs") or {}, options.get("config_kwargs") or {})
    if not region or variable("AWS_DEFAULT_REGION") or any("region_name" in place for place in places):
        return dict(options)
    return {**options, "client_kwargs": {"region_name": region, **places[1]}}


_VERSION = "?versionId="
# Access points are buckets whose names hold colons and, behind one of those, slashes (boto's guide, "Access points").
_ARN = re.compile(
    r"(arn:[^/]*:(?:accesspoint[:/][^/:]+|outpost[:/][^/:]+[:/](?:accesspoint|bucket)[:/][^/:]+))(?:[:/](.*))?\Z",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class S3Name:
    """``scheme`` (``s3`` or ``s3a``), ``bucket`` (a name, an access point's alias or its ARN; "" for none), ``key``
    ("" for none) and ``version`` ("" for the newest), which a URL has as ``?versionId=``, as for s3fs."""

    scheme: str
    bucket: str
    key: str
    version: str = ""

    @classmethod
    def of(cls, url: str) -> S3Name:
        """Return the parts of ``s3://bucket/key[?versionId=…]``."""
        scheme, _, path = url.partition("://")
        if (arn := _ARN.match(path)) is not None:
            bucket, key = arn[1], arn[2] or ""
        else:
            bucket, _, key = path.partition("/")
        key, _, version = key.partition(_VERSION)
        return cls(scheme, bucket, key, version)

    @property
    def folder(self) -> str:
        """The URL that keys of the bucket are appended to; without a bucket, the one that buckets are appended to."""
        return f"{self.scheme}://{self.bucket}/" if self.bucket else f"{self.scheme}://"

    @property
    def is_directory(self) -> bool:
        """True if the bucket is one of S3 Express, which has sessions of its own and ETags that are no checksums."""
        return self.bucket.endswith("--x-s3")
