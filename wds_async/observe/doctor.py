"""The doctor: takes the figures of a pipeline, of a running job or a service, and says what bounds it (`symptoms`)."""

from __future__ import annotations

import collections
import itertools
import json
import os
import threading
import time
import urllib.parse
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from wds_async import config, shared_batches
from wds_async.errors import ReaderClosed, TransferError
from wds_async.observe.diagnosis import Diagnosis, Figures, diagnose, diagnose_service
from wds_async.redact import redact
from wds_async.shardlists.lists import SimpleShardList
from wds_async.storage.http.service_client import ask_service
from wds_async.transfer import stack_sampler
from wds_async.transfer.stats import Board

__all__ = ["Examination", "ask", "examine", "examine_running", "figures_of", "is_running", "what_bounds"]

_LARGEST = 5e16
_TEXTS = frozenset(("url", "error", "client", "job", "region"))
_ANSWER_BYTES = 16 << 20
_FIRST_ITEM_S = 30.0
_AT_ONCE = 1024
_QUICK_S = 0.05
_WORKERS_END_S = 2.0
_ENDS_S = 0.1  # who waits for bytes of a reader that is closed notices it within a second, and needs nobody for that


def what_bounds(pipeline: Any) -> Diagnosis:
    """What bounded ``pipeline`` (a dataset or a loader) in what it read so far."""
    return diagnose(figures_of(pipeline))


def figures_of(pipeline: Any) -> Figures:
    """The counters of ``pipeline`` in this process and its workers, and what there is to read with."""
    stats = pipeline.statistics()
    loader, dataset = _parts(pipeline)
    workers = getattr(loader, "num_workers", 0)
    if loader is None and stats is not None and stats.processes > 1:
        workers = round(stats.processes)
    return Figures.of(
        {} if stats is None else stats.as_dict(),
        workers=workers,
        cores=_cores(),
        shards=_shards(dataset),
        handover=config.settings().handover and shared_batches.possible(),
        places=() if workers or stats is None or not stats.looked_s else _places(dataset),
    )


def _parts(pipeline: Any) -> tuple[Any, Any]:
    """The DataLoader, if there is one, and the dataset."""
    first: Any = next(iter(getattr(pipeline, "pipeline", ())), None)
    return (first, first.dataset) if hasattr(first, "num_workers") else (None, pipeline)


def _shards(dataset: Any) -> int:
    first = next(iter(getattr(dataset, "pipeline", ())), None)
    return len(first.urls) if isinstance(first, SimpleShardList) else 0


