"""Equal steps: every rank gets as many items in an epoch as any other, so that none waits for one that has ended."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wds_async import packages, world
from wds_async.arguments import check_size
from wds_async.errors import ConfigError, StateError, WdsError

__all__ = ["Alignment", "EqualSteps", "Passes", "StepCount", "Tally", "aligned", "chosen_steps", "counted", "in_step"]

logger = logging.getLogger("wds_async")

MODES = ("drop", "pad", "repeat")
WINDOW = 8
"""Items that a rank takes before all compare; it begins with one, so that the first comes soon."""
_SAVE_EVERY = 200
"""A state is saved so rarely that it takes one part in this many of the time."""

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

    def share(self, here: world.Place) -> int:
        """Return the share of ``steps`` of the worker that stands at ``here``."""
        share, rest = divmod(self.steps or 0, here.num_workers)
        return share + (here.worker < rest)


def chosen_steps(equal: str | None, steps: int | None) -> EqualSteps | None:
    """Return what ``equal`` and ``steps`` of a dataset choose. ConfigError for choices that there are not."""
    return None if equal is None and steps is None else EqualSteps("repeat" if equal is None else equal, steps)


def in_step(
    start: Passes,
    equal: EqualSteps,
    rewind: Callable[[], None],
    iteration: Any,
    save: Callable[[], Any] | None = None,
) -> Iterator[Any]:
    """Yield as many items of ``start()`` on this rank as on any other. ``rewind`` makes ``start`` begin the same epoch
    once more. ``iteration`` is that of the pipeline: it has the state to go on from and the run over the stages, and
    keeps what is to be saved of this. ``save`` saves the run, unless its own method is meant.

    Raises what `counted` and `aligned` raise, ConfigError where the ranks cannot compare what they have, and StateError
    for a state of other equal steps.
    """
    begun = False

    def begin() -> Iterator[Any]:
        nonlocal begun
        if begun:
            rewind()
        begun = True
        return start()

    saved = iteration.take_steps()
    if equal.steps is not None:
        count = StepCount(saved)
        iteration.keep_steps(count)
        return counted(begin, equal, count)
    tally = _tally_of_ranks()
    if tally is None:
        if saved is not None and "size" in saved:
            raise StateError("the state is of one of several ranks, which compared what they had; this one is alone")
        return begin()
    if save is None:

        def save() -> Any:
            return iteration.run.save()

    alignment = Alignment(equal.mode, save, saved, iteration.saved_run)
    iteration.keep_steps(alignment)
    return aligned(begin, equal.mode, tally, alignment=alignment)


# ------------------------------------------------------------------ a number of steps


class StepCount:
    """Count of the items that a worker has given of its share of ``steps``. ``saved``: what `save` returned, or the
    ``left`` items of a share that was made anew.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        if saved is not None and "left" not in saved:
            raise StateError("the state is of ranks that compare what they have (equal= without steps=): go on so")
        self.loaded = saved
        self.count = self.share = 0
        self.again = False
        """The share of the data was over, and was begun again."""
        self.last: Any = None
        """Item that "pad" gives again."""

    def begin(self, share: int) -> None:
        """Count up to ``share`` items."""
        self.share = share
        if self.loaded is not None:
            self.count = self.loaded.get("count", share - self.loaded["left"])
            self.again = self.loaded["again"]
            self.last = _unpacked(self.loaded)

    def save(self, run: Callable[[], Any]) -> dict[str, Any]:
        """Return the parts of a pipeline's state: that of its ``run``, and the count."""
        last = {} if self.last is None else _packed(self.last)
        equal = {"count": self.count, "left": self.share - self.count, "again": self.again, **last}
        return {"run": run(), "equal": equal}


def counted(begin: Passes, equal: EqualSteps, count: StepCount | None = None) -> Iterator[Any]:
    """Yield this worker's share of ``equal.steps``, from where ``count`` is.

    Raises ConfigError where there are fewer and the mode is "drop", and where there are none at all.
    """
    here, at = world.place(), count or StepCount()
    at.begin(equal.share(here))
    goes_on, last = at.loaded is not None, None
    if at.last is not None or at.count >= at.share:
        begin()  # the epoch, of which nothing more is taken
    while at.last is None and at.count < at.share:
        before = at.count
        for item in itertools.islice(begin(), at.share - at.count):
            at.count += 1
            last = item if equal.mode == "pad" else None
            yield item
        if at.count == at.share:
            return
        empty, goes_on = at.count == before and not goes_on, False
        if empty or equal.mode == "drop":
            raise ConfigError(
                f"steps={equal.steps}: worker {here.worker} of rank {here.rank} has {at.count} of the {at.share} that"
                " are its share; give fewer steps, or equal='repeat' or equal='pad', which give some samples twice"
            )
        _log_filled(equal.mode, at.share - at.count)
        at.again = True
        if equal.mode == "pad":
            at.last = _last_of(begin, equal.mode) if at.count == before else last
    while at.count < at.share:
        at.count += 1
        yield at.last


