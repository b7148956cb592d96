"""Feeds of actors of a Ray cluster: the same order, ends and states as with processes of one machine."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed import feeds
from tests.distributed.feeds import by_ranks, expected, keys
from wds_async import distributed as dist
from wds_async.errors import ConfigError

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def _shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(feeds.SHARDS, feeds.write_shards(tmp_path_factory.mktemp("feed"), 5, 20))
        yield


def engine() -> dist.RayEngine:
    return dist.RayEngine(runtime_env={"env_vars": {feeds.SHARDS: os.environ[feeds.SHARDS]}})


def test_order_ends_and_states_are_those_of_processes(ray: Any) -> None:
    wanted = expected(feeds.plain, 2, epochs=2)
    with dist.Feed(feeds.plain, engine(), decoders=2) as feed:
        got = by_ranks(feed, 2, epochs=2)
        assert [batch for step in zip(got[0][1], got[1][1], strict=True) for batch in step] == wanted[1][:24]
        loader = feed.loader(0, 1)
        iterator = iter(loader)
        first = [next(iterator)[0] for _ in range(7)]
        state = json.loads(json.dumps(loader.state_dict()))
        feed.resize(3)
        assert sorted(key for batch in first + keys(loader) for key in batch) == sorted(
            key for batch in wanted[0] for key in batch
        )
    with dist.Feed(feeds.plain, decoders=2) as local:
        assert by_ranks(local, 1, states=state)[0][0] == wanted[0][7:]


def test_arrays_are_views_of_the_object_store_and_tensors_can_be_written_to(ray: Any) -> None:
    with dist.Feed(feeds.images, engine(), decoders=1, ahead="4M") as feed:
        held = list(pickle.loads(pickle.dumps(feed)).loader(0, 1))
    assert keys(held) == expected(feeds.images, 1)[0]
    for names, arrays in held:
        for key, image in zip(names, arrays, strict=True):
            assert (image == int(key[4:])).all()
            assert not image.flags.owndata
            assert not image.flags.writeable


def test_an_error_of_the_pipeline_names_the_shard_and_the_sample(ray: Any) -> None:
    with dist.Feed(feeds.broken, engine(), decoders=2) as feed, pytest.raises(dist.FeedError, match=r"003-007.*t-003"):
        list(feed.loader(0, 1))


def test_a_feed_that_is_closed_and_decoders_that_fit_no_machine_are_errors(ray: Any) -> None:
    with dist.Feed(feeds.plain, engine()) as feed:
        loader = feed.loader(0, 1)
        assert next(iter(loader))
    with pytest.raises(dist.FeedError, match="its coordinator does not answer"):
        next(iter(feed.loader(0, 1)))
    with pytest.raises(ConfigError, match="no machine of the cluster has as much"):
        dist.Feed(feeds.plain, "ray", cpus=64)
