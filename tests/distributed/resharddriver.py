"""A job of many small tasks: as a function, and as a program, ``resharddriver.py INPUTS OUT [name=value …]``, which
writes a line for each attempt that ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from wds_async.distributed import resharding
from wds_async.distributed.progress import JobProgress

__all__ = ["job_of"]

_SMALL: dict[str, Any] = {"_TASK_BYTES": (60_000, 60_000), "_LEAST_MEMORY": 1, "_READER_SHARE": 40}


def job_of(inputs: Any, out: Path | str, **arguments: Any) -> resharding.ReshardJob:
    """Return a job that writes seven shards, unless ``arguments`` say otherwise."""
    values: dict[str, Any] = {"shuffle": 7, "memory": 400_000, "output": "o-{000..006}.tar", **arguments}
    before = {name: getattr(resharding, name) for name in _SMALL}
    try:
        vars(resharding).update(_SMALL)
        return resharding.reshard(inputs, f"{out}/{values.pop('output')}", **values)
    finally:
        vars(resharding).update(before)


def _told(progress: JobProgress) -> None:
    sys.stdout.write(f"{progress.job}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    options = {name: json.loads(value) for name, _, value in (option.partition("=") for option in sys.argv[3:])}
    job_of(sys.argv[1], sys.argv[2], on_progress=_told, **options).run()
