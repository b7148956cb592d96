"""One attempt at a task: run its work, commit its record, and tell what came of it."""

from __future__ import annotations

import contextvars
import os
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async import config, world
from wds_async.distributed.folder import JobFolder
from wds_async.distributed.tasks import AttemptResult, Task, Work
from wds_async.errors import (
    ConfigError,
    CostLimitReached,
    DuplicateField,
    MissingExtra,
    MissingField,
    ObjectChanged,
    UnsafeContent,
    UrlError,
)
from wds_async.observe.ledger import Ledger, Ledgers
from wds_async.redact import redact
from wds_async.transfer.traffic import Traffic

__all__ = ["Attempt", "add_traffic", "error_text", "one_line", "skipped_entries"]

_KEPT = 1000
"""Entries of the ledger that a record names."""
_LEDGER = ("stage", "reason", "shard", "offset", "bytes", "samples", "key", "field", "rest")
_PERMANENT = (
    ConfigError,
    UrlError,
    MissingExtra,
    UnsafeContent,
    ObjectChanged,
    CostLimitReached,
    MissingField,
    DuplicateField,
)
_MOST_CHARACTERS = 2000
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PYTHON = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")


_traffic: contextvars.ContextVar[Traffic | None] = contextvars.ContextVar("traffic", default=None)
"""Traffic of the attempt that runs in this context."""


def add_traffic(traffic: Traffic | None) -> None:
    """Count what a work's reader has read for the attempt that runs it; nothing outside of one."""
    total = _traffic.get()
    if total is not None and traffic is not None:
        total.merge(traffic)


def skipped_entries(ledger: Ledger | Ledgers) -> tuple[tuple[Mapping[str, Any], ...], dict[str, Any]]:
    """Return the first 1,000 entries of ``ledger`` for a record, without what differs between two runs; and for its
    ``more`` how many there are, where there are more."""
    skipped = [
        {name: value for name in _LEDGER if (value := getattr(entry, name)) not in (None, False)}
        for entry in ledger.entries()
    ]
    return tuple(skipped[:_KEPT]), {"skipped": len(skipped)} if len(skipped) > _KEPT else {}


@dataclass(frozen=True)
class Attempt:
    """Callable that runs an attempt at a task of ``work`` and commits it to ``folder``; see `engines.base.RunAttempt`.

    The work sees rank 0 of 1 and worker 0 of 1 wherever it runs, since its result must not depend on that.
    """

    work: Work
    folder: JobFolder
    secure: bool = field(default_factory=config.security_enforced)

    def __call__(self, task: Task) -> AttemptResult:
        began, traffic = time.monotonic(), Traffic()
        config.inherit_security(self.secure)
        token = _traffic.set(traffic)
        record, first, error, permanent = None, True, "", False
        try:
            with world.standing_at(world.Place(0, 1, 0, 1)):
                record = self.work.run(task)
            first = self.folder.commit(record)
        except (Exception, SystemExit) as exn:  # a function that calls sys.exit must not end the worker
            record, error, permanent = None, error_text(exn, task), isinstance(exn, _PERMANENT)
        finally:
            _traffic.reset(token)
        return AttemptResult(
            task=task.number,
            record=record,
            error=error,
            permanent=permanent,
            first=first,
            seconds=time.monotonic() - began,
            traffic=traffic.as_dict(),
            place=f"{socket.gethostname()}:{os.getpid()}",
        )


def error_text(exn: BaseException, task: Task) -> str:
    """Return an error of ``task`` as one line, see `one_line`, with a shard where it names none."""
    text = one_line(exn)
    urls = [redact(one.url) for one in task.inputs if "/_wds/" not in one.url]  # not a job's own files
    if urls and not any(url in text for url in urls):
        return f"{urls[0]}{f' and {len(urls) - 1} more' if len(urls) > 1 else ''}: {text}"
    return text


def one_line(exn: BaseException) -> str:
    """Return an error as one line without secrets: what, the notes on it (shard and sample), and the line of the
    program's own code where it was raised."""
    message = str(exn).strip()
    kind = type(exn).__name__
    parts = [f"{kind}: {message}" if message else kind, *getattr(exn, "__notes__", ())]
    text = "; ".join(redact(" ".join(part.split())) for part in parts)
    frames = traceback.extract_tb(exn.__traceback__)
    own = [frame for frame in frames if not _is_library(os.path.abspath(frame.filename))]
    if own:
        text += f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name})"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def _is_library(path: str) -> bool:
    """Return whether a file is one of this package, or of Python's own."""
    return path.startswith(_HERE) or (path.startswith(_PYTHON) and "site-packages" not in path)
