"""States of pipelines that keep samples or shards: going on within a cache, and while one is filled."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wds_async as wds
from tests.checkpoint.pipelines import dataset, shown, taken
from tests.servers import Origin, make_shards
from wds_async.errors import StateError
from wds_async.samplecache import SQLiteCache


def through_json(pipeline: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(pipeline.state_dict()))
    return state


def kept(samples: list[Any], folder: Path, chunk: int = 3) -> wds.DataPipeline:
    return wds.DataPipeline(tuple(samples), wds.LMDBCached(folder, map_size=1e8, chunksize=chunk))


@given(
    keys=st.lists(st.sampled_from(["a", "b", "_", "", "c" * 600, None]), min_size=1, max_size=14),
    chunk=st.integers(1, 5),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_a_database_is_filled_further(
    keys: list[str | None], chunk: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It ends with the same samples, wherever the process was killed behind the state, and from the state twice."""
    samples = [number if key is None else {"__key__": key, "n": number} for number, key in enumerate(keys)]
    folder = tmp_path_factory.mktemp("lmdb")
    whole = kept(samples, folder / "whole", chunk)
    assert list(whole) == samples
    later = list(whole)
    before, behind = data.draw(st.integers(0, len(samples))), data.draw(st.integers(0, len(samples) + 1))
    first = kept(samples, folder / "killed", chunk)
    items = iter(first)
    assert list(itertools.islice(items, before)) == samples[:before]
    state = through_json(first)
    taken(items, behind)
    del items, first
    for ends in (data.draw(st.integers(0, len(samples) - before)), None):
        resumed = kept(samples, folder / "killed", chunk)
        resumed.load_state_dict(state)
        assert list(itertools.islice(resumed, ends)) == samples[before:][:ends]
        del resumed
    assert list(kept(samples, folder / "killed", chunk)) == later


def test_a_database_that_has_gone_is_an_error(tmp_path: Path) -> None:
    samples = [{"__key__": f"{number:03d}"} for number in range(20)]
    pipeline = kept(samples, tmp_path / "lmdb")
    list(pipeline)
    iterator = iter(pipeline)
    assert list(itertools.islice(iterator, 5)) == samples[:5]
    state = through_json(pipeline)
    iterator.close()  # type: ignore[attr-defined]
    del pipeline, iterator
    resumed = kept(samples, tmp_path / "lmdb")
    resumed.load_state_dict(state)
    assert list(resumed) == samples[5:]
    del resumed
    shutil.rmtree(tmp_path / "lmdb")
    resumed = kept(samples, tmp_path / "lmdb")
    resumed.load_state_dict(state)
    with pytest.raises(StateError, match="sample 5 of a database that is not there"):
        list(resumed)


def test_a_database_that_another_run_fills_is_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = list(range(20))
    pipeline = kept(samples, tmp_path / "lmdb")
    iterator = iter(pipeline)
    taken(iterator, 9)
    state = through_json(pipeline)
    other = iter(kept(samples[::-1], tmp_path / "lmdb"))
    next(other)
    resumed = kept(samples, tmp_path / "lmdb")
    resumed.load_state_dict(state)
    assert list(resumed) == samples[9:]
    assert "the next epoch fills it" in caplog.text
    list(other)
    assert sorted(kept([], tmp_path / "lmdb")) == samples


def test_workers_fill_their_databases_further(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    urls = [str(path) for path in make_shards(tmp_path / "shards", shards=4, samples=20)]

    def make(name: str) -> wds.WebLoader:
        stage = wds.LMDBCached(tmp_path / name, map_size=1e8, chunksize=3)
        samples = dataset(urls, shardshuffle=4, seed=1).compose(stage)
        return wds.WebLoader(samples, batch_size=None, num_workers=2)

    whole = make("whole")
    epochs = [shown(whole) for _ in range(3)]
    loader, state, items = make("killed"), None, []
    for count in (17, 30, 50, 7):
        iterator = iter(loader)
        items += taken(iterator, count)
        state = through_json(loader)
        taken(iterator, 9)
        del iterator
        loader = make("killed")
        loader.load_state_dict(state)
    items += shown(loader)
    assert items == epochs[0] + epochs[1]
    assert shown(loader) == epochs[2]


def test_an_sqlite_cache_is_run_again_if_its_order_allows(tmp_path: Path) -> None:
    samples = [{"__key__": f"{number:03d}"} for number in range(20)]

    def make(**kw: Any) -> wds.DataPipeline:
        return wds.DataPipeline(tuple(samples), SQLiteCache(tmp_path / "a.db", 12, **kw))

    pipeline = make()
    iterator = iter(pipeline)
    taken(iterator, 5)
    state = through_json(pipeline)
    taken(iterator, 3)
    for _ in range(2):  # from the state of an epoch that filled it, while it is filled and behind that
        resumed = make()
        resumed.load_state_dict(state)
        assert list(resumed) == samples[5:12]
        assert list(resumed) == samples[:12]
    shuffled = make(shuffle=True)
    taken(iter(shuffled), 5)
    with pytest.raises(StateError, match="shuffle behind it"):
        shuffled.state_dict()


def test_a_cache_of_shards_goes_on(tmp_path: Path, origin: Origin) -> None:
    urls = []
    for path in make_shards(tmp_path / "shards", shards=3, samples=20, payload=5000):
        origin.add(f"/{path.name}", path.read_bytes())
        urls.append(origin.url(f"/{path.name}"))

    def make() -> Any:
        return dataset(urls, cache_dir=tmp_path / "cache", shardshuffle=3, seed=2).shuffle(12, initial=12, seed=1)

    without = dataset(urls, shardshuffle=3, seed=2).shuffle(12, initial=12, seed=1)
    epochs = [[sample["__key__"] for sample in without] for _ in range(3)]
    pipeline = make()
    for epoch in range(2):
        iterator = iter(pipeline)
        keys = [sample["__key__"] for sample in itertools.islice(iterator, 31)]
        state = through_json(pipeline)
        resumed = make()
        resumed.load_state_dict(state)
        assert keys + [sample["__key__"] for sample in resumed] == epochs[epoch]
        assert [sample["__key__"] for sample in resumed] == epochs[epoch + 1]
        assert [sample["__key__"] for sample in iterator] == epochs[epoch][31:]


def test_a_cache_that_is_too_large_for_a_state_says_so(tmp_path: Path) -> None:
    urls = [str(path) for path in make_shards(tmp_path, shards=1, samples=70)]
    pipeline = dataset(urls).map(lambda sample: {**sample, "large": bytes([int(sample["cls"])]) * (1 << 20)}).mcached()
    iterator = iter(pipeline)
    taken(iterator, 60)
    assert len(json.dumps(pipeline.state_dict())) < 1e6
    taken(iterator, 6)
    with pytest.raises(StateError, match=r"Cached keeps more than 64 MB.*put it before"):
        pipeline.state_dict()


def test_what_a_cache_in_memory_has_is_small_in_a_state(tmp_path: Path) -> None:
    urls = [str(path) for path in make_shards(tmp_path, shards=2, samples=500)]
    pipeline = dataset(urls, shardshuffle=2, seed=1).mcached()
    first = shown(pipeline)
    iterator = iter(pipeline)
    taken(iterator, 300)
    text = json.dumps(pipeline.state_dict())
    assert len(text) < 60_000
    resumed = dataset(urls, shardshuffle=2, seed=1).mcached()
    resumed.load_state_dict(json.loads(text))
    assert shown(resumed) == first[300:]
    assert shown(resumed) == first
