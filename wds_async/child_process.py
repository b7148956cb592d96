"""Processes of this package's own, with a connection to the process that starts them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from wds_async import config
from wds_async.errors import WdsError

__all__ = ["ChildProcess", "begin", "receive"]

_START = (
    "import sys; from multiprocessing.connection import Connection; parent = Connection(int(sys.argv[1]));"
    " sys.path[:] = parent.recv(); from wds_async.{} import main; main(parent)"
)
_GRACE_S = 1.5
"""Time to discard what was being made once the process must end."""


class ChildProcess:
    """A new interpreter that runs ``main(parent)`` of ``module`` of this package, and finds ``data`` in ``parent``, its
    connection to here. It inherits neither threads nor open readers, and does not import the program's script. WdsError
    where it cannot be started."""

    def __init__(self, module: str, data: bytes) -> None:
        ours, theirs = socket.socketpair()
        try:
            number = theirs.fileno()
            command = [sys.executable, "-c", _START.format(module), str(number)]
            self.popen = subprocess.Popen(command, pass_fds=[number])
        except OSError as exn:
            ours.close()
            raise WdsError(f"no worker process can be started: {exn}") from exn
        finally:
            theirs.close()
        self.connection: Any = Connection(ours.detach())
        with contextlib.suppress(OSError):  # it has ended already
            self.connection.send(sys.path)
            self.connection.send_bytes(data)

    def stop(self) -> None:
        """Ask the process to end."""
        with contextlib.suppress(OSError):
            self.popen.terminate()

    def end(self, within_s: float) -> str:
        """Wait for the process to end, kill it if it does not ``within_s``; return how it ended."""
        self.connection.close()
        try:
            status = self.popen.wait(max(0.0, within_s))
        except subprocess.TimeoutExpired:
            self.popen.kill()
            status = self.popen.wait()
        if status >= 0:
            return f"ended with status {status}"
        name = signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"
        return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


def begin() -> None:
    """Prepare the process: SIGTERM is a KeyboardInterrupt in its main thread, SIGINT is for its parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    signal.signal(signal.SIGTERM, _end)
    sys.unraisablehook = _unraisable
    config.configure_logging()


def receive(parent: Any, take: Callable[[Any], None]) -> None:
    """Give what ``parent`` sends to ``take``, and end this process when the parent closes the connection or ends. It
    is for a thread: the main thread may be busy then."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            take(parent.recv())
    take(None)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE_S)
    os._exit(1)  # no process is left to read a status


def _end(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # another one would only interrupt the end that this one begins
    raise KeyboardInterrupt  # no attempt catches it, and a writer discards what it has


def _unraisable(ignored: Any) -> None:
    # The interrupt may come where Python cannot raise it, as in a finalizer: ``receive`` ends this process soon after.
    if ignored.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(ignored)
