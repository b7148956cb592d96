"""``python -m benchmarks.store``: a server like an object store, 50 ms to the first byte, 50 MB/s a connection."""

from __future__ import annotations

from benchmarks.corpus import Corpus, image_like
from benchmarks.harness import Bench, command
from benchmarks.http import shard_bytes

__all__ = ["main"]


@command("store")
def main(bench: Bench) -> None:
    """Throughput from a store-like server with default settings; shards of 66 MB and of 1 MB."""
    large = image_like(bench.root, bench.shards, shard_bytes(bench), distinct=False)
    count = 50 if bench.quick else 1000
    many = image_like(bench.root, count, 1_000_000, distinct=False, name="many")
    with bench.nginx(store_like=True) as server:
        contenders = ["wds_async", "wds_async pipeline", "webdataset", "curl -Z"]
        results = bench.read("store-like, 66 MB shards", server, large, contenders)
        many_small = bench.read("store-like, 1 MB shards", server, many, ["wds_async"])
        # webdataset takes a tenth of a second for each of these: fifty tell its pace.
        part = Corpus(many.names[:50], many.samples * 50 // count, many.size_bytes * 50 // count)
        bench.read("store-like, 1 MB shards", server, part, ["webdataset"], repeat=1)
    ours, theirs = results.get("wds_async"), results.get("webdataset")
    if ours and theirs:
        bench.ratio_bar("store-like: throughput, ours over webdataset's", 18, ours.mb_s, theirs.mb_s)
    if ours:
        small = many_small["wds_async"]
        bench.ratio_bar("store-like: MB/s with 1 MB shards over 66 MB shards", 0.6, small.mb_s, ours.mb_s)
        bench.memory_bar("store-like, 66 MB shards", ours)
        bench.memory_bar("store-like, 1 MB shards", small)


if __name__ == "__main__":
    main()
