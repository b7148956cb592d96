"""History in a state: how many items came, how the iteration began, and what was read of which shard."""

from __future__ import annotations

import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from wds_async.checkpoint.packing import save_global_random, shard_of, unpack_items, unpack_places
from wds_async.checkpoint.states import pack_bytes, unpack_bytes
from wds_async.errors import StateError, UnsafeContent
from wds_async.tar.group import RawSample

__all__ = [
    "History",
    "ReadLog",
    "SampleAccount",
    "Stretch",
    "ranges_of",
    "read_before",
    "shared_history",
    "state_at_start",
    "workers_of",
]

Stretch = tuple[str, int, int | None]
"""A piece of a shard, from one sample's first header to another's: URL, first byte, byte behind it (None: its end)."""


MOST_LOGGED = 10_000
"""Most pieces of shards in the log of a worker: 40 kB of a state for whole shards, 200 kB for short pieces."""


class History:
    """History of an iteration of a pipeline: how it began, and what has come of it. ``saved`` is that of an iteration
    to go on with.

    ``epochs`` are the numbers of the epochs before it began.
    """

    def __init__(self, epochs: Mapping[str, int], saved: Mapping[str, Any] | None = None, loaded: bool = False) -> None:
        self._before = saved["steps"] if saved else 0
        self._counter = itertools.count(1)
        self.start: dict[str, Any] | None = None
        """Epochs, generators and starts of stages; None: not known."""
        self.first: Mapping[str, Any] | None = None
        """State at the start of the iteration, once its first pass is over."""
        self._read: Counter[Stretch] = Counter()
        """Stretches that earlier passes have read."""
        self._tells = True
        """True if that is known."""
        self._lost = 0
        """Batches of workers in earlier passes whose samples are not known."""
        self._last: Mapping[str, Any] | None = None
        """State of the last pass, where workers sent theirs before they ended."""
        if saved is not None:
            self._lost = saved.get("lost", 0)
            self.start, self.first = saved["start"], saved["first"]
            self._tells = saved["read"] is not None
            self._read.update(_unpacked_counts(saved["read"]))
        elif not loaded:
            self.start = {"epochs": dict(epochs), "random": save_global_random(), "stages": None}

    def counted(self, items: Iterator[Any]) -> Iterator[Any]:
        """Return ``items``, which are counted in C: a generator of our own would cost each of them more."""
        return itertools.compress(items, self._counter)

    @property
    def steps(self) -> int:
        """Items that came out since the iteration began, in earlier processes too."""
        return int(self._before + int(repr(self._counter)[6:-1]) - 1)

    def began_with(self, state: Mapping[str, Any] | None) -> None:
        """Note the ``state`` at the start of the iteration, now that its first pass is over; None: it has none."""
        self.first = state
        if state is None:
            self.start = None

    def begin_again(self) -> None:
        """Count from 0: the next iteration goes on in the same stream, and its start is in the middle of that."""
        self._before, self._counter, self.start, self.first = 0, itertools.count(1), None, None
        self._read.clear()

    def pass_over(self, run: Mapping[str, Any], last: bool = False) -> None:
        """Note what a pass that is over has read; ``run`` is its state. ``last``: no other one follows."""
        account = SampleAccount()
        try:
            account.add_run(run, [])
        except StateError:
            self._tells = False
        if account.behind and last:
            self._last = run
            return
        self._lost += account.behind
        self._read.update({stretch: count for stretch, count in account.stretches.items() if count})

    def save(self, stages: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return this for a state; ``stages`` are how the stages began, None where that is not known now."""
        steps = self.steps
        if self.start is not None and self.start["stages"] is None and steps:  # now all stages have begun
            self.start = None if stages is None else {**self.start, "stages": dict(stages)}
        read = _packed_counts(self._read) if self._tells else None
        begun = {"steps": steps, "start": self.start, "first": self.first}
        return {**begun, "read": read, "lost": self._lost, "last": self._last}


class ReadLog:
    """The stretches of shards that a reading stage has given, in order, compressed as they come.

    It is given up when there are more than `MOST_LOGGED`, so that the state of an endless stream stays small.
    """

    def __init__(self) -> None:
        self._deflate: Any = None
        self._done = bytearray()
        self._count = 0
        self._given_up = False

    def add(self, stretch: Stretch) -> None:
        """Note one more."""
        self._count += 1
        if self._given_up or self._count > MOST_LOGGED:
            self._give_up()
            return
        self._deflate = self._deflate or zlib.compressobj(9)
        self._done += self._deflate.compress(_line(stretch))

    def _give_up(self) -> None:
        self._given_up, self._deflate, self._done = True, None, bytearray()

    def packed(self, unfinished: Iterable[Stretch] = ()) -> str | None:
        """Return all of it as text, with those that are still being read; None if it was given up."""
        if self._given_up:
            return None
        lines = b"".join(map(_line, unfinished))
        if self._deflate is None and not lines:
            return ""
        deflate = zlib.compressobj(9) if self._deflate is None else self._deflate.copy()
        return pack_bytes(bytes(self._done) + deflate.compress(lines) + deflate.flush())

    def load(self, packed: str | None) -> None:
        """Go on from what `packed` returned."""
        if packed is None:
            self._give_up()
            return
        for stretch in ReadLog.unpacked(packed):
            self.add(stretch)

    @staticmethod
    def unpacked(packed: str) -> list[Stretch]:
        """Return the stretches that `packed` has packed."""
        if not packed:
            return []
        lines = zlib.decompress(unpack_bytes(packed)).splitlines()
        return [(url, start, stop) for url, start, stop in map(json.loads, lines)]


def _line(stretch: Stretch) -> bytes:
    return json.dumps(stretch, separators=(",", ":")).encode() + b"\n"


def _packed_counts(counts: Mapping[Stretch, int]) -> str:
    if not counts:
        return ""
    return pack_bytes(zlib.compress(json.dumps([[*key, n] for key, n in sorted(counts.items(), key=repr)]).encode()))


def _unpacked_counts(packed: str | None) -> dict[Stretch, int]:
    rows = json.loads(zlib.decompress(unpack_bytes(packed))) if packed else []
    return {(url, start, stop): count for url, start, stop, count in rows}


class SampleAccount:
    """Samples that states tell of: those that were read count 1, and those that stages hold are taken off again.

    All is linear: the account of all ranks is the sum of theirs, and what came between two states is the difference.
    Without ``held`` what stages hold is left in.
    """

    def __init__(self, held: bool = True) -> None:
        self.stretches: Counter[Stretch] = Counter()
        self._with_held = held
        self.keys: Counter[tuple[str, str]] = Counter()
        """By URL and key, samples whose place is not known: less than 0, where they are held."""
        self.nameless: Counter[str] = Counter()
        """By stage, items that it holds of which not even the key is known."""
        self.behind: int = 0
        """Batches of workers that came behind the states which they sent."""
        self.lost = 0
        """Such batches of passes that are over: they cannot be made again."""
        self.facts: dict[str, Mapping[str, Any]] = {}
        """Version and compression of shards, where states have them."""

    def add(self, state: Mapping[str, Any]) -> None:
        """Count what ``state`` of a pipeline or loader tells."""
        if (history := state.get("history")) is not None:
            if history["read"] is None:
                raise _untold()
            for stretch, count in _unpacked_counts(history["read"]).items():
                self.stretches[stretch] += count
            self.lost += history.get("lost", 0)
            if history.get("last") is not None:
                self.add_run(history["last"], state["stages"])
        self.behind += state.get("equal", {}).get("behind", 0)
        if state.get("run") is not None:
            self.add_run(state["run"], state["stages"])

    def add_run(self, run: Mapping[str, Any], stages: list[str]) -> None:
        """Count what a pass has read, and what its stages hold."""
        if run["replayed"]:
            raise _untold()
        shards = [shard_of(*entry) for entry in run.get("shards", ())]
        self.facts |= {entry[0]: entry[1] for entry in run.get("shards", ())}
        for number, saved in run["states"].items():
            self._add_saved(saved, shards, stages[int(number)] if stages else number)
        if isinstance(source := run.get("source"), Mapping):
            self.add(source)

    def _add_saved(self, saved: Any, shards: list[Any], stage: str, sign: int = -1) -> None:
        if isinstance(saved, list):
            for one in saved:
                self._add_saved(one, shards, stage, sign)
        if not isinstance(saved, Mapping):
            return
        if "count" in saved and ("references" in saved or "items" in saved):
            if self._with_held or sign > 0:
                self._hold(saved, shards, stage, sign)
            return
        if "url" in saved and "version" in saved:
            self.facts[saved["url"]] = saved
        if saved.get("without_source"):  # what it gives was not read in this iteration
            if "kept" not in saved:
                raise StateError(f"the stage {stage} gives what it has stored: which samples those are cannot be told")
            self._add_saved(saved["kept"], shards, stage, sign=1)
            return
        for name, value in saved.items():
            if name == "nested":
                for one in value:
                    self.behind += one.get("behind", 0)
                    self.add(one.get("state", one))
            elif name == "log" and value is None:
                raise _untold()
            elif name == "log":
                self.stretches.update(ReadLog.unpacked(value))
            elif name not in ("entries", "kept"):  # what is kept has been given
                self._add_saved(value, shards, stage, sign)

    def _hold(self, saved: Mapping[str, Any], shards: list[Any], stage: str, sign: int) -> None:
        if "references" in saved:
            for shard, first, stop in unpack_places(saved, shards):
                self.stretches[shard[0], first, stop] += sign
        try:
            items = unpack_items(saved) if saved["count"] and "items" in saved else []  # type: ignore[arg-type]
        except UnsafeContent:
            self.nameless[stage] += saved["count"]
            return
        for item in items:
            places = list(_places_in(item))
            for place in places:
                if len(place) == 3:
                    self.stretches[place] += sign
                else:
                    self.keys[place] += sign
            if not places:
                self.nameless[stage] += 1

    def __sub__(self, earlier: SampleAccount) -> SampleAccount:
        between = SampleAccount()
        for name in ("stretches", "keys", "nameless"):
            counts: Counter[Any] = getattr(between, name)
            counts.update(getattr(self, name))
            counts.subtract(getattr(earlier, name))
        between.facts = {**earlier.facts, **self.facts}
        return between


def _untold() -> StateError:
    return StateError(
        "what came out of the job is not known: a stage declares nothing of what it holds (docs/exact.md says how it "
        "does), or a worker has read more shards than a state lists, "
        f"{MOST_LOGGED}"
    )


def _places_in(item: Any) -> Iterator[Any]:
    """Yield where the samples in an item stand: a `Stretch`, or URL and key; nothing where that cannot be told."""
    if isinstance(item, RawSample):
        yield item.shard, item.offset, item.stop
    elif isinstance(item, Mapping) and "__key__" in item and "__url__" in item:
        key, url = item["__key__"], item["__url__"]
        pairs = zip(url, key, strict=False) if isinstance(key, list | tuple) else [(url, key)]
        yield from pairs
    elif isinstance(item, list):
        for one in item:
            yield from _places_in(one)


def ranges_of(stretches: Mapping[Stretch, int]) -> dict[str, list[tuple[int, int | None, int]]]:
    """Return, by URL, the ranges of bytes that count more than 0: first byte, byte behind them, count; in order."""
    steps: dict[str, Counter[float]] = {}
    stops: dict[str, list[int]] = {}
    for url, _, stop in stretches:
        stops.setdefault(url, []).extend([] if stop is None else [stop])
    for (url, start, stop), count in stretches.items():
        if stop is None and count < 0:  # the last sample of what was read of its shard: it ends where that does
            stop = min((one for one in stops[url] if one > start), default=None)  # noqa: PLW2901
        changes = steps.setdefault(url, Counter())
        changes[start] += count
        changes[float("inf") if stop is None else stop] -= count
    ranges: dict[str, list[tuple[int, int | None, int]]] = {}
    for url, changes in steps.items():
        places, count = sorted(place for place, change in changes.items() if change), 0
        found: list[tuple[int, int | None, int]] = []
        for place, behind in itertools.pairwise([*places, float("inf")]):
            count += changes[place]
            if count > 0 and behind > place:
                found.append((int(place), None if behind == float("inf") else int(behind), count))
        if found:
            ranges[url] = found
    return ranges


def read_before(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the history of a pipeline that goes on behind ``states``, whose start it does not know: what these tell
    was read, with what their stages hold."""
    account, tells, steps = SampleAccount(held=False), True, 0
    for state in states:
        steps = max(steps, (state.get("history") or {"steps": 0})["steps"])
        try:
            account.add(state)
        except StateError:
            tells = False
    read = _packed_counts(account.stretches) if tells else None
    return {"steps": steps, "start": None, "first": None, "read": read, "lost": account.behind + account.lost}


def shared_history(states: Sequence[Mapping[str, Any]], share: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the history of the ``share`` of a rank of what was left behind ``states`` of all old ranks. What is not
    told by the shares, as of workers that had ended, is told by that of rank 0."""
    steps = read_before(map(_past_of, states))["steps"]
    if "history" in share and not workers_of(share):
        return {**share["history"], "steps": steps}
    rest: list[Mapping[str, Any]] = []
    told = any("history" in worker["state"] for worker in workers_of(share))
    for state in states if rank == 0 else ():
        rest += [worker["state"] for worker in workers_of(state) if worker["ended"]] if told else [state]
        rest += [_past_of(state)] if told else []
    return {**read_before(rest), "steps": steps}


def _past_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``state`` without what has begun and is not over."""
    return {**state, "run": None}


def workers_of(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the workers' states in the state of a loader."""
    nested = ((state["run"] or {}).get("states", {}).get("0") or {}).get("nested", ())
    return [one for one in nested if "state" in one]


def state_at_start(pipeline: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that the iteration which ``state`` is of began with. StateError where that is not known."""
    history = state.get("history")
    if history is None and state["run"] is None:
        return dict(state)  # it has not begun
    if history is not None and history["first"] is not None:
        return dict(history["first"])
    if history is not None and not history["steps"] and history["start"] is not None:
        return dict(state)
    if history is None or history["start"] is None:
        raise StateError(
            "the state does not tell how its epoch began: it was shared out among other ranks or workers, or goes on "
            "in a stream, or an earlier version saved it. Give an earlier state: what came behind it can be replayed"
        )
    start, run = history["start"], state["run"]
    states = {}
    for number, one in enumerate(pipeline.declared()):
        saved, begun = run["states"].get(str(number), {}), start["stages"].get(str(number), {})
        if saved.get("without_source"):
            raise StateError(
                f"the stage {one.name} gives what it stored in an earlier epoch, and a state does not tell in which "
                "order: steps before it cannot be made again; give an earlier state"
            )
        kind: Any = one.state if isinstance(one.state, type) else None
        if kind is not None and (began := kind.at_start(one.stage, begun, saved)):
            states[str(number)] = began
    random = {"random": start["random"]} if "random" in start else {}
    again: dict[str, Any] = {"replayed": run["replayed"], "states": states}
    if run["replayed"]:
        again |= {"given": 0, "sources": run["sources"], "random": run["random"], "random_now": run["random"]}
    elif "source" in run:
        nested = isinstance(run["source"], Mapping)
        again |= {"source": state_at_start(pipeline.pipeline[0], run["source"]) if nested else 0, "ended": False}
    epochs = {number: epoch + 1 for number, epoch in start["epochs"].items()}
    kept = {name: value for name, value in state.items() if name not in ("random", "equal")}
    began = {"steps": 0, "start": None, "first": None, "read": ""}
    return {**kept, **random, "epochs": epochs, "passes": 0, "given": 0, "run": again, "history": began}
