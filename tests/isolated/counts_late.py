"""A daemonic worker that counts for the first time when its program is already exiting, and is then terminated."""

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile

import common  # noqa: F401 - the path

fork = multiprocessing.get_context("fork")
exiting, counted = fork.Event(), fork.Event()


def leave() -> None:
    """Let the worker count before multiprocessing ends it: this was registered later, so it runs earlier."""
    exiting.set()
    assert counted.wait(30)
    os.write(1, b"counted\n")


atexit.register(leave)

from wds_async.transfer.stats import Board  # noqa: E402 - what it does at exit comes before the worker counts


def work(board: Board) -> None:
    exiting.wait()
    board.counters().add("samples")
    counted.set()
    signal.pause()


if __name__ == "__main__":
    tempfile.tempdir = sys.argv[1]
    board = Board()
    fork.Process(target=work, args=(board,), daemon=True).start()
