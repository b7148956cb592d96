"""An index of 1,000 shards beside reading them, on the same engine.

Each contender is a job of the same tasks on two processes of the local engine, with a record for each task. Only what a
task does with the shards differs. The time of a job is that of `Job.run`, with the starts of its processes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

import wds_async as wds
from benchmarks.bench import Bench, measured, scenario
from benchmarks.corpus import Corpus, pictures, tiny
from wds_async import distributed as dist
from wds_async.distributed.tasks import Record, Task
from wds_async.transfer.reader import open_shards

__all__ = ["ReadWork", "contend", "main"]

PROCESSES = 2
_KINDS = ("json", "wds")
_ROWS = {"bytes": "our reader, bytes alone", "samples": "our reader, samples", "index": "dist.index"}
_CHILD = """
import json, sys
from benchmarks.scenarios.distributed.index import contend
print(json.dumps(contend(**json.loads(sys.stdin.read()))))
"""


@dataclass(frozen=True)
class ReadWork:
    """Work: read the shards of a task and keep nothing. ``what``: "bytes" or "samples"."""

    what: str

    def describe(self) -> dict[str, Any]:
        """Return what is read."""
        return {"kind": "read", "what": self.what}

    def run(self, task: Task) -> Record:
        """Read all that the shards hold."""
        urls = [one.url for one in task.inputs]
        count = _samples(urls) if self.what == "samples" else _bytes(urls)
        return Record(task.number, task.identity(self.describe()), task.inputs, (), more={"count": count})


def _bytes(urls: Sequence[str]) -> int:
    size = 0
    with open_shards(list(urls)) as shards:
        for shard in shards:
            while (piece := shard.read()) is not None:
                size += len(piece)
    return size


def _samples(urls: Sequence[str]) -> int:
    return sum(1 for _ in wds.WebDataset(list(urls), shardshuffle=False))


def contend(what: str, urls: list[str], out: str) -> dict[str, Any]:
    """Return the seconds that one contender takes, and what it counted. It runs in a process of its own."""
    job = dist.index(urls, f"{out}/", kinds=_KINDS, workers=PROCESSES)
    if what != "index":
        job = dist.Job(ReadWork(what), job.tasks, dist.JobFolder(f"{out}/_wds/{what}"), options={"workers": PROCESSES},
                       finishes=False)  # fmt: skip
    began = time.monotonic()
    job.run()
    wall_s = time.monotonic() - began
    records = list(job.folder.records(range(len(job.tasks))))
    count = sum(one.samples_in if what == "index" else one.more["count"] for one in records)
    return {"wall_s": wall_s, "count": count, "tasks": len(records)}


def _case(bench: Bench, table: Table, title: str, corpus: Corpus, floors: Sequence[str]) -> None:
    """Measure the index of ``corpus`` beside both kinds of reading, in turns; ``floors`` are those with a bar."""
    taken: dict[str, list[float]] = {what: [] for what in _ROWS}
    with bench.nginx() as server:
        urls = [server.url(name) for name in corpus.names]
        for turn in range(bench.repeat):
            for what in _ROWS:
                out = bench.root / title / f"{what}-{turn}"
                reading = measured(_CHILD, what=what, urls=urls, out=str(out))
                assert reading["count"] == (corpus.size_bytes if what == "bytes" else corpus.samples), reading
                bench.raw.append({"case": title, "contender": what, **reading})
                taken[what].append(reading["wall_s"])
    medians = {what: statistics.median(times) for what, times in taken.items()}
    for what, name in _ROWS.items():
        speed = corpus.size_bytes / 1e6 / medians[what]
        table.add_row(title, name, f"{speed:.0f}", f"{corpus.samples / medians[what]:,.0f}", f"{medians[what]:.2f}")
    for what in floors:
        ratio = medians[what] / medians["index"]
        bench.bar(f"index of {title} on {PROCESSES} cores, beside {_ROWS[what]}: speed", "≥ 0.8", ratio, ratio >= 0.8)


@scenario("distributed.index", shards=1000, repeat=3)
def main(bench: Bench) -> None:
    """Indexes of many shards as a job, beside reading their bytes and their samples by the same engine."""
    shards = 20 if bench.quick else bench.shards
    image = bytes(range(256)) * 40
    corpora = {
        "samples of 10 kB": (pictures(bench.root, shards, 320, [image]), ("samples", "bytes")),
        # A header in Python takes longer than a kilobyte from this machine's own server.
        "samples of 200 bytes": (tiny(bench.root, shards, 500), ("samples",)),
    }
    table = Table(title=f"{shards:,} shards, {PROCESSES} processes, from nginx on loopback", title_justify="left")
    for name in ("case", "contender", "MB/s", "samples/s", "wall s"):
        table.add_column(name, justify="left" if name in ("case", "contender") else "right")
    for title, (corpus, floors) in corpora.items():
        if not bench.only or title in bench.only:
            _case(bench, table, title, corpus, floors)
    bench.console.print(table)
    bench.notes.append(json.dumps({"processes": PROCESSES, "kinds": _KINDS, "python": sys.version.split()[0]}))
