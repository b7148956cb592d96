"""The process of one peer: ``python -m benchmarks.runner``. Only the standard library, beside the peer's packages.

It takes a `Job` as JSON from standard input, prepares, prints ``ready`` and waits for a line; then it reads under the
clock, prints what it measured as JSON, and stays until standard input ends, so that its memory can be measured from
outside. What anything else prints goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
import warnings
from typing import Any, TextIO

from benchmarks.peer import Job, load_peer
from benchmarks.processes import adopt_orphans, cpu_s, memory_bytes, reset_peak, tree

__all__ = ["main", "measure"]


def _cpu() -> dict[str, float]:
    """Return CPU seconds so far: of this process and of what it has waited for, to the microsecond, and of descendants
    that live, in steps of 10 ms."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    others = sum(cpu_s(pid, ended_children=True) for pid in tree(os.getpid())[1:])
    return {
        "user_s": own.ru_utime + ended.ru_utime,
        "system_s": own.ru_stime + ended.ru_stime,
        "others_s": others,
        "children_s": ended.ru_utime + ended.ru_stime + others,
    }


def measure(job: Job, out: TextIO) -> dict[str, Any]:
    """Prepare, wait for the start, and read once under the clock."""
    run = load_peer(job.peer).tasks[job.task](job)
    if job.warm:
        run()
        job.first_s = None
    print("ready", file=out, flush=True)
    sys.stdin.readline()
    reset_peak()
    base, before = memory_bytes("self", "VmRSS"), _cpu()
    began_at, job.began = time.time(), time.perf_counter()
    samples = run()
    wall_s = time.perf_counter() - job.began
    spent = {name: value - before[name] for name, value in _cpu().items()}
    return {
        "began_at": began_at,
        "wall_s": wall_s,
        "cpu_s": spent["user_s"] + spent["system_s"] + spent["others_s"],
        **spent,
        "samples": samples,
        "first_s": job.first_s,
        "own_peak_bytes": memory_bytes("self", "VmHWM") - base,
    }


def main() -> None:
    """Do the job of standard input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.set_inheritable(out.fileno(), False)
    warnings.simplefilter("ignore")
    adopt_orphans()
    given = json.loads(sys.stdin.readline())
    known = {one.name for one in dataclasses.fields(Job)}
    job = Job(**{name: value for name, value in given.items() if name in known})
    if job.task == "make":
        make = load_peer(job.peer).make
        assert make is not None, f"{job.peer} has no writer"
        print(json.dumps({"names": make(job)}), file=out, flush=True)
        return
    print(json.dumps(measure(job, out)), file=out, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
