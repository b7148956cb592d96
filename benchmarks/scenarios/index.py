"""Indexes of small samples beside reading the same bytes, and random access by them.

Each measurement is a process of its own, and what is compared is measured in turn."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from rich.table import Table

from benchmarks.bench import Bench, measured, scenario
from benchmarks.corpus import Corpus, image_like, pictures, tiny

__all__ = ["main", "measured"]

BATCH, SHARDS = 256, 100
ROUND_TRIPS = 4

_CHILD = """
import json, random, resource, sys, time
import wds_async as wds
from wds_async.indexed.randomaccess import IndexedDataset
from wds_async.indexed.scan import scan_shards
from wds_async.transfer.reader import open_shards

job = json.loads(sys.stdin.read())

def cpu():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

def read():
    with open_shards(job["urls"]) as shards:
        for shard in shards:
            while shard.read() is not None:
                pass

def samples():
    for sample in wds.WebDataset(job["urls"], shardshuffle=False):
        pass

def index():
    for scanned in scan_shards(job["urls"]):
        assert scanned.index is not None, scanned.error

def save():
    for scanned in scan_shards(job["urls"]):
        with open(f"{job['folder']}/{scanned.url.rpartition('/')[2]}.index", "wb") as file:
            file.write(scanned.index.to_bytes())

def batches():
    draw, taken = random.Random(job["seed"]), []
    with IndexedDataset(job["urls"], index=job["folder"]) as dataset:
        for _ in range(job["batches"]):
            chosen = draw.sample(range(len(dataset)), job["size"])
            began = time.monotonic()
            assert len(dataset[chosen]) == job["size"]
            taken.append(time.monotonic() - began)
    return taken

began, cpu_before = time.monotonic(), cpu()
result = globals()[job["what"]]()
print(json.dumps({"wall_s": time.monotonic() - began, "cpu_s": cpu() - cpu_before, "result": result}))
"""


def _raw_s(urls: list[str]) -> float:
    """Return the seconds that curl takes to read ``urls`` at the same time, without looking at the bytes."""
    code = "import subprocess, sys, time\nbegan = time.monotonic()\nsubprocess.run(sys.argv[1:], check=True)\n"
    code += "print(time.monotonic() - began)"
    curl = [shutil.which("curl") or "curl", "-sSZ", "--parallel-max", "16"]
    for url in urls:
        curl += ["-o", "/dev/null", url]
    done = subprocess.run([sys.executable, "-c", code, *curl], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _speed(bench: Bench, table: Table, title: str, corpus: Corpus, beside: str) -> None:
    """Measure the index of ``corpus``; the bar is what our reader takes for ``beside``: "read" (its bytes alone) or
    "samples"."""
    taken: dict[str, list[float]] = {}
    with bench.nginx() as server:
        urls = [server.url(name) for name in corpus.names]
        for _ in range(bench.repeat):
            for what in ("read", "samples", "index"):
                reading = measured(_CHILD, what=what, urls=urls)
                bench.raw.append({"case": title, "what": what, **reading})
                taken.setdefault(what, []).append(reading["wall_s"])
            taken.setdefault("raw", []).append(_raw_s(urls))
            bench.raw.append({"case": title, "what": "raw", "wall_s": taken["raw"][-1]})
    rows = {"raw": "curl -Z", "read": "our reader, bytes alone", "samples": "our reader, samples", "index": "index"}
    speeds = {what: corpus.size_bytes / 1e6 / statistics.median(taken[what]) for what in rows}
    for what, name in rows.items():
        table.add_row(f"{corpus.size_bytes / 1e9:.2f} GB, {title}: {name}", f"{speeds[what]:.0f} MB/s")
    ratio = speeds["index"] / speeds[beside]
    bench.bar(f"index of {title} over {rows[beside]}: throughput", "≥ 0.8", ratio, ratio >= 0.8)


def _access(bench: Bench, table: Table) -> None:
    """Measure batches of samples among shards of the store-like server."""
    count = 10 if bench.quick else SHARDS
    size = 1_000_000 if bench.quick else max(bench.shard_bytes // 4, 1)
    corpus = image_like(bench.root, count, size, distinct=False, name="access")
    folder = bench.root / "indexes"
    Path(folder).mkdir()
    with bench.nginx() as server:
        measured(_CHILD, what="save", urls=[server.url(name) for name in corpus.names], folder=str(folder))
    taken: list[float] = []
    first: list[float] = []
    trips: list[float] = []
    with bench.nginx(store_like=True) as server:
        job = {"what": "batches", "urls": [server.url(name) for name in corpus.names], "folder": str(folder)}
        for seed in range(bench.repeat):
            trips += measured(_CHILD, **job, size=1, batches=6, seed=seed)["result"][1:]
            batch = min(BATCH, corpus.samples // 2)
            cold, *warm = measured(_CHILD, **job, size=batch, batches=6, seed=seed)["result"]
            first.append(cold)
            taken += warm
    bench.raw.append({"case": "access", "trips_s": trips, "first_s": first, "batches_s": taken})
    trip = statistics.median(trips)
    table.add_row("one sample of the store-like server: a round trip", f"{trip * 1e3:.0f} ms")
    for name, values in (("the first batch", first), ("a later batch", taken)):
        value = statistics.median(values)
        table.add_row(f"{BATCH} samples of {SHARDS} shards, {name}", f"{value * 1e3:.0f} ms")
        measure = f"random access: {name} of {BATCH} samples among {SHARDS} shards, in round trips"
        bench.bar(measure, f"≤ {ROUND_TRIPS}", value / trip, value / trip <= ROUND_TRIPS)


@scenario("index", repeat=3)
def main(bench: Bench) -> None:
    """The speed of making indexes, and the time of random access by them."""
    table = Table(title="indexes", title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    small = [os.urandom(10_000) for _ in range(16)]
    corpus = pictures(bench.root, *((2, 200) if bench.quick else (20, 4_250)), small)
    _speed(bench, table, "samples of 10 kB", corpus, "read")
    # A header in Python takes longer than a kilobyte from this machine's own server.
    corpus = tiny(bench.root, *((2, 2_000) if bench.quick else (20, 24_400)))
    _speed(bench, table, "samples of 200 bytes", corpus, "samples")
    _access(bench, table)
    bench.console.print(table)
