"""``python -m benchmarks.busy``: a consumer that holds the GIL in pure Python while the bytes come over TLS."""

from __future__ import annotations

import timeit

from benchmarks.contenders import spin
from benchmarks.corpus import image_like
from benchmarks.harness import Bench, command
from benchmarks.http import shard_bytes

__all__ = ["main"]

COMPUTE_S_PER_SAMPLE = 180e-6
"""Pure Python for each sample of 100 KB: about as long as reading takes over TLS, the hardest proportion."""


def turns_per_sample() -> int:
    """How often `spin` has to turn on this machine."""
    turns = 200_000
    best = min(timeit.repeat(lambda: spin(turns), number=1))
    return max(1, int(turns * COMPUTE_S_PER_SAMPLE / best))


@command("busy")
def main(bench: Bench) -> None:
    """Wall time of reading and computing together, against each alone."""
    corpus = image_like(bench.root, bench.shards, shard_bytes(bench))
    turns = turns_per_sample()
    with bench.nginx(tls=True) as server:
        compute = bench.read("computing alone", server, corpus, ["nothing"], spin=turns).get("nothing")
        alone = bench.read("reading alone, TLS", server, corpus, ["wds_async", "webdataset"])
        both = bench.read("reading and computing, TLS", server, corpus, ["wds_async", "webdataset"], spin=turns)
    ours, reading = both.get("wds_async"), alone.get("wds_async")
    if compute and ours and reading:
        limit = 1.1 * (compute.wall_s + reading.cpu_s)
        bar = f"≤ 1.1 x (compute {compute.wall_s:.2f} + I/O CPU {reading.cpu_s:.2f}) = {limit:.2f} s"
        bench.bar("busy consumer over TLS: wall", bar, ours.wall_s, ours.wall_s <= limit, "{:.2f} s")
        bench.memory_bar("busy", ours)


if __name__ == "__main__":
    main()
