"""Time and memory until a process knows its share of 100,000 shards.

Nothing is read: the dataset is made, and its first shard taken from the stages before reading, as the last worker of
4,096 ranks with 16 workers each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

import click
from rich.table import Table

from benchmarks.bench import ROOT, Bench, scenario

__all__ = ["main", "plan"]

SHARDS, RANKS, WORKERS = 100_000, 4_096, 16
SOURCES = {
    "local files": "/data/imagenet/train-{{000000..{last:06d}}}.tar",
    "https": "https://data.example.com/imagenet/train-{{000000..{last:06d}}}.tar",
    "s3": "s3://bucket/imagenet/train-{{000000..{last:06d}}}.tar",
}

_CODE = """\
import json, re, sys, time
import wds_async as wds
from wds_async.reading.stage import ReadingStage

wds.WebDataset, wds.DataPipeline  # names are looked up when they are first used
status = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = status()
began = time.perf_counter()
dataset = wds.WebDataset(sys.argv[1], shardshuffle="epoch", seed=1)
made = time.perf_counter()
reading = next(i for i, stage in enumerate(dataset.pipeline) if isinstance(stage, ReadingStage))
shards = wds.DataPipeline(*dataset.pipeline[:reading])
first = next(iter(shards))
planned = time.perf_counter()
share = 1 + sum(1 for _ in shards)
print(json.dumps({"made_s": made - began, "s": planned - began, "peak_bytes": status(), "imported_bytes": before,
                  "first": first["url"], "shards": share}))
"""


def plan(url: str) -> dict[str, Any]:
    """Plan ``url`` in a fresh process, as the last worker of the last rank, and return what it measured."""
    place = {"RANK": RANKS - 1, "WORLD_SIZE": RANKS, "WORKER": WORKERS - 1, "NUM_WORKERS": WORKERS}
    done = subprocess.run(
        [sys.executable, "-c", _CODE, url],
        env={**os.environ, **{name: str(number) for name, number in place.items()}},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode:
        raise click.ClickException(f"planning {url} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@scenario("planning", repeat=3)
def main(bench: Bench) -> None:
    """Time and memory until a worker knows its first shard: 100,000 shards, 4,096 ranks x 16 workers, permuted."""
    table = Table(title=f"{SHARDS:,} shards, {RANKS:,} ranks x {WORKERS} workers", title_justify="left")
    for title in ("shards", "dataset made, s", "first shard known, s", "peak MB", "of it imported"):
        table.add_column(title, justify="left" if title == "shards" else "right")
    for source, pattern in SOURCES.items():
        if bench.only and source not in bench.only:
            continue
        runs = [plan(pattern.format(last=SHARDS - 1)) for _ in range(bench.repeat)]
        made, seconds = (statistics.median(run[name] for run in runs) for name in ("made_s", "s"))
        peak, imported = (max(run[name] for run in runs) for name in ("peak_bytes", "imported_bytes"))
        bench.raw += [{"case": source, **run} for run in runs]
        table.add_row(source, f"{made:.2f}", f"{seconds:.2f}", f"{peak / 1e6:.0f}", f"{imported / 1e6:.0f}")
        measure = f"planning {SHARDS:,} shards ({source}) for {RANKS:,} ranks x {WORKERS} workers"
        bench.bar(measure, "≤ 2 s", seconds, seconds <= 2, "{:.2f} s")
        bench.bar(f"{measure}: memory of the process", "≤ 200 MB", peak / 1e6, peak <= 200e6, "{:.0f} MB")
    bench.console.print(table)
