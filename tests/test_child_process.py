"""The processes that this package starts."""

import subprocess
import sys

ASKED_TO_END_IN_A_FINALIZER = """
import os, signal
from wds_async.child_process import begin

class Left:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass

begin()
left = Left()
del left
print("goes on")
"""


def test_an_interrupt_that_a_finalizer_swallows_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED_TO_END_IN_A_FINALIZER], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("goes on\n", "")
