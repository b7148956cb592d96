"""The doctor: figures of a pipeline, a running job or a service, and their `diagnosis`."""

from __future__ import annotations

import collections
import itertools
import json
import os
import threading
import time
import urllib.parse
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from wds_async import config, shared_batches
from wds_async.errors import ReaderClosed, TransferError
from wds_async.observe.diagnosis import Diagnosis, Figures, diagnose, diagnose_service
from wds_async.redact import redact
from wds_async.shardlists.lists import SimpleShardList
from wds_async.storage.http.service_client import ask_service

__all__ = ["Examination", "examine", "examine_running", "fetch_stats", "figures_of", "is_running", "what_bounds"]

_LARGEST = 5e16
_TEXTS = frozenset(("url", "error", "client", "job", "region"))
_ANSWER_BYTES = 16 << 20
_FIRST_ITEM_S = 30.0
_AT_ONCE = 1024
_QUICK_S = 0.05
_WORKERS_END_S = 2.0
_ENDS_S = 0.1  # a thread that waits for bytes of a closed reader notices within a second; nothing depends on it


def what_bounds(pipeline: Any) -> Diagnosis:
    """Return the diagnosis of what ``pipeline`` (a dataset or a loader) has read so far."""
    return diagnose(figures_of(pipeline))


def figures_of(pipeline: Any) -> Figures:
    """Return the counters of ``pipeline`` in this process and its workers, and its resources."""
    stats = pipeline.statistics()
    first: Any = next(iter(getattr(pipeline, "pipeline", ())), None)
    loader, dataset = (first, first.dataset) if hasattr(first, "num_workers") else (None, pipeline)
    workers = getattr(loader, "num_workers", 0)
    if loader is None and stats is not None and stats.processes > 1:
        workers = round(stats.processes)
    shard_list = next(iter(getattr(dataset, "pipeline", ())), None)
    return Figures.of(
        {} if stats is None else stats.as_dict(),
        workers=workers,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        shards=len(shard_list.urls) if isinstance(shard_list, SimpleShardList) else 0,
        handover=config.settings().handover and shared_batches.possible(),
    )


# ------------------------------------------------------------------ by running it


@dataclass(frozen=True, slots=True)
class Examination:
    """Diagnosis and figures of ``seconds`` of reading."""

    diagnosis: Diagnosis
    figures: Figures
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes of shards read per second."""
        return self.figures.bytes / self.seconds if self.seconds else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples read per second."""
        return self.figures.samples / self.seconds if self.seconds else 0.0


def examine(pipeline: Any, seconds: float = 10.0) -> Examination:
    """Read ``pipeline`` (a dataset or loader) for so long from its first item on, epoch after epoch, discard the items,
    and return the diagnosis. Close ``pipeline`` then.

    Wait half a minute for the first item at most. Raise what reading raises.
    """
    reading = _ReadingThread(pipeline)
    began = time.monotonic()
    reading.start()
    reading.first.wait(max(seconds, _FIRST_ITEM_S))
    first = time.monotonic()
    reading.ended.wait(max(0.0, seconds))
    figures, now = figures_of(pipeline), time.monotonic()
    reading.leave(_WORKERS_END_S if figures.workers else _ENDS_S)
    if figures.workers:
        return Examination(diagnose(figures), figures, max(now - first, 1e-9))  # without the time that workers start in
    if reading.until:  # There is no consumer, so the pipeline works whenever it does not wait for bytes.
        whole, waited = reading.until - began, reading.waited_s
        figures = replace(figures, thread_s=whole, wait_s=waited, cpu_s=max(0.0, whole - waited))
    return Examination(diagnose(figures), figures, now - began)


