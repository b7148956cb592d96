"""Handlers of a stage's exceptions, ``handler(exception) -> bool``, with WebDataset's names.

True goes on with the next item (a shard, a sample), False ends the stage's stream here; a handler may also raise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from wds_async.errors import ConfigError

__all__ = [
    "Handler", "Recorder", "check_handler", "ignore_and_continue", "ignore_and_stop", "passed", "reraise_exception",
    "warn_and_continue", "warn_and_stop",
]  # fmt: skip

Handler = Callable[[Exception], bool]


def check_handler(handler: Any) -> None:
    """Raise ConfigError unless ``handler`` is callable: called at the first fault, it would hide that fault."""
    if not callable(handler):
        raise ConfigError(
            f"handler={handler!r}: it is a function from an exception to a bool, as in handler=wds.warn_and_continue"
        )


class Recorder:
    """A handler that calls ``note(exception, sample)`` for each exception that the wrapped handler does not raise.

    An exception of ``note`` is raised, whatever the wrapped handler returned. ``stopped()`` is called where that ends
    the stream.
    """

    __slots__ = ("handler", "note", "stopped")

    def __init__(
        self,
        handler: Handler,
        note: Callable[[Exception, Any], object] | None,
        stopped: Callable[[], object] | None = None,
    ) -> None:
        self.handler = handler
        self.note = note
        self.stopped = stopped

    def __call__(self, exn: Exception) -> bool:
        try:
            return self.about(exn, None)
        finally:
            del exn

    def about(self, exn: Exception, sample: Any) -> bool:
        """Return the handler's answer to ``exn``, which ``sample`` caused (None: unknown)."""
        try:
            answer = self.handler(exn)
            if not answer and self.stopped is not None:
                self.stopped()
            if self.note is not None:
                self.note(exn, sample)
            return answer
        finally:
            del exn


def passed(handler: Handler, exn: Exception, sample: Any = None) -> bool:
    """Return the answer of ``handler`` to ``exn``, which ``sample`` caused. Stages call this, so that skipped samples
    are recorded with their place."""
    try:
        return handler.about(exn, sample) if isinstance(handler, Recorder) else handler(exn)
    finally:
        del exn


def reraise_exception(exn: Exception) -> bool:
    """Raise ``exn`` again: the default everywhere, so that nothing is lost unless the user allows it."""
    try:
        raise exn
    finally:
        del exn  # its traceback holds this frame: a cycle would keep the stages below, and their engine, for a while


def ignore_and_continue(exn: Exception) -> bool:
    """Skip the bad item silently and go on with the next one."""
    return True


def warn_and_continue(exn: Exception) -> bool:
    """Warn, then go on with the next item."""
    warnings.warn(repr(exn), stacklevel=2)
    return True


def ignore_and_stop(exn: Exception) -> bool:
    """End the stage's stream silently, as if it had been exhausted."""
    return False


def warn_and_stop(exn: Exception) -> bool:
    """Warn, then end the stage's stream."""
    warnings.warn(repr(exn), stacklevel=2)
    return False
