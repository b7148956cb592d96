"""Several streams as one: in turn, or drawn at random by weight."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from wds_async import world
from wds_async.checkpoint.states import RandomState, without_random
from wds_async.errors import ConfigError
from wds_async.pipeline import Composite
from wds_async.stages import Traits

__all__ = [
    "Mix",
    "MixState",
    "RandomMix",
    "RoundRobin",
    "check_weights",
    "random_samples",
    "round_robin_longest",
    "round_robin_shortest",
]


class MixState(RandomState):
    """State of a mix: its datasets', which of them are left, whose turn it is, and the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[int] | None = None
        """Numbers of the datasets that have not ended; None before it begins."""
        self.turn = 0
        self._datasets: Sequence[Any] = ()
        self._states: Sequence[Any] = ()

    def begin_with(self, count: int) -> list[int]:
        """Return the numbers of the datasets that are left of ``count``; the caller removes those that end."""
        if self.left is None:
            self.left = list(range(count))
        return self.left

    def of(self, datasets: Sequence[Any]) -> None:
        """Go on with ``datasets``."""
        self._datasets = datasets
        for number, (dataset, state) in enumerate(zip(datasets, self._states, strict=False)):
            dataset.load_state_dict(state if number in (self.left or ()) else {**state, "run": None})

    def end(self) -> None:
        """Note that the mix is over, whatever its datasets have left."""
        self.left = []

    def save(self) -> dict[str, Any]:
        # Random numbers are the pipeline's around it. Where it ends before a mix within it, that one's datasets have
        # an epoch to go on from, too.
        states = [
            {**without_random(one.state_dict()), "sources": one.state_between()["sources"]} for one in self._datasets
        ]
        return {**super().save(), "nested": states, "left": self.left, "turn": self.turn}

    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved)
        if "nested" in saved:  # not where the mix begins again
            self._states, self.left, self.turn = saved["nested"], saved["left"], saved["turn"]

    @classmethod
    def at_start(cls, stage: Any, start: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        from wds_async.checkpoint.history import state_at_start  # noqa: PLC0415 (the decoders)

        pairs = zip(stage.datasets, saved["nested"], strict=True)
        nested = [without_random(state_at_start(dataset, state)) for dataset, state in pairs]
        return {**start, "nested": nested, "left": list(range(len(nested))), "turn": 0}


def round_robin_shortest(*sources: Iterable[Any]) -> Iterator[Any]:
    """Yield one item of each source in turn, until the one whose turn it is has none."""
    return map(next, itertools.cycle([iter(source) for source in sources]))


def round_robin_longest(*sources: Iterable[Any]) -> Iterator[Any]:
    """Yield one item of each source in turn, until all have ended; a source that has ended loses its turn."""
    turns: Iterator[Iterator[Any]] = iter([iter(source) for source in sources])
    for left in range(len(sources), 0, -1):
        turns = itertools.cycle(itertools.islice(turns, left))
        yield from map(next, turns)  # ends with one of them; those after it are the next in turn


def check_weights(weights: Sequence[float], count: int) -> None:
    """ConfigError unless these are ``count`` finite numbers, none below 0 and not all 0."""
    if len(weights) != count:
        raise ConfigError(f"{len(weights)} probabilities for {count} datasets: give one for each")
    if count and not (all(math.isfinite(w) and w >= 0 for w in weights) and sum(weights) > 0):
        raise ConfigError(f"probabilities {list(weights)}: none may be below 0, infinite or NaN, and one is above 0")


def _bounds(weights: Sequence[float]) -> list[float]:
    """Return the running sums of the shares: a random number in 0 … 1 falls to the first that is not below it.

    By numpy and in webdataset's order of operations, since another rounding would now and then choose another source.
    """
    import numpy as np  # noqa: PLC0415 (mixing alone needs it here)

    total = np.sum(weights)
    # Where only sources of weight 0 are left they come one after another: "longest" promises all of them.
    bounds: list[float] = (np.array(weights) / total).cumsum().tolist() if total > 0 else [1.0] * len(weights)
    return bounds


def random_samples(
    sources: Iterable[Iterable[Any]],
    probs: Iterable[float] | None = None,
    longest: bool = False,
    *,
    rng: random.Random | None = None,
    endless: Collection[int] = (),
    state: MixState | None = None,
) -> Iterator[Any]:
    """Yield items of ``sources``, each from one drawn with its probability (``probs``, in any scale; None: all alike).

    Ends with the first source that ends; with ``longest`` the others go on, in the proportions among them, until the
    last has ended. ``endless`` are numbers of sources that are not waited for: the mix is over once all others have
    ended. One ``rng.random()`` is taken for each draw; without ``rng``, one ``random.random()``.
    """
    streams = [iter(source) for source in sources]
    weights = [1.0] * len(streams) if probs is None else list(probs)
    state = state or MixState()
    draw = world.global_draws() if rng is None else state.begin(rng).random
    return _drawn_by_weight(streams, weights, longest, endless, draw, state.begin_with(len(streams)))


def _drawn_by_weight(
    streams: Sequence[Iterator[Any]],
    weights: Sequence[float],
    longest: bool,
    endless: Collection[int],
    draw: Callable[[], float],
    left: list[int],
) -> Iterator[Any]:
    while left:
        bounds, last = _bounds([weights[number] for number in left]), len(left) - 1
        drawn = [streams[number] for number in left]
        while True:
            i = min(bisect_left(bounds, draw()), last)  # the last bound may be rounded to just below 1
            try:
                item = next(drawn[i])
            except StopIteration:
                break
            yield item
        if not longest:
            return
        if left.pop(i) not in endless and all(number in endless for number in left):
            return


class Mix(world.TorchDataset, Composite):
    """Base of the mixes: iterators are closed with the mix, and calls reach all datasets."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = datasets

    @property
    def traits(self) -> Traits:
        """Its state is known if those of all datasets are, and no dataset is there twice."""
        known = all(hasattr(one, "load_state_dict") for one in self.datasets)
        apart = len({id(one) for one in self.datasets}) == len(self.datasets)
        return Traits(state=MixState if known and apart else False)

    def _parts(self) -> Sequence[Any]:
        return self.datasets

    def mixed(self, sources: list[Iterator[Any]], state: MixState) -> Iterator[Any]:
        """Yield the items of ``sources``, in this mix's order."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.run()

    def run(self, *, state: MixState | None = None) -> Iterator[Any]:
        """Begin to mix, or go on where ``state`` is."""
        state = state or MixState()
        state.of(self.datasets)
        left = state.begin_with(len(self.datasets))
        datasets = [dataset if number in left else () for number, dataset in enumerate(self.datasets)]
        return self._closing([self.as_given(number, items) for number, items in enumerate(datasets)], state)

    def as_given(self, number: int, items: Iterable[Any]) -> Iterable[Any]:
        """Return ``items`` of the dataset ``number`` as the mix gives them."""
        return items

    def _closing(self, datasets: Iterable[Iterable[Any]], state: MixState) -> Iterator[Any]:
        """Begin the epoch of all ``datasets`` now, so that a state has it of those, too, of which nothing came yet."""
        pairs = [(dataset, iter(dataset)) for dataset in datasets]
        # An iterator that was handed in is its owner's, who may go on with it.
        closes = [getattr(source, "close", None) for dataset, source in pairs if source is not dataset]
        items = self._drawn([source for _, source in pairs], state)
        return self._until_closed(items, [close for close in closes if callable(close)], state)

    def _drawn(self, sources: list[Iterator[Any]], state: MixState) -> Iterator[Any]:
        return self.mixed(sources, state)

    def _until_closed(
        self, items: Iterator[Any], closes: Sequence[Callable[[], Any]], state: MixState
    ) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            for close in closes:
                stack.callback(close)
            yield from items
            state.end()


class RoundRobin(Mix):
    """One item of each of ``datasets`` in turn.

    Ends with the first that has no more; with ``longest``, with the last.
    """

    def __init__(self, datasets: Sequence[Iterable[Any]], longest: bool = False) -> None:
        super().__init__(datasets)
        self.longest = longest

    def mixed(self, sources: list[Iterator[Any]], state: MixState) -> Iterator[Any]:
        left = state.begin_with(len(sources))
        while left:
            state.turn %= len(left)
            for item in sources[left[state.turn]]:
                state.turn += 1
                yield item
                break
            else:
                if not self.longest:
                    return
                del left[state.turn]


class RandomMix(Mix):
    """Items of ``datasets``, each from one drawn with its probability.

    ``probs`` are probabilities in any scale, one for each dataset; None: all alike. The mix ends with the first dataset
    that ends, which cuts the others short; with ``longest`` it goes on with the others until all have ended. With
    ``seed`` every iteration (in every worker) draws the same. Without one ``random.random()`` is drawn from, which
    ``random.seed(...)`` and torch, in its workers, seed. Raises ConfigError for probabilities that are none.
    """

    def __init__(
        self,
        datasets: Sequence[Iterable[Any]],
        probs: Sequence[float] | None = None,
        longest: bool = False,
        seed: Any = None,
    ) -> None:
        super().__init__(datasets)
        if probs is not None:
            check_weights(probs, len(datasets))
        self.probs = probs
        self.longest = longest
        self.seed = seed

    def mixed(self, sources: list[Iterator[Any]], state: MixState) -> Iterator[Any]:
        rng = None if self.seed is None else random.Random(self.seed)
        return random_samples(sources, self.probs, self.longest, rng=rng, state=state)
