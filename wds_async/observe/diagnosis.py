"""Diagnosis: from figures to the bottleneck of a pipeline, in one sentence, and the one knob to turn next.

A pure function: nothing is measured here, and equal figures give equal words. Shares are compared, not absolute times,
so a busy machine gets the diagnosis of an idle one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

__all__ = ["Bound", "Diagnosis", "Figures", "diagnose", "diagnose_service"]

_CONSUMED = 0.25  # a loader that waits less than this for its workers feeds a busy program
_MOST = 0.5
_REFUSED = 0.01
_FAULTY = 0.05
_LEAST_FAULTS = 2
_FULL = 0.5  # a budget that is the limit is three quarters full on average, one that is not a tenth
_ONE_BY_ONE = 4
_SLOWED = 2.0  # of the fastest of eight parts, which a store of uneven latency does not reach
_FASTER = "a faster way to the store (its region, a larger machine), or WDS_CACHE"
_CHEAP_S = 1e-3  # CPU time of a batch below which handing it over, some 0.1 ms, is no detail


class Bound(enum.Enum):
    """The bottleneck."""

    NOTHING_READ = "nothing was read"
    NETWORK = "the network or the store"
    LATENCY = "the store's latency"
    THROTTLING = "the store's limit on requests"
    FAULTS = "faults of the store"
    BUDGET = "the byte budget"
    CPU = "the CPU"
    HANDOVER = "the hand-over between processes"
    CONSUMER = "the consumer"
    SHARDS = "too few shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a run: cells of `transfer.stats.Stats` (sums over processes), and where it runs. 0 is unknown."""

    bytes: float = 0
    samples: float = 0
    requests: float = 0
    retries: float = 0
    throttled: float = 0
    wait_s: float = 0
    thread_s: float = 0
    cpu_s: float = 0
    full_s: float = 0
    head_s: float = 0
    body_s: float = 0
    batches: float = 0
    starved_s: float = 0
    consumer_s: float = 0
    processes: float = 0
    connections_limit: float = 0
    """Of all processes: the number that the engine found."""
    connections_most: float = 0
    """Of all processes: ``WDS_CONNECTIONS`` of each."""
    slowdown: float = 0
    """Of all processes: how many times their best time parts take."""
    budget_bytes: float = 0
    """Of all processes."""
    workers: int = 0
    """DataLoader workers; 0: the samples are read in the process that uses them."""
    cores: int = 0
    shards: int = 0
    """Shards of this rank."""
    handover: bool = True
    """True if batches come through shared memory (``WDS_HANDOVER``)."""

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the reading threads' time: ``waiting`` for bytes, ``working``, ``idle``."""
        busy = self.wait_s + self.cpu_s
        whole = max(self.thread_s, busy) or 1.0
        return {
            "waiting": self.wait_s / whole,
            "working": self.cpu_s / whole,
            "idle": max(0.0, self.thread_s - busy) / whole,
        }

    @classmethod
    def of(cls, counters: Mapping[str, float], **more: Any) -> Figures:
        """Return the ``counters`` that have a name here, together with ``more``."""
        names = {one.name for one in fields(cls)}
        return cls(**{**{name: value for name, value in counters.items() if name in names}, **more})

    def since(self, before: Figures) -> Figures:
        """Return the change since ``before``, with the gauges of now; all of it where a counter has been reset."""
        now, then = asdict(self), asdict(before)
        if any(now[name] < then[name] for name in ("bytes", "samples", "thread_s")):
            return self
        return Figures(**{name: now[name] - then[name] if name in _COUNTED else now[name] for name in now})


_GAUGES = ("processes", "connections_limit", "connections_most", "slowdown", "budget_bytes")
_COUNTED = {one.name for one in fields(Figures) if one.type == "float" and one.name not in _GAUGES}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The bottleneck of a pipeline. ``str`` of it is the sentence and the knob."""

    bound: Bound
    why: str
    """The figures behind it, which end the sentence."""
    knob: str
    """The one thing to change next."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of the reading threads' time, from 0 to 1: ``waiting`` for bytes, ``working``, ``idle``."""

    @property
    def sentence(self) -> str:
        """One sentence, with the figures behind it."""
        opening = "Nothing was read" if self.bound is Bound.NOTHING_READ else f"Bound by {self.bound.value}"
        return f"{opening}: {self.why}."

    def __str__(self) -> str:
        return f"{self.sentence} Next: {self.knob}."

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return {"bound": self.bound.name.lower(), "sentence": self.sentence, "knob": self.knob, "shares": self.shares}


def diagnose(figures: Figures) -> Diagnosis:
    """Return the diagnosis of these figures, whatever they are."""
    figures = Figures(**{name: _finite(value) for name, value in asdict(figures).items()})
    rules = (_nothing, _few_shards, _consumer, _handover, _waiting)
    result = next(filter(None, (rule(figures) for rule in rules)), None) or _cpu(figures)
    return replace(result, shares={name: round(share, 4) for name, share in figures.shares.items()})


