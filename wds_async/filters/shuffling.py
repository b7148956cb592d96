"""Shuffling a stream through a buffer, or all of it, and random subsampling."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wds_async.arguments import check_probability, check_size, size
from wds_async.checkpoint.states import Held, RandomState, Rest
from wds_async.errors import ConfigError
from wds_async.stages import PipelineStage, Traits, pipelinefilter
from wds_async.world import CountsEpochs, DrawnSeed, SharedEpoch, global_draws, seed_number

__all__ = ["detshuffle", "epochshuffle", "permutation", "rsample", "shuffle"]

_PERMUTED_AT_MOST = 10**7


def _below(rng: Any) -> Callable[[int], int]:
    """Return ``below(n)``, which gives a random number in 0 … n-1: the one that ``rng.randint(0, n - 1)`` gives.

    For Python's own generator without the three calls that ``randint`` makes around ``getrandbits``.
    """
    if type(rng) is not random.Random:
        return lambda n: int(rng.randint(0, n - 1))
    bits = rng.getrandbits

    def below(n: int) -> int:
        width = n.bit_length()
        k = bits(width)
        while k >= n:
            k = bits(width)
        return k

    return below


class ShuffleState(RandomState):
    """State of a shuffle: the items in its buffer, and its generator."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: list[Any] = []

    def save(self) -> dict[str, Any]:
        return {**super().save(), "buffer": Held(self.buffer)}

    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved)
        self.buffer = saved.get("buffer", [])


def _shuffle(
    data: Iterable[Any],
    bufsize: int = 1000,
    initial: int = 100,
    rng: random.Random | None = None,
    seed: Any = None,
    handler: Any = None,
    *,
    state: ShuffleState | None = None,
) -> Iterator[Any]:
    """Hold up to ``bufsize`` items and yield a random one of them for each that comes.

    Output begins when ``initial`` items are held; while fewer than ``bufsize`` are, two are taken for each that
    leaves. The same ``seed`` gives the same order in every iteration (and in every worker); with neither ``seed``
    nor ``rng`` each iteration has its own. ``handler`` is accepted for WebDataset's sake.
    """
    if seed is not None and rng is not None:
        raise ConfigError("shuffle: give seed or rng, not both")
    state = state or ShuffleState()
    below = _below(state.begin(random.Random(seed) if rng is None else rng))  # Random(None) asks the operating system
    bufsize = check_size("shuffle", "bufsize", bufsize)
    initial = min(check_size("shuffle", "initial", initial), bufsize)
    source = iter(data)
    buffer = state.buffer
    append, pop = buffer.append, buffer.pop
    for item in source:
        append(item)
        if len(buffer) < bufsize:
            for second in source:
                append(second)
                break
        if (n := len(buffer)) >= initial:
            i = below(n)
            last = pop()
            if i == n - 1:
                yield last
            else:
                chosen, buffer[i] = buffer[i], last
                yield chosen
    while buffer:
        i = below(len(buffer))
        buffer[i], buffer[-1] = buffer[-1], buffer[i]
        yield pop()


_ALL = Traits(one_to_one=True, same_items=True, reorders=True, state=ShuffleState)
shuffle = pipelinefilter(_shuffle, {"bufsize": size(), "initial": size()}, _ALL)


class detshuffle(CountsEpochs, PipelineStage):
    """`shuffle` whose order follows from ``seed + epoch``. Every iteration is a new epoch, the first ``epoch + 1``.

    The epoch is counted in memory that DataLoader workers share, so that new workers go on counting, and
    is the same in all workers and ranks that began as many iterations.
    """

    traits = _ALL

    def __init__(self, bufsize: int = 1000, initial: int = 100, seed: int | DrawnSeed = 0, epoch: int = -1) -> None:
        self.bufsize = check_size("detshuffle", "bufsize", bufsize)
        self.initial = check_size("detshuffle", "initial", initial)
        self.seed = seed
        self._epoch = SharedEpoch(check_size("detshuffle", "epoch", epoch))

    def run(self, src: Iterable[Any], *, state: ShuffleState | None = None) -> Iterator[Any]:
        """Begin the next epoch over ``src``."""
        rng = random.Random(seed_number(self.seed) + self._epoch.next())
        return _shuffle(src, self.bufsize, self.initial, rng, state=state)

    def __repr__(self) -> str:
        seed = seed_number(self.seed)
        return f"<detshuffle bufsize={self.bufsize} initial={self.initial} seed={seed} epoch={self.epoch}>"


def permutation(n: int, seed: Any, epoch: int) -> list[int]:
    """Return the numbers from 0 to n-1 in an order that follows from ``seed`` and ``epoch`` alone.

    They are sorted by ``n`` draws of ``random()`` of a Mersenne Twister (`random.Random`) seeded with the SHA-256 of
    ``"seed epoch"``. Python promises these numbers for all its versions, and does not promise those of its ``shuffle``.
    So the order is the same on every machine; and seed 1 in epoch 2 has another one than seed 2 in epoch 1.
    """
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    draw = random.Random(int.from_bytes(digest, "big")).random
    keys = [draw() for _ in range(n)]
    return sorted(range(n), key=keys.__getitem__)


class epochshuffle(CountsEpochs, PipelineStage):
    """All items in an order drawn anew for each epoch (`permutation`); every iteration is one, the first ``epoch + 1``.

    A full permutation, for lists of shards: everything is taken from the source first, and each order is as likely as
    any other, which a buffer (`detshuffle`) does not give. Epochs are counted as `detshuffle` counts them, so that all
    ranks and workers compute the same order. ConfigError for more than 10 million items, which a source without end
    would have.
    """

    traits = Traits(one_to_one=True, same_items=True, reorders=True, state=Rest)

    def __init__(self, seed: int | DrawnSeed = 0, epoch: int = -1) -> None:
        self.seed = seed
        self._epoch = SharedEpoch(check_size("epochshuffle", "epoch", epoch))

    def run(self, src: Iterable[Any], *, state: Rest | None = None) -> Iterator[Any]:
        """Begin the next epoch over ``src``."""
        return _permuted(src, seed_number(self.seed), self._epoch.next(), state or Rest())

    def __repr__(self) -> str:
        return f"<epochshuffle seed={seed_number(self.seed)} epoch={self.epoch}>"


def _permuted(src: Iterable[Any], seed: Any, epoch: int, state: Rest) -> Iterator[Any]:
    yield from state.rest()
    items = list(itertools.islice(src, _PERMUTED_AT_MOST + 1))
    if len(items) > _PERMUTED_AT_MOST:
        raise ConfigError(
            f"epochshuffle holds all items, and more than {_PERMUTED_AT_MOST:,} came: shuffle a list without end "
            "through a buffer (a number as shardshuffle=, or detshuffle)"
        )
    state.hold(deque(items[i] for i in permutation(len(items), seed, epoch)))
    yield from state.rest()


def _rsample(
    data: Iterable[Any], p: float = 0.5, seed: Any = None, *, state: RandomState | None = None
) -> Iterator[Any]:
    """Let each item pass with probability ``p``. With ``seed`` every iteration chooses the same ones;
    without one it draws from the global ``random``, which ``random.seed(...)`` and torch, in its workers, seed."""
    check_probability("rsample", "p", p)
    draw = global_draws() if seed is None else (state or RandomState()).begin(random.Random(seed)).random
    for item in data:
        if draw() < p:
            yield item


rsample = pipelinefilter(_rsample, {"p": check_probability}, Traits(same_items=True, state=RandomState))
