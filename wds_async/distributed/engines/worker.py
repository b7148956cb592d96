"""Main program of a process of the local engine."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from wds_async import config
from wds_async.distributed.tasks import Task

__all__ = ["main"]

_GRACE_S = 1.5
"""Time for an attempt to discard what it was writing once the process must end."""


def main(parent: Connection) -> None:
    """Run the attempts at the tasks that ``parent`` sends, until it closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    signal.signal(signal.SIGTERM, _end)
    config.configure_logging()
    tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    try:
        attempt = pickle.loads(parent.recv_bytes())
    except EOFError:
        return
    except Exception as exn:
        parent.send(("broken", f"{type(exn).__name__}: {exn}"))
        return
    # Not in the main thread: that one may be busy with a task when the parent ends.
    threading.Thread(target=_receive, args=(parent, tasks), name="wds-async-tasks", daemon=True).start()
    try:
        parent.send(("ready", None))
        while (task := tasks.get()) is not None:
            parent.send(("result", attempt(task)))
    except (BrokenPipeError, ConnectionResetError):
        return
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGTERM)


def _receive(parent: Connection, tasks: queue.SimpleQueue[Task | None]) -> None:
    try:
        while True:
            tasks.put(parent.recv())
    except (EOFError, OSError):
        tasks.put(None)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE_S)
    os._exit(1)  # no process is left to read a status


def _end(number: int, frame: Any) -> None:
    raise KeyboardInterrupt  # no attempt catches it, and a writer discards what it has
