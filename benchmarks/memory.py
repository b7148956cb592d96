"""``python -m benchmarks.memory``: peak memory above the imported interpreter, whatever the shards and budget."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from benchmarks.corpus import Corpus, image_like, one_big, tiny
from benchmarks.harness import Bench, command
from benchmarks.http import shard_bytes

__all__ = ["main"]


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


@command("memory")
def main(bench: Bench) -> None:
    """Peak memory: shard sizes from 1 KB to 20 GB, plain, TLS and store-like, three budgets, and one field of 1 GB."""
    images = image_like(bench.root, bench.shards, shard_bytes(bench))
    big = one_big(bench.root, 50_000_000 if bench.quick else 1_000_000_000)
    many = image_like(bench.root, 50 if bench.quick else 500, 1_000_000, distinct=False, name="many")
    times = 200 if bench.quick else 5_000
    (name,) = holes(bench.root, "least.tar", 1, 512).names
    os.truncate(bench.root / name, 1024)
    least = Corpus((name,) * times, times, 1024 * times)
    huge = holes(bench.root, "huge.tar", 50 if bench.quick else 5_000, 4 << 20)
    field = holes(bench.root, "field.tar", 1, 100_000_000 if bench.quick else 1_000_000_000)
    small = tiny(bench.root, 4, 2_500 if bench.quick else 25_000)

    def case(title: str, corpus: Corpus, budget: str | None = None, *, held: int = 0, **server: bool) -> None:
        environment = {"WDS_BUDGET": budget} if budget else {}
        with bench.nginx(**server) as running:
            result = bench.read(title, running, corpus, ["wds_async"], environment=environment)
        bench.memory_bar(title, result.get("wds_async"), held)

    case("66 MB shards", images)
    case("66 MB shards, TLS", images, tls=True)
    case("66 MB shards, store-like", images, store_like=True)
    case("one shard of 1 GB, store-like", big, store_like=True)
    case("one shard of 20 GB", huge)
    case("one field of 1 GB, budget 32 MiB", field, "32M", held=field.size_bytes)
    case("1 MB shards, store-like", many, store_like=True)
    case("1 KB shards", least)
    case("small samples", small)
    case("66 MB shards, budget 32 MiB", images, "32M", store_like=True)
    case("66 MB shards, budget 256 MiB", images, "256M", store_like=True)


if __name__ == "__main__":
    main()
