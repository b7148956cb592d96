"""`MultiLoader`."""

from __future__ import annotations

import pytest

from wds_async.errors import ReaderClosed
from wds_async.multi import MultiLoader
from wds_async.pipeline import DataPipeline
from wds_async.shardlists import split_by_worker

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_every_item_once_in_every_iteration() -> None:
    loader = MultiLoader(DataPipeline(range(20), split_by_worker), workers=2)
    for _ in range(2):
        assert sorted(loader) == list(range(20))
    assert sorted(loader.map(str)) == sorted(map(str, range(20)))


def test_kill() -> None:
    loader = MultiLoader(DataPipeline(range(20)), workers=1)
    next(iter(loader))
    loader.kill()
    with pytest.raises(ReaderClosed):
        iter(loader)
