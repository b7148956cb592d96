"""A consumer that holds the GIL in pure Python while the bytes come over TLS."""

from __future__ import annotations

import timeit

from benchmarks.bench import Bench, Row, scenario
from benchmarks.corpus import image_like
from benchmarks.peer import spin

__all__ = ["busy"]

COMPUTE_S_PER_SAMPLE = 180e-6
"""Pure Python for each sample of 100 KB: about as long as reading takes over TLS, the hardest proportion."""


def turns_per_sample() -> int:
    """How often `spin` has to turn on this machine."""
    turns = 200_000
    best = min(timeit.repeat(lambda: spin(turns), number=1))
    return max(1, int(turns * COMPUTE_S_PER_SAMPLE / best))


@scenario("busy")
def busy(bench: Bench) -> None:
    """A consumer busy in pure Python, over TLS: the wall beside computing alone and reading alone."""
    corpus = bench.make(image_like, bench.shards, bench.shard_bytes)
    turns, rows = turns_per_sample(), bench.rows(["wds_async", "webdataset", "webdataset_fsspec"], floors=())
    with bench.serve(corpus, "https") as source:
        compute = bench.compare("computing alone", source, "compute", [Row("nothing")], spin=turns).get("nothing")
        alone = bench.compare("reading alone, TLS", source, rows=bench.rows([row.peer for row in rows]))
        apart = Row("wds_async", "wds_async, WDS_ENGINE=process", environment={"WDS_ENGINE": "process"})
        both = bench.compare("reading and computing, TLS", source, rows=[*rows, apart], spin=turns)
    reading = alone.get("wds_async")
    for label, ours in both.items():
        if compute and reading and label in ("wds_async", apart.name):
            limit = 1.1 * max(compute.wall_s, reading.wall_s)
            bar = f"≤ 1.1 x max(compute {compute.wall_s:.2f}, I/O {reading.wall_s:.2f}) = {limit:.2f} s"
            bench.bar(f"busy consumer over TLS, {label}: wall", bar, ours.wall_s, ours.wall_s <= limit, "{:.2f} s")
            bench.memory_bar("busy", ours)
