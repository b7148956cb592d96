"""Until the first sample and the first batch, 50 ms to the first byte; and going on in the middle of an epoch.

The server's log says when the first connection was accepted, so that "after connect" is measured, not guessed."""

from __future__ import annotations

from benchmarks.bench import Bench, Source, scenario
from benchmarks.corpus import image_like

__all__ = ["first", "resume"]

ROUND_TRIP_S = 0.050
_FEW = ("wds_async", "webdataset", "webdataset_fsspec", "torchdata", "obstore")
"""All peers read a first sample in a new process; the rest is for these."""


def _trips(bench: Bench, case: str, source: Source, *, warm: bool) -> None:
    rows = bench.rows(_FEW if warm else None, floors=())
    results = bench.compare(case, source, rows=rows, first=True, warm=warm)
    if ours := results.get("wds_async"):
        trips = (ours.first_s - ours.connected_s) / ROUND_TRIP_S
        bench.bar(f"{case}: after connect", "≤ 2.5 round trips", trips, trips <= 2.5)


@scenario("first", repeat=3)
def first(bench: Bench) -> None:
    """Time to the first sample, again in the same process, and to the first batch of a DataLoader with 2 workers."""
    corpus = bench.make(image_like, max(2, bench.shards // 8), bench.shard_bytes, distinct=False)
    with bench.serve(corpus, store_like=True) as source:
        _trips(bench, "first sample, in a new process", source, warm=False)
        _trips(bench, "first sample, again", source, warm=True)
        bench.compare("first batch, 2 workers", source, "loader", bench.rows(_FEW, floors=()), workers=2, first=True)


@scenario("resume", repeat=3)
def resume(bench: Bench) -> None:
    """Time to the first sample in the middle of an epoch, from a saved state, beside a start without one."""
    corpus = bench.make(image_like, bench.shards, bench.shard_bytes, distinct=False)
    rows = bench.rows(_FEW, floors=())
    with bench.serve(corpus, store_like=True) as source:
        # Making the state has read half an epoch: the start beside it is not the first of its process either.
        fresh = bench.compare("a start without a state", source, rows=rows, first=True, warm=True)
        going_on = bench.compare("from a state", source, "resume", rows, first=True)
    if "wds_async" in fresh and "wds_async" in going_on:
        ratio = going_on["wds_async"].first_s / fresh["wds_async"].first_s
        bench.bar("first sample from a state over that of a start without", "≤ 1.2", ratio, ratio <= 1.2)
