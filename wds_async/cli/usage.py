"""What this process and its children cost: CPU seconds and resident bytes. Exact on Linux, near elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

__all__ = ["cpu_s", "descendants", "live_children_cpu_s", "peak_bytes", "resident_bytes"]

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def cpu_s() -> float:
    """User and system seconds of this process and of its children that have ended and been waited for."""
    try:
        import resource  # noqa: PLC0415 (POSIX only)
    except ImportError:
        times = os.times()
        return times.user + times.system
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def descendants(pid: int | None = None) -> list[int]:
    """Process ids of living children and theirs (Linux; elsewhere none)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def live_children_cpu_s() -> float:
    """User and system seconds of living children, which `cpu_s` does not hold yet."""
    total = 0
    for pid in descendants():
        with contextlib.suppress(OSError):
            # proc(5): the fields after the name in brackets; 14 to 17 are utime, stime, cutime, cstime.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / _TICKS


def resident_bytes() -> int:
    """Resident memory of this process and its living children, pages that they share counted for each."""
    return sum(_status(pid, "VmRSS") for pid in (os.getpid(), *descendants()))


def peak_bytes() -> int:
    """The most this process alone has been resident.

    From ``VmHWM``: ``ru_maxrss`` also holds what the process was before ``exec``, its parent's size.
    """
    peak = _status(os.getpid(), "VmHWM")
    if peak:
        return peak
    try:
        import resource  # noqa: PLC0415 (POSIX only)
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0
