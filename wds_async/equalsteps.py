"""Equal steps: every rank gets as many items in an epoch as any other, so that none waits for one that has ended."""

from __future__ import annotations

import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_async import packages, world
from wds_async.arguments import check_size
from wds_async.errors import ConfigError, WdsError

__all__ = ["EqualSteps", "Passes", "Tally", "aligned", "chosen_steps", "counted", "in_step"]

logger = logging.getLogger("wds_async")

MODES = ("drop", "pad", "repeat")
WINDOW = 8
"""Items that a rank takes before all compare; it begins with one, so that the first comes soon."""

Passes = Callable[[], Iterator[Any]]
"""Begins the items of an epoch; called again, it begins the same ones again."""

Tally = Callable[[int], tuple[int, int]]
"""From a number of this rank to the least and the largest of all ranks."""


@dataclass(frozen=True, slots=True)
class EqualSteps:
    """Rule by which all ranks get equally many items, as they leave the pipeline: batches, if it makes batches.

    ``mode``: ``"drop"`` ends all ranks with the one that has the fewest, ``"pad"`` gives the last item of a rank that
    has fewer again, ``"repeat"`` begins its share again. ``steps``: so many for each rank, shared among its workers.
    """

    mode: str
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"equal={self.mode!r}: one of {', '.join(map(repr, MODES))}")
        if self.steps is not None:
            check_size("WebDataset", "steps", self.steps, at_least=1)


def chosen_steps(equal: str | None, steps: int | None) -> EqualSteps | None:
    """Return what ``equal`` and ``steps`` of a dataset choose. ConfigError for choices that there are not."""
    return None if equal is None and steps is None else EqualSteps("repeat" if equal is None else equal, steps)


def in_step(start: Passes, equal: EqualSteps, rewind: Callable[[], None], given: int = 0) -> Iterator[Any]:
    """Yield as many items of ``start()`` on this rank as on any other. ``rewind`` makes ``start`` begin the same epoch
    once more. ``given``: so many of ``steps`` were given before, and ``start`` goes on behind them.

    Raises what `counted` and `aligned` raise, and ConfigError where the ranks cannot compare what they have.
    """
    begun = False

    def begin() -> Iterator[Any]:
        nonlocal begun
        if begun:
            rewind()
        begun = True
        return start()

    if equal.steps is not None:
        return counted(begin, equal, given)
    tally = _tally_of_ranks()
    return begin() if tally is None else aligned(begin, equal.mode, tally)


def counted(begin: Passes, equal: EqualSteps, given: int = 0) -> Iterator[Any]:
    """Yield this worker's share of ``equal.steps``, of which so many were ``given`` before.

    Raises ConfigError where there are fewer and the mode is "drop", and where there are none at all.
    """
    assert equal.steps is not None
    here = world.place()
    share, rest = divmod(equal.steps, here.num_workers)
    share += here.worker < rest
    count, last, goes_on = given, None, given > 0
    while count < share:
        before = count
        for item in itertools.islice(begin(), share - count):
            count += 1
            last = item if equal.mode == "pad" else None
            yield item
        if count == share:
            return
        empty, goes_on = count == before and not goes_on, False
        if empty or equal.mode == "drop":
            raise ConfigError(
                f"steps={equal.steps}: worker {here.worker} of rank {here.rank} has {count} of the {share} that are its"
                " share; give fewer steps, or equal='repeat' or equal='pad', which give some samples twice"
            )
        _log_filled(equal.mode, share - count)
        if equal.mode == "pad":
            if count == before:  # it goes on behind its last item
                last = deque(begin(), maxlen=1).pop()
            yield from itertools.repeat(last, share - count)
            return


def aligned(begin: Passes, mode: str, tally: Tally, window: int = WINDOW) -> Iterator[Any]:
    """Yield as many items on every rank as on any other.

    Each rank takes a few items ahead, and one ``tally`` compares how many each has got. What all have is given. Where
    one has ended, "drop" ends everywhere; with the other modes it fills up until all have ended.

    Raises ConfigError on all ranks where one has nothing to fill up with, and WdsError on the others where one fails.
    """
    items, size, given = begin(), 1, 0
    more: Iterator[Any] | None = None
    last = None
    while True:
        ahead, failure = _taken(items, size)
        least, most = tally(-1 if failure is not None else len(ahead))
        if failure is not None:
            raise failure
        if least < 0:
            raise WdsError(f"equal={mode!r}: another rank ended with an error, which it shows; so this one ends too")
        if not (given or least) and most and mode != "drop":
            raise ConfigError(f"equal={mode!r}: a rank has nothing to {mode}: there are fewer samples than ranks")
        everywhere = least if mode == "drop" else most
        for _ in range(min(everywhere, len(ahead))):
            given += 1
            last = ahead[0] if mode == "pad" else None
            yield ahead.popleft()
            everywhere -= 1
        if everywhere:
            if more is None:
                _log_filled(mode, None)
                more = itertools.repeat(last) if mode == "pad" else _without_end(begin)
            yield from itertools.islice(more, everywhere)
        if (least if mode == "drop" else most) < size:
            if ahead:
                logger.warning(
                    "equal='drop': the rank with the fewest has ended after %d steps; this one leaves %d that it had"
                    " ready, and what it had not read yet",
                    given,
                    len(ahead),
                )
            return
        size = min(2 * size, window)


def _taken(items: Iterator[Any], size: int) -> tuple[deque[Any], Exception | None]:
    ahead: deque[Any] = deque()
    try:
        for item in itertools.islice(items, size):
            ahead.append(item)
    except Exception as exn:  # the other ranks have to hear of it first
        return ahead, exn
    return ahead, None


def _without_end(begin: Passes) -> Iterator[Any]:
    while True:
        empty = True
        for item in begin():
            empty = False
            yield item
        if empty:
            raise ConfigError("equal='repeat': the share of this rank gave samples once, and now gives none")


def _log_filled(mode: str, count: int | None) -> None:
    here = world.place()
    logger.info(
        "equal=%r: rank %d, worker %d has fewer steps than others, and fills up%s",
        mode,
        here.rank,
        here.worker,
        "" if count is None else f" with {count}",
    )


@functools.lru_cache(1)
def _group_of_cpus(world_group: Any) -> Any:
    """Return the group that compares numbers in this machine's memory: one of its own beside a group of GPUs."""
    dist = packages.loaded("torch.distributed")
    return world_group if dist.get_backend(world_group) == "gloo" else dist.new_group(backend="gloo")


def _tally_of_ranks() -> Tally | None:
    """Return the comparison of all ranks by torch.distributed; None where there is one rank. ConfigError where there
    are several, and no process group is initialised."""
    if world.place().world_size == 1:
        return None
    dist = packages.loaded("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "equal= without steps= lets the ranks compare what they have by torch.distributed, which is not"
            " initialised: initialise it before the loop begins, or give steps="
        )
    torch, group = packages.loaded("torch"), _group_of_cpus(dist.group.WORLD)

    def tally(number: int) -> tuple[int, int]:
        both = torch.tensor([-number, number])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        least, most = both.tolist()
        return -int(least), int(most)

    return tally
