"""Undecoded samples from nginx on loopback, plain and over TLS: images of 100 KB, samples of 200 bytes and of 20 MB."""

from __future__ import annotations

from benchmarks.bench import Bench, Reading, Row, scenario
from benchmarks.corpus import image_like, large_samples, tiny
from benchmarks.peer import load_peer, peer_names

__all__ = ["http", "https", "large", "small"]


def _cpu(reading: Reading) -> float:
    return reading.cpu_s_per_gb


@scenario("http")
def http(bench: Bench) -> None:
    """Undecoded images of 100 KB, plain HTTP."""
    corpus = bench.make(image_like, bench.shards, bench.shard_bytes)
    rows = [*bench.rows(), Row("wds_async", "wds_async, asyncio's loop", {"options": {"loop": "asyncio"}})]
    with bench.serve(corpus, "http") as source:
        results = bench.compare("images, http", source, rows=rows)
    ours, theirs, floor = (results.get(name) for name in ("wds_async", "webdataset", "recv_into"))
    if ours and floor:
        ratio = ours.cpu_s_per_gb / floor.cpu_s_per_gb
        bench.bar("http: CPU over the recv_into loop's", "≤ 1.4 x", ratio, ratio <= 1.4, "{:.2f} x")
    if ours and theirs:
        bench.ratio_bar("http: CPU, webdataset's over ours", 6.5, theirs.cpu_s_per_gb, ours.cpu_s_per_gb)
    bench.least_bar("http: CPU s/GB", "wds_async", results, _cpu)
    if ours:
        fast = {name: r for name, r in results.items() if r.mb_s >= ours.mb_s / 2}
        measure = "http: memory of all processes, of the peers that reach half of our throughput"
        bench.least_bar(measure, "wds_async", fast, lambda r: r.pss_bytes / 1e6, "{:.0f} MB")
    bench.memory_bar("http", ours)


@scenario("https")
def https(bench: Bench) -> None:
    """Undecoded images of 100 KB, verified TLS."""
    corpus = bench.make(image_like, bench.shards, bench.shard_bytes)
    with bench.serve(corpus, "https") as source:
        results = bench.compare("images, https", source)
    ours, theirs, floor = (results.get(name) for name in ("wds_async", "webdataset", "recv_into"))
    if ours and floor:
        ratio = ours.cpu_s_per_gb / floor.cpu_s_per_gb
        bench.bar("https: CPU over the recv_into loop's", "≤ 1.25 x", ratio, ratio <= 1.25, "{:.2f} x")
    if ours and theirs:
        bench.ratio_bar("https: CPU, webdataset's over ours", 4.5, theirs.cpu_s_per_gb, ours.cpu_s_per_gb)
        bench.ratio_bar("https: throughput over webdataset's", 4, ours.mb_s, theirs.mb_s)
    bench.least_bar("https: CPU s/GB", "wds_async", results, _cpu)
    bench.memory_bar("https", ours)


@scenario("small", shards=16)
def small(bench: Bench) -> None:
    """Undecoded text: samples of two fields, together under 200 bytes (--shards: of 25,000 samples each)."""
    corpus = bench.make(tiny, bench.shards, 2_500 if bench.quick else 25_000)
    with bench.serve(corpus, "http") as source:
        results = bench.compare("samples of 200 bytes", source, rows=bench.rows(part=1 / 4))
    ours, theirs = results.get("wds_async"), results.get("webdataset")
    if ours and theirs:
        measure = "samples per CPU second, over webdataset's"
        bench.ratio_bar(measure, 12, ours.samples_per_cpu_s, theirs.samples_per_cpu_s)
    tars = {name: r for name, r in results.items() if name.partition(",")[0] in _tar_readers()}
    bench.least_bar("samples per CPU second", "wds_async", tars, lambda r: r.samples_per_cpu_s, "{:,.0f}", most=True)
    bench.memory_bar("small samples", ours)


def _tar_readers() -> list[str]:
    return [name for name in peer_names() if load_peer(name).format == "tar"]


@scenario("large", shards=8, repeat=3)
def large(bench: Bench) -> None:
    """Undecoded samples of 20 MB, plain HTTP (--shards: of 10 samples each)."""
    corpus = bench.make(large_samples, bench.shards, 2 if bench.quick else 10, 20_000_000)
    with bench.serve(corpus, "http") as source:
        results = bench.compare("samples of 20 MB", source)
    bench.least_bar("samples of 20 MB: CPU s/GB", "wds_async", results, _cpu)
    bench.memory_bar("samples of 20 MB", results.get("wds_async"), held=20_000_000)
