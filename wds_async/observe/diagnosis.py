"""From figures to a diagnosis: what bounds a pipeline, in one sentence, and the one knob to turn next.

Nothing is measured here and nothing asked: the same figures always give the same words. Shares are compared, never
absolute times, so that a busy machine says the same as an idle one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["Bound", "Diagnosis", "Figures", "diagnose", "diagnose_service"]

_CONSUMED = 0.25  # a loader that waits less than this for its workers feeds a program that is busy
_IDLE = 0.5
_SENDING = 0.5
_AWAY = 0.5
_REFUSED = 0.01
_FAULTY = 0.05
_LEAST_FAULTS = 2
_HEAD = 0.5
_FULL = 0.5  # of a budget that is the limit three quarters are taken on average, of one that is not a tenth
_ONE_BY_ONE = 4
_ENOUGH_S = 0.05


class Bound(enum.Enum):
    """What sets the pace."""

    NOTHING_READ = "nothing was read"
    NETWORK = "the network"
    LATENCY = "the store's latency"
    THROTTLING = "the store's limit on requests"
    FAULTS = "faults of the store"
    SOURCE = "the files or commands that are read"
    BUDGET = "the byte budget"
    PARSING = "parsing"
    DECODING = "decoding"
    PROGRAM = "the pipeline's own functions"
    STAGES = "shuffling and batching"
    HANDOVER = "the hand-over between processes"
    CONSUMER = "the consumer"
    SHARDS = "too few shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is known of a run: cells of `transfer.stats.Stats` (sums over processes), and where it runs. 0 and None are
    for what nobody knows."""

    bytes: float = 0
    wire_bytes: float = 0
    samples: float = 0
    requests: float = 0
    retries: float = 0
    throttled: float = 0
    wait_s: float = 0
    read_s: float = 0
    head_s: float = 0
    body_s: float = 0
    looked_s: float = 0
    waiting_s: float = 0
    parsing_s: float = 0
    decoding_s: float = 0
    program_s: float = 0
    stages_s: float = 0
    handing_s: float = 0
    sending_s: float = 0
    idle_s: float = 0
    away_s: float = 0
    full_s: float = 0
    batches: float = 0
    starved_s: float = 0
    consumer_s: float = 0
    processes: float = 0
    connections_limit: float = 0
    """Of all processes, as the engine found."""
    connections_most: float = 0
    """Of all processes: ``WDS_CONNECTIONS`` of each."""
    budget_bytes: float = 0
    """Of all processes."""
    workers: int = 0
    """DataLoader workers; 0: the samples are read where they are used."""
    cores: int = 0
    shards: int = 0
    """That there are, for this rank."""
    handover: bool = True
    """Whether batches come through shared memory (``WDS_HANDOVER``)."""
    places: tuple[str, ...] = ()
    """Where the program's own functions were found most often."""

    @classmethod
    def of(cls, counters: Mapping[str, float], **known: Any) -> Figures:
        """Those in ``counters`` that have a name here, with what else is ``known``."""
        names = {one.name for one in fields(cls)}
        return cls(**{**{name: value for name, value in counters.items() if name in names}, **known})

    def since(self, before: Figures) -> Figures:
        """What came after ``before``; gauges as they are now. Where a counter went down it began anew, so all of it."""
        now, then = asdict(self), asdict(before)
        if any(now[name] < then[name] for name in ("bytes", "samples", "looked_s")):
            return self
        return Figures(**{name: now[name] - then[name] if name in _COUNTED else now[name] for name in now})


_GAUGES = ("processes", "connections_limit", "connections_most", "budget_bytes")
_COUNTED = {one.name for one in fields(Figures) if one.type == "float" and one.name not in _GAUGES}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What bounds a pipeline. ``str`` of it is the sentence and the knob."""

    bound: Bound
    sentence: str
    """One sentence, with the figures that it is drawn from."""
    knob: str
    """The one thing to change next."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Where the time of the threads that read went, from 0 to 1: ``waiting``, ``parsing``, …"""

    def __str__(self) -> str:
        return f"{self.sentence} Next: {self.knob}."

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"bound": self.bound.name.lower(), "sentence": self.sentence, "knob": self.knob, "shares": self.shares}


