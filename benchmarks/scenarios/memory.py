"""Peak memory above the imported interpreter, whatever the shards and the budget. (Beside the peers: `http`.)"""

from __future__ import annotations

import os

from benchmarks.bench import Bench, Row, scenario
from benchmarks.corpus import Corpus, holes, image_like, one_big, tiny

__all__ = ["memory"]


@scenario("memory", repeat=3)
def memory(bench: Bench) -> None:
    """Peak memory: shard sizes from 1 KB to 20 GB, plain, TLS and store-like, three budgets, and one field of 1 GB."""
    images = bench.make(image_like, bench.shards, bench.shard_bytes)
    big = bench.make(one_big, 50_000_000 if bench.quick else 1_000_000_000)
    many = bench.make(image_like, 50 if bench.quick else 500, 1_000_000, distinct=False, name="many")
    times = 200 if bench.quick else 5_000
    (name,) = holes(bench.root, "least.tar", 1, 512).names
    os.truncate(bench.root / name, 1024)
    least = Corpus((name,) * times, times, 1024 * times)
    huge = holes(bench.root, "huge.tar", 50 if bench.quick else 5_000, 4 << 20)
    field = holes(bench.root, "field.tar", 1, 100_000_000 if bench.quick else 1_000_000_000)
    small = bench.make(tiny, 4, 2_500 if bench.quick else 25_000)

    def case(title: str, corpus: Corpus, budget_mib: int = 0, *, scheme: str = "http", held: int = 0,
             store_like: bool = False) -> None:  # fmt: skip
        environment = {"WDS_BUDGET": f"{budget_mib}M"} if budget_mib else {}
        with bench.serve(corpus, scheme, store_like=store_like) as source:
            result = bench.compare(title, source, rows=[Row("wds_async")], environment=environment)
        bench.memory_bar(title, result.get("wds_async"), budget_mib << 20, held)

    case("66 MB shards", images)
    case("66 MB shards, TLS", images, scheme="https")
    case("66 MB shards, store-like", images, store_like=True)
    case("one shard of 1 GB, store-like", big, store_like=True)
    case("one shard of 20 GB", huge)
    case("one field of 1 GB, budget 32 MiB", field, 32, held=field.size_bytes)
    case("1 MB shards, store-like", many, store_like=True)
    case("1 KB shards", least)
    case("small samples", small)
    case("66 MB shards, budget 32 MiB", images, 32, store_like=True)
    case("66 MB shards, budget 256 MiB", images, 256, store_like=True)
