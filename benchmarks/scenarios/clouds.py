"""The same bytes by each store's protocol, from nginx as the data path; signing, and listing."""

from __future__ import annotations

from benchmarks import datapath
from benchmarks.bench import Bench, Row, measured, scenario
from benchmarks.corpus import image_like
from tests.servers.s3list import S3List

__all__ = ["az", "gs", "listing", "s3", "signing"]

_TURNS = 3
"""We read the corpus several times over in one epoch: an S3 client takes 0.05 s of CPU and 0.1 s to be made, once an
epoch, which would be a fifth of one gigabyte's. Others, of which it is a small part, read it once."""
_LISTED_KEYS = 100_000
_LISTING_MB = 64
_SIGNING = """
import asyncio, json, os, sys, time

job = json.load(sys.stdin)
os.environ.update(job["environment"])
from wds_async.storage.registry import Backends, locate

async def run():
    backends = Backends(asyncio.to_thread)
    places = [locate(url) for url in job["urls"]]
    for place in places:
        await backends.of(place).access(place)
    began = time.process_time()
    for number in range(job["count"]):
        place = places[number % len(places)]
        await backends.of(place).access(place)
    spent = time.process_time() - began
    await backends.close()
    return spent / job["count"]

print(json.dumps({"cpu_s": asyncio.run(run())}))
"""
_LISTING = """
import json, os, sys, time

job = json.load(sys.stdin)
os.environ.update(job["environment"])
import s3fs
from benchmarks.processes import memory_bytes, reset_peak
from wds_async.storage.listing.expand import expand_listed

reset_peak()
base, cpu, began = memory_bytes("self", "VmRSS"), time.process_time(), time.perf_counter()
matched = len(expand_listed(job["url"]))
reading = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "matched": matched}
print(json.dumps({**reading, "peak_bytes": memory_bytes("self", "VmHWM") - base}))
"""


def _store(bench: Bench, scheme: str) -> None:
    corpus = bench.make(image_like, bench.shards, bench.shard_bytes).times(1 if bench.quick else _TURNS)
    with bench.serve(corpus, scheme) as source:
        plain = Row("wds_async", "wds_async, http://", {"urls": source.plain_urls})
        results = bench.compare(f"images, {scheme}", source, rows=[plain, *bench.rows(part=1 / _TURNS)])
    ours, http, theirs = (results.get(name) for name in ("wds_async", plain.label, "tarfile_fsspec"))
    if ours and http:
        bench.ratio_bar(f"{scheme}://: throughput over http://", 0.85, ours.mb_s, http.mb_s)
        ratio = ours.cpu_s_per_gb / http.cpu_s_per_gb
        bench.bar(f"{scheme}://: CPU over http://", "≤ 1.15 x", ratio, ratio <= 1.15, "{:.2f} x")
    if ours and theirs:
        bench.ratio_bar(f"{scheme}://: CPU, tarfile's over ours", 2, theirs.cpu_s_per_gb, ours.cpu_s_per_gb)
    bench.least_bar(f"{scheme}://: CPU s/GB", "wds_async", results, lambda reading: reading.cpu_s_per_gb)


@scenario("s3", repeat=3)
def s3(bench: Bench) -> None:
    """Undecoded images of 100 KB, s3:// from nginx as the data path."""
    _store(bench, "s3")


@scenario("gs", repeat=3)
def gs(bench: Bench) -> None:
    """Undecoded images of 100 KB, gs:// from nginx as the data path."""
    _store(bench, "gs")


@scenario("az", repeat=3)
def az(bench: Bench) -> None:
    """Undecoded images of 100 KB, az:// from nginx as the data path."""
    _store(bench, "az")


@scenario("signing", repeat=3)
def signing(bench: Bench) -> None:
    """CPU of asking a store for one shard's request, as a share of reading that shard over http://."""
    corpus = bench.make(image_like, bench.shards, bench.shard_bytes)
    with bench.serve(corpus) as source:
        reading = bench.compare("images, http", source, rows=[Row("wds_async")])["wds_async"]
        assert source.server is not None
        for name, store in datapath.STORES.items():
            job = {"urls": store.urls(corpus), "count": 200 if bench.quick else 2000}
            signed = measured(_SIGNING, **job, environment=store.environment(source.server.base))
            share = signed["cpu_s"] / (reading.cpu_s / bench.shards)
            bench.raw.append({"case": f"signing, {name}", "label": name, **signed})
            bench.bar(f"{name}://: signing, of the CPU of a shard", "≤ 2 %", 100 * share, share <= 0.02, "{:.2f} %")


@scenario("listing", repeat=1)
def listing(bench: Bench) -> None:
    """Peak memory of matching a few names among 100,000 keys of s3://."""
    with S3List([f"shard-{number:06d}.tar" for number in range(_LISTED_KEYS)]) as server:
        environment = datapath.STORES["s3"].environment(server.endpoint)
        listed = measured(_LISTING, url="s3://bench/shard-0*000.tar", environment=environment)
    bench.raw.append({"case": "listing", "label": "wds_async", **listed})
    bench.notes.append(f"listing of {_LISTED_KEYS:,} keys: {listed['wall_s']:.1f} s, {listed['cpu_s']:.1f} s of CPU")
    peak_mb = listed["peak_bytes"] / 1e6
    measure = "listing of 100,000 keys: peak memory"
    bench.bar(measure, f"≤ {_LISTING_MB} MB", peak_mb, peak_mb <= _LISTING_MB, "{:.0f} MB")
