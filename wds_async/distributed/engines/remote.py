"""Attempts on machines of a cluster: what engines send there, and what runs there."""

from __future__ import annotations

import functools
import os
import pickle
import socket

from wds_async import config
from wds_async.distributed.engines.base import RunAttempt
from wds_async.distributed.tasks import AttemptResult, Task
from wds_async.errors import ConfigError
from wds_async.redact import redact

__all__ = ["not_loaded", "reach", "run_pickled", "short_error"]

_MOST_CHARACTERS = 500
_REACH_WITHIN_S = 10.0


def run_pickled(data: bytes, task: Task) -> AttemptResult:
    """Run an attempt at ``task`` in this process, where ``data`` is pickled what runs it. An attempt that cannot be
    loaded here, as its module is missing, is an outcome like any other."""
    try:
        attempt = _loaded(data)
    except Exception as exn:
        return not_loaded(task, short_error(exn))
    return attempt(task)


def not_loaded(task: Task, error: str) -> AttemptResult:
    """Return the outcome of a task whose job cannot be loaded in this process, because of ``error``."""
    place = f"{socket.gethostname()}:{os.getpid()}"
    advice = "Its modules, and the same wds_async, have to be on every machine"
    return AttemptResult(task.number, error=f"the job cannot be loaded on {place}: {error}. {advice}", place=place)


@functools.lru_cache(maxsize=4)
def _loaded(data: bytes) -> RunAttempt:
    config.configure_logging()
    attempt: RunAttempt = pickle.loads(data)
    return attempt


def short_error(exn: BaseException) -> str:
    """Return kind and message of an error as one line: where a message has many lines, its first and its last."""
    lines = [" ".join(line.split()) for line in str(exn).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if len(lines) > 1:
        text = f"{text} … {lines[-1]}"
    text = f"{type(exn).__name__}: {redact(text)}" if text else type(exn).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def reach(address: str, what: str, kind: str) -> None:
    """Raise ConfigError where nothing listens at ``address``, a host and port: clients of clusters would go on trying
    for minutes, and end the program then. ``what`` asks, and ``kind`` says which address it is."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return  # a name of another kind, such as "auto": the client knows at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_WITHIN_S).close()
    except (OSError, OverflowError, UnicodeError) as exn:
        raise ConfigError(
            f"{what}: no cluster answers at {redact(address)}: {exn}. The address is {kind}. Look whether it runs, and"
            " whether this machine may reach it"
        ) from exn
