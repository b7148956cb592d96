"""Datasets around datasets."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async import extradatasets as extra

theirs = pytest.importorskip("webdataset")


def test_with_epoch_goes_on_where_the_last_epoch_ended() -> None:
    epochs = extra.with_epoch(range(5), 3)
    assert [list(epochs) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    epochs.close()
    epochs.close()
    assert list(epochs) == [0, 1, 2]
    assert list(pickle.loads(pickle.dumps(epochs))) == [0, 1, 2]


def test_with_epoch_longer_than_its_dataset() -> None:
    assert list(extra.with_epoch(range(2), 7)) == [0, 1, 0, 1, 0, 1, 0]
    assert list(extra.with_epoch([], 7)) == []


def test_with_epoch_begins_anew_in_a_forked_worker() -> None:
    from torch.utils.data import DataLoader

    epochs = extra.with_epoch(range(5), 3)
    list(epochs)
    loader = DataLoader(epochs, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert list(loader) == [0, 1, 2]
    assert list(epochs) == [3, 4, 0]


def test_with_epoch_closes_what_is_open() -> None:
    ended = []

    class Dataset:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(10)
            finally:
                ended.append(True)

    epochs = extra.with_epoch(Dataset(), 3)
    list(epochs)
    assert not ended
    epochs.close()
    assert ended


@pytest.mark.parametrize(
    "dataset", [extra.MockDataset(1, 2), extra.with_epoch(range(3), 2), extra.with_length(range(2), 2)]
)
def test_torch_takes_them(dataset: Any) -> None:
    from torch.utils.data import DataLoader, IterableDataset

    assert isinstance(dataset, IterableDataset)
    assert len(list(DataLoader(dataset, batch_size=None))) == 2


limits = st.none() | st.integers(1, 20)


@given(st.integers(1, 6), limits, limits, limits)
def test_repeatedly_is_webdatasets(n: int, nepochs: int | None, nbatches: int | None, nsamples: int | None) -> None:
    source = [[[i] * (1 + i % 3)] for i in range(n)]
    ours, other = (
        list(itertools.islice(f(source, nepochs, nbatches, nsamples), 100))
        for f in (extra.repeatedly, theirs.repeatedly)
    )
    assert ours == other


def test_repeatedly_asks_the_users_batchsize_and_does_not_spin() -> None:
    assert len(list(extra.repeatedly(["abc"], nsamples=10, batchsize=len))) == 4
    assert list(extra.repeatedly(iter(range(3)))) == [0, 1, 2]
    assert list(extra.repeatedly([])) == []
    assert list(extra.repeatedly(range(3), nepochs=0)) == []