def _last_of(begin: Passes, mode: str) -> Any:
    """Return the last item of a share of which nothing was given since a state was loaded."""
    items = deque(begin(), maxlen=1)
    if not items:
        raise ConfigError(f"equal={mode!r}: the share of this worker has nothing to {mode}: there are too few samples")
    return items.pop()


def _packed(item: Any) -> dict[str, Any]:
    from wds_async.checkpoint.packing import pack_items  # noqa: PLC0415 (the decoders)

    return {"last": pack_items([item], "equal='pad'")}


def _unpacked(saved: Mapping[str, Any]) -> Any:
    from wds_async.checkpoint.packing import unpack_items  # noqa: PLC0415 (the decoders)

    return unpack_items(saved["last"])[0] if "last" in saved else None


# ------------------------------------------------------------------ ranks that compare what they have


class Alignment:
    """Position of a rank among those that compare what they have.

    Items in hand were taken from the pipeline and are not given yet, so the pipeline is ahead. It is saved now and then
    where a window begins; a state is the latest of these, with the number of items since. To go on, they are taken
    once more, with the program's random numbers as they were, and dropped. Where a window is over nothing is in hand.
    """

    def __init__(
        self, mode: str, run: Callable[[], Any] = dict, saved: Mapping[str, Any] | None = None, saved_run: Any = None
    ) -> None:
        if saved is not None and saved.get("mode") not in (None, mode):
            raise StateError(f"the state is of a dataset with equal={saved['mode']!r}, and this one has {mode!r}")
        if saved is not None and "size" not in saved and "given" not in saved:
            raise StateError("the state is of a dataset with steps=: go on with that")
        loaded = saved or {}
        self.mode, self._run, self.window = mode, run, WINDOW
        self.loaded = saved is not None
        self.size: int = loaded.get("size", 1)
        """Items of the present window."""
        self.place: int = loaded.get("place", 0)
        """Those of them that were given."""
        self.own: int = loaded.get("own", 0)
        """Those of them that were taken, and not filled up with."""
        self.given: int = loaded.get("given", 0)
        """Items of earlier windows."""
        self.behind: int = loaded.get("behind", 0)
        """Items of the pipeline since it was saved, up to this window's."""
        self.again: bool = loaded.get("again", False)
        """The pipeline, as it was saved, had begun its share again."""
        self.over: bool = loaded.get("over", False)
        """The share has ended once."""
        self.ended: bool = loaded.get("ended", False)
        self.everywhere = 0
        """Items of the window that all ranks give."""
        self.random: list[Any] = loaded.get("random", [])
        """The program's generators where windows began in another state than the one before ended in."""
        self.last: Any = _unpacked(loaded)
        """The latest item of the share, which "pad" gives again."""
        self._saved = saved_run
        self._due_at = 0.0
        self._mark: Any = None

    def begin_window(self) -> None:
        """Save the pipeline if that is due."""
        from wds_async.checkpoint.packing import (  # noqa: PLC0415 (the decoders)
            global_random_mark,
            save_global_random,
        )

        if self.size > 1 and (began := time.monotonic()) >= self._due_at:
            try:
                self._saved = self._run()
            except Exception as exn:  # for who asks for a state
                self._saved = exn
            self.again, self.behind, self.random = self.over, 0, [[0, save_global_random()]]
            now = time.monotonic()
            self._due_at = now + _SAVE_EVERY * (now - began)
        elif self._mark is not None and self._mark != global_random_mark():
            self.random.append([self.behind, save_global_random()])

    def took(self, own: int, everywhere: int) -> None:
        """Note that the window has ``own`` items in hand, and that all ranks give ``everywhere``."""
        self.own, self.everywhere = own, everywhere
        self.over = self.over or own < self.size

    def note_random(self) -> None:
        """Note the program's random numbers where all of the window is in hand."""
        from wds_async.checkpoint.packing import global_random_mark  # noqa: PLC0415 (the decoders)

        self._mark = global_random_mark()

    def end_window(self) -> None:
        """Go on to the next window, unless this was the last one."""
        self.behind += self.from_pipeline()
        self.given += self.place
        self.ended = self.everywhere < self.size
        self.size, self.place, self.own, self.everywhere = self._next_size(), 0, 0, 0

    def from_pipeline(self) -> int:
        """Return how many of the items that this window has given came from the pipeline."""
        return min(self.place, self.own) if self.mode == "pad" else self.place

    def _next_size(self) -> int:
        return min(2 * self.size, self.window)

    def save(self, run: Callable[[], Any]) -> dict[str, Any]:
        """Return the parts of a pipeline's state: that of a run over its stages, and the place from there."""
        over, ended = self.place == self.everywhere, self.everywhere < self.size
        facts = {"mode": self.mode, "over": self.over}
        if self.mode == "pad":
            facts |= _packed(self.last) if self.over or self.size == 1 else {}
            # The next window may be empty: then the last item of this one is taken once more, and is what to pad with.
            over = over and (ended or self.size == 1)
        if over:
            facts |= {"size": self._next_size(), "given": self.given + self.place, "again": self.over, "ended": ended}
            return {"run": run(), "equal": facts}
        if isinstance(self._saved, Exception):
            raise self._saved
        behind = self.behind + self.from_pipeline()
        facts |= {"size": self.size, "given": self.given, "again": self.again, "place": self.place}
        facts |= {"own": min(self.place, self.own), "behind": behind, "random": self.random}
        return {"run": self._saved, "equal": facts}


