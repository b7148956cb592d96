"""Global batches (``WebDataset(canonical=…)``) in states: the number of the next one, for any ranks and workers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from wds_async import world
from wds_async.errors import ConfigError, StateError
from wds_async.logs import warn_once
from wds_async.shardlists.canonical import CanonicalSplit
from wds_async.stages import bound_arguments, traits_of

__all__ = ["check_batches", "check_loader", "next_batch", "state_at"]

logger = logging.getLogger("wds_async")


def _split_of(dataset: Any) -> tuple[int, CanonicalSplit]:
    """Return the number of the stage that divides the batches of ``dataset``, and the stage. It is followed by the one
    that reads shards and the one that counts samples.
    """
    return next((n, stage) for n, stage in enumerate(dataset.pipeline) if isinstance(stage, CanonicalSplit))


def _sizes(stages: Sequence[Any]) -> tuple[list[int | None], str]:
    """Return the number of samples in each item after each of ``stages`` (None: unknown), and the name of the first
    stage that drops or reorders samples ("" if none does). Functions of the program are assumed not to drop any.
    """
    sizes: list[int | None] = [0]
    unordered = ""
    for stage in stages:
        traits, size = traits_of(stage), sizes[-1]
        if traits is None or traits.reorders or (traits.same_items and not traits.one_to_one):
            unordered = unordered or str(getattr(getattr(stage, "f", stage), "__name__", type(stage).__name__))
            size = size if traits else None
        elif traits.takes_batches:
            size = 0
        elif traits.batches:
            bound = bound_arguments(stage) if traits.count and size == 0 else None
            unordered = unordered if traits.count else unordered or stage.f.__name__
            if bound is not None:
                bound.apply_defaults()
            size = None if bound is None else bound.arguments["batchsize"]
        sizes.append(size)
    return sizes, unordered.lstrip("_")


def check_batches(dataset: Any) -> None:
    """Raise ConfigError if the batches of ``dataset`` are not of the size of a rank's part. Warn, once per job, if one
    of its stages drops or reorders samples.
    """
    number, split = _split_of(dataset)
    here, (sizes, unordered) = world.place(), _sizes(dataset.pipeline[number + 3 :])
    part = split.of_rank(here.world_size)
    if sizes[-1] not in (None, 0, part):
        raise ConfigError(
            f"canonical={split.batch}: each of {here.world_size} ranks gets {part} samples of a global batch, and the "
            f"dataset makes batches of {sizes[-1]}; write .batched({split.batch} // world_size)"
        )
    if unordered and here.rank == here.worker == 0:
        warn_once(
            logger,
            f"canonical {unordered}",
            "canonical=%d: behind the stage %s, which drops samples or gives them in another order, other numbers of "
            "ranks or workers make other batches",
            split.batch,
            unordered,
        )


def check_loader(loader: Any) -> None:
    """Raise ConfigError if the batches of ``loader``, a DataLoader, are not those of its dataset's split."""
    number, split = _split_of(loader.dataset)
    size, part = _sizes(loader.dataset.pipeline[number + 3 :])[0][-1], split.of_rank(world.place().world_size)
    one_by_one = loader.batch_size is None and not loader.num_workers
    if one_by_one or size is None or (size or 1) * (loader.batch_size or 1) == part:
        return
    raise ConfigError(
        f"canonical={split.batch}: each rank gets {part} samples of a global batch, and the batches of the loader have "
        f"{(size or 1) * (loader.batch_size or 1)}; take .batched({part}) with batch_size=None, or batch_size={part}"
    )


def next_batch(dataset: Any, ranks: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of the next global batch, from the states of all ``ranks``. Each has its ``workers``
    (``state``, ``behind``, ``ended``), the worker whose turn is ``next``, and the number of items (``batch_size``) in
    each batch that came ``behind`` a state. None if samples came in another order, so that only the rest can be shared
    out.

    Raises StateError where it cannot, and where the ranks are at different batches. A worker that is within a batch
    begins it again, with a warning.
    """
    number, split = _split_of(dataset)
    sizes, unordered = _sizes(dataset.pipeline[number + 3 :])
    if unordered or None in sizes:
        workers = [worker for rank in ranks for worker in rank["workers"] if not worker["ended"]]
        if any(worker["behind"] or worker["state"]["run"] is None for worker in workers):
            raise StateError(
                f"canonical= with the stage {unordered}, which drops samples or gives them in another order: go on with"
                " as many ranks and workers as before"
            )
        return None
    for worker in (worker for rank in ranks for worker in rank["workers"] if worker["state"]["run"] is not None):
        split.check_shape(worker["state"]["run"]["states"][str(number)]["shape"])
    part = split.of_rank(len(ranks))
    found = {_next_of(rank, number, part, sizes) for rank in ranks}
    if len(found) > 1:
        raise StateError(
            f"the ranks are at different global batches ({sorted(found)}): save the states of all at the same step"
        )
    return found.pop()


def _next_of(rank: Mapping[str, Any], number: int, part: int, sizes: Sequence[Any]) -> int:
    workers, turn = rank["workers"], rank["next"]
    if workers[turn]["ended"]:
        return sys.maxsize
    runs = [{} if worker["state"]["run"] is None else worker["state"]["run"]["states"] for worker in workers]
    states = {int(name): state for name, state in runs[turn].items()}
    # Batches had the size of a part then; in this pipeline they have that of one now.
    held = sum(_held(state) * (part if sizes[n - number - 3] else 1) for n, state in states.items() if n > number + 2)
    read = states.get(number + 2, {}).get("count", 0)
    whole, rest = divmod(read - held + workers[turn]["behind"] * part, part)
    if rest:
        logger.warning(
            "a state that was taken behind %d of the %d samples of a batch, or whose stages have dropped samples, goes "
            "on with the whole batch: these come again",
            rest,
            part,
        )
    first: int = max(state.get(str(number), {}).get("first", 0) for state in runs)
    return first + int(whole) * len(workers) + int(turn)


def _held(saved: Any) -> int:
    """Return the number of items in the ``saved`` state of a stage."""
    if isinstance(saved, Mapping):
        if "count" in saved and ("references" in saved or "items" in saved):
            return int(saved["count"])
        return sum(map(_held, saved.values()))
    return sum(map(_held, saved)) if isinstance(saved, list) else 0


def state_at(dataset: Any, first: int, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state with which ``dataset`` continues, on this rank and worker, with global batch ``first``.
    ``states`` are those of the old workers that had not ended.
    """
    number, split = _split_of(dataset)
    # A state from before its worker had begun names the epoch before.
    epochs = [{k: n + (state["run"] is None) for k, n in state["epochs"].items()} for state in states]
    return {
        **{name: states[0][name] for name in ("version", "stages", "seeds")},
        "epochs": {name: max(one[name] for one in epochs) for name in epochs[0]},
        "place": list(world.place()[:2]),
        "passes": 0,
        "given": 0,
        "run": {"replayed": False, "states": {str(number): {"first": first, "shape": list(split.shape)}}},
    }
