"""Diagnosis: from figures to the bottleneck of a pipeline, in one sentence, and the one knob to turn next.

A pure function: nothing is measured here, and equal figures give equal words. Shares are compared, not absolute times,
so a busy machine gets the diagnosis of an idle one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
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
    """Whether batches come through shared memory (``WDS_HANDOVER``)."""

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
    sentence: str
    """One sentence, with the figures behind it."""
    knob: str
    """The one thing to change next."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of the reading threads' time, from 0 to 1: ``waiting`` for bytes, ``working``, ``idle``."""

    def __str__(self) -> str:
        return f"{self.sentence} Next: {self.knob}."

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return {"bound": self.bound.name.lower(), "sentence": self.sentence, "knob": self.knob, "shares": self.shares}


def diagnose(figures: Figures) -> Diagnosis:
    """Return the diagnosis of these figures, whatever they are."""
    clean = Figures(**{name: _finite(value) for name, value in asdict(figures).items()})
    shares = _shares(clean)
    for rule in (_nothing, _few_shards, _consumer, _handover, _waiting):
        result = rule(clean, shares)
        if result is not None:
            return _diagnosis(result, shares)
    return _diagnosis(_cpu(clean, shares), shares)


_Shares = Mapping[str, float]
_Result = tuple[Bound, str, str]  # a bound, the reason that ends its sentence, and the knob


def _diagnosis(result: _Result, shares: _Shares) -> Diagnosis:
    bound, why, knob = result
    opening = "Bound by " + bound.value if bound is not Bound.NOTHING_READ else "Nothing was read"
    return Diagnosis(bound, f"{opening}: {why}.", knob, {name: round(share, 4) for name, share in shares.items()})


