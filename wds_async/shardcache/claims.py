"""Who has a name that several URLs could have: the first that asks, and for as long as the cache's folder is there."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from wds_async.shardcache.partial import PARTIAL

__all__ = ["claim"]


def claim(folder: Path, name: str, owner: str) -> bool:
    """Whether ``name`` in the cache at ``folder`` is ``owner``'s; a name that was nobody's is from now on.

    Where nothing can be written, nobody's name is everybody's: nothing will be kept under it either.
    """
    key = hashlib.sha256(os.fsencode(name)).hexdigest()[:24]
    path = folder / PARTIAL / f"{key}.claim"
    text = owner.encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:  # the first wins
            file.write(text)
    try:
        return path.read_bytes() == text
    except OSError:
        return True
