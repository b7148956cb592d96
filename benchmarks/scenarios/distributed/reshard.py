"""A global shuffle beside reading and writing the same shards once.

Two processes each, on the same disk. What is to be beaten reads samples and writes them in the order in which they
come. ``--shards 152`` are 10 GB.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
from rich.table import Table

from benchmarks.bench import ROOT, Bench, scenario
from benchmarks.corpus import Corpus, image_like, tiny

__all__ = ["main"]

PROCESSES = 2
MEMORY = 1 << 30
"""Bytes for all processes together."""
_COPY = """
import sys
import wds_async as wds

out, *urls = sys.argv[1:]
with wds.ShardWriter(out, mtime=0, verbose=0, encoder=False, maxcount=10**9, maxsize=66e6) as sink:
    for sample in wds.WebDataset(urls, shardshuffle=False):
        sink.write(sample)
"""
_RESHARD = """
import sys
from wds_async import distributed as dist

out, memory, *urls = sys.argv[1:]
print(dist.reshard(urls, out, shuffle=7, maxsize="66M", memory=int(memory), workers=2).run())
"""
_LOOK_EVERY_S = 0.05


def _tree(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    return found


def _resident_bytes(pid: int) -> int:
    """Return the memory of a process, what it shares with others divided by their number."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def _run(code: str, *shares: list[str]) -> dict[str, float]:
    """Return wall and CPU seconds and the most memory of a process for each of ``shares``, all at once."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, began, peak = os.times(), time.monotonic(), 0
    running = [
        subprocess.Popen([sys.executable, "-c", code, *share], env=environment, stdout=subprocess.DEVNULL)
        for share in shares
    ]
    while any(process.poll() is None for process in running):
        peak = max(peak, sum(_resident_bytes(pid) for process in running for pid in _tree(process.pid)))
        time.sleep(_LOOK_EVERY_S)
    if any(process.returncode for process in running):
        raise click.ClickException("a contender failed (see above)")
    after, wall = os.times(), time.monotonic() - began
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall_s": wall, "cpu_s": cpu, "peak_bytes": peak}


def _measure(bench: Bench, case: str, corpus: Corpus) -> dict[str, dict[str, float]]:
    """Return the medians of both contenders, which take turns; of memory the most."""
    urls = [str(bench.root / name) for name in corpus.names]
    rows: dict[str, list[dict[str, float]]] = {"read and write": [], "reshard": []}
    for _ in range(bench.repeat):
        for contender, taken in rows.items():
            out = bench.root / "out"
            out.mkdir()
            if contender == "reshard":
                result = _run(_RESHARD, [f"{out}/o-{{shard:06d}}.tar", str(MEMORY * 3 // 4 // PROCESSES), *urls])
            else:
                result = _run(_COPY, *([f"{out}/{n}-%06d.tar", *urls[n::PROCESSES]] for n in range(PROCESSES)))
            size = sum(path.stat().st_size for path in out.glob("*.tar"))
            shutil.rmtree(out)
            taken.append(result)
            bench.raw.append({"case": case, "contender": contender, "bytes_out": size, **result})
    return {
        name: {
            **{key: statistics.median(one[key] for one in taken) for key in ("wall_s", "cpu_s")},
            "peak_bytes": max(one["peak_bytes"] for one in taken),
        }
        for name, taken in rows.items()
    }


@scenario("distributed.reshard", shards=16, repeat=1)
def main(bench: Bench) -> None:
    """A shuffle of all samples by two processes: ``reshard`` against reading and writing them once."""
    corpora = {
        "100 KB samples": image_like(bench.root, bench.shards),
        # With keys of their own: a sample whose key is in its new shard already is written anew, under another.
        "200 B samples": tiny(bench.root, max(2, bench.shards // 4), 2_000 if bench.quick else 25_000, distinct=True),
    }
    table = Table(title=f"{PROCESSES} processes, read and written on a local disk", title_justify="left")
    for title in ("case", "contender", "MB/s", "wall s", "CPU s/GB", "peak MB"):
        table.add_column(title, justify="left" if title in ("case", "contender") else "right")
    for case, corpus in corpora.items():
        if bench.only and case not in bench.only:
            continue
        medians = _measure(bench, case, corpus)
        gb = corpus.size_bytes / 1e9
        for contender, row in medians.items():
            figures = (1e3 * gb / row["wall_s"], row["wall_s"], row["cpu_s"] / gb, row["peak_bytes"] / 1e6)
            table.add_row(case, contender, *(f"{one:.1f}" for one in figures))
        ratio = medians["reshard"]["wall_s"] / medians["read and write"]["wall_s"]
        bench.bar(f"reshard, {case}: time over that of reading and writing", "≤ 2.2 x", ratio, ratio <= 2.2, "{:.2f} x")
        peak = medians["reshard"]["peak_bytes"]
        measure = f"reshard, {case}: peak memory of all processes"
        bench.bar(measure, f"≤ {MEMORY / 1e6:.0f} MB", peak / 1e6, peak <= MEMORY, "{:.0f} MB")
    bench.console.print(table)