class _ReadingThread(threading.Thread):
    """Thread that reads a pipeline, so that a store that does not answer does not block the doctor."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(name="doctor", daemon=True)
        self.first = threading.Event()
        """Set when an item has come, or none will."""
        self.ended = threading.Event()
        self.until = self.waited_s = 0.0
        """Times of the last items, and the seconds waited for them until then."""
        self._pipeline = pipeline
        self._stopped = False
        self._error: Exception | None = None

    def run(self) -> None:
        """Take items until stopped; an epoch without any is the last."""
        try:
            while self._epoch():
                pass
        except Exception as exn:
            self._error = exn
        finally:
            self.first.set()
            self.ended.set()

    def _epoch(self) -> bool:
        items, count, some = iter(self._pipeline), 1, False
        while not self._stopped:
            began = time.monotonic()
            # In C, so that taking tiny samples is not what takes the time.
            if not collections.deque(itertools.islice(items, count), maxlen=1):
                return some
            some = True
            stats = self._pipeline.statistics()
            self.until, self.waited_s = time.monotonic(), 0.0 if stats is None else stats.wait_s
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


# ------------------------------------------------------------------ by its statistics


def is_running(address: str) -> bool:
    """Return whether ``address`` is that of a service or job, and no shard: ``http://host:port`` without a path,
    ``unix:/path``, or anything that ends with ``/v1/stats``."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "unix":
        return True
    return parts.scheme in ("http", "https") and (parts.path in ("", "/") or parts.path.endswith("/v1/stats"))


def examine_running(address: str, seconds: float = 10.0, *, timeout_s: float = 10.0) -> Examination:
    """Return the diagnosis of the job or service at ``address`` now, by two readings of its ``/v1/stats``, ``seconds``
    apart. Raise what `fetch_stats` raises."""
    before, began = fetch_stats(address, timeout_s), time.monotonic()
    threading.Event().wait(seconds)
    now = fetch_stats(address, timeout_s)
    passed = time.monotonic() - began
    if now.get("kind") == "service":
        taken = max(0.0, now["counters"].get("client_bytes", 0) - before["counters"].get("client_bytes", 0))
        return Examination(diagnose_service(now, before), Figures(bytes=taken), passed)
    figures = _figures_in(now).since(_figures_in(before))
    return Examination(diagnose(figures), figures, passed)


def _figures_in(document: dict[str, Any]) -> Figures:
    gauges = document.get("gauges", {})
    counters = {"budget_bytes": gauges.get("window_limit_bytes", 0), **gauges, **document.get("counters", {})}
    processes = round(counters.get("processes", 0))
    return Figures.of(counters, workers=processes if counters.get("batches", 0) or processes > 1 else 0)


def fetch_stats(address: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """Return the document ``/v1/stats`` of ``http://host:port``, ``https://…`` or ``unix:/path``.

    Raise ConfigError for an address of another form, and TransferError where no service or job answers.
    """
    parts = urllib.parse.urlsplit(address)
    path = parts.path if parts.scheme != "unix" else ""
    path = path if path.endswith("/v1/stats") else path.rstrip("/") + "/v1/stats"
    headers = {"Authorization": f"Bearer {parts.password}"} if parts.password else {}
    try:
        answer = ask_service(address, "GET", path, timeout_s=timeout_s, limit_bytes=_ANSWER_BYTES, headers=headers)
    except OSError as exn:
        raise TransferError(f"{redact(address)}: no answer: {str(exn) or type(exn).__name__}") from exn
    if answer.status != 200:
        advice = "; give a token: http://any:TOKEN@host:port" if answer.status == HTTPStatus.UNAUTHORIZED else ""
        raise TransferError(f"{redact(address)}: {path} is answered with {answer.status} {answer.reason}{advice}")
    try:
        document = json.loads(answer.body)
        valid = document["kind"] in ("service", "job") and isinstance(document["counters"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise TransferError(f"{redact(address)}: the server there is no service or job of wds_async")
    return _checked(document)


def _checked(document: dict[str, Any]) -> dict[str, Any]:
    """Return ``document`` without values of unexpected types: any server may answer at an address."""
    clean = {name: part for name, part in document.items() if isinstance(part, (str, bool)) or _is_number(part)}
    clean |= {name: _row(document.get(name)) for name in ("counters", "gauges", "cost")}
    origins = document.get("origins")
    clean["origins"] = {name: _row(row) for name, row in origins.items()} if isinstance(origins, dict) else {}
    for name in ("slowest", "errors", "plans"):
        rows = document.get(name)
        clean[name] = [_row(row) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    for name in ("time", "uptime_s"):
        if not _is_number(clean.get(name)):
            clean.pop(name, None)
    return clean


def _row(part: Any) -> dict[str, Any]:
    """Return the numbers, and the texts of expected names; ``dollars`` are two numbers."""
    row: dict[str, Any] = {}
    for name, value in part.items() if isinstance(part, dict) else ():
        pair = name == "dollars" and isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
        if pair or _is_number(value) or (name in _TEXTS and isinstance(value, str)):
            row[name] = value
    return row


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number that fits into clocks and columns."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
