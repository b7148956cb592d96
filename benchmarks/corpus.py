"""Shards to read: image-like ones, tiny samples, and one big shard; written with Python's ``tarfile``."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "SHARD_BYTES",
    "Corpus",
    "holes",
    "image_like",
    "large_samples",
    "one_big",
    "photos",
    "pictures",
    "small_images",
    "tiny",
]

IMAGE_BYTES = 100_000
SHARD_BYTES = 66_000_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """``names`` of the shards in their folder; ``samples`` and ``size_bytes`` of all of them together."""

    names: tuple[str, ...]
    samples: int
    size_bytes: int

    def times(self, count: int) -> Corpus:
        """The same shards, each read ``count`` times."""
        return Corpus(self.names * count, self.samples * count, self.size_bytes * count)

    def first(self, count: int) -> Corpus:
        """The first ``count`` shards, of shards that are alike."""
        part = min(count, len(self.names))
        if part == len(self.names):
            return self
        return Corpus(self.names[:part], *(one * part // len(self.names) for one in (self.samples, self.size_bytes)))


def image_like(
    root: Path, shards: int = 16, shard_bytes: int = SHARD_BYTES, *, distinct: bool = True, name: str = "images"
) -> Corpus:
    """Shards of ``shard_bytes`` with samples of jpg (about 100 KB of random bytes), cls and json.

    With ``distinct=False`` all are hard links to one, where only the network counts, not the server's memory.
    """
    per_shard = max(1, shard_bytes // (IMAGE_BYTES + 3 * 1024))
    pool = os.urandom(1 << 24)
    rng = random.Random(0)

    def fields(index: int) -> dict[str, bytes]:
        size = IMAGE_BYTES + rng.randrange(-2048, 2048)
        at = rng.randrange(len(pool) - size)
        about = b'{"index": %d, "label": "none"}' % index
        return {"jpg": pool[at : at + size], "cls": b"%d" % (index % 1000), "json": about}

    return _alike(root, name, shards, per_shard, fields, distinct=distinct)


def tiny(root: Path, shards: int = 8, per_shard: int = 25_000, *, distinct: bool = False) -> Corpus:
    """Shards of samples with two fields that are together under 200 bytes. ``distinct``: each shard has keys of its
    own; otherwise all are hard links to one."""

    def fields(index: int) -> dict[str, bytes]:
        return {"txt": b"a caption of sample %08d, " % index * 4, "cls": b"%d" % (index % 1000)}

    return _alike(root, "tiny", shards, per_shard, fields, distinct=distinct)


def small_images(root: Path, shards: int, per_shard: int) -> Corpus:
    """Shards of samples of jpg (1,000 random bytes) and cls."""
    pool = os.urandom(1 << 20)

    def fields(index: int) -> dict[str, bytes]:
        at = index * 997 % (len(pool) - 1000)
        return {"jpg": pool[at : at + 1000], "cls": b"%d" % (index % 1000)}

    return _alike(root, "small", shards, per_shard, fields)


def large_samples(root: Path, shards: int, per_shard: int, sample_bytes: int) -> Corpus:
    """Shards of samples of bin (``sample_bytes`` random bytes) and cls."""
    data = os.urandom(sample_bytes)
    return _alike(root, "large", shards, per_shard, lambda index: {"bin": data, "cls": b"%d" % (index % 1000)})


def holes(root: Path, name: str, count: int, field_bytes: int) -> Corpus:
    """A shard of ``count`` fields of zeros that take no room on the disk: only the network and the reader count."""
    info = tarfile.TarInfo()
    info.size = field_bytes
    with (root / name).open("wb") as file:
        for number in range(count):
            info.name = f"{number:08d}.bin"
            file.write(info.tobuf(tarfile.USTAR_FORMAT))
            file.seek(-(-field_bytes // 512) * 512, os.SEEK_CUR)
        file.truncate(file.tell() + 1024)
    return Corpus((name,), count, (root / name).stat().st_size)


def photos(root: Path, shards: int, per_shard: int, *, noisy: bool = False) -> Corpus:
    """Shards of samples of jpg (400 x 400, photo-like of 40 KB or noise of 87 KB) and cls."""
    from benchmarks.pictures import DISTINCT, noisy_jpeg, photo_jpeg  # noqa: PLC0415 (others need no Pillow)

    make = noisy_jpeg if noisy else photo_jpeg
    images = [make(seed) for seed in range(DISTINCT)]
    return pictures(root, shards, per_shard, images, name="noise" if noisy else "photos")


def one_big(root: Path, size_bytes: int = 1_000_000_000) -> Corpus:
    """One shard of ``size_bytes``."""
    return image_like(root, 1, size_bytes, name="big")


def pictures(root: Path, shards: int, per_shard: int, images: Sequence[bytes], name: str = "pictures") -> Corpus:
    """Shards of ``per_shard`` samples of jpg (``images`` in turn) and cls."""

    def fields(index: int) -> dict[str, bytes]:
        return {"jpg": images[index % len(images)], "cls": b"%d" % (index % 1000)}

    return _alike(root, name, shards, per_shard, fields)


def _alike(
    root: Path,
    name: str,
    shards: int,
    per_shard: int,
    fields: Callable[[int], dict[str, bytes]],
    *,
    distinct: bool = False,
) -> Corpus:
    """Shards with ``fields`` of their samples by number: hard links to one, or ``distinct``."""
    names = [f"{name}-{n:06d}.tar" for n in range(shards)]
    for number, path in enumerate(root / n for n in names):
        if number and not distinct:
            os.link(root / names[0], path)
            continue
        with tarfile.open(path, "w") as archive:
            for index in range(number * per_shard, (number + 1) * per_shard):
                for field, data in fields(index).items():
                    info = tarfile.TarInfo(f"{index:08d}.{field}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    return Corpus(tuple(names), per_shard * shards, sum((root / n).stat().st_size for n in names))
