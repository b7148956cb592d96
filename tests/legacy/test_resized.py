"""Epochs cut out of a continuing iteration."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator

import pytest
import torch

from tests.legacy.common import deprecated
from wds_async.legacy.datasets import ChoppedDataset, ResizedDataset


class Numbers(torch.utils.data.IterableDataset[int]):
    """A user's own dataset: 0 to ``n - 1``."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.closed = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))

    def __len__(self) -> int:
        return self.n

    def close(self) -> None:
        self.closed += 1


resize = functools.partial(deprecated, ResizedDataset)


def test_epochs_continue() -> None:
    dataset = resize(Numbers(5), 3)
    assert [list(dataset) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert isinstance(dataset, torch.utils.data.IterableDataset)
    assert ChoppedDataset is ResizedDataset


def test_length_and_nominal() -> None:
    assert len(resize(Numbers(5))) == 5
    assert len(resize(Numbers(5), 3)) == 3
    assert len(resize(Numbers(5), 3, nominal=77)) == 77
    assert list(resize(Numbers(5), nominal=77)) == [0, 1, 2, 3, 4]
    assert bool(resize(Numbers(0)))


def test_an_epoch_that_is_left_goes_on() -> None:
    dataset = resize(Numbers(10), 4)
    assert next(iter(dataset)) == 0
    assert list(dataset) == [1, 2, 3, 4]


@pytest.mark.timeout(10)
def test_a_source_that_can_be_read_once_ends() -> None:
    assert list(resize(iter(range(2)), 5)) == [0, 1]


def test_pickle_begins_anew_and_close() -> None:
    dataset = resize(source := Numbers(5), 3)
    list(dataset)
    assert list(pickle.loads(pickle.dumps(dataset))) == [0, 1, 2]
    assert list(dataset) == [3, 4, 0]
    dataset.close()
    assert source.closed == 1
    assert list(dataset) == [0, 1, 2]


def test_workers_make_iterations_of_their_own() -> None:
    dataset = resize(Numbers(5), 3)
    list(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(loader) == [0, 0, 1, 1, 2, 2]
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    assert [list(loader) for _ in range(2)] == [[0, 1, 2], [3, 4, 0]]
    del loader
