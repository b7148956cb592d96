"""What ``import wds_async`` costs, and which packages it imports."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from typing import Any

from rich.table import Table

from benchmarks.bench import ROOT, Bench, scenario

__all__ = ["cpu_seconds", "main", "timed_import"]

UNWANTED = ("torch", "torchvision", "s3fs", "gcsfs", "adlfs", "botocore", "aiobotocore", "azure", "google", "PIL")

_CODE = """\
import json, sys, time
began = time.perf_counter()
import {module}
{more}
took = time.perf_counter() - began
print(json.dumps({{"s": took, "modules": sorted({{name.partition(".")[0] for name in sys.modules}})}}))
"""


def timed_import(module: str, more: str = "") -> dict[str, Any]:
    """Import ``module`` in a fresh interpreter: seconds, and the packages then loaded."""
    command = [sys.executable, "-c", _CODE.format(module=module, more=more)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


BASELINE = "import numpy, asyncio, httptools"
OURS = "import wds_async; wds_async.WebDataset"


def cpu_seconds(code: str) -> float:
    """Run ``code`` in a fresh interpreter and return its CPU seconds, user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _show_ratio(bench: Bench) -> None:
    """Compare the CPU of our import with that of three packages, in turns, so that both meet the same machine."""
    pairs = [(cpu_seconds(BASELINE), cpu_seconds(OURS)) for _ in range(3 if bench.quick else 20)]
    theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    bench.console.print(f"CPU of {OURS!r}: {ours:.3f} s, of {BASELINE!r}: {theirs:.3f} s")
    bench.raw += [{"case": "cpu", "baseline_s": base, "s": own} for base, own in pairs]
    bench.bar(f"CPU of the import against {BASELINE!r}", "≤ 1.5", ours / theirs, ours <= 1.5 * theirs, "{:.2f}")


@scenario("importtime", repeat=3)
def main(bench: Bench) -> None:
    """Show the seconds and the CPU of importing, and that neither torch nor a cloud's packages are imported."""
    table = Table(title="import", title_justify="left")
    for title in ("module", "s", "unwanted packages"):
        table.add_column(title)
    # Names resolve when they are first used, so the honest figure is that of a name in use.
    cases = (("wds_async", ""), ("wds_async", "wds_async.WebDataset"), ("webdataset", "webdataset.WebDataset"))
    for module, more in cases:
        title = f"import {module}" + (f", {more.rpartition('.')[2]}" if more else "")
        timed_import(module, more)  # writes the bytecode, so that all turns are alike
        runs = [timed_import(module, more) for _ in range(1 if bench.quick else 2 * bench.repeat + 1)]
        seconds = statistics.median(run["s"] for run in runs)
        unwanted = [name for name in UNWANTED if name in runs[0]["modules"]]
        table.add_row(title, f"{seconds:.3f}", ", ".join(unwanted) or "none")
        bench.raw += [{"case": title, "s": run["s"], "unwanted": unwanted} for run in runs]
        if module == "wds_async":
            bench.bar(title, "≤ 0.25 s", seconds, seconds <= 0.25, "{:.3f} s")
            measure = f"{title}: torch, cloud and image packages"
            bench.bar(measure, "none", len(unwanted), not unwanted, "{:.0f}")
    bench.console.print(table)
    _show_ratio(bench)
