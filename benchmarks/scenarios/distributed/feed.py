"""A `Feed` with one and two decoders beside the bare pipeline.

The pipeline decodes pictures of 400 x 400 into batches of 16 (7.7 MB), and the program that takes them does nothing
else, so decoding bounds. Each contender is a process; what counts is an epoch after the first, when all have started,
and the CPU of all its processes. What a feed needs above the bare pipeline, with as many decoders, is the hand-over.
"""

from __future__ import annotations

import json
import os
import statistics

import click
from rich.table import Table

from benchmarks.bench import ROOT, Bench, measured, scenario
from benchmarks.corpus import pictures
from benchmarks.pictures import photo_jpeg

__all__ = ["main"]

BARE, ONE, TWO = CONTENDERS = ("bare pipeline", "Feed, 1 decoder", "Feed, 2 decoders")
SHARD_IMAGES = 128

_PIPELINE = """
import wds_async as wds

def pipeline():
    return wds.WebDataset({url!r}, nodesplitter=wds.split_by_node).decode("rgb8").to_tuple("jpg", "cls").batched(16)
"""
_CODE = """\
import json, sys, time
import psutil
job = json.load(sys.stdin)
sys.path[:0] = [job["folder"], job["root"]]
import feedpipeline
from wds_async import distributed as dist

def cpu():
    me = psutil.Process()
    return sum(sum(one.cpu_times()[:4]) for one in [me, *me.children(recursive=True)])

feed = dist.Feed("feedpipeline:pipeline", decoders=job["decoders"], ahead="256M") if job["decoders"] else None
loader = feed.loader(0, 1) if feed else feedpipeline.pipeline()
images = sum(len(batch[0]) for batch in loader)
rows = []
for _ in range(job["repeat"]):
    before, began = cpu(), time.monotonic()
    assert sum(len(batch[0]) for batch in loader) == images
    rows.append({"wall_s": time.monotonic() - began, "cpu_s": cpu() - before, "images": images})
if feed:
    feed.close()
print(json.dumps(rows))
"""


@scenario("distributed.feed", shards=40, repeat=3)
def main(bench: Bench) -> None:
    """Pictures decoded by other processes: ``Feed`` with one and two decoders, and what the hand-over costs."""
    corpus = pictures(bench.root, bench.shards, SHARD_IMAGES, [photo_jpeg(seed) for seed in range(8)])
    url = f"{bench.root}/pictures-{{000000..{bench.shards - 1:06d}}}.tar"
    (bench.root / "feedpipeline.py").write_text(_PIPELINE.format(url=url))
    medians: dict[str, dict[str, float]] = {}
    for decoders, contender in enumerate(CONTENDERS):
        if bench.only and contender not in bench.only:
            continue
        rows = measured(_CODE, folder=str(bench.root), root=str(ROOT), decoders=decoders, repeat=bench.repeat)
        bench.raw += [{"contender": contender, **row} for row in rows]
        medians[contender] = {name: statistics.median(row[name] for row in rows) for name in ("wall_s", "cpu_s")}
        if rows[0]["images"] != corpus.samples:
            raise click.ClickException(f"{contender} gave {rows[0]['images']} pictures of {corpus.samples}")
    table = Table(title="pictures of 400 x 400 from a local disk", title_justify="left")
    for title in ("contender", "pictures/s", "CPU ms for each"):
        table.add_column(title, justify="left" if title == "contender" else "right")
    for contender, row in medians.items():
        each_ms = 1000 * row["cpu_s"] / corpus.samples
        table.add_row(contender, f"{corpus.samples / row['wall_s']:.0f}", f"{each_ms:.2f}")
    bench.console.print(table)
    if len(medians) == len(CONTENDERS):
        title = "Feed where decoding bounds: pictures a second of 2 decoders beside 1"
        bench.ratio_bar(title, 1.8, medians[ONE]["wall_s"], medians[TWO]["wall_s"])
        for contender in (ONE, TWO):
            share = medians[contender]["cpu_s"] / medians[BARE]["cpu_s"] - 1
            bar = f"{contender}: CPU of the hand-over beside that of decoding"
            bench.bar(bar, "≤ 10 %", 100 * share, share <= 0.1, "{:.1f} %")
    bench.notes.append(json.dumps({"cpus": os.cpu_count(), "batch": 16}))
