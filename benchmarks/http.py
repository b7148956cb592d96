"""``python -m benchmarks.http``: image-like shards from nginx on loopback, plain HTTP, undecoded samples."""

from __future__ import annotations

from benchmarks.corpus import SHARD_BYTES, image_like
from benchmarks.harness import Bench, command

__all__ = ["CONTENDERS", "main", "shard_bytes"]

CONTENDERS = [
    "wds_async",
    "wds_async pipeline",
    "wds_async asyncio",
    "webdataset",
    "webdataset pipeline",
    "webdataset fsspec",
    "aiohttp",
    "curl -Z",
    "recv_into",
]


def shard_bytes(bench: Bench) -> int:
    """66 MB, a tenth of it with ``--quick``."""
    return SHARD_BYTES // 10 if bench.quick else SHARD_BYTES


@command("http")
def main(bench: Bench) -> None:
    """CPU seconds per GB and throughput over plain HTTP."""
    corpus = image_like(bench.root, bench.shards, shard_bytes(bench))
    with bench.nginx() as server:
        results = bench.read("plain HTTP", server, corpus, CONTENDERS)
    ours, theirs = results.get("wds_async"), results.get("webdataset")
    if ours:
        bench.bar("CPU s/GB", "≤ 0.8", ours.cpu_s_per_gb, ours.cpu_s_per_gb <= 0.8)
    if ours and theirs:
        bench.ratio_bar("CPU: webdataset's over ours", 7, theirs.cpu_s_per_gb, ours.cpu_s_per_gb)
        bench.ratio_bar("throughput: ours over webdataset's", 6, ours.mb_s, theirs.mb_s)
    bench.memory_bar("plain HTTP", ours)


if __name__ == "__main__":
    main()
