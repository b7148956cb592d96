"""Batches of the past: what came out of a loader at a step, made again from a saved state."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async import world
from wds_async.checkpoint.history import SampleAccount, state_at_start
from wds_async.checkpoint.packing import load_global_random, save_global_random
from wds_async.checkpoint.seen import SeenSample, samples_of, states_of
from wds_async.errors import ConfigError, StateError

__all__ = ["Replayed", "replay", "replayed"]


@dataclass(frozen=True)
class Replayed:
    """A batch that was made again, of step ``step`` of rank ``rank``."""

    batch: Any
    step: int
    rank: int
    world_size: int
    worker: int | None = None
    """The DataLoader worker that made it; None where there is none, or where stages behind the workers made it."""
    account: SampleAccount | None = field(default=None, repr=False)
    untold: str = ""
    """Why it cannot be told which samples the batch was made of."""

    def samples(self) -> list[SeenSample]:
        """Return the samples that were read for the batch: those that it holds, and those that filters dropped in
        between. The shards are read for their keys. StateError where it cannot be told which they are."""
        if self.account is None:
            raise StateError(self.untold)
        return list(samples_of(self.account))


def replay(pipeline: Any, state: Any, step: int, rank: int | None = None) -> Any:
    """Return, byte for byte, the batch of ``step`` that came, or will come, out of ``pipeline`` on ``rank``.

    ``pipeline`` is a `WebLoader`, or a dataset or `DataPipeline` that was iterated without one, made as in the job. It
    is not changed by this, and neither are the program's generators of random numbers. ``state`` is the state of that
    rank, the states of several ranks, or a merged one (`merge_states`); ``rank`` may be left out where it is of one.
    ``step`` counts what came out of that rank since the epoch began, from 0, as ``enumerate(loader)`` does in an epoch
    that is not interrupted: ``state["history"]["steps"]`` is the first step behind the state. Steps before the state
    are made from the start of the epoch.

    No worker is started: a DataLoader's workers run in this process, in turn. Raises StateError where the state is of
    another rank or of other stages, where the start of the epoch is not known, and where the epoch has fewer steps;
    and what reading raises where a shard has been replaced.
    """
    return replayed(pipeline, state, step, rank, told=False).batch


def replayed(pipeline: Any, state: Any, step: int, rank: int | None = None, *, told: bool = True) -> Replayed:
    """Return the batch of `replay` with where it came from: its worker, and the samples it was made of if ``told``."""
    if step < 0:
        raise ConfigError(f"replay: step={step}: steps count from 0")
    one = _state_of(state, rank)
    place = world.Place(one["place"][0], one["place"][1], 0, 1)
    if one.get("equal", {}).get("mode") and place.world_size > 1:
        raise StateError(
            "equal= without steps= or index= compares the ranks while they run: the batches of one cannot be made "
            "again without the others"
        )
    with _aside(place):
        copy = pipeline.detached()
        copy.load_state_dict(one)  # before anything else: it says what does not fit
        steps = (one.get("history") or {"steps": 0})["steps"]
        if step >= steps and one["run"] is None and steps:
            raise StateError(f"the epoch of the state had {steps} steps on rank {place.rank}: there is no step {step}")
        if step < steps:
            start = state_at_start(copy, one)
            if (direct := _turn_of(copy, one, step)) is not None:
                return _of_worker(copy, start, direct, Replayed(None, step, *place[:2]), told)
            one, steps = start, 0
            copy = pipeline.detached()
            copy.load_state_dict(one)
        return _of_pipeline(copy, step, steps, place, told)


def _state_of(state: Any, rank: int | None) -> dict[str, Any]:
    """Return the state of ``rank`` of those that were given."""
    states = states_of(state)
    ranks = sorted(one["place"][0] for one in states)
    size = states[0]["place"][1]
    if rank is None and len(states) > 1:
        raise ConfigError(f"replay: the states are of the ranks {ranks}: say which one by rank=")
    for one in states:
        if rank in (None, one["place"][0]):
            return dict(one)
    raise StateError(
        f"there is no state of rank {rank}, but of {ranks} of {size}: give the state that rank {rank} saved, or those "
        "of all ranks"
    )


@contextlib.contextmanager
def _aside(place: world.Place) -> Iterator[None]:
    """Stand at ``place``, and leave the program's generators as they are."""
    before = save_global_random()
    try:
        with world.standing_at(place):
            yield
    finally:
        load_global_random(before)


def _of_pipeline(copy: Any, step: int, steps: int, place: world.Place, told: bool) -> Replayed:
    """Run ``copy``, out of which ``steps`` items have come, to ``step``."""
    items = iter(copy)
    try:
        came = sum(1 for _ in itertools.islice(items, step - steps))
        before, untold = _account(copy) if told else (None, "")
        batch = next(items, _END) if came == step - steps else _END
        if batch is _END:
            raise StateError(
                f"the epoch of the state has {steps + came} steps on rank {place.rank}: there is no step {step}"
            )
        after, untold = _account(copy) if told and not untold else (None, untold)
        worker = getattr(copy.pipeline[0], "latest", None) if len(copy.pipeline) == 1 else None
        account = after - before if after is not None and before is not None else None
        return Replayed(batch, step, place.rank, place.world_size, worker, account, untold)
    finally:
        if callable(close := getattr(items, "close", None)):
            close()


_END = object()


def _account(pipeline: Any) -> tuple[SampleAccount | None, str]:
    """Return what the state of ``pipeline`` tells of samples; or why it tells nothing."""
    account = SampleAccount()
    try:
        account.add(pipeline.state_dict())
    except StateError as exn:
        return None, str(exn)
    return account, ""


def _turn_of(copy: Any, state: Mapping[str, Any], step: int) -> tuple[int, int] | None:
    """Return which worker made the batch of a ``step`` before the state, and which of its batches that was.

    That is known where batches come out as the workers make them, in the first pass over the data: workers take turns,
    and one that has ended loses its turn. None where all of them must run again to know.
    """
    if len(copy.pipeline) > 1 or not getattr(copy.pipeline[0], "num_workers", 0) or state["run"] is None:
        return None
    if state["passes"] or (copy.repetitions != 1 and copy.continues):
        return None
    loader, saved = copy.pipeline[0], state["run"]["states"]["0"]
    counts = []
    for worker in saved["nested"]:
        items, size = (worker["state"].get("history") or {"steps": 0})["steps"], loader.batch_size or 1
        counts.append((items // size if loader.drop_last else -(-items // size)) + worker["behind"])
    turns = sorted((batch, number) for number, count in enumerate(counts) for batch in range(count))
    if len(turns) != state["history"]["steps"]:
        return None
    batch, number = turns[step]
    return number, batch


def _of_worker(copy: Any, start: Mapping[str, Any], turn: tuple[int, int], what: Replayed, told: bool) -> Replayed:
    """Run one worker of ``copy`` from the ``start`` of the epoch to the batch of its ``turn``."""
    copy.load_state_dict(start)
    number, batch = turn
    items = iter(copy)
    worker = copy.pipeline[0].workers[number]
    try:
        for _ in range(batch):
            next(worker)
        before, untold = _account(worker) if told else (None, "")
        made = next(worker)
        after, untold = _account(worker) if told and not untold else (None, untold)
    finally:
        worker.close()
        items.close()
    account = after - before if after is not None and before is not None else None
    return Replayed(made, what.step, what.rank, what.world_size, number, account, untold)
