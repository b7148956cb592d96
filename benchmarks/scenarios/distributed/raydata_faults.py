"""Samples lost where a store answers 503 at one place of a shard.

Both read the same two shards of 4 MB from one server into Ray, `ray.data.read_webdataset` by pyarrow's client of S3
with its own settings. In each run three requests in a row are answered with 503, beginning with a random one of those
that the reader makes. pyarrow repeats a request twice, so with the third answer the error reaches Ray, which reads on
from a stream that has advanced. So that shards of 4 MB are read by several requests, as large ones are, both readers
ask for 256 KiB at once. Payload is random bytes, or zeros (masks, silence), which look like the end of an archive.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.table import Table

from benchmarks.bench import Bench, measured, scenario
from benchmarks.scenarios.distributed.raydata import ENVIRONMENT

__all__ = ["main"]

OURS, RAYS = READERS = ("raydata.read", "ray.data.read_webdataset")
CASES = {"1 KB samples": (1_000, False), "100 KB samples": (100_000, False), "100 KB samples of zeros": (100_000, True)}
SHARD_BYTES = 4_000_000

_CODE = """\
import json, logging, random, sys
import pyarrow.fs, ray, ray.data
from tests.servers import Origin, make_shard
from wds_async.distributed import raydata

job = json.load(sys.stdin)
size = job["size"]
ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False,
         logging_level="ERROR")
context = ray.data.DataContext.get_current()
context.enable_progress_bars, context.streaming_read_buffer_size = False, 256 << 10
logging.getLogger("ray.data").setLevel("ERROR")
fields = [bytes(size) if job["zeros"] else random.Random(n).randbytes(size) for n in range(job["samples"])]
shard = make_shard({f"{n:06d}": {"bin": value} for n, value in enumerate(fields)})

def read(reader, origin):
    if reader == "raydata.read":
        urls = [origin.url(f"bucket/{n}.tar") for n in range(2)]
        dataset = raydata.read(urls, transfer={"budget_bytes": 1 << 20, "part_bytes": 256 << 10})
    else:
        store = pyarrow.fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{origin.port}", scheme="http", anonymous=True, region="us-east-1"
        )
        dataset = ray.data.read_webdataset(["bucket/0.tar", "bucket/1.tar"], filesystem=store, decoder=None)
    try:
        return dataset.count()
    except Exception as exn:
        return type(exn).__name__

found = []
for reader in job["readers"]:
    with Origin({f"/bucket/{n}.tar": shard for n in range(2)}) as origin:
        rows, requests = read(reader, origin), len(origin.requests)
        assert rows == 2 * job["samples"], rows
        for run in range(job["repeat"]):
            origin.forget()
            origin.behave(status=503, skip=random.Random(run).randrange(requests - 2), times=3)
            found.append({"contender": reader, "run": run, "rows": read(reader, origin)})
print(json.dumps(found))
ray.shutdown()
"""


def _runs(bench: Bench, case: str) -> dict[str, Counter[str]]:
    """Return, by reader, how many runs ended in which way, and how many samples they lost without an error."""
    size, zeros = CASES[case]
    samples = SHARD_BYTES // max(size, 4_000)
    job = {"size": size, "zeros": zeros, "samples": samples, "readers": READERS, "repeat": bench.repeat}
    found: list[dict[str, Any]] = measured(_CODE, ENVIRONMENT, **job)
    counts: dict[str, Counter[str]] = {reader: Counter() for reader in READERS}
    for row in found:
        bench.raw.append({"case": case, **row})
        count, rows = counts[row["contender"]], row["rows"]
        if isinstance(rows, str):
            count["error"] += 1
        else:
            count["lost"] += rows != 2 * samples
            count["samples"] += 2 * samples - rows
        count["runs"] += 1
    return counts


@scenario("distributed.raydata_faults", repeat=10)
def main(bench: Bench) -> None:
    """Runs that lose samples where a store answers 503: ``raydata.read`` beside ``ray.data.read_webdataset``."""
    table = Table(title="three answers of 503 at a random place", title_justify="left")
    for title in ("case", "reader", "runs", "silent losses", "samples lost", "errors"):
        table.add_column(title, justify="left" if title in ("case", "reader") else "right")
    for case in CASES:
        if bench.only and case not in bench.only:
            continue
        counts = _runs(bench, case)
        for reader, count in counts.items():
            table.add_row(case, reader, *(str(count[name]) for name in ("runs", "lost", "samples", "error")))
        ours, theirs = counts[OURS], counts[RAYS]
        bad, their_bad = ours["lost"] + ours["error"], theirs["lost"] + theirs["error"]
        measure = (
            f"{case}: runs with samples lost or an error, of {ours['runs']}; ray.data.read_webdataset: {their_bad}"
        )
        bench.bar(measure, "0", bad, bad == 0, "{:.0f}")
    bench.console.print(table)
