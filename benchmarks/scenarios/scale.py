"""Whether a sample costs the same however many shards there are, and however much is read; and what caches give."""

from __future__ import annotations

import os
from collections.abc import Mapping

from benchmarks.bench import Bench, Reading, scenario
from benchmarks.corpus import SHARD_BYTES, Corpus, image_like

__all__ = ["cache", "shards", "size"]


def _flat(bench: Bench, what: str, results: Mapping[str, Reading]) -> None:
    """The largest cost of a sample must be within 10 % of the smallest."""
    if results:
        costs = {case: reading.cpu_ms_per_sample for case, reading in results.items()}
        ratio = max(costs.values()) / min(costs.values())
        bench.bar(f"CPU a sample, {what}: most over least", "≤ 1.10 x", ratio, ratio <= 1.1, "{:.2f} x")


@scenario("shards")
def shards(bench: Bench) -> None:
    """A gigabyte in 1 to 1,000 shards of 1 GB to 1 MB: CPU a sample must be flat."""
    total = 20_000_000 if bench.quick else 1_000_000_000
    flat = {}
    for count in (1, 10, 100, 1000):
        number = min(count, total // 1_000_000)
        corpus = bench.make(image_like, number, total // number, distinct=False, name=f"of-{count}")
        with bench.serve(corpus) as source:
            case = f"{number} shards of {total / number / 1e6:.0f} MB"
            rows = bench.rows(["wds_async", "webdataset", "webdataset_fsspec"])
            results = bench.compare(case, source, rows=rows)
            if "wds_async" in results:
                flat[case] = results["wds_async"]
    _flat(bench, "1 to 1,000 shards", flat)


@scenario("size", repeat=3)
def size(bench: Bench) -> None:
    """0.1 to 100 GB, the same shard again and again: CPU a sample must be flat."""
    shard = 2_000_000 if bench.quick else SHARD_BYTES
    one = bench.make(image_like, 1, shard)
    sizes = (0.01, 0.04) if bench.quick else (0.1, 1, 10, 100)
    flat = {}
    for gigabytes in sizes:
        corpus = one.times(round(gigabytes * 1e9 / one.size_bytes))
        with bench.serve(corpus) as source:
            case = f"{gigabytes:g} GB"
            results = bench.compare(case, source, rows=bench.rows(["wds_async"]))
            if "wds_async" in results:
                flat[case] = results["wds_async"]
            bench.memory_bar(case, results.get("wds_async"))
    _flat(bench, f"{sizes[0]:g} to {sizes[-1]:g} GB", flat)


def _drop(bench: Bench, corpus: Corpus) -> None:
    """Take the shards out of the page cache."""
    for name in corpus.names:
        with open(bench.root / name, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@scenario("cache")
def cache(bench: Bench) -> None:
    """Local files out of a cold and a warm page cache; http with a cache on the disk, the first and the second time."""
    corpus = bench.make(image_like, bench.shards, bench.shard_bytes)
    with bench.serve(corpus, "file") as source:
        bench.compare("local files, cold", source, before=lambda: _drop(bench, corpus))
        bench.compare("local files, warm", source)
    rows = bench.rows(["wds_async", "webdataset", "webdataset_fsspec"], floors=False)
    with bench.serve(corpus) as source:
        bench.compare("http into a cache on the disk", source, rows=rows, cache=True)
        bench.compare("out of that cache", source, rows=rows, cache=True, warm=True)
