"""CPU and memory of this process and its children, checked against work of a known size."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from wds_async.cli import usage

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SPIN = "import time\nwhile time.process_time() < 0.3: pass"


def test_own_cpu_counts() -> None:
    start, before = time.process_time(), usage.cpu_s()
    while time.process_time() < start + 0.15:
        pass
    spent = usage.cpu_s() - before
    assert 0.09 < spent <= time.process_time() - start + 0.02  # it counts in ticks of 10 ms


def test_ended_children_count() -> None:
    before = usage.cpu_s()
    subprocess.run([sys.executable, "-c", SPIN], check=True, timeout=30)
    assert usage.cpu_s() - before > 0.25


@linux
def test_living_children_count() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SPIN + "\nprint(flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in usage.descendants()
        assert usage.live_children_cpu_s() > 0.25
        assert usage.resident_bytes() > usage._status(child.pid, "VmRSS") > 1_000_000
    finally:
        child.communicate(b"\n", timeout=30)
    assert child.pid not in usage.descendants()


@linux
def test_the_peak_is_that_of_this_program() -> None:
    """Not of the process that started it: ``ru_maxrss`` would say 300 MB here."""
    code = (
        "import subprocess, sys; fat = bytearray(b'x') * 300_000_000;"
        "sys.exit(subprocess.run([sys.executable, '-c', "
        "'from wds_async.cli import usage; import sys; sys.exit(usage.peak_bytes() > 200_000_000)']).returncode)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


def test_the_peak_grows() -> None:
    before = usage.peak_bytes()
    fat = bytearray(b"x") * (before + 50_000_000)
    assert usage.peak_bytes() >= before + 40_000_000
    del fat
