"""Equal steps: as many items on every rank, and no rank waits for ever."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.equalsteps import EqualSteps, aligned, counted
from wds_async.errors import ConfigError, WdsError

TIMEOUT_S = 60.0


class Ranks:
    """Threads that compare numbers as ranks do; one that waits for ever fails."""

    def __init__(self, count: int) -> None:
        self._numbers = [0] * count
        self._barrier = threading.Barrier(count)
        self.compared = 0

    def tally(self, rank: int) -> Callable[[int], tuple[int, int]]:
        def tally(number: int) -> tuple[int, int]:
            self._numbers[rank] = number
            self._barrier.wait(TIMEOUT_S)
            both = min(self._numbers), max(self._numbers)
            self._barrier.wait(TIMEOUT_S)
            self.compared += rank == 0
            return both

        return tally


def run(shares: list[Callable[[], Iterator[Any]]], mode: str, window: int = 8) -> tuple[list[Any], int]:
    """What each rank gets: a list, or its error; and how often they compared."""
    ranks = Ranks(len(shares))

    def one(rank: int) -> Any:
        try:
            return list(aligned(shares[rank], mode, ranks.tally(rank), window))
        except WdsError as error:
            return error

    with ThreadPoolExecutor(len(shares)) as threads:
        return list(threads.map(one, range(len(shares)))), ranks.compared


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.sampled_from(["drop", "pad", "repeat"]))
def test_as_many_on_every_rank(sizes: list[int], mode: str) -> None:
    shares = [lambda rank=rank, size=size: iter([(rank, n) for n in range(size)]) for rank, size in enumerate(sizes)]
    found, compared = run(shares, mode)
    if mode != "drop" and not min(sizes) and max(sizes):
        assert all(isinstance(one, ConfigError) for one in found)  # on all of them: none waits for the others
        return
    steps = min(sizes) if mode == "drop" else max(sizes)
    for rank, (size, items) in enumerate(zip(sizes, found, strict=True)):
        own = [(rank, n) for n in range(size)]
        fill = itertools.repeat(own[-1]) if own and mode == "pad" else itertools.cycle(own)
        assert items == own[:steps] + list(itertools.islice(fill, max(0, steps - size)))
    assert compared <= 5 + steps // 8


def test_an_error_of_one_rank_ends_all() -> None:
    def failing() -> Iterator[int]:
        yield from range(20)
        raise ConfigError("this rank's own")

    found, _ = run([failing, lambda: iter(range(30))], "drop")
    assert [str(error).split(";")[0] for error in found] == [
        "this rank's own",
        "equal='drop': another rank ended with an error, which it shows",
    ]


def place(monkeypatch: pytest.MonkeyPatch, worker: int, count: int) -> None:
    monkeypatch.setenv("WORKER", str(worker))
    monkeypatch.setenv("NUM_WORKERS", str(count))


@pytest.mark.parametrize("mode", ["pad", "repeat"])
def test_steps_are_shared_among_workers(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [9, 2, 30]
    found = []
    for worker, size in enumerate(sizes):
        place(monkeypatch, worker, 3)
        found.append(list(counted(lambda size=size: iter(range(size)), EqualSteps(mode, 20))))
    second = [0, 1, 0, 1, 0, 1, 0] if mode == "repeat" else [0, *[1] * 6]
    assert found == [list(range(7)), second, list(range(6))]


def test_steps_that_a_worker_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 1, 2)
    with pytest.raises(ConfigError, match=r"steps=9: worker 1 of rank 0 has 3 of the 4"):
        list(counted(lambda: iter(range(3)), EqualSteps("drop", 9)))
    with pytest.raises(ConfigError, match="has 0 of the 4"):
        list(counted(lambda: iter(()), EqualSteps("repeat", 9)))
    assert list(counted(lambda: iter(range(9)), EqualSteps("drop", 8))) == [0, 1, 2, 3]


def test_choices_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match="equal='cut': one of 'drop', 'pad', 'repeat'"):
        EqualSteps("cut")
    with pytest.raises(ConfigError, match="steps"):
        EqualSteps("drop", 0)
