"""`dali_source`, driven as DALI's documents say that ``fn.external_source`` drives its source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_async as wds
from tests.servers.shards import make_shard
from wds_async.errors import ConfigError

FILES = {f"{i:02d}": {"jpg": bytes([i]) * (i + 1), "cls": b"%d" % i, "txt": b"text"} for i in range(10)}


class ExternalSource:
    """``fn.external_source(source, num_outputs=n, batch=True, cycle="raise")``: ``run`` asks for the next batch, and
    ``StopIteration`` ends an epoch, whereupon the source is iterated anew."""

    def __init__(self, source: Any, num_outputs: int, batch_size: int) -> None:
        self.source, self.num_outputs, self.batch_size = source, num_outputs, batch_size
        self.iterator: Iterator[Any] = iter(source)

    def run(self) -> tuple[list[np.ndarray[Any, Any]], ...]:
        try:
            outputs = next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.source)
            raise
        assert isinstance(outputs, (tuple, list))
        assert len(outputs) == self.num_outputs
        for output in outputs:
            assert isinstance(output, list)
            assert len(output) <= self.batch_size
            assert all(type(array) is np.ndarray for array in output)
            assert len({(array.ndim, array.dtype) for array in output}) == 1
        return tuple(outputs)

    def epoch(self) -> list[tuple[list[np.ndarray[Any, Any]], ...]]:
        batches = []
        while True:
            try:
                batches.append(self.run())
            except StopIteration:
                return batches


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "a.tar").write_bytes(make_shard(FILES))
    return str(tmp_path / "a.tar")


def test_every_epoch_has_all_samples_in_batches_of_arrays(url: str) -> None:
    source = ExternalSource(wds.dali_source(url, "jpg cls txt", 4, shardshuffle=False), 3, 4)
    for _ in range(2):
        batches = source.epoch()
        assert [len(files) for files, _, _ in batches] == [4, 4, 2]
        assert [bytes(file) for files, _, _ in batches for file in files] == [x["jpg"] for x in FILES.values()]
        assert [labels[0].dtype for _, labels, _ in batches] == [np.int64] * 3
        assert [label.tolist() for _, labels, _ in batches for label in labels] == [[i] for i in range(10)]
        assert bytes(batches[0][2][0]) == b"text"


def test_a_dataset_is_taken_as_it_is(url: str) -> None:
    dataset = wds.WebDataset(url, shardshuffle=False).slice(3).map(lambda x: {"jpg": x["jpg"], "cls": np.float32(0.5)})
    ((files, labels),) = ExternalSource(wds.dali_source(dataset), 2, 64).epoch()
    assert [len(file) for file in files] == [1, 2, 3]
    assert (labels[0].tolist(), labels[0].dtype) == ([0.5], np.float32)


def test_what_dali_cannot_take_is_named(url: str) -> None:
    dataset = wds.WebDataset(url, shardshuffle=False).map_dict(cls=lambda cls: {"label": cls})
    with pytest.raises(ConfigError, match="field 'cls' is a dict"):
        ExternalSource(wds.dali_source(dataset), 2, 64).run()
    with pytest.raises(ConfigError, match="give them to the dataset"):
        wds.dali_source(dataset, shardshuffle=False)
