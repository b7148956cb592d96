"""Whether a sample costs the same however many shards there are, and however much is read; and what caches give."""

from __future__ import annotations

import os
from collections.abc import Mapping

from benchmarks.bench import Bench, Reading, scenario
from benchmarks.corpus import SHARD_BYTES, Corpus, image_like
from benchmarks.peer import load_peer

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
    corpora = {}
    for count in (1, 10, 100, 1000):
        number = min(count, total // 1_000_000)
        case = f"{number} shards of {total / number / 1e6:.0f} MB"
        corpora[case] = bench.make(image_like, number, total // number, distinct=False, name=f"of-{count}")
    rows = bench.rows(["wds_async", "webdataset", "webdataset_fsspec"], floors=("recv_into",))
    ours = {}
    for turn in range(bench.repeat):  # the cases in turn too: in minutes the machine itself changes
        if turn and bench.late:
            break
        for case, corpus in corpora.items():
            with bench.serve(corpus) as source:
                here = [row for row in rows if turn < 2 or not row.peer.startswith("webdataset")]
                results = bench.compare(case, source, rows=here, repeat=1)
                if "wds_async" in results:
                    ours[case] = results["wds_async"]
    _flat(bench, "1 to 1,000 shards", ours)


@scenario("size", repeat=3)
def size(bench: Bench) -> None:
    """0.1 to 100 GB, the same shard again and again: CPU a sample must be flat. The largest is read once."""
    shard = 2_000_000 if bench.quick else SHARD_BYTES
    one = bench.make(image_like, 1, shard)
    sizes = (0.01, 0.04) if bench.quick else (0.1, 1, 10, 100)
    ours = {}
    for turn in range(bench.repeat):
        if turn and bench.late:
            break
        for gigabytes in sizes[:-1] if turn else sizes:
            corpus, case = one.times(round(gigabytes * 1e9 / one.size_bytes)), f"{gigabytes:g} GB"
            with bench.serve(corpus) as source:
                rows = bench.rows(["wds_async"], floors=("recv_into",))
                results = bench.compare(case, source, rows=rows, repeat=3 if gigabytes == 0.1 else 1)
                if "wds_async" in results:
                    ours[case] = results["wds_async"]
    for case, reading in ours.items():
        bench.memory_bar(case, reading)
    _flat(bench, f"{sizes[0]:g} to {sizes[-1]:g} GB", ours)


def _drop(bench: Bench, corpus: Corpus) -> None:
    """Take the shards out of the page cache."""
    for name in corpus.names:
        with open(bench.root / name, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@scenario("cache", shards=8, repeat=3)
def cache(bench: Bench) -> None:
    """Local files out of a cold and a warm page cache; http with a cache on the disk, the first and the second time."""
    corpus = bench.make(image_like, bench.shards, bench.shard_bytes)
    rows = [row for row in bench.rows() if load_peer(row.peer).format == "tar"]
    with bench.serve(corpus, "file") as source:
        bench.compare("local files, cold", source, rows=rows, before=lambda: _drop(bench, corpus))
        bench.compare("local files, warm", source)
    rows = bench.rows(["wds_async", "webdataset", "webdataset_fsspec"], floors=())
    with bench.serve(corpus) as source:
        bench.compare("http into a cache on the disk", source, rows=rows, cache=True)
        bench.compare("out of that cache", source, rows=rows, cache=True, warm=True)
