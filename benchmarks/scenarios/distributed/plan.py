"""Planning a million tasks, and resuming a hundred thousand.

A server on loopback answers listings as S3 does, a thousand keys a page; there is no data. What is measured, in a fresh
process, is the time until the first task is handed over, and the memory of the process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.bench import Bench, measured, scenario
from tests.servers.s3list import S3List

__all__ = ["main"]

TASKS, RESUMED = 1_000_000, 100_000

_CHILD = """
import json, os, re, sys, time
asked = json.loads(sys.stdin.read())
os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
               "AWS_ENDPOINT_URL_S3": asked["endpoint"], "AWS_EC2_METADATA_DISABLED": "true"}
from wds_async import distributed as dist

class Started(BaseException):
    pass

class Engine:
    name, capacity = "none", 1
    def start(self, attempt): pass
    def close(self): pass
    def submit(self, task): raise Started

dist.map_shards, dist.Job  # names are looked up when they are first used
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
imported, began = peak(), time.perf_counter()
job = dist.map_shards(asked["inputs"], asked["output"], "copy:copy", engine=Engine())
planned = time.perf_counter()
try:
    job.run()
except Started:
    pass
handed = time.perf_counter()
records = 0
if asked["records"]:
    records = len(dist.JobFolder(asked["records"]).finished())
print(json.dumps({"tasks": len(job.tasks), "listed_s": planned - began, "handed_s": handed - planned,
                  "records": records, "records_s": time.perf_counter() - handed, "peak_bytes": peak(),
                  "imported_bytes": imported}))
"""


def _keys(count: int) -> list[str]:
    return [f"in/train-{number:06d}.tar" for number in range(count)]


def _plan(bench: Bench, count: int, out: Path) -> dict[str, Any]:
    """Plan ``count`` tasks from nothing, and return what that took."""
    with S3List(_keys(count)) as server:
        return _child(server, out, "")


def _resume(count: int, out: Path) -> dict[str, Any]:
    """Begin a job of ``count`` tasks, give all but ten of them a record, and return what it took to go on."""
    records = [f"{number:05d}.json" for number in range(count - 10)]
    with S3List([*_keys(count), *(f"out/_wds/map/{name}" for name in records)]) as server:
        _child(server, out, "")
        for name in records:
            (out / "_wds/map" / name).touch()
        return _child(server, out, "s3://bucket/out/_wds/map")


def _child(server: S3List, out: Path, records: str) -> dict[str, Any]:
    asked = {"inputs": "s3://bucket/in/*.tar", "output": f"{out}/t-{{task:06d}}.tar", "records": records}
    result: dict[str, Any] = measured(_CHILD, endpoint=server.endpoint, **asked)
    return result


@scenario("distributed.plan", repeat=1)
def main(bench: Bench) -> None:
    """Time and memory until the first of a million tasks is handed over; resuming a job of 100,000 tasks."""
    tasks, resumed = (TASKS // 100, RESUMED // 100) if bench.quick else (TASKS, RESUMED)
    table = Table(title="until the first task is handed over", title_justify="left")
    for title in ("case", "inputs listed, s", "then, s", "records listed, s", "peak MB", "of it imported"):
        table.add_column(title, justify="left" if title == "case" else "right")
    rows = {"plan": _plan(bench, tasks, bench.root / "plan"), "resume": _resume(resumed, bench.root / "resume")}
    for case, row in rows.items():
        bench.raw.append({"case": case, **row})
        seconds = (f"{row[name]:.1f}" for name in ("listed_s", "handed_s", "records_s"))
        sizes = (f"{row[name] / 1e6:.0f}" for name in ("peak_bytes", "imported_bytes"))
        table.add_row(f"{case} {row['tasks']:,} tasks", *seconds, *sizes)
    bench.console.print(table)
    plan, resume = rows["plan"], rows["resume"]
    assert (plan["tasks"], resume["tasks"], resume["records"]) == (tasks, resumed, resumed - 10)
    seconds = resume["listed_s"] + resume["handed_s"] + resume["records_s"]
    bench.bar(f"resuming {resumed:,} tasks, until the first one is handed over", "≤ 10 s", seconds, seconds <= 10,
              "{:.1f} s")  # fmt: skip
    planned, peak = plan["listed_s"] + plan["handed_s"], plan["peak_bytes"]
    bench.bar(f"planning {tasks:,} tasks, until the first one is handed over", "≤ 120 s", planned, planned <= 120,
              "{:.1f} s")  # fmt: skip
    bench.bar(f"planning {tasks:,} tasks: memory of the process", "≤ 1 GB", peak / 1e6, peak <= 1e9, "{:.0f} MB")
    bench.notes.append(f"Records are listed twice when resuming, on a local disk and as on S3. {os.cpu_count()} CPUs.")
