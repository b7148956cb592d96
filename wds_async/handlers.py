"""What to do with an exception that a stage met: ``handler(exception) -> bool``.

``True`` means go on with the next item (a shard, a sample), ``False`` means end this stage's stream here;
a handler may also raise. The five handlers carry WebDataset's names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from wds_async.errors import ConfigError

__all__ = [
    "Handler",
    "check_handler",
    "ignore_and_continue",
    "ignore_and_stop",
    "reraise_exception",
    "warn_and_continue",
    "warn_and_stop",
]

Handler = Callable[[Exception], bool]


def check_handler(handler: Any) -> None:
    """Raise ConfigError for what is no function: called at the first fault, it would hide that fault."""
    if not callable(handler):
        raise ConfigError(
            f"handler={handler!r}: it is a function from an exception to a bool, as in handler=wds.warn_and_continue"
        )


def reraise_exception(exn: Exception) -> bool:
    """Raise it again: the default everywhere, so that nothing is lost unless the user says so."""
    raise exn


def ignore_and_continue(exn: Exception) -> bool:
    """Pass over the bad item silently and go on with the next one."""
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
