"""What an S3 URL names. It is never percent-decoded: keys may hold ``%20``, ``#``, ``?``, ``//`` or ``..`` as such."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["S3Name"]

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
        """The parts of ``s3://bucket/key[?versionId=…]``."""
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
