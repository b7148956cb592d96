"""Small shards, the same bytes every time, made by Python's ``tarfile`` and so independent of our writer."""

from __future__ import annotations

import io
import json
import random
import struct
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["make_shard", "make_shards", "make_tar", "png", "sample_fields"]


def png(seed: int, side: int = 8) -> bytes:
    """A valid RGB image of ``side`` x ``side`` pixels (PNG specification, chunks IHDR, IDAT, IEND)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rng = random.Random(seed)
    rows = b"".join(b"\0" + rng.randbytes(3 * side) for _ in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def sample_fields(number: int) -> dict[str, bytes]:
    """The fields of sample ``number``: an image, a class from 0 to 9, and a small document."""
    return {
        "png": png(number),
        "cls": str(number % 10).encode(),
        "json": json.dumps({"number": number}).encode(),
    }


def make_tar(members: Iterable[tuple[str, bytes]], *, format: int = tarfile.USTAR_FORMAT) -> bytes:
    """An archive of ``(name, data)`` in this order, with every date and owner at zero."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def make_shard(samples: Mapping[str, Mapping[str, bytes]]) -> bytes:
    """An archive of ``{key: {field: data}}``, fields adjacent and in the order given."""
    return make_tar((f"{key}.{field}", data) for key, fields in samples.items() for field, data in fields.items())


def make_shards(
    directory: Path, shards: int = 2, samples: int = 5, *, pattern: str = "shard-%06d.tar", payload: int = 0
) -> list[Path]:
    """Write ``shards`` files of ``samples`` samples each; sample numbers go on from shard to shard.

    With ``payload`` every sample has a further field ``bin`` of that many bytes, so that shards can be larger
    than one part of the engine.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard in range(shards):
        contents = {}
        for number in range(shard * samples, (shard + 1) * samples):
            fields = sample_fields(number)
            if payload:
                fields["bin"] = random.Random(number).randbytes(payload)
            contents[f"{number:06d}"] = fields
        path = directory / (pattern % shard)
        path.write_bytes(make_shard(contents))
        paths.append(path)
    return paths
