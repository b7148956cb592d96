"""Merging of the states of all ranks, and sharing what is left among another number of ranks and workers.

What the old workers had still to read is laid end to end, worker by worker: samples that their stages held, the rest of
the shard that each had open, and the shards after that. Each new worker takes an equal piece of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from wds_async import world
from wds_async.checkpoint.history import read_before
from wds_async.checkpoint.packing import (
    Shard,
    load_global_random,
    pack_items,
    pack_places,
    save_global_random,
    shard_of,
    unpack_items,
    unpack_places,
)
from wds_async.checkpoint.run import Declared, Run
from wds_async.checkpoint.states import check_keys, pack_random, without_history
from wds_async.errors import StateError

__all__ = [
    "WorkerPart", "equal_of", "given_of", "merge_states", "part_of", "parts_of", "ranks_of", "share", "shared_states",
    "state_of_rank", "with_states",
]  # fmt: skip

_AS_BEFORE = "go on with as many ranks and workers as before"


@dataclass(frozen=True)
class WorkerPart:
    """A piece of what an old worker still had to read: from ``first`` to before ``last`` of ``whole``."""

    state: Mapping[str, Any]
    """State of its pipeline."""
    place: world.Place
    behind: int = 0
    """Items that came behind the state."""
    first: int = 0
    last: int = 1
    whole: int = 1
    ended: bool = False
    """Its share of the epoch was over."""

    def of(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return the piece of ``items`` that is this part's."""
        return items[slice(*self.bounds(len(items)))]

    def bounds(self, count: int) -> tuple[int, int]:
        """Return where that piece begins and ends, of ``count`` items."""
        return -(-self.first * count // self.whole), -(-self.last * count // self.whole)


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states of all ranks as one, which any number of ranks with any number of workers can load.

    ``states`` are those that `DataPipeline.state_dict` (or `WebLoader`'s) returned on each rank at the same step, in
    any order. Every rank loads the same merged state; together they read the samples that are left of the epoch, each
    once. What can be shared out are pipelines whose stages all declare their state, from shards that end. Raises
    StateError where a rank's state is missing or there twice, or where they are of different versions or stages.
    """
    given = list(states)
    if not given:
        raise StateError("merge_states: no states were given")
    for state in given:
        check_keys(state, "version", "stages", "place", "run")
    merged = sorted(given, key=lambda state: tuple(state["place"]))
    places = [tuple(state["place"]) for state in merged]
    if places != [(rank, len(merged)) for rank in range(len(merged))]:
        raise StateError(
            f"merge_states takes the state of each rank once, and got those of (rank, world size) {places}"
        )
    for name in ("version", "stages"):
        if any(state[name] != merged[0][name] for state in merged):
            raise StateError(f"merge_states: the {name} of the states differ: {[state[name] for state in merged]}")
    return {"version": merged[0]["version"], "stages": merged[0]["stages"], "merged": merged}


def with_states(merged: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a merged state with the states of the ranks, which `AllRanks` makes one text of. StateError where they
    are damaged."""
    if not isinstance(text := merged["merged"], str):
        return merged
    try:
        return {**merged, "merged": json.loads(text)}
    except ValueError as exn:
        raise StateError(f"a damaged state: the states of its ranks cannot be read ({exn})") from exn


def state_of_rank(merged: Mapping[str, Any], here: world.Place) -> dict[str, Any] | None:
    """Return the state of this rank, from which it goes on exactly; None where the states are of other ranks."""
    states = merged["merged"]
    return dict(states[here.rank]) if len(states) == here.world_size else None


def ranks_of(merged: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the states of the ranks whose epoch had begun and was not over."""
    return [state for state in merged["merged"] if state["run"] is not None]


def parts_of(units: Sequence[WorkerPart], number: int, count: int) -> list[WorkerPart]:
    """Return the pieces of ``units`` for the new worker ``number`` of ``count``: equal shares, in their order."""
    begin, end, parts = number * len(units), (number + 1) * len(units), []
    for place, unit in enumerate(units):
        first, last = max(begin - place * count, 0), min(end - place * count, count)
        if first < last:
            parts.append(replace(unit, first=first, last=last, whole=count))
    return parts


def part_of(state: Mapping[str, Any], place: world.Place, behind: int = 0) -> WorkerPart:
    """Return what the worker of ``state`` had still to read, all of it; ``behind`` items came behind the state."""
    equal = state.get("equal", {})
    ended = any(equal.get(name) for name in ("again", "over", "ended"))
    if came := equal.get("behind", 0):
        before = {"random": equal["random"][0][1], "given": max(0, state["given"] - came)}
        state, behind = {**state, **before}, behind + came
    return WorkerPart(state, place, behind, ended=ended)


def equal_of(pipeline: Any, parts: Sequence[WorkerPart]) -> dict[str, Any]:
    """Return what the state of ``pipeline`` has of equal steps, for a worker that stands here: its part of the
    ``steps`` that all workers, whose ``parts`` these are, had still to give; so many on every rank."""
    equal, here = getattr(pipeline, "equal_steps", None), world.place()
    if equal is None:
        return {}
    if equal.steps is None:
        return {"equal": {"mode": equal.mode, "given": 1}}
    counts = [part.state.get("equal", {}).get("left", equal.share(part.place)) - part.behind for part in parts]
    # A rank that fills up can give one more; one that must not has to have them.
    of_rank = sum(counts) // here.world_size if equal.mode == "drop" else -(-sum(counts) // here.world_size)
    share, rest = divmod(of_rank, here.num_workers)
    return {"equal": {"left": share + (here.worker < rest), "again": False}}


def share(pipeline: Any, parts: Sequence[WorkerPart], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of ``pipeline`` that has still to read ``parts``; ``template`` is any of the old states. It
    tells what those old workers had read of which it has the first part."""
    settled = [_settled(pipeline, part) for part in parts]
    read = read_before(part.state for part in settled if not part.first)
    return {**_share_of(pipeline, settled, template), "history": read}


def _share_of(pipeline: Any, settled: Sequence[WorkerPart], template: Mapping[str, Any]) -> dict[str, Any]:
    begun = [part for part in settled if part.state["run"] is not None]
    if len({part.state["passes"] for part in begun}) > 1:
        raise StateError(f"the workers are in different passes of repeat(): {_AS_BEFORE}")
    place = world.place()
    return {
        **{name: template[name] for name in ("version", "stages", "seeds")},
        "epochs": _latest([template, *(part.state for part in settled)]),
        "place": [place.rank, place.world_size],
        "passes": min((part.state["passes"] for part in begun), default=template["passes"]),
        "given": given_of(pipeline.nsamples, begun, old=pipeline.nsamples),
        "run": {"replayed": False, "states": {}, **_shared_run(pipeline, begun)},
    }


def given_of(epoch: int, parts: Sequence[WorkerPart], *, old: int) -> int:
    """Return the number of the ``epoch`` items of a pipeline that count as given, so that the rest of the ``old`` ones
    is shared out.
    """
    left = sum(Fraction((old - part.state["given"]) * (part.last - part.first), part.whole) for part in parts)
    return max(0, epoch - math.ceil(left))


def _latest(states: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the latest epochs of ``states``: a worker may have begun one before another."""
    return {number: max(state["epochs"][number] for state in states) for number in states[0]["epochs"]}


def _settled(pipeline: Any, part: WorkerPart) -> WorkerPart:
    """Return ``part`` with the state behind the items that came behind its own, or of an epoch that has begun."""
    if not part.behind and part.state["run"] is not None:
        return part
    before = save_global_random()
    try:
        with world.standing_at(part.place):
            copy = pipeline.compose()
            copy.equal_steps = None
            copy.load_state_dict({name: value for name, value in part.state.items() if name != "equal"})
            with contextlib.closing(iter(copy)) as items:
                came = sum(1 for _ in itertools.islice(items, part.behind))
                state = copy.state_dict()
    finally:
        load_global_random(before)
    return replace(part, state={**state, "run": None} if came < part.behind else state, behind=0)


def _shared_run(pipeline: Any, parts: Sequence[WorkerPart]) -> dict[str, Any]:
    """Return what a run over ``pipeline`` would save that still has to read ``parts``."""
    declared = pipeline.declared()
    run = Run(declared)
    entries: list[Any] = []
    parts = [_source_over(_from_stop(part)) if _is_without_source(part) else part for part in parts]
    nested = []
    for part in parts:
        saved = part.state["run"]
        if saved["replayed"] or not (run.reads or isinstance(saved.get("source", {}), Mapping)):
            raise StateError(
                f"a state of the stages {part.state['stages']} cannot be shared out among other ranks or workers: one "
                "of them declares nothing of its state, or the first is no list of shards"
            )
        if _is_without_source(part):
            continue
        if run.reads:
            entries += part.of(_remaining(pipeline, part))
        elif "source" in saved and not saved["ended"]:
            nested.append(replace(part, state=saved["source"]))
    numbers: dict[Shard, int] = {}
    states = {
        str(number): shared_states(
            one, [(part, part.state["run"]["states"].get(str(number), {})) for part in parts], numbers
        )
        for number, one in enumerate(declared)
        if isinstance(one.state, type) and (number > run.source or not run.reads)
    }
    facts = {shard_of(*entry): entry[1] for part in parts for entry in part.state["run"].get("shards", ())}
    shared = {"states": states, "shards": [[shard[0], facts[shard]] for shard in numbers]}
    if run.reads:
        states[str(run.source)] = {"shards": 0, "entries": entries, "endless": _is_endless(pipeline)}
        if _is_endless(pipeline):  # other shards than a worker of this place had drawn before
            drawn = [part.state["run"]["states"].get("0") for part in parts]
            states["0"] = {"random": pack_random(random.Random(json.dumps([drawn, world.place()])).getstate())}
        return shared
    if "0" in states:
        return shared
    if nested:
        within = pipeline.pipeline[0]
        source = _share_of(within, [_settled(within, part) for part in nested], nested[0].state)
        return {**shared, "source": source, "ended": False}
    ended = next((part.state["run"]["source"] for part in parts), None) or pipeline.pipeline[0].state_between()
    return {**shared, "source": ended, "ended": True}


def _is_without_source(part: WorkerPart) -> bool:
    """Return whether a stage gives only what it has stored, and takes nothing from the stages before it."""
    return "stopped" in part.state["run"] or any(
        saved.get("without_source") for saved in part.state["run"]["states"].values()
    )


def _from_stop(part: WorkerPart) -> WorkerPart:
    """Return ``part`` without what is held in front of the stage where a handler ended the stream."""
    run = part.state["run"]
    first = run.get("stopped", 0)
    states = {number: state for number, state in run["states"].items() if int(number) >= first or number == "0"}
    return replace(part, state={**part.state, "run": {**run, "states": states}})


def _source_over(part: WorkerPart) -> WorkerPart:
    """Return ``part`` with its mix as one that is over: what the others would have read is in the store."""
    run = part.state["run"]
    if "left" not in run["states"].get("0", {}):
        return part
    states = {**run["states"], "0": {**run["states"]["0"], "left": []}}
    return replace(part, state={**part.state, "run": {**run, "states": states}})


def shared_states(
    declared: Declared, states: Sequence[tuple[WorkerPart, Mapping[str, Any]]], numbers: dict[Shard, int]
) -> dict[str, Any]:
    """Return the state of a stage that holds what the parts of its old ``states`` held; ``numbers`` are those of the
    shards that it refers to."""
    combined = _combined(states, declared.name, numbers)
    if (nested := [(part, saved) for part, saved in states if "nested" in saved]) and hasattr(
        declared.stage, "datasets"
    ):
        combined |= _shared_mix(declared.stage.datasets, nested)
    assert isinstance(declared.state, type)
    amounts = {
        name: sum(len(part.of(range(saved[name]))) for part, saved in states if name in saved)
        for name in declared.state.amounts
        if any(name in saved for _, saved in states)
    }
    return {**combined, **amounts, **declared.state.shared([saved for _, saved in states])}


def _shared_mix(datasets: Sequence[Any], states: Sequence[tuple[WorkerPart, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the state of a mix of ``datasets``."""
    nested, left = [], []
    for number, dataset in enumerate(datasets):
        parts = [replace(part, state=saved["nested"][number]) for part, saved in states if number in saved["left"]]
        template = states[0][1]["nested"][number]
        if parts:
            nested.append(_share_of(dataset, [_settled(dataset, part) for part in parts], template))
        else:
            nested.append({**without_history(template), "run": None})
        left += [number] if parts else []
    return {"nested": nested, "left": left, "turn": 0}


def _combined(states: Sequence[tuple[WorkerPart, Any]], stage: str, numbers: dict[Shard, int]) -> Any:
    """Return the items that are in all ``states`` under their names, each part's piece; references stay references."""
    names = dict.fromkeys(name for _, saved in states for name in saved if name != "nested")
    combined: dict[str, Any] = {}
    for name in names:
        values = [(part, saved[name]) for part, saved in states if isinstance(saved.get(name), Mapping)]
        if not any("count" in value for _, value in values):
            combined |= {name: _combined(values, stage, numbers)} if values else {}
            continue
        if any("ranges" in value for _, value in values):
            combined[name] = _shared_ranges(values)
            continue
        items = [item for part, value in values if "items" in value for item in part.of(unpack_items(value))]
        places = [
            place
            for part, value in values
            if "references" in value
            for place in part.of(unpack_places(value, [shard_of(*one) for one in part.state["run"].get("shards", ())]))
        ]
        done = not places or any(value["done"] for _, value in values if "items" in value)
        if items and places and done:
            raise StateError(f"some workers have results of the stage {stage} and others its samples: {_AS_BEFORE}")
        combined[name] = pack_places(places, numbers)
        if items or not places:
            combined[name] |= {**pack_items(items, stage), "done": done, "count": len(items) + len(places)}
    return combined


def _shared_ranges(values: Sequence[tuple[WorkerPart, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return what the parts have of numbers in stores: ``ranges`` of a name and the arguments of a `range`."""
    ranges = []
    for part, value in values:
        first, last = part.bounds(value["count"])
        begin = 0
        for name, *numbers in value["ranges"]:
            of_store = range(*numbers)
            piece = of_store[max(0, first - begin) : max(0, last - begin)]
            ranges += [[name, piece.start, piece.stop, piece.step]] if piece else []
            begin += len(of_store)
    return {"ranges": ranges, "count": sum(len(range(*numbers)) for _, *numbers in ranges)}


def _remaining(pipeline: Any, part: WorkerPart) -> list[Any]:
    """Return the shards that the worker of ``part`` had still to read, the open one from where it was."""
    with world.standing_at(part.place):
        copy = pipeline.compose()
        copy.load_state_dict({**part.state, "random": save_global_random()})
        return Run(copy.declared(), part.state["run"]).shards_left(copy.invoke, endless=_is_endless(pipeline))


def _is_endless(pipeline: Any) -> bool:
    return bool(getattr(pipeline.pipeline[0], "nshards", 0) == sys.maxsize)