class _Share:
    """The items of a rank: those of its share, and behind its end those that it fills up with."""

    def __init__(self, begin: Passes, at: Alignment) -> None:
        self._begin, self._at = begin, at
        self._more: Iterator[Any] | None = None
        self._items = begin()
        if at.again:
            self._more = itertools.chain(self._items, _without_end(begin)) if at.mode == "repeat" else None
            self._items = iter(())

    def ahead(self, size: int) -> tuple[deque[Any], Exception | None]:
        """Return up to ``size`` items of the share, and the error that ended it."""
        items: deque[Any] = deque()
        try:
            items.extend(itertools.islice(self._items, size))
        except Exception as exn:  # the other ranks have to hear of it first
            return items, exn
        if items and self._at.mode == "pad":
            self._at.last = items[-1]
        return items, None

    def filled(self, count: int) -> Iterator[Any]:
        """Return ``count`` items to fill up with."""
        if self._at.mode == "pad":
            self._at.last = _last_of(self._begin, "pad") if self._at.last is None else self._at.last
            return itertools.repeat(self._at.last, count)
        if self._more is None:
            _log_filled(self._at.mode, None)
            self._more = _without_end(self._begin)
        return itertools.islice(self._more, count)

    def go_back(self) -> Exception | None:
        """Drop the items that came behind the saved run, with the program's random numbers as they were. Return the
        error that ended them."""
        from wds_async.checkpoint.packing import load_global_random  # noqa: PLC0415 (the decoders)

        turns = [*self._at.random, [self._at.behind, None]]
        for (position, generators), (next_position, _) in itertools.pairwise(turns):
            load_global_random(generators)
            items, failure = self.ahead(next_position - position)
            if failure is not None:
                return failure
            if self._at.mode == "repeat":
                deque(self.filled(next_position - position - len(items)), 0)
        self._at.behind -= self._at.from_pipeline()
        return None


def aligned(
    begin: Passes, mode: str, tally: Tally, window: int = WINDOW, *, alignment: Alignment | None = None
) -> Iterator[Any]:
    """Yield as many items on every rank as on any other, from where ``alignment`` is.

    Each rank takes a few items ahead, and one ``tally`` compares how many each has got. What all have is given. Where
    one has ended, "drop" ends everywhere; with the other modes it fills up until all have ended.

    Raises ConfigError on all ranks where one has nothing to fill up with, and WdsError on the others where one fails.
    """
    from wds_async.checkpoint.packing import load_global_random, save_global_random  # noqa: PLC0415 (the decoders)

    at = alignment or Alignment(mode)
    at.window = window
    before = save_global_random() if at.place else None
    share = _Share(begin, at)
    failure = share.go_back() if at.place else None
    while not at.ended:
        if not at.place:
            at.begin_window()
        ahead, failure = share.ahead(at.size - at.own) if failure is None else (deque(), failure)
        least, most = tally(-1 if failure is not None else at.own + len(ahead))
        if failure is not None:
            raise failure
        if least < 0:
            raise WdsError(f"equal={mode!r}: another rank ended with an error, which it shows; so this one ends too")
        if not (at.given or at.loaded or least) and most and mode != "drop":
            raise ConfigError(f"equal={mode!r}: a rank has nothing to {mode}: there are fewer samples than ranks")
        everywhere = least if mode == "drop" else most
        at.took(at.own + len(ahead), everywhere)
        if (missing := everywhere - at.place - len(ahead)) > 0:
            ahead.extend(share.filled(missing))
        at.note_random()
        if before is not None:
            load_global_random(before)
            before = None
        for _ in range(everywhere - at.place):
            at.place += 1
            yield ahead.popleft()
        at.end_window()
        if at.ended and ahead:
            logger.warning(
                "equal='drop': the rank with the fewest has ended after %d steps; this one leaves %d that it had"
                " ready, and what it had not read yet",
                at.given,
                len(ahead),
            )


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
