"""``python -m benchmarks.memory``: peak memory above the imported interpreter, whatever the shards and budget."""

from __future__ import annotations

from benchmarks.corpus import Corpus, image_like, one_big, tiny
from benchmarks.harness import Bench, command
from benchmarks.http import shard_bytes

__all__ = ["main"]


@command("memory")
def main(bench: Bench) -> None:
    """Peak memory: shard sizes from 1 MB to 1 GB, plain, TLS and store-like, three budgets."""
    images = image_like(bench.root, bench.shards, shard_bytes(bench))
    big = one_big(bench.root, 50_000_000 if bench.quick else 1_000_000_000)
    many = image_like(bench.root, 50 if bench.quick else 500, 1_000_000, distinct=False, name="many")
    small = tiny(bench.root, 4, 2_500 if bench.quick else 25_000)
    ours = ["wds_async"]

    def case(title: str, corpus: Corpus, budget: str | None = None, **server: bool) -> None:
        environment = {"WDS_BUDGET": budget} if budget else {}
        with bench.nginx(**server) as running:
            result = bench.read(title, running, corpus, ours, environment=environment)
        bench.memory_bar(title, result.get("wds_async"))

    case("66 MB shards", images)
    case("66 MB shards, TLS", images, tls=True)
    case("66 MB shards, store-like", images, store_like=True)
    case("one shard of 1 GB, store-like", big, store_like=True)
    case("1 MB shards, store-like", many, store_like=True)
    case("small samples", small)
    case("66 MB shards, budget 32 MiB", images, "32M", store_like=True)
    case("66 MB shards, budget 256 MiB", images, "256M", store_like=True)


if __name__ == "__main__":
    main()
