"""Shuffling a stream through a buffer, and random subsampling."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wds_async.arguments import check_probability, check_size, size
from wds_async.errors import ConfigError
from wds_async.pipeline import PipelineStage, Traits, pipelinefilter
from wds_async.world import CountsEpochs, DrawnSeed, SharedEpoch, global_draws, seed_number

__all__ = ["detshuffle", "rsample", "shuffle"]


def _below(rng: Any) -> Callable[[int], int]:
    """``below(n)``: a random number in 0 … n-1, the one that ``rng.randint(0, n - 1)`` gives.

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


def _shuffle(
    data: Iterable[Any],
    bufsize: int = 1000,
    initial: int = 100,
    rng: random.Random | None = None,
    seed: Any = None,
    handler: Any = None,
) -> Iterator[Any]:
    """Hold up to ``bufsize`` items and yield a random one of them for each that comes.

    Output begins when ``initial`` items are held; while fewer than ``bufsize`` are, two are taken for each that
    leaves. The same ``seed`` gives the same order in every iteration (and in every worker); with neither ``seed``
    nor ``rng`` each iteration has its own. ``handler`` is accepted for WebDataset's sake.
    """
    if seed is not None and rng is not None:
        raise ConfigError("shuffle: give seed or rng, not both")
    below = _below(random.Random(seed) if rng is None else rng)  # Random(None) asks the operating system
    bufsize = check_size("shuffle", "bufsize", bufsize)
    initial = min(check_size("shuffle", "initial", initial), bufsize)
    source = iter(data)
    buffer: list[Any] = []
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


_ALL = Traits(one_to_one=True, same_items=True)
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

    def run(self, src: Iterable[Any]) -> Iterator[Any]:
        """Begin the next epoch over ``src``."""
        return _shuffle(src, self.bufsize, self.initial, random.Random(seed_number(self.seed) + self._epoch.next()))

    def __repr__(self) -> str:
        seed = seed_number(self.seed)
        return f"<detshuffle bufsize={self.bufsize} initial={self.initial} seed={seed} epoch={self.epoch}>"


def _rsample(data: Iterable[Any], p: float = 0.5, seed: Any = None) -> Iterator[Any]:
    """Let each item pass with probability ``p``. With ``seed`` every iteration chooses the same ones;
    without one it draws from the global ``random``, which ``random.seed(...)`` and torch, in its workers, seed."""
    check_probability("rsample", "p", p)
    draw = global_draws() if seed is None else random.Random(seed).random
    for item in data:
        if draw() < p:
            yield item


rsample = pipelinefilter(_rsample, {"p": check_probability}, Traits(same_items=True))