def _finite(value: Any) -> Any:
    """Return a counter, at least 0: those of other processes are read while they are written."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return max(value, 0) if math.isfinite(value) else 0


def _nothing(figures: Figures) -> Diagnosis | None:
    if figures.bytes > 0 or figures.samples > 0:
        return None
    why, knob = "no byte has come so far", "let it run, or look at the shards: wds-async resolve --check"
    return _store_fault(figures) or Diagnosis(Bound.NOTHING_READ, why, knob)


def _few_shards(figures: Figures) -> Diagnosis | None:
    if not 0 < figures.shards < figures.workers:
        return None
    why = f"{figures.shards} of them for {figures.workers} workers, and each is read by one"
    return Diagnosis(Bound.SHARDS, why, f"num_workers={figures.shards}, or more and smaller shards")


def _consumer(figures: Figures) -> Diagnosis | None:
    knob = "nothing: it is the GPU, or the program that takes the batches"
    taken_s, idle = figures.starved_s + figures.consumer_s, figures.shares["idle"]
    if taken_s > 0:
        starved = figures.starved_s / taken_s
        if starved >= _CONSUMED:
            return None
        why = f"it waits for batches {starved:.0%} of its time, and the workers wait for it"
    elif idle < _MOST:
        return None
    elif figures.workers:
        why = f"the workers neither waited for bytes nor computed {idle:.0%} of the time: what was ready was not taken"
    else:
        why = f"the thread that reads neither waited for bytes nor computed {idle:.0%} of the time"
        if idle <= 1 - _CONSUMED:
            knob = "num_workers=1, which reads beside the program and not between its steps"
    return Diagnosis(Bound.CONSUMER, why, knob)


def _handover(figures: Figures) -> Diagnosis | None:
    taken_s, shares = figures.starved_s + figures.consumer_s, figures.shares
    if not figures.workers or not taken_s:
        return None
    waits = f"the program waits {figures.starved_s / taken_s:.0%} of its time"
    one_by_one = figures.batches and figures.samples / figures.batches < _ONE_BY_ONE
    if one_by_one and shares["waiting"] < _MOST and figures.cpu_s / figures.batches < _CHEAP_S:
        knob = ".batched(64) in the dataset, so that samples cross 64 at a time"
        return Diagnosis(Bound.HANDOVER, f"{waits} for samples that cross one by one", knob)
    if shares["idle"] < max(shares.values()) or not shares["idle"]:
        return None  # else the loader waits as well, or it would be the consumer
    why = f"{waits}, and the workers neither wait for bytes nor compute {shares['idle']:.0%} of theirs"
    knob = "less to hand over: crop, resize or convert in the workers (uint8 and not float), and drop unused fields"
    if not figures.handover:
        knob = "WDS_HANDOVER=1, which hands large values over through shared memory"
    return Diagnosis(Bound.HANDOVER, why, knob)


def _waiting(figures: Figures) -> Diagnosis | None:
    """Return what the reading threads wait for, where they wait more than they work."""
    shares = figures.shares
    if shares["waiting"] <= shares["working"]:
        return None
    if (fault := _store_fault(figures)) is not None:
        return fault
    busy = shares["waiting"] + shares["working"]
    whose = "of the workers' working time" if figures.workers else "of the time inside the pipeline"
    waits = f"waiting for bytes is {shares['waiting'] / busy:.0%} {whose}"
    if not figures.requests:
        faster = "a faster disk or command, or WDS_CACHE on a local disk"
        return Diagnosis(Bound.NETWORK, f"{waits}, and it reads files or commands", faster)
    processes = max(1.0, figures.processes)
    limit, most = figures.connections_limit / processes, round(figures.connections_most / processes)
    more_connections = f"WDS_CONNECTIONS={2 * (most or round(limit))}" if most or limit else "twice the WDS_CONNECTIONS"
    taken_s = figures.head_s + figures.body_s
    if not taken_s:
        return Diagnosis(Bound.NETWORK, f"{waits}, and no request was answered yet", more_connections)
    head, slowdown = figures.head_s / taken_s, figures.slowdown / processes
    if slowdown >= _SLOWED:
        why = f"{waits}, and parts take {slowdown:.1f} times their best time: more connections bring no more"
        return Diagnosis(Bound.NETWORK, why, _FASTER)
    if head < _MOST:
        why = f"{waits}, and {1 - head:.0%} of a request is its body"
        if most and limit >= most:
            return Diagnosis(Bound.NETWORK, f"{why}, over all {most} connections", more_connections)
        why += f"; more than {limit:.0f} connections bring no more" if limit else ""
        return Diagnosis(Bound.NETWORK, why, _FASTER)
    each = figures.head_s / max(1.0, figures.requests - figures.retries)
    why = f"{waits}, and {head:.0%} of a request ({1e3 * each:,.0f} ms) passes before its first byte"
    full = min(1.0, figures.full_s / figures.thread_s) if figures.thread_s else 0.0
    if full >= _FULL:
        budget = round(2 * figures.budget_bytes / processes / 2**20)
        knob = f"WDS_BUDGET={budget}M" if budget else "twice the WDS_BUDGET"
        return Diagnosis(Bound.BUDGET, f"{why}, with {full:.0%} of the budget taken by parts in flight", knob)
    larger = "larger shards, which make fewer requests, or a store that is nearer, or WDS_CACHE"
    return Diagnosis(
        Bound.LATENCY, why, larger if 0 < limit < figures.connections_most / processes else more_connections
    )


def _store_fault(figures: Figures) -> Diagnosis | None:
    """Return that the store refuses or fails requests, where it does so often."""
    sent = max(figures.requests, figures.retries)
    if figures.throttled >= max(_LEAST_FAULTS, _REFUSED * sent):
        why = f"it refused {figures.throttled:,.0f} of {sent:,.0f} requests (429 or 503)"
        fewer = "WDS_PART_SIZE=8M, which makes fewer requests"
        if figures.processes > 1:
            fewer = f"num_workers={max(1, int(figures.processes) // 2)}"
        return Diagnosis(Bound.THROTTLING, why, f"{fewer}, or ask for a higher quota")
    faults = figures.retries - figures.throttled
    if faults >= max(_LEAST_FAULTS, _FAULTY * sent):
        why = f"{faults:,.0f} of {sent:,.0f} requests failed and were tried again"
        return Diagnosis(Bound.FAULTS, why, "look what fails: WDS_LOG=info names each fault")
    return None


def _cpu(figures: Figures) -> Diagnosis:
    whose = "of the workers' time" if figures.workers else "of the time of the one thread that reads"
    why = f"parsing, decoding and functions of the program are {figures.shares['working']:.0%} {whose}"
    if figures.samples and figures.bytes:
        why += f" ({figures.bytes / figures.samples:,.0f} bytes a sample)"
    most = min(figures.cores or 2 * figures.workers + 2, figures.shards or 1 << 30)
    workers = min(most, max(2, 2 * figures.workers))
    profile = "speed up the functions that `py-spy top --pid PID` names"
    if workers > figures.workers:
        return Diagnosis(Bound.CPU, why, f"num_workers={workers}, or {profile}")
    return Diagnosis(Bound.CPU, why, f"{profile}, or do their work once, when shards are written; or more cores")


def diagnose_service(now: Mapping[str, Any], before: Mapping[str, Any]) -> Diagnosis:
    """Return the bottleneck of a service between two of its ``/v1/stats`` documents, whatever they hold."""
    moved = _moved(now.get("counters", {}), before.get("counters", {}))
    gauges = {name: _finite(value) for name, value in now.get("gauges", {}).items()}
    taken = moved.get("hit_bytes", 0) + moved.get("miss_bytes", 0)
    hits = moved.get("hit_bytes", 0) / max(1, taken)
    result: Diagnosis | None = None
    for name, row in now.get("origins", {}).items():
        fault = _store_fault(Figures.of(_moved(row, before.get("origins", {}).get(name, {}))))
        if fault is not None and result is None:
            result = replace(fault, why=f"{name}: {fault.why}")
    full = gauges.get("window_bytes", 0) / (gauges.get("window_limit_bytes", 0) or math.inf)
    result = result or _of_service(taken, hits, full)
    return replace(result, shares={"from_disk": round(hits, 4)})


def _of_service(taken: float, hits: float, full: float) -> Diagnosis:
    """Return the bottleneck of a service that gave so many bytes, ``hits`` of them from its disk, with its window
    ``full``."""
    if not taken:
        job = "look at a job instead: wds-async doctor http://job:port"
        return Diagnosis(Bound.NOTHING_READ, "no client took a shard's byte", job)
    if hits >= _MOST:
        why = f"{hits:.0%} of the bytes came from the disk: the clients set the pace, or this node's network"
        job = "nothing here: look at a job that reads, by wds-async doctor http://job:port"
        return Diagnosis(Bound.CONSUMER, why, job)
    why = f"{1 - hits:.0%} of the bytes had to be fetched"
    if full >= _FULL:
        why = f"{why}, and {full:.0%} of the memory for them is taken"
        return Diagnosis(Bound.BUDGET, why, "memory_bytes, twice as much")
    knob = "plans of the clients further ahead, or a larger cache_size if they read it before"
    return Diagnosis(Bound.NETWORK, why, knob)


def _moved(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """Return the counters since ``before``; all of them where one has been reset."""
    numbers, then = (
        {name: _finite(value) for name, value in each.items() if isinstance(value, (int, float))}
        for each in (now, before)
    )
    if any(numbers[name] < then.get(name, 0) for name in ("bytes", "requests", "client_bytes") if name in numbers):
        return numbers
    return {name: max(0.0, value - then.get(name, 0)) for name, value in numbers.items()}
