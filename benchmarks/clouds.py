"""``python -m benchmarks.clouds``: the same bytes by each store's protocol, from nginx as their data path."""

from __future__ import annotations

from benchmarks import datapath
from benchmarks.corpus import Corpus, image_like
from benchmarks.harness import Bench, Job, child, command
from benchmarks.http import shard_bytes
from benchmarks.link import RATE, link
from tests.servers import Nginx
from tests.servers.s3list import S3List

__all__ = ["main"]

_LISTED_KEYS = 100_000
_LISTING_MB = 64
_TURNS_OVER_THE_CORPUS = 3


@command("clouds")
def main(bench: Bench) -> None:
    """s3://, gs:// and az:// against http://; signing, listing, and a shaped link."""
    corpus = image_like(bench.root, bench.shards, shard_bytes(bench))
    datapath.prepare(bench.root, corpus)
    with bench.nginx(extra=datapath.directives(bench.root), modules=datapath.MODULES) as server:
        _compare(bench, server, corpus)
        _signing(bench, server, corpus)
    _listing(bench)
    _link(bench, corpus)


def _compare(bench: Bench, server: Nginx, corpus: Corpus) -> None:
    """All in one turn: the machine's moods then are everybody's. The corpus is read several times over in one epoch: an
    S3 client takes 0.05 s of CPU and 0.1 s to be made, once an epoch, which would be a fifth of one gigabyte's."""
    turns = 1 if bench.quick else _TURNS_OVER_THE_CORPUS
    corpus = Corpus(corpus.names * turns, corpus.samples * turns, corpus.size_bytes * turns)
    jobs = {"http": Job("wds_async", [server.url(name) for name in corpus.names])}
    for name, store in datapath.STORES.items():
        urls, environment = store.urls(corpus), store.environment(server.base)
        jobs[name] = Job("wds_async", urls, environment)
        jobs[f"{name} tarfile"] = Job("tarfile fsspec", urls, environment)
    results = bench.read_jobs("one process", jobs, corpus)
    plain = results.get("http")
    for name in datapath.STORES:
        ours, theirs = results.get(name), results.get(f"{name} tarfile")
        if ours and plain:
            bench.ratio_bar(f"{name}://: throughput over http://", 0.85, ours.mb_s, plain.mb_s)
            ratio = ours.cpu_s_per_gb / plain.cpu_s_per_gb
            bench.bar(f"{name}://: CPU over http://", "≤ 1.15 x", ratio, ratio <= 1.15, "{:.2f} x")
        if ours and theirs:
            bench.ratio_bar(f"{name}://: CPU, tarfile's over ours", 2, theirs.cpu_s_per_gb, ours.cpu_s_per_gb)


def _signing(bench: Bench, server: Nginx, corpus: Corpus) -> None:
    """CPU of asking a store for one shard's request, as a share of reading that shard."""
    for name, store in datapath.STORES.items():
        reading = bench.readings["one process"].get(name)
        if reading is None:
            continue
        job = {"measure": "signing", "contender": name, "urls": store.urls(corpus), "count": 2000}
        signed = child(job, store.environment(server.base))
        share = signed["cpu_s"] / (reading.cpu_s_per_gb * corpus.size_bytes / 1e9 / bench.shards)
        bench.raw.append({"case": "signing", **signed})
        bench.bar(f"{name}://: signing, of the CPU of a shard", "≤ 2 %", 100 * share, share <= 0.02, "{:.2f} %")


def _listing(bench: Bench) -> None:
    """Peak memory of matching one name among 100,000 keys."""
    with S3List([f"shard-{number:06d}.tar" for number in range(_LISTED_KEYS)]) as server:
        job = {"measure": "listing", "contender": "listing", "url": "s3://bench/shard-0*000.tar"}
        listed = child(job, datapath.STORES["s3"].environment(server.endpoint))
    bench.raw.append({"case": "listing", **listed})
    peak_mb = listed["peak_bytes"] / 1e6
    bench.notes.append(f"listing of {_LISTED_KEYS:,} keys: {listed['wall_s']:.1f} s, {listed['cpu_s']:.1f} s of CPU")
    bench.bar(
        "listing of 100,000 keys: peak memory", f"≤ {_LISTING_MB} MB", peak_mb, peak_mb <= _LISTING_MB, "{:.0f} MB"
    )


def _link(bench: Bench, corpus: Corpus) -> None:
    """Four DataLoader workers on a store-like server behind a shaped link; as root only."""
    store = datapath.STORES["s3"]
    turns = 2 if bench.quick else _TURNS_OVER_THE_CORPUS  # every worker needs a shard
    longer = Corpus(corpus.names * turns, corpus.samples * turns, corpus.size_bytes * turns)
    with link() as (name, address):
        inside = ("ip", "netns", "exec", name)
        with bench.nginx(store_like=True, command=inside, host=address) as server:
            jobs = {
                "s3, 4 workers": Job("wds_async workers", store.urls(longer), store.environment(server.base)),
                "curl -Z": Job("curl -Z", [server.url(one) for one in longer.names]),
            }
            results = bench.read_jobs(f"link of {RATE}", jobs, longer)
    ours, curl = results.get("s3, 4 workers"), results.get("curl -Z")
    if ours and curl:
        bench.ratio_bar("link: throughput, 4 workers from s3:// over curl -Z", 0.93, ours.mb_s, curl.mb_s)


if __name__ == "__main__":
    main()