def _places(dataset: Any) -> tuple[str, ...]:
    boards = (getattr(stage, "board", None) for stage in getattr(dataset, "pipeline", ()))
    return tuple(
        place for one in boards if isinstance(one, Board) for place in stack_sampler.hot_places(one.counters())
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 0


# ------------------------------------------------------------------ by running it


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found out in ``seconds`` of reading, or of looking at what reads."""

    diagnosis: Diagnosis
    figures: Figures
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes of shards that were read in a second."""
        return self.figures.bytes / self.seconds if self.seconds else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples that were read in a second."""
        return self.figures.samples / self.seconds if self.seconds else 0.0


def examine(pipeline: Any, seconds: float = 10.0) -> Examination:
    """Read ``pipeline`` (a dataset or loader) for so long from its first item on, pass after pass, do nothing with what
    comes, and say what bounds it. ``pipeline`` is closed then.

    Where no item comes within half a minute, that is examined too. Raises what reading raises.
    """
    patient = _Patient(pipeline)
    began = time.monotonic()
    patient.start()
    patient.first.wait(max(seconds, _FIRST_ITEM_S))
    first = time.monotonic()
    patient.ended.wait(max(0.0, seconds))
    figures, now = figures_of(pipeline), time.monotonic()
    patient.leave(_WORKERS_END_S if figures.workers else _ENDS_S)
    whole = now - began
    # Workers that start are no part of what is read in a second.
    return Examination(diagnose(figures), figures, max(now - first, 1e-9) if figures.workers else whole)


class _Patient(threading.Thread):
    """Reads on a thread of its own, so that a store that says nothing holds up nobody."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(name="doctor", daemon=True)
        self.first = threading.Event()
        """An item has come, or none will."""
        self.ended = threading.Event()
        self._pipeline = pipeline
        self._stopped = False
        self._error: Exception | None = None

    def run(self) -> None:
        """Take items until told to stop; a pass without any is the last."""
        try:
            while self._pass():
                pass
        except Exception as exn:
            self._error = exn
        finally:
            self.first.set()
            self.ended.set()

    def _pass(self) -> bool:
        items, count, some = iter(self._pipeline), 1, False
        while not self._stopped:
            began = time.monotonic()
            # In C, so that taking tiny samples is not what takes the time.
            if not collections.deque(itertools.islice(items, count), maxlen=1):
                return some
            some = True
            self.first.set()
            count = min(2 * count, _AT_ONCE) if time.monotonic() - began < _QUICK_S else 1
        return False

    def leave(self, within_s: float) -> None:
        """Stop, and raise what reading raised before."""
        ended, self._stopped = self.ended.is_set(), True
        self._pipeline.close()
        self.join(within_s)
        if ended and self._error is not None and not isinstance(self._error, ReaderClosed):
            raise self._error


# ------------------------------------------------------------------ by asking it


def is_running(address: str) -> bool:
    """Whether ``address`` is that of a service or job, and no shard: ``http://host:port`` without a path,
    ``unix:/path``, or anything that ends with ``/v1/stats``."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "unix":
        return True
    return parts.scheme in ("http", "https") and (parts.path in ("", "/") or parts.path.endswith("/v1/stats"))


def examine_running(address: str, seconds: float = 10.0, *, timeout_s: float = 10.0) -> Examination:
    """What bounds the job or service at ``address`` now: from two looks at its ``/v1/stats``, ``seconds`` apart.

    Raises what `ask` raises.
    """
    before, began = ask(address, timeout_s), time.monotonic()
    threading.Event().wait(seconds)
    now = ask(address, timeout_s)
    passed = time.monotonic() - began
    if now.get("kind") == "service":
        figures = Figures.of({"bytes": _change(now, before, "client_bytes")})
        return Examination(diagnose_service(now, before), figures, passed)
    figures = _figures_in(now).since(_figures_in(before))
    return Examination(diagnose(figures), figures, passed)


def _change(now: dict[str, Any], before: dict[str, Any], name: str) -> float:
    return max(0.0, float(now["counters"].get(name, 0)) - float(before["counters"].get(name, 0)))


def _figures_in(document: dict[str, Any]) -> Figures:
    gauges = document.get("gauges", {})
    counters = {"budget_bytes": gauges.get("window_limit_bytes", 0), **gauges, **document.get("counters", {})}
    processes = round(counters.get("processes", 0))
    taken = counters.get("batches", 0) or counters.get("idle_s", 0)
    return Figures.of(counters, workers=processes if taken or processes > 1 else 0)


def ask(address: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """The document ``/v1/stats`` of ``http://host:port``, ``https://…`` or ``unix:/path``.

    Raises ConfigError for an address of another form, and TransferError where nobody answers, or says something else.
    """
    path, headers = _question(address)
    try:
        answer = ask_service(address, "GET", path, timeout_s=timeout_s, limit_bytes=_ANSWER_BYTES, headers=headers)
    except OSError as exn:
        raise TransferError(f"{redact(address)}: no answer: {str(exn) or type(exn).__name__}") from exn
    if answer.status != 200:
        advice = "; give a token: http://any:TOKEN@host:port" if answer.status == HTTPStatus.UNAUTHORIZED else ""
        raise TransferError(f"{redact(address)}: {path} is answered with {answer.status} {answer.reason}{advice}")
    try:
        document = json.loads(answer.body)
        known = document["kind"] in ("service", "job") and isinstance(document["counters"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise TransferError(f"{redact(address)}: what answers there is no service or job of wds_async")
    return _sound(document)


def _sound(document: dict[str, Any]) -> dict[str, Any]:
    """``document`` without what is not of its kind: whoever answers at an address may write anything into it."""
    found = {name: part for name, part in document.items() if isinstance(part, (str, bool)) or _is_number(part)}
    found |= {name: _row(document.get(name)) for name in ("counters", "gauges", "cost")}
    origins = document.get("origins")
    found["origins"] = {name: _row(row) for name, row in origins.items()} if isinstance(origins, dict) else {}
    for name in ("slowest", "errors", "plans"):
        rows = document.get(name)
        found[name] = [_row(row) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    for name in ("time", "uptime_s"):
        if not _is_number(found.get(name)):
            found.pop(name, None)
    return found


def _row(given: Any) -> dict[str, Any]:
    """Numbers, and texts where texts belong; ``dollars`` are two numbers."""
    found: dict[str, Any] = {}
    for name, value in given.items() if isinstance(given, dict) else ():
        pair = name == "dollars" and isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
        if pair or _is_number(value) or (name in _TEXTS and isinstance(value, str)):
            found[name] = value
    return found


def _is_number(value: Any) -> bool:
    """Whether people can mean it: neither infinite nor so large that no clock and no column can hold it."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def _question(address: str) -> tuple[str, dict[str, str]]:
    """The path that ``/v1/stats`` has there, and the headers to ask for it with."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "unix":
        return "/v1/stats", {}
    path = parts.path if parts.path.endswith("/v1/stats") else parts.path.rstrip("/") + "/v1/stats"
    return path, {"Authorization": f"Bearer {parts.password}"} if parts.password else {}