def diagnose(figures: Figures) -> Diagnosis:
    """What bounds the run that gave these figures. Always an answer, whatever they are."""
    clean = Figures(**{name: _sound(value) for name, value in asdict(figures).items()})
    for rule in (_nothing, _few_shards, _consumer, _handover):
        found = rule(clean)
        if found is not None:
            return _told(found, _shares(clean))
    shares = _shares(clean)
    most = max(_ROOMS, key=lambda room: shares[room])
    return _told(_ROOMS[most](clean, shares), shares)


_Found = tuple[Bound, str, str]  # a bound, the end of its sentence (why), and the knob


def _told(found: _Found, shares: Mapping[str, float]) -> Diagnosis:
    bound, why, knob = found
    opening = "Bound by " + bound.value if bound is not Bound.NOTHING_READ else "Nothing was read"
    return Diagnosis(bound, f"{opening}: {why}.", knob, {name: round(share, 4) for name, share in shares.items()})


def _sound(value: Any) -> Any:
    """Counters of several processes are read while they are written, and differences of them may be odd."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return max(value, 0) if math.isfinite(value) else 0


def _shares(figures: Figures) -> dict[str, float]:
    """Of the time that was looked at; where nobody looked, by the waits alone."""
    seconds = {name: getattr(figures, f"{name}_s") for name in (*_ROOMS, "idle", "away")}
    total = sum(seconds.values())
    if total < _ENOUGH_S and figures.read_s > total:
        waiting = min(1.0, figures.wait_s / figures.read_s)
        return {**dict.fromkeys(seconds, 0.0), "waiting": waiting, "away": 1.0 - waiting}
    return {name: one / total if total else 0.0 for name, one in seconds.items()}


def _of_work(figures: Figures, shares: Mapping[str, float], name: str) -> str:
    """The share of ``name`` in what is neither idle nor away, in words."""
    busy = 1.0 - shares["idle"] - shares["away"]
    share = shares[name] / busy if busy > 0 else 0.0
    whose = "of the workers' working time" if figures.workers else "of the time inside the pipeline"
    return f"{share:.0%} {whose}"


# ------------------------------------------------------------------ what is seen at once


def _nothing(figures: Figures) -> _Found | None:
    if figures.bytes > 0 or figures.samples > 0:
        return None
    if figures.retries >= _LEAST_FAULTS:
        return _faulty(figures) or _refused(figures)
    return Bound.NOTHING_READ, "no byte has come so far", "let it run, or look at the shards: wds-async resolve --check"


def _few_shards(figures: Figures) -> _Found | None:
    if not 0 < figures.shards < figures.workers:
        return None
    why = f"{figures.shards} of them for {figures.workers} workers, and each is read by one"
    return Bound.SHARDS, why, f"num_workers={figures.shards}, or more and smaller shards"


def _consumer(figures: Figures) -> _Found | None:
    taken_s = figures.starved_s + figures.consumer_s
    if taken_s > 0:
        starved = figures.starved_s / taken_s
        if starved >= _CONSUMED:
            return None
        why = f"it waits for batches {starved:.0%} of its time, and the workers wait for it"
        return Bound.CONSUMER, why, "nothing: it is the GPU, or the program that takes the batches"
    shares = _shares(figures)
    if figures.workers and shares["idle"] >= _IDLE:
        why = f"the workers had nothing to do {shares['idle']:.0%} of the time, because nobody took what was ready"
        return Bound.CONSUMER, why, "nothing: it is the GPU, or the program that takes the batches"
    if shares["away"] < _AWAY:
        return None
    why = f"the program spends {shares['away']:.0%} of its time with samples that it has"
    if figures.workers or shares["away"] > 1 - _CONSUMED:
        return Bound.CONSUMER, why, "nothing: it is the GPU, or the program that takes the samples"
    return Bound.CONSUMER, why, "num_workers=1, which reads beside the program and not between its steps"


def _handover(figures: Figures) -> _Found | None:
    shares = _shares(figures)
    taken_s, sending = figures.starved_s + figures.consumer_s, figures.sending_s / (figures.looked_s or math.inf)
    if not figures.workers or not taken_s or (shares["idle"] < max(shares.values()) and sending < _SENDING):
        return None  # else the loader waits as well, or it would be the consumer
    waits = f"the program waits {figures.starved_s / taken_s:.0%} of its time"
    idle = f"and the workers have nothing to do {shares['idle']:.0%} of theirs"
    why = f"while batches are under way {sending:.0%} of the time" if sending >= _SENDING else idle
    return Bound.HANDOVER, f"{waits}, {why}", _lighter(figures)


def _lighter(figures: Figures) -> str:
    """What makes a hand-over cheaper."""
    if figures.batches and figures.samples / figures.batches < _ONE_BY_ONE:
        return ".batched(64) in the dataset, so that samples cross 64 at a time, and not one by one"
    if not figures.handover:
        return "WDS_HANDOVER=1, which hands large values over through shared memory"
    return "less to hand over: crop, resize or convert in the workers (uint8 and not float), and drop unused fields"


# ------------------------------------------------------------------ where the time goes


def _waiting(figures: Figures, shares: Mapping[str, float]) -> _Found:
    found = _refused(figures) or _faulty(figures)
    if found is not None:
        return found
    waits = f"waiting for bytes is {_of_work(figures, shares, 'waiting')}"
    if not figures.requests:
        return Bound.SOURCE, waits, "a faster disk or command, or WDS_CACHE on a local disk"
    taken_s = figures.head_s + figures.body_s
    if not taken_s:
        return Bound.NETWORK, f"{waits}, and nobody knows which part of it", _more_connections(figures)
    head = figures.head_s / taken_s
    if head < _HEAD:
        return _link(figures, f"{waits}, and {1 - head:.0%} of a request is its body")
    each = figures.head_s / max(1.0, figures.requests - figures.retries)
    why = f"{waits}, and {head:.0%} of a request ({1e3 * each:,.0f} ms) passes before its first byte"
    if _full(figures):
        why = f"{why}, with {_full(figures):.0%} of the budget taken by what is on its way"
        budget = round(2 * _each(figures, figures.budget_bytes) / 2**20)
        return Bound.BUDGET, why, f"WDS_BUDGET={budget}M" if budget else "twice the WDS_BUDGET"
    if 0 < figures.connections_limit < figures.connections_most:
        return Bound.LATENCY, why, "larger shards, which make fewer requests, or a store that is nearer, or WDS_CACHE"
    return Bound.LATENCY, why, _more_connections(figures)


def _link(figures: Figures, why: str) -> _Found:
    limit, most = _each(figures, figures.connections_limit), round(_each(figures, figures.connections_most))
    if most and limit >= most:
        return Bound.NETWORK, f"{why}, over all {most} connections", f"WDS_CONNECTIONS={2 * most}"
    found = f"; more than {limit:.0f} connections bring no more" if limit else ""
    return Bound.NETWORK, why + found, "a faster way to the store (its region, a larger machine), or WDS_CACHE"


def _more_connections(figures: Figures) -> str:
    most = round(_each(figures, figures.connections_most or figures.connections_limit))
    return f"WDS_CONNECTIONS={2 * most}" if most else "twice the WDS_CONNECTIONS"


def _refused(figures: Figures) -> _Found | None:
    asked = max(figures.requests, figures.retries)
    if figures.throttled < _LEAST_FAULTS or figures.throttled < _REFUSED * asked:
        return None
    why = f"it refused {figures.throttled:,.0f} of {asked:,.0f} requests (429 or 503)"
    if figures.processes > 1:
        workers = max(1, int(figures.processes) // 2)
        return Bound.THROTTLING, why, f"num_workers={workers}, or ask for a higher quota"
    return Bound.THROTTLING, why, "WDS_PART_SIZE=8M, which makes fewer requests, or ask for a higher quota"


def _faulty(figures: Figures) -> _Found | None:
    faults, asked = figures.retries - figures.throttled, max(figures.requests, figures.retries)
    if faults < _LEAST_FAULTS or faults < _FAULTY * asked:
        return None
    why = f"{faults:,.0f} of {asked:,.0f} requests failed and were tried again"
    return Bound.FAULTS, why, "look what fails: WDS_LOG=info names each fault"


def _parsing(figures: Figures, shares: Mapping[str, float]) -> _Found:
    why = f"making samples of bytes is {_of_work(figures, shares, 'parsing')}"
    if figures.samples and figures.bytes:
        why += f" ({figures.bytes / figures.samples:,.0f} bytes a sample)"
    return Bound.PARSING, why, _more_workers(figures, "fewer and larger members: fields in one file, samples in one")


def _decoding(figures: Figures, shares: Mapping[str, float]) -> _Found:
    why = f"decoding is {_of_work(figures, shares, 'decoding')}"
    return (
        Bound.DECODING,
        why,
        _more_workers(figures, "store what is cheaper to decode, or more cores"),
    )


def _program(figures: Figures, shares: Mapping[str, float]) -> _Found:
    where = f", most of it in {figures.places[0]}" if figures.places else ""
    why = f"functions of the program are {_of_work(figures, shares, 'program')}{where}"
    return Bound.PROGRAM, why, _more_workers(figures, "make them cheaper, or do their work once, when shards are made")


def _stages(figures: Figures, shares: Mapping[str, float]) -> _Found:
    why = f"they are {_of_work(figures, shares, 'stages')}"
    return Bound.STAGES, why, _more_workers(figures, "a smaller shuffle buffer, and one batching only")


def _handing(figures: Figures, shares: Mapping[str, float]) -> _Found:
    return Bound.HANDOVER, f"it is {_of_work(figures, shares, 'handing')}", _lighter(figures)


_ROOMS: dict[str, Callable[[Figures, Mapping[str, float]], _Found]] = {
    "waiting": _waiting,
    "parsing": _parsing,
    "decoding": _decoding,
    "program": _program,
    "stages": _stages,
    "handing": _handing,
}


# ------------------------------------------------------------------ a service


def diagnose_service(now: Mapping[str, Any], before: Mapping[str, Any]) -> Diagnosis:
    """What bounded a service between two of its ``/v1/stats`` documents. Always an answer."""
    moved = _moved(now.get("counters", {}), before.get("counters", {}))
    gauges = {name: _sound(value) for name, value in now.get("gauges", {}).items()}
    then = before.get("origins", {})
    origins = {name: _moved(row, then.get(name, {})) for name, row in now.get("origins", {}).items()}
    hits = moved.get("hit_bytes", 0) / max(1, moved.get("hit_bytes", 0) + moved.get("miss_bytes", 0))
    return _told(_service(moved, gauges, origins, hits), {"from_disk": hits})


def _service(
    moved: Mapping[str, float], gauges: Mapping[str, float], origins: Mapping[str, Mapping[str, float]], hits: float
) -> _Found:
    for name, row in origins.items():
        asked = Figures.of(row)
        found = _refused(asked) or _faulty(asked)
        if found is not None:
            return found[0], f"{name}: {found[1]}", found[2]
    if not moved.get("hit_bytes", 0) + moved.get("miss_bytes", 0):
        return (
            Bound.NOTHING_READ,
            "no client took a shard's byte",
            "look at a job instead: wds-async doctor http://job:port",
        )
    if hits >= _HEAD:
        why = f"{hits:.0%} of the bytes came from the disk: the clients set the pace, or this node's network"
        return Bound.CONSUMER, why, "nothing here: ask a job that reads, by wds-async doctor http://job:port"
    full = gauges.get("window_bytes", 0) / (gauges.get("window_limit_bytes", 0) or math.inf)
    why = f"{1 - hits:.0%} of the bytes had to be fetched"
    if full >= _FULL:
        return Bound.BUDGET, f"{why}, and {full:.0%} of the memory for them is taken", "memory_bytes, twice as much"
    return Bound.NETWORK, why, "plans of the clients further ahead, or a larger cache_size if they read it before"


def _moved(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """Counters since ``before``; all of them where one went down, since then it began anew."""
    numbers = {name: _sound(value) for name, value in now.items() if isinstance(value, (int, float))}
    then = {name: _sound(value) for name, value in before.items() if isinstance(value, (int, float))}
    if any(numbers[name] < then.get(name, 0) for name in ("bytes", "requests", "client_bytes") if name in numbers):
        return numbers
    return {name: max(0.0, value - then.get(name, 0)) for name, value in numbers.items()}


# ------------------------------------------------------------------ words and sums


def _more_workers(figures: Figures, otherwise: str) -> str:
    """Twice as many workers, as long as there are cores and shards for them."""
    most = min(figures.cores or 2 * figures.workers + 2, figures.shards or 1 << 30)
    workers = min(most, max(2, 2 * figures.workers))
    return f"num_workers={workers}" if workers > figures.workers else otherwise


def _full(figures: Figures) -> float:
    """How much of the budget was taken, on average; 0 where that leaves room."""
    share = figures.full_s / figures.looked_s if figures.looked_s else 0.0
    return min(1.0, share) if share >= _FULL else 0.0


def _each(figures: Figures, total: float) -> float:
    return total / max(1.0, figures.processes)
