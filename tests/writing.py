"""What the tests of writing share: a sample, and how a tar is read back by the standard library and by us."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from wds_async.tar.decompress import plain
from wds_async.tar.group import samples
from wds_async.tar.parse import members
from wds_async.writer import TarWriter

__all__ = ["SAMPLE", "entries", "in_memory", "memory", "read", "small"]

SAMPLE: dict[str, Any] = {
    "__key__": "a/b",
    "__url__": "dropped",
    "txt": "grüße",
    "cls": 3,
    "input.npy": np.arange(4.0),
    "json": {"x": 1},
    "jpg": np.zeros((4, 4, 3), np.uint8),
    "bin": b"\0" * 511,
}


def entries(data: bytes | Path) -> list[tuple[Any, ...]]:
    raw = data.read_bytes() if isinstance(data, Path) else data
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return [
            (m.name, m.mode, m.uname, m.gname, m.uid, m.gid, m.mtime, m.type, tar.extractfile(m).read())  # type: ignore[union-attr]
            for m in tar
        ]


def read(data: bytes) -> list[dict[str, Any]]:
    pieces = iter([memoryview(data)])
    return list(samples(members(plain(lambda: next(pieces, None), "u"), "u"), "u"))


def in_memory(*todo: dict[str, Any], **kw: Any) -> bytes:
    out = io.BytesIO()
    with TarWriter(out, **kw) as sink:
        for sample in todo:
            sink.write(sample)
    return out.getvalue()


def small(number: int) -> dict[str, Any]:
    return {"__key__": f"{number:04d}", "cls": number % 10, "bin": b"x" * 99}


def memory() -> Any:
    """fsspec's memory file system, empty."""
    import fsspec

    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    return filesystem
