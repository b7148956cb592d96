"""Main program of a process of the local engine."""

from __future__ import annotations

import pickle
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection

from wds_async.child_process import begin, receive
from wds_async.distributed.tasks import Task

__all__ = ["main"]


def main(parent: Connection) -> None:
    """Run the attempts at the tasks that ``parent`` sends, until it closes the connection or ends."""
    begin()
    tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    try:
        attempt = pickle.loads(parent.recv_bytes())
    except EOFError:
        return
    except Exception as exn:
        parent.send(("broken", f"{type(exn).__name__}: {exn}"))
        return
    try:
        # Not in the main thread: that one may be busy with a task when the parent ends.
        threading.Thread(target=receive, args=(parent, tasks.put), name="wds-async-tasks", daemon=True).start()
        parent.send(("ready", None))
        while (task := tasks.get()) is not None:
            parent.send(("result", attempt(task)))
    except (BrokenPipeError, ConnectionResetError):
        return
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
