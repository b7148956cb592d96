"""``python -m benchmarks --run distributed.raydata``: `raydata.read` beside Ray Data's own reader of WebDatasets.

Both read the same shards of a local disk into Ray's object store, on a cluster of one node with two CPUs. What counts
is the CPU of all processes: driver, raylet, store and workers. The cluster runs before, and each reader has read all
shards once, so that no worker starts or imports anything while it is measured. Ray's reader is told not to decode
(``decoder=None``), as ours does not either. The floor is our loader in the driver, which gives samples and no blocks.
"""

from __future__ import annotations

import statistics
from typing import Any

import click
from rich.table import Table

from benchmarks.bench import ROOT, Bench, measured, scenario
from benchmarks.corpus import Corpus, image_like, small_images
from benchmarks.peer import load_peer

__all__ = ["ENVIRONMENT", "main"]

OURS, RAYS, FLOOR = READERS = ("raydata.read", "ray.data.read_webdataset", "WebDataset, without Ray")
FIGURES = ("wall_s", "cpu_s")
FACTORS = {"1 KB samples": 6.0, "100 KB samples": 1.0}

_CODE = """\
import json, logging, sys, time
import psutil, ray, ray.data
import wds_async as wds
from wds_async.distributed import raydata

job = json.load(sys.stdin)
ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=job["store_bytes"],
         log_to_driver=False, logging_level="ERROR")
ray.data.DataContext.get_current().enable_progress_bars = False
logging.getLogger("ray.data").setLevel("ERROR")

def cpu():
    me = psutil.Process()
    return sum(sum(one.cpu_times()[:4]) for one in [me, *me.children(recursive=True)])

def read(reader, urls):
    if reader == "raydata.read":
        dataset = raydata.read(urls)
    elif reader.startswith("WebDataset"):
        return sum(1 for _ in wds.WebDataset(urls, shardshuffle=False))
    else:
        dataset = ray.data.read_webdataset(urls, decoder=None)
    return sum(entry.metadata.num_rows for bundle in dataset.iter_internal_ref_bundles() for entry in bundle.blocks)

for reader in job["readers"]:
    read(reader, job["urls"])
rows = []
for turn in range(job["repeat"]):
    for reader in job["readers"]:
        before, began = cpu(), time.monotonic()
        samples = read(reader, job["urls"])
        wall = time.monotonic() - began
        rows.append({"contender": reader, "samples": samples, "wall_s": wall, "cpu_s": cpu() - before})
print(json.dumps(rows))
ray.shutdown()
"""
ENVIRONMENT = {
    **load_peer("ray_data").environment,
    "RAY_prestart_worker_first_driver": "0",
    "PYTHONWARNINGS": "ignore",
    "PYTHONPATH": str(ROOT),
}


def _measure(bench: Bench, case: str, corpus: Corpus) -> dict[str, dict[str, float]]:
    """Return the medians of both readers, which take turns."""
    urls = [str(bench.root / name) for name in corpus.names]
    job = {"urls": urls, "readers": READERS, "repeat": bench.repeat, "store_bytes": 600 << 20}
    rows: list[dict[str, Any]] = measured(_CODE, ENVIRONMENT, **job)
    bench.raw += [{"case": case, **row} for row in rows]
    if wrong := [row for row in rows if row["samples"] != corpus.samples]:
        raise click.ClickException(f"{case}: {wrong[0]['samples']} of {corpus.samples} samples by {wrong[0]}")
    return {
        reader: {name: statistics.median(row[name] for row in rows if row["contender"] == reader) for name in FIGURES}
        for reader in READERS
    }


@scenario("distributed.raydata", shards=6, repeat=3)
def main(bench: Bench) -> None:
    """Reading shards into Ray's object store: ``raydata.read`` against ``ray.data.read_webdataset``."""
    per_shard = 2_000 if bench.quick else 15_000
    corpora = {
        "1 KB samples": small_images(bench.root, bench.shards, per_shard),
        "100 KB samples": image_like(bench.root, bench.shards),
    }
    table = Table(title="into Ray's object store, on two CPUs", title_justify="left")
    for title in ("case", "reader", "MB/s", "CPU s", "CPU s/GB", "CPU µs a sample"):
        table.add_column(title, justify="left" if title in ("case", "reader") else "right")
    for case, corpus in corpora.items():
        if bench.only and case not in bench.only:
            continue
        medians = _measure(bench, case, corpus)
        for reader, row in medians.items():
            figures = (
                f"{corpus.size_bytes / 1e6 / row['wall_s']:.0f}",
                f"{row['cpu_s']:.2f}",
                f"{row['cpu_s'] / corpus.size_bytes * 1e9:.2f}",
                f"{row['cpu_s'] / corpus.samples * 1e6:.1f}",
            )
            table.add_row(case, reader, *figures)
        measure = f"{case}: CPU of ray.data.read_webdataset, in multiples of raydata.read's"
        bench.ratio_bar(measure, FACTORS[case], medians[RAYS]["cpu_s"], medians[OURS]["cpu_s"])
    bench.console.print(table)
