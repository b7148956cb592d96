"""``python -m benchmarks --run distributed.map``: `map_shards` beside a bare loop over our reader and writer.

Two processes each read the same shards with the same function and write one shard for each, to the same disk. The loop
keeps no records and no checksums, and it cannot be started again. `map_shards` has a third process, which starts the
two: half a second, whatever the size of the job.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.bench import ROOT, Bench, scenario
from benchmarks.corpus import Corpus, image_like, tiny

__all__ = ["main"]

PROCESSES = 2
_STEPS = """
def step(sample):
    return {**sample, "step": b"1"}
"""
_LOOP = """
import sys
import wds_async as wds
from steps import step

out, *urls = sys.argv[1:]
with wds.ShardWriter(out, mtime=0, verbose=0) as sink:
    for url in urls:
        for sample in wds.WebDataset(url, shardshuffle=False):
            sink.write(step(sample))
        sink.finish()
"""
_MAP = """
import sys
from wds_async import distributed as dist

out, *urls = sys.argv[1:]
print(dist.map_shards(urls, out, "steps:step", workers=2).run())
"""


def _run(folder: Path, code: str, *shares: list[str]) -> dict[str, float]:
    """Return wall and CPU seconds of a process for each of ``shares``, all at once."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    before, began = os.times(), time.monotonic()
    running = [
        subprocess.Popen([sys.executable, "-c", code, *share], env=environment, stdout=subprocess.DEVNULL)
        for share in shares
    ]
    if any(process.wait() for process in running):
        raise click.ClickException("a contender failed (see above)")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall_s": time.monotonic() - began, "cpu_s": cpu}


def _measure(bench: Bench, case: str, corpus: Corpus) -> dict[str, dict[str, float]]:
    """Return the medians of both contenders, which take turns."""
    urls = [str(bench.root / name) for name in corpus.names]
    rows: dict[str, list[dict[str, float]]] = {"bare loop": [], "map_shards": []}
    for _ in range(bench.repeat):
        for contender, taken in rows.items():
            out = bench.root / "out"
            if contender == "bare loop":
                shares = [[f"{out}/{n}-%06d.tar", *urls[n::PROCESSES]] for n in range(PROCESSES)]
                result = _run(bench.root, _LOOP, *shares)
            else:
                result = _run(bench.root, _MAP, [f"{out}/o-{{task:06d}}.tar", *urls])
            size = sum(path.stat().st_size for path in out.glob("*.tar"))
            shutil.rmtree(out)
            taken.append(result)
            bench.raw.append({"case": case, "contender": contender, "bytes_out": size, **result})
    return {
        name: {key: statistics.median(one[key] for one in taken) for key in ("wall_s", "cpu_s")}
        for name, taken in rows.items()
    }


@scenario("distributed.map", shards=192, repeat=3)
def main(bench: Bench) -> None:
    """A function over every sample, by two processes: ``map_shards`` against a bare loop."""
    (bench.root / "steps.py").write_text(_STEPS)
    corpora: dict[str, Any] = {
        "100 KB samples": image_like(bench.root, bench.shards),
        "200 B samples": tiny(bench.root, max(2, bench.shards // 3), 2_000 if bench.quick else 25_000),
    }
    table = Table(title=f"{PROCESSES} processes, read and written on a local disk", title_justify="left")
    for title in ("case", "contender", "MB/s", "wall s", "CPU s"):
        table.add_column(title, justify="left" if title in ("case", "contender") else "right")
    for case, corpus in corpora.items():
        if bench.only and case not in bench.only:
            continue
        medians = _measure(bench, case, corpus)
        for contender, row in medians.items():
            speed = corpus.size_bytes / 1e6 / row["wall_s"]
            table.add_row(case, contender, f"{speed:.0f}", f"{row['wall_s']:.2f}", f"{row['cpu_s']:.2f}")
        bench.ratio_bar(
            f"map_shards on {PROCESSES} cores, {case}: speed of the bare loop", 0.95,
            1 / medians["map_shards"]["wall_s"], 1 / medians["bare loop"]["wall_s"],
        )  # fmt: skip
    bench.console.print(table)
    bench.notes.append(json.dumps({"processes": PROCESSES}))
