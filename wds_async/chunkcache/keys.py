"""What an object is kept under: its URL, or where that holds a secret, what may be seen of it and a digest."""

from __future__ import annotations

import functools
import hashlib

from wds_async.redact import redact

__all__ = ["key_of"]


@functools.lru_cache(maxsize=4096)
def key_of(url: str) -> str:
    """``url`` as the index may hold it, which lies on a disk: a signature or password is not written down. Whoever asks
    for the object by another signature asks for another object: no one's right is used by others."""
    shown = redact(url)
    return url if shown == url else f"{shown} {hashlib.sha256(url.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
