"""Samples that had come out of a job when its states were saved."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from wds_async import world
from wds_async.checkpoint.history import SampleAccount, ranges_of, workers_of
from wds_async.checkpoint.merge import with_states
from wds_async.checkpoint.packing import load_global_random, save_global_random
from wds_async.checkpoint.states import check_keys
from wds_async.errors import ShardFormatError, StateError
from wds_async.redact import redact

__all__ = ["SeenSample", "account_of", "ranges_seen", "samples_of", "seen", "states_of"]

logger = logging.getLogger("wds_async")

_BEHIND_ALL = float("inf")


class SeenSample(NamedTuple):
    """A sample, or a range of samples, of a shard: its bytes are from ``start`` to before ``stop`` of the tar."""

    url: str
    start: int | None
    """None where the sample is known by its key only."""
    stop: int | None
    """None: the end of the shard."""
    key: str | None
    """``__key__`` of the sample; None of a range."""
    times: int
    """Number of times that it came: several of shards that are drawn again, or in a job that repeats its data."""


def seen(state: Any, pipeline: Any = None, *, ranges: bool = False) -> Iterator[SeenSample]:
    """Yield the samples that the job had read and handed on, in the epoch of ``state``, when it was saved.

    ``state`` is the state of a rank, the states of several, or a merged one. Samples that shuffles and other stages
    held are not among them, and neither are those of batches that workers had made ahead. Samples that a filter or a
    handler dropped behind the reading are: they were read. Keys are found by reading the shards once more; ``ranges``
    gives ranges of bytes instead, which reads nothing.

    A state lags behind by the batches that came since each worker last sent its own: a warning counts them. With
    ``pipeline``, made as in the job, these are made again, and counted. It is not changed by that. Raises StateError
    for what is no state, where a stage declares nothing of what it holds, and where a shard has been replaced.
    """
    account = account_of(state, pipeline)
    return ranges_seen(account) if ranges else samples_of(account)


def states_of(state: Any) -> list[Mapping[str, Any]]:
    """Return the states of ranks in a state, a merged one, or several. StateError for what is none."""
    given = [state] if isinstance(state, Mapping) else list(state)
    states: list[Mapping[str, Any]] = []
    for one in given:
        check_keys(one, "version", "stages")
        states += with_states(one)["merged"] if "merged" in one else [one]
    for one in states:
        check_keys(one, "place", "epochs", "run")
    if not states:
        raise StateError("no state was given")
    places = Counter(tuple(one["place"]) for one in states)
    if len({size for _, size in places}) > 1 or max(places.values()) > 1:
        raise StateError(f"give the state of each rank once, of one job; those are of (rank, ranks) {sorted(places)}")
    return states


def account_of(state: Any, pipeline: Any = None) -> SampleAccount:
    """Return what the states in ``state`` tell together (see `seen`)."""
    account, states = SampleAccount(), states_of(state)
    for one in states:
        account.add(one if pipeline is None else _settled(one, pipeline))
    if not account.stretches and any((one.get("history") or {"steps": 0})["steps"] for one in states):
        raise StateError(f"the state tells of no shards: none of the stages {states[0]['stages']} reads any")
    if account.behind:
        logger.warning(
            "%d batches came behind the states that workers sent last, and their samples are not counted: give the "
            "pipeline, and they are",
            account.behind,
        )
    if account.lost:
        logger.warning("%d batches came at the ends of earlier passes, and their samples are not counted", account.lost)
    for stage, count in account.nameless.items():
        logger.warning(
            "the stage %s held %d items without __key__ and __url__, whose samples are counted though they had not "
            "come out: shuffle samples before they lose these",
            stage,
            count,
        )
    return account


def _settled(state: Mapping[str, Any], pipeline: Any) -> Mapping[str, Any]:
    """Return ``state`` with the states of the workers behind their latest batches."""
    history = state.get("history") or {}
    if state["run"] is None and history.get("last") is not None:
        settled = _settled({**state, "run": history["last"]}, pipeline)
        return {**state, "history": {**history, "last": settled["run"]}}
    before = save_global_random()
    try:
        with world.standing_at(world.Place(state["place"][0], state["place"][1], 0, 1)):
            copy = pipeline.detached()
            copy.load_state_dict(state)
            if not any(worker.get("behind") for worker in workers_of(state)):
                return state
            with contextlib.closing(iter(copy)):
                workers = [worker.state() for worker in copy.pipeline[0].workers]
    finally:
        load_global_random(before)
    run = state["run"]
    nested = [{"state": one.state, "behind": 0, "ended": one.ended} for one in workers]
    return {**state, "run": {**run, "states": {**run["states"], "0": {**run["states"]["0"], "nested": nested}}}}


def ranges_seen(account: SampleAccount) -> Iterator[SeenSample]:
    """Yield the ranges of bytes that ``account`` has. Nothing is read."""
    for url, ranges in ranges_of(account.stretches).items():
        for start, stop, count in ranges:
            yield SeenSample(url, start, stop, None, count)
    if held := -sum(count for count in account.keys.values() if count < 0):
        logger.warning(
            "%d samples within these ranges are held by stages, which know their keys, not their places", held
        )


def samples_of(account: SampleAccount) -> Iterator[SeenSample]:
    """Yield the samples that ``account`` has, whose shards are read for it, by ranges, for their keys. StateError where
    a shard has been replaced."""
    keys = Counter(account.keys)
    for url, ranges in ranges_of(account.stretches).items():
        for sample in _listed(url, ranges, account.facts.get(url, {})):
            count = _count_at(ranges, sample) + keys.pop((url, sample["__key__"]), 0)
            if count > 0:
                yield SeenSample(url, sample.offset, sample.stop, sample["__key__"], count)
    for (url, key), count in keys.items():
        if count > 0:
            yield SeenSample(url, None, None, key, count)


def _listed(url: str, ranges: Sequence[tuple[int, int | None, int]], facts: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the samples in ``ranges`` of a shard; of a compressed one, all."""
    from wds_async.reading.position import entries_of  # noqa: PLC0415 (the engine)
    from wds_async.reading.samples import tarfile_samples  # noqa: PLC0415 (the engine)

    places = [(url, start, stop) for start, stop, _ in ranges]
    entries = [{**entry, "version": facts.get("version", "")} for entry in entries_of(places, {url: facts})]
    try:
        yield from tarfile_samples(entries)
    except ShardFormatError as exn:
        raise StateError(f"{redact(url)}: its samples have no keys to list ({exn}); ranges=True lists bytes") from exn


def _count_at(ranges: Sequence[tuple[int, int | None, int]], sample: Any) -> int:
    """Return how often a sample is in ``ranges``, by its last byte: where the job leaves members out, its samples begin
    later than they do here."""
    end = sample.stop
    if end is None:  # the last one of the shard, or of the bytes that were read
        end = min((stop for _, stop, _ in ranges if stop is not None and stop > sample.offset), default=_BEHIND_ALL)
    last = end - 1
    for start, stop, count in ranges:
        if start <= last and (stop is None or last < stop):
            return count
    return 0
