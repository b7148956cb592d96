"""A server like an object store, 50 ms to the first byte and 50 MB/s a connection: alone, and behind a shaped link."""

from __future__ import annotations

from benchmarks.bench import Bench, scenario
from benchmarks.corpus import image_like
from benchmarks.link import link

__all__ = ["links", "store"]

_BESIDE = {"http": ("wds_async", "webdataset", "torchdata"), "s3": ("wds_async", "webdataset_fsspec", "obstore")}
_PAYLOAD = 1448 / 1514
"""Of the bytes that a link of Ethernet frames carries: what is not headers of Ethernet, IP and TCP."""


@scenario("store", repeat=3)
def store(bench: Bench) -> None:
    """Undecoded images from a store-like server; shards of 66 MB and of 1 MB."""
    large = bench.make(image_like, bench.shards, bench.shard_bytes, distinct=False)
    many = bench.make(image_like, 50 if bench.quick else 1000, 1_000_000, distinct=False, name="many")
    with bench.serve(large, store_like=True) as source:
        results = bench.compare("store-like, 66 MB shards", source, rows=bench.rows(part=1 / 4))
    with bench.serve(many, store_like=True) as source:
        # Most peers take a tenth of a second for each of these: fifty tell their pace.
        many_small = bench.compare("store-like, 1 MB shards", source, rows=bench.rows(floors=(), part=1 / 20))
    ours, theirs, small = results.get("wds_async"), results.get("webdataset"), many_small.get("wds_async")
    if ours and theirs:
        bench.ratio_bar("store-like: throughput, ours over webdataset's", 18, ours.mb_s, theirs.mb_s)
    if ours and small:
        bench.ratio_bar("store-like: MB/s with 1 MB shards over 66 MB shards", 0.6, small.mb_s, ours.mb_s)
    bench.memory_bar("store-like, 66 MB shards", ours)
    bench.memory_bar("store-like, 1 MB shards", small)


@scenario("link", shards=16, repeat=3, needs="root, iproute2")
def links(bench: Bench) -> None:
    """A store-like server behind links of 1, 2 and 5 Gbit/s; s3:// with 4 workers at 2 (--only 1, 2, 5 or s3)."""
    corpus = bench.make(image_like, bench.shards, bench.shard_bytes, distinct=False)
    cases = (("1", 1, "http", 0), ("2", 2, "http", 0), ("5", 5, "http", 2), ("s3", 2, "s3", 4))
    for name, gigabits, scheme, workers in cases:
        if bench.only and name not in bench.only:
            continue
        times = 1 if bench.quick else gigabits  # eight seconds of the link
        read = corpus.times(max(times, -(-workers // len(corpus.names))))
        case = f"link of {gigabits} Gbit/s, {scheme}://, {f'{workers} workers' if workers else 'one process'}"
        with link(f"{gigabits}gbit") as (namespace, address):
            inside = ("ip", "netns", "exec", namespace)
            with bench.serve(read, scheme, store_like=True, command=inside, host=address) as source:
                task = "loader" if workers else "samples"
                rows = bench.rows(_BESIDE[scheme], floors=("curl",), part=1 / (8 * gigabits))
                results = bench.compare(case, source, task, rows, workers=workers)
        ours, curl = results.get("wds_async"), results.get("curl")
        if ours:
            share = ours.mb_s * 8 / (1000 * gigabits * _PAYLOAD)
            bench.bar(f"{case}: share of what it carries", "≥ 95 %", 100 * share, share >= 0.95, "{:.0f} %")
            bench.memory_bar(case, ours)
        if ours and curl:
            bench.ratio_bar(f"{case}: throughput over curl -Z", 0.93, ours.mb_s, curl.mb_s)
