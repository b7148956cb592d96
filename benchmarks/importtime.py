"""``python -m benchmarks.importtime``: how long ``import wds_async`` takes, and what it drags in."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from rich.table import Table

from benchmarks.harness import ROOT, Bench, command

__all__ = ["main", "timed_import"]

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


@command("importtime")
def main(bench: Bench) -> None:
    """Seconds of importing, and that neither torch nor a cloud's packages come along."""
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


if __name__ == "__main__":
    main()