def _finite(value: Any) -> Any:
    """Return a counter, at least 0: those of other processes are read while they are written."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return max(value, 0) if math.isfinite(value) else 0


def _shares(figures: Figures) -> dict[str, float]:
    whole = max(figures.thread_s, figures.wait_s + figures.cpu_s)
    if not whole:
        return {"waiting": 0.0, "working": 0.0, "idle": 0.0}
    waiting, working = figures.wait_s / whole, figures.cpu_s / whole
    return {"waiting": waiting, "working": working, "idle": max(0.0, 1.0 - waiting - working)}


def _nothing(figures: Figures, shares: _Shares) -> _Result | None:
    if figures.bytes > 0 or figures.samples > 0:
        return None
    if figures.retries >= _LEAST_FAULTS:
        return _faulty(figures) or _refused(figures)
    return Bound.NOTHING_READ, "no byte has come so far", "let it run, or look at the shards: wds-async resolve --check"


def _few_shards(figures: Figures, shares: _Shares) -> _Result | None:
    if not 0 < figures.shards < figures.workers:
        return None
    why = f"{figures.shards} of them for {figures.workers} workers, and each is read by one"
    return Bound.SHARDS, why, f"num_workers={figures.shards}, or more and smaller shards"


def _consumer(figures: Figures, shares: _Shares) -> _Result | None:
    nothing = "nothing: it is the GPU, or the program that takes the batches"
    taken_s = figures.starved_s + figures.consumer_s
    if taken_s > 0:
        starved = figures.starved_s / taken_s
        if starved >= _CONSUMED:
            return None
        return Bound.CONSUMER, f"it waits for batches {starved:.0%} of its time, and the workers wait for it", nothing
    idle = shares["idle"]
    if idle < _MOST:
        return None
    if figures.workers:
        why = f"the workers neither waited for bytes nor computed {idle:.0%} of the time: what was ready was not taken"
        return Bound.CONSUMER, why, nothing
    why = f"the thread that reads neither waited for bytes nor computed {idle:.0%} of the time"
    aside = "num_workers=1, which reads beside the program and not between its steps"
    return Bound.CONSUMER, why, nothing if idle > 1 - _CONSUMED else aside


def _handover(figures: Figures, shares: _Shares) -> _Result | None:
    taken_s = figures.starved_s + figures.consumer_s
    if not figures.workers or not taken_s:
        return None
    waits = f"the program waits {figures.starved_s / taken_s:.0%} of its time"
    one_by_one = figures.batches and figures.samples / figures.batches < _ONE_BY_ONE
    if one_by_one and shares["waiting"] < _MOST and figures.cpu_s / figures.batches < _CHEAP_S:
        why = f"{waits} for samples that cross one by one"
        return Bound.HANDOVER, why, ".batched(64) in the dataset, so that samples cross 64 at a time"
    if shares["idle"] < max(shares.values()) or not shares["idle"]:
        return None  # else the loader waits as well, or it would be the consumer
    why = f"{waits}, and the workers neither wait for bytes nor compute {shares['idle']:.0%} of theirs"
    if not figures.handover:
        return Bound.HANDOVER, why, "WDS_HANDOVER=1, which hands large values over through shared memory"
    return (
        Bound.HANDOVER,
        why,
        "less to hand over: crop, resize or convert in the workers (uint8 and not float), and drop unused fields",
    )


# ------------------------------------------------------------------ waiting for bytes


def _waiting(figures: Figures, shares: _Shares) -> _Result | None:
    if shares["waiting"] <= shares["working"]:
        return None
    result = _refused(figures) or _faulty(figures)
    if result is not None:
        return result
    busy = shares["waiting"] + shares["working"]
    whose = "of the workers' working time" if figures.workers else "of the time inside the pipeline"
    waits = f"waiting for bytes is {shares['waiting'] / busy:.0%} {whose}"
    if not figures.requests:
        faster = "a faster disk or command, or WDS_CACHE on a local disk"
        return Bound.NETWORK, f"{waits}, and it reads files or commands", faster
    taken_s = figures.head_s + figures.body_s
    if not taken_s:
        return Bound.NETWORK, f"{waits}, and no request was answered yet", _more_connections(figures)
    head, slowdown = figures.head_s / taken_s, _of_one(figures, figures.slowdown)
    if slowdown >= _SLOWED:
        why = f"{waits}, and parts take {slowdown:.1f} times their best time: more connections bring no more"
        return Bound.NETWORK, why, _FASTER
    if head < _MOST:
        return _link(figures, f"{waits}, and {1 - head:.0%} of a request is its body")
    each = figures.head_s / max(1.0, figures.requests - figures.retries)
    why = f"{waits}, and {head:.0%} of a request ({1e3 * each:,.0f} ms) passes before its first byte"
    full = min(1.0, figures.full_s / figures.thread_s) if figures.thread_s else 0.0
    if full >= _FULL:
        budget = round(2 * _of_one(figures, figures.budget_bytes) / 2**20)
        knob = f"WDS_BUDGET={budget}M" if budget else "twice the WDS_BUDGET"
        return Bound.BUDGET, f"{why}, with {full:.0%} of the budget taken by parts in flight", knob
    if 0 < figures.connections_limit < figures.connections_most:
        return Bound.LATENCY, why, "larger shards, which make fewer requests, or a store that is nearer, or WDS_CACHE"
    return Bound.LATENCY, why, _more_connections(figures)


def _link(figures: Figures, why: str) -> _Result:
    limit, most = _of_one(figures, figures.connections_limit), round(_of_one(figures, figures.connections_most))
    if most and limit >= most:
        return Bound.NETWORK, f"{why}, over all {most} connections", f"WDS_CONNECTIONS={2 * most}"
    more = f"; more than {limit:.0f} connections bring no more" if limit else ""
    return Bound.NETWORK, why + more, _FASTER


def _more_connections(figures: Figures) -> str:
    most = round(_of_one(figures, figures.connections_most or figures.connections_limit))
    return f"WDS_CONNECTIONS={2 * most}" if most else "twice the WDS_CONNECTIONS"


def _refused(figures: Figures) -> _Result | None:
    sent = max(figures.requests, figures.retries)
    if figures.throttled < _LEAST_FAULTS or figures.throttled < _REFUSED * sent:
        return None
    why = f"it refused {figures.throttled:,.0f} of {sent:,.0f} requests (429 or 503)"
    if figures.processes > 1:
        workers = max(1, int(figures.processes) // 2)
        return Bound.THROTTLING, why, f"num_workers={workers}, or ask for a higher quota"
    return Bound.THROTTLING, why, "WDS_PART_SIZE=8M, which makes fewer requests, or ask for a higher quota"


def _faulty(figures: Figures) -> _Result | None:
    faults, sent = figures.retries - figures.throttled, max(figures.requests, figures.retries)
    if faults < _LEAST_FAULTS or faults < _FAULTY * sent:
        return None
    why = f"{faults:,.0f} of {sent:,.0f} requests failed and were tried again"
    return Bound.FAULTS, why, "look what fails: WDS_LOG=info names each fault"


def _of_one(figures: Figures, total: float) -> float:
    return total / max(1.0, figures.processes)


# ------------------------------------------------------------------ computing


def _cpu(figures: Figures, shares: _Shares) -> _Result:
    whose = "of the workers' time" if figures.workers else "of the time of the one thread that reads"
    why = f"parsing, decoding and functions of the program are {shares['working']:.0%} {whose}"
    if figures.samples and figures.bytes:
        why += f" ({figures.bytes / figures.samples:,.0f} bytes a sample)"
    most = min(figures.cores or 2 * figures.workers + 2, figures.shards or 1 << 30)
    workers = min(most, max(2, 2 * figures.workers))
    profile = "the functions that `py-spy top --pid PID` names"
    if workers > figures.workers:
        return Bound.CPU, why, f"num_workers={workers}, or make cheaper {profile}"
    return Bound.CPU, why, f"make cheaper {profile}, or do their work once, when shards are written; or more cores"


# ------------------------------------------------------------------ a service


def diagnose_service(now: Mapping[str, Any], before: Mapping[str, Any]) -> Diagnosis:
    """Return the bottleneck of a service between two of its ``/v1/stats`` documents, whatever they hold."""
    moved = _moved(now.get("counters", {}), before.get("counters", {}))
    gauges = {name: _finite(value) for name, value in now.get("gauges", {}).items()}
    then = before.get("origins", {})
    origins = {name: _moved(row, then.get(name, {})) for name, row in now.get("origins", {}).items()}
    hits = moved.get("hit_bytes", 0) / max(1, moved.get("hit_bytes", 0) + moved.get("miss_bytes", 0))
    return _diagnosis(_service(moved, gauges, origins, hits), {"from_disk": hits})


def _service(
    moved: Mapping[str, float], gauges: Mapping[str, float], origins: Mapping[str, Mapping[str, float]], hits: float
) -> _Result:
    for name, row in origins.items():
        figures = Figures.of(row)
        result = _refused(figures) or _faulty(figures)
        if result is not None:
            return result[0], f"{name}: {result[1]}", result[2]
    if not moved.get("hit_bytes", 0) + moved.get("miss_bytes", 0):
        job = "look at a job instead: wds-async doctor http://job:port"
        return Bound.NOTHING_READ, "no client took a shard's byte", job
    if hits >= _MOST:
        why = f"{hits:.0%} of the bytes came from the disk: the clients set the pace, or this node's network"
        return Bound.CONSUMER, why, "nothing here: look at a job that reads, by wds-async doctor http://job:port"
    full = gauges.get("window_bytes", 0) / (gauges.get("window_limit_bytes", 0) or math.inf)
    why = f"{1 - hits:.0%} of the bytes had to be fetched"
    if full >= _FULL:
        return Bound.BUDGET, f"{why}, and {full:.0%} of the memory for them is taken", "memory_bytes, twice as much"
    return Bound.NETWORK, why, "plans of the clients further ahead, or a larger cache_size if they read it before"


def _moved(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """Return the counters since ``before``; all of them where one has been reset."""
    numbers = {name: _finite(value) for name, value in now.items() if isinstance(value, (int, float))}
    then = {name: _finite(value) for name, value in before.items() if isinstance(value, (int, float))}
    if any(numbers[name] < then.get(name, 0) for name in ("bytes", "requests", "client_bytes") if name in numbers):
        return numbers
    return {name: max(0.0, value - then.get(name, 0)) for name, value in numbers.items()}
