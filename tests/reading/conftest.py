"""Shards of given bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., list[str]]:
    def write(*shards: bytes | None) -> list[str]:
        """Return the paths of shards with these bytes; None is a shard that is not there."""
        paths = [tmp_path / f"{i}.tar" for i in range(len(shards))]
        for path, data in zip(paths, shards, strict=True):
            if data is not None:
                path.write_bytes(data)
        return [str(path) for path in paths]

    return write
