"""DataLoader workers end when the process that they work for has ended.

torch's worker looks for its parent between two batches only. One that waits for bytes would go on until the stall ends
(`WDS_TIMEOUT`, minutes), and one whose last batch fills the pipe that nobody reads would never end: it waits for the
pipe, which its fellow workers hold open. Where the parent was killed, or the kernel took it for its memory, these would
stay behind on the machine, with what they hold.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Any

from wds_async import packages, world

__all__ = ["end_with_parent"]

_GRACE_S = 1.5
"""What the worker has to end by itself, once nothing is read any more."""

_watched = 0


def end_with_parent(stop: Callable[[], object]) -> None:
    """In a DataLoader worker: from now on, end this process soon after the one that made it. ``stop`` is called first,
    and ends what is being read. Costs a thread that sleeps in the kernel; does nothing in any other process, or when
    called again."""
    global _watched
    if _watched == os.getpid() or world.torch_worker() is None:
        return
    _watched = os.getpid()
    parent = packages.loaded("multiprocessing.process").parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent, stop), name="wds-async-orphan", daemon=True).start()


def _watch(parent: Any, stop: Callable[[], object]) -> None:
    _wait_for(parent)
    # It may hang where the worker does; the time counts from here.
    threading.Thread(target=stop, name="wds-async-orphan-stop", daemon=True).start()
    threading.Event().wait(_GRACE_S)
    os._exit(1)  # nobody is left who would read a status, or what the exit would wait to write


def _wait_for(parent: Any) -> None:
    """Return when ``parent`` has ended."""
    try:
        # Not multiprocessing's own sentinel: of workers that were forked one after another, each holds those of the
        # earlier ones open.
        descriptor = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old or a guarded kernel
        parent.join()
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    finally:
        os.close(descriptor)
