"""CPU and memory of a process and all that it started, from /proc. Only the standard library."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import threading
import time
from pathlib import Path

__all__ = ["MemorySampler", "adopt_orphans", "cpu_s", "kill_tree", "memory_bytes", "pss_bytes", "reset_peak", "tree"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36
_EVERY_S = 0.05
_SHARE = 20
"""Between two readings of memory the sampler sleeps so many times as long as one took: counting pages stops the
process that is measured."""


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends, so that `tree` still has them."""
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the third on: state, parent, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def tree(root: int) -> list[int]:
    """Return ``root`` and its descendants, zombies included."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                children.setdefault(int(_fields(int(name))[1]), []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_s(pid: int, *, ended_children: bool = False) -> float:
    """Return the user and system seconds of a process, all threads together, in steps of 10 ms; 0 where it is gone.
    ``ended_children`` adds those of the children that it has waited for."""
    try:
        fields = _fields(pid)
    except (OSError, IndexError):
        return 0.0
    return sum(int(value) for value in fields[11 : 15 if ended_children else 13]) / _TICKS


def memory_bytes(pid: int | str, field: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (the peak) of a process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10 if found else 0


def pss_bytes(pid: int) -> int:
    """Return a process's proportional share of the memory that it maps; 0 where it is gone."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def reset_peak() -> None:
    """Make ``VmHWM`` of this process start again at ``VmRSS`` (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def kill_tree(root: int) -> None:
    """Kill a process and all its descendants."""
    for pid in tree(root):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class MemorySampler:
    """Measures in a thread, until the block ends, the memory of a process and its descendants: ``start_bytes`` and
    ``peak_bytes``, each a sum of proportional shares, and the largest number of ``processes``."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.start_bytes = self.peak_bytes = self.processes = 0

    def __enter__(self) -> MemorySampler:
        self._sample()
        self.start_bytes = self.peak_bytes
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()
        self._sample()

    def _sample(self) -> None:
        pids = tree(self._root)
        self.processes = max(self.processes, len(pids))
        self.peak_bytes = max(self.peak_bytes, sum(map(pss_bytes, pids)))

    def _watch(self) -> None:
        took = 0.0
        while not self._end.wait(max(_EVERY_S, _SHARE * took)):
            began = time.perf_counter()
            self._sample()
            took = time.perf_counter() - began
