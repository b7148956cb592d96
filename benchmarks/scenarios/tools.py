"""The tools of the command line over 100,000 samples: seconds of CPU and peak memory, beside ``tar`` and ``cat``."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.table import Table

from benchmarks.bench import Bench, scenario
from benchmarks.corpus import tiny
from benchmarks.processes import MemorySampler

__all__ = ["main"]

_PLACES = ("--workers", "1", "-y")


def _commands(urls: list[str], out: Path) -> dict[str, list[str]]:
    wds = [sys.executable, "-m", "wds_async"]
    return {
        "cat > all.tar (floor)": ["sh", "-c", f"cat {' '.join(urls)} > {out}/all.tar"],
        "tar: extract and create": [
            "sh", "-c",
            f"cd {out} && mkdir x && for f in {' '.join(urls)}; do tar xf $f -C x; done && tar cf all.tar -C x .",
        ],
        "cat -o": [*wds, "cat", *urls, "-o", f"{out}/all.tar", *_PLACES],
        "sort": [*wds, "sort", *urls, f"{out}/sorted.tar", "--by", "fraction(key)", "--memory", "256MiB", *_PLACES],
        "shuffle": [*wds, "shuffle", *urls, f"{out}/", "--memory", "256MiB", *_PLACES],
        "filter": [*wds, "filter", *urls, f"{out}/", "cls < 500", *_PLACES],
        "select": [*wds, "select", *urls, f"{out}/", "cls", *_PLACES],
        "copy": [*wds, "copy", *urls, f"{out}/", *_PLACES],
        "stats": [*wds, "stats", *urls],
        "diff": [*wds, "diff", urls[0].rpartition("/")[0] + "/*.tar", urls[0].rpartition("/")[0] + "/*.tar", "-q"],
        "verify --write": [*wds, "verify", *urls, "--write", "--sums", f"{out}/SHA256SUMS"],
    }  # fmt: skip


def _run(command: list[str]) -> dict[str, float]:
    """Return the seconds of CPU and wall clock of a command with all its processes, and its peak memory."""
    before, began = os.times(), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with MemorySampler(process.pid) as memory:
        _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]}: {errors.decode()[-500:]}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"cpu_s": cpu, "wall_s": time.perf_counter() - began, "pss_bytes": float(memory.peak_bytes)}


@scenario("tools", repeat=1)
def main(bench: Bench) -> None:
    """100,000 samples of two small fields in eight shards, by each command with one process for tasks."""
    corpus = bench.make(tiny, 8, 1_250 if bench.quick else 12_500, distinct=True)
    urls = [str(bench.root / name) for name in corpus.names]
    title = f"{corpus.samples:,} samples, {corpus.size_bytes / 1e6:.0f} MB"
    table = Table("command", "CPU s", "wall s", "MiB", title=title, title_justify="left")
    for name, command in _commands(urls, bench.root / "out").items():
        readings = []
        for _ in range(bench.repeat):
            shutil.rmtree(bench.root / "out", ignore_errors=True)
            (bench.root / "out").mkdir()
            readings.append(_run(command))
        row = {figure: statistics.median(one[figure] for one in readings) for figure in readings[0]}
        bench.raw.append({"case": name, **row})
        table.add_row(name, f"{row['cpu_s']:.1f}", f"{row['wall_s']:.1f}", f"{row['pss_bytes'] / 2**20:.0f}")
    bench.console.print(table)
