"""What states cost, and how soon a loader that goes on gives its first sample.

Each measurement is a process of its own, and what is compared is measured in turn."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from benchmarks.bench import Bench, measured, scenario
from benchmarks.corpus import image_like

__all__ = ["main"]

_CHILD = """
import json, resource, sys, time
import wds_async as wds

job = json.loads(sys.stdin.read())

def cpu():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

def dataset():
    return wds.WebDataset(job["urls"], shardshuffle=False, split=job.get("split")).shuffle(job.get("buffer", 0), seed=1)

def pipeline():
    batches = dataset().batched(64, collation_fn=None)
    if not job.get("workers"):
        return batches
    return wds.WebLoader(batches, batch_size=None, num_workers=job["workers"])

def read():
    loader, began, cpu_before, size = pipeline(), time.monotonic(), cpu(), 0
    for number, batch in enumerate(loader, 1):
        size += sum(len(sample["jpg"]) for sample in batch)
        if job.get("every") and number % job["every"] == 0:
            loader.state_dict()
    wall = time.monotonic() - began
    del loader
    return {"wall_s": wall, "cpu_s": cpu() - cpu_before, "bytes": size}

def state():
    samples = dataset()
    iterator = iter(samples)
    for _ in range(job["after"]):
        next(iterator)
    return samples.state_dict()

def first():
    samples = dataset()
    began = time.monotonic()
    if job.get("state"):
        samples.load_state_dict(job["state"])
    next(iter(samples))
    return {"wall_s": time.monotonic() - began}

print(json.dumps({"read": read, "state": state, "first": first}[job["what"]]()))
"""


def medians(jobs: dict[str, dict[str, Any]], repeat: int, field: str) -> dict[str, float]:
    """Return the median of each of ``jobs``, done in turn."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeat):
        for name, job in jobs.items():
            taken[name].append(measured(_CHILD, **job)[field])
    return {name: statistics.median(values) for name, values in taken.items()}


@scenario("exact", repeat=3)
def main(bench: Bench) -> None:
    """The cost of states, of going on, and of cutting shards."""
    corpus = image_like(bench.root, bench.shards, bench.shard_bytes, distinct=False)
    table = Table(title="states", title_justify="left")
    for title in ("what", "without", "with", "with / without"):
        table.add_column(title, justify="left" if title == "what" else "right")

    def compare(what: str, jobs: dict[str, dict[str, Any]], field: str, unit: str) -> float:
        values = medians(jobs, bench.repeat, field)
        bench.raw.append({"measure": what, **values})
        before, behind = values["without"], values["with"]
        table.add_row(what, f"{before:.3f} {unit}", f"{behind:.3f} {unit}", f"{behind / before:.3f}")
        return behind / before

    with bench.nginx() as server:
        urls = [server.url(name) for name in corpus.names]
        for workers in (0, 2):
            plain = {"what": "read", "urls": urls, "buffer": 1000, "workers": workers}
            jobs = {"without": plain, "with": {**plain, "every": 10}}
            ratio = compare(f"a state at every 10th batch, {workers} workers, shuffle(1000)", jobs, "cpu_s", "CPU s")
            bench.bar(
                f"state at every 10th batch, {workers} workers: CPU with over without", "≤ 1.01", ratio, ratio <= 1.01
            )
        cut = {"what": "read", "urls": urls, "split": "bytes"}
        ratio = compare('split="bytes"', {"without": {**cut, "split": None}, "with": cut}, "wall_s", "s")
        bench.bar('split="bytes" over whole shards: wall', "≤ 1.03", ratio, ratio <= 1.03)
    with bench.nginx(store_like=True) as server:
        urls = [server.url(name) for name in corpus.names]
        late = measured(_CHILD, what="state", urls=urls, after=corpus.samples - 50)
        jobs = {"without": {"what": "first", "urls": urls}, "with": {"what": "first", "urls": urls, "state": late}}
        ratio = compare("first sample, 50 ms to the first byte, at the end of the epoch", jobs, "wall_s", "s")
        bench.bar("first sample after going on over that of a fresh start", "≤ 1.2", ratio, ratio <= 1.2)
    bench.console.print(table)
