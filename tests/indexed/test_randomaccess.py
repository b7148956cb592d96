"""`IndexedDataset`: samples by number from where they are, by few ranged reads."""

from __future__ import annotations

import copy
import gzip
import json
import operator
import os
import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wds_async as wds
from tests.servers import BEFORE_HEAD, Nginx, make_shard, make_shards
from tests.tar.test_index import energon_of
from tests.writing import in_memory
from wds_async.errors import (
    ConfigError,
    CorruptShard,
    CostLimitReached,
    ObjectChanged,
    ShardFormatError,
    ShardNotFound,
    TruncatedShard,
)
from wds_async.indexed import places
from wds_async.indexed.randomaccess import IndexedDataset
from wds_async.indexed.samplers import WeightedSampler
from wds_async.indexed.scan import scan_shards
from wds_async.indexed.shardindex import ShardIndex
from wds_async.tar.index import DaliIndex, scan

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WIDS_CACHE", str(tmp_path / "cache"))  # WDS_CACHE would turn the cache of shards on too


def indexes(urls: list[str]) -> list[ShardIndex]:
    found = [scanned.index for scanned in scan_shards(urls)]
    assert None not in found
    return found  # type: ignore[return-value]


@pytest.fixture
def served(tmp_path: Path, nginx: Callable[..., Nginx]) -> tuple[list[str], Nginx]:
    """Four shards of nine samples of 40 kB on nginx, whose log tells the requests; their indexes in the cache."""
    paths = make_shards(tmp_path / "data", 4, 9, payload=40_000)
    server = nginx(tmp_path / "data", access_log=True)
    urls = [server.url(path.name) for path in paths]
    for url, one in zip(urls, indexes(urls), strict=True):
        places.keep(one, url)
    return urls, server


def streamed(urls: list[str]) -> list[dict[str, Any]]:
    with wds.WebDataset(urls, shardshuffle=False) as dataset:
        return list(dataset)


def key_of(sample: dict[str, Any]) -> str:
    """At module level, so that spawned workers can import it."""
    return str(sample["__key__"])


# ------------------------------------------------------------------ samples


def test_a_sample_is_that_of_a_stream(served: tuple[list[str], Nginx]) -> None:
    urls, _ = served
    expected = streamed(urls)
    with wds.IndexedDataset(urls) as dataset:
        assert len(dataset) == 36
        assert [dataset[i] for i in range(36)] == expected
        assert dataset[-1] == expected[-1]
        assert dataset[np.int64(7)] == expected[7]
        assert dataset[[20, 3, 20]] == [expected[20], expected[3], expected[20]]
        assert dataset[30:40:2] == expected[30::2]
        assert dataset.__getitems__([]) == []
        assert dataset[9].offset == 0
        first, again = dataset[[5, 5]]
        assert first == again
        assert first is not again
        for beyond in (36, -37, 10**30):
            with pytest.raises(IndexError, match="of a dataset of 36"):
                dataset[beyond]
        with pytest.raises(TypeError):
            dataset["1"]


def test_transformations_in_turn(served: tuple[list[str], Nginx]) -> None:
    urls, _ = served
    with IndexedDataset(urls, transformations=[key_of, int]) as dataset:
        assert dataset[[35, 0]] == [35, 0]
    with IndexedDataset(urls, transformations=key_of) as dataset:
        assert dataset[7] == "000007"
    with pytest.raises(TypeError, match="transformations"):
        IndexedDataset(urls, transformations=["PIL"])


def test_neighbours_are_one_range_and_all_ranges_are_requested_at_once(served: tuple[list[str], Nginx]) -> None:
    urls, server = served
    with IndexedDataset(urls) as dataset:
        done = len(server.log())
        dataset.__getitems__([0, 1, 4, 8, 9, 13, 30])
        log = server.log()[done:]
        assert sorted(entry["uri"] for entry in log) == ["/shard-000000.tar", "/shard-000001.tar", "/shard-000003.tar"]
    with IndexedDataset(urls, gap_bytes=0) as dataset:
        done = len(server.log())
        dataset.__getitems__([0, 1, 4, 8])
        assert len(server.log()) - done == 3
        sent = sum(entry["body_bytes"] for entry in server.log()[done:])
        assert sent < 4 * 50_000  # nothing but the samples


def test_a_batch_among_a_hundred_shards_takes_two_rounds(tmp_path: Path, origin: Any) -> None:
    """The server answers nothing until half of the requests are there, all without a first look at the shards."""
    paths = make_shards(tmp_path / "data", 100, 12)
    urls = [origin.add(path.name, path.read_bytes()) for path in paths]
    known = indexes(urls)
    origin.forget()
    origin.behave(stall_after=BEFORE_HEAD)
    wanted = random.Random(1).sample(range(1200), 256)
    with (
        IndexedDataset(urls, index=known, gap_bytes=0, transfer={"hedge_share": 0}) as dataset,
        ThreadPoolExecutor(1) as pool,
    ):
        batch = pool.submit(dataset.__getitems__, wanted)
        origin.wait_until(lambda one: one.in_flight == 128, 30)
        origin.release()
        assert [sample["__key__"] for sample in batch.result(60)] == [f"{n:06d}" for n in wanted]
    assert 200 < len(origin.requests) < 256
    assert origin.most_in_flight == 128


def test_a_sample_larger_than_a_part_comes_in_several(tmp_path: Path, nginx: Callable[..., Nginx]) -> None:
    make_shards(tmp_path / "data", 1, 2, payload=9 << 20)
    server = nginx(tmp_path / "data", access_log=True)
    url = server.url("shard-000000.tar")
    with IndexedDataset(url, index=indexes([url]), transfer={"part_bytes": 1 << 20}) as dataset:
        done = len(server.log())
        assert len(dataset[1]["bin"]) == 9 << 20
        assert dataset[1] == streamed([url])[1]
        assert len([entry for entry in server.log()[done:] if entry["body_bytes"] <= 1 << 20]) >= 10


def test_the_limit_on_costs_holds(served: tuple[list[str], Nginx], monkeypatch: pytest.MonkeyPatch) -> None:
    urls, _ = served
    monkeypatch.setenv("WDS_COST_LIMIT", "0")
    with IndexedDataset(urls) as dataset, pytest.raises(CostLimitReached):
        dataset[0]


# ------------------------------------------------------------------ indexes


@pytest.mark.parametrize("kind", ["wds", "dali", "energon"])
def test_indexes_of_every_kind_beside_the_shards(kind: str, tmp_path: Path, origin: Any) -> None:
    """Names of more than a hundred letters have headers of their own, which only our index and Energon's point at."""
    samples = [{"__key__": f"{n}/{'k' * (1 + n * 60)}", "txt": f"text {n}", "jpg": bytes(n * 300)} for n in range(4)]
    data = in_memory(*samples)
    url = origin.add("d/x.tar", data)
    pieces = iter([memoryview(data)])
    files = {
        "wds": indexes([url])[0].to_bytes(),
        "dali": DaliIndex(scan(lambda: next(pieces, None), "u")).text().encode(),
        "energon": energon_of(data),
    }
    (place,) = places.places(["d/x.tar"], kind)
    origin.add(place, files[kind])
    with IndexedDataset(url, kind=kind) as dataset:
        assert dataset[::-1] == streamed([url])[::-1]
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / Path(place).name).write_bytes(files[kind])
    with IndexedDataset(url, kind=kind, index=tmp_path / "i") as dataset:
        assert len(dataset) == 4


def test_no_index_and_no_good_index(served: tuple[list[str], Nginx], tmp_path: Path) -> None:
    urls, _ = served
    with pytest.raises(ShardNotFound, match=r"other\.tar has no index: .*wds-async index"):
        IndexedDataset([urls[0].replace("shard-000000", "other")])
    with pytest.raises(ConfigError, match="kind='x': one of dali, energon, wds"):
        IndexedDataset(urls, kind="x")
    (tmp_path / "data" / "shard-000000.tar.idx").write_bytes(b"12345")
    with pytest.raises(ConfigError, match="no index of Energon"):
        IndexedDataset(urls[0], kind="energon")
    with pytest.raises(ConfigError, match="4 shards and 1 indexes"):
        IndexedDataset(urls, index=indexes(urls[:1]))


def test_an_index_of_another_shard_gives_no_wrong_sample(tmp_path: Path) -> None:
    one, other = tmp_path / "one.tar", tmp_path / "other.tar"
    one.write_bytes(make_shard({f"a{n}": {"txt": bytes(n)} for n in range(5)}))
    other.write_bytes(make_shard({f"b{n}": {"txt": bytes(n)} for n in range(5)}))
    (known,) = indexes([str(other)])
    claimed = ShardIndex.of(
        str(one), 0, "", known.starts, known.starts + known.lengths, keys=[f"b{n}" for n in range(5)]
    )
    with IndexedDataset(one, index=[claimed]) as dataset, pytest.raises(CorruptShard, match="'b3' should be at bytes"):
        dataset[3]
    shifted = ShardIndex.of(str(one), 0, "", known.starts + 512, known.starts + 512 + known.lengths)
    with IndexedDataset(one, index=[shifted]) as dataset, pytest.raises(ShardFormatError):
        dataset[3]
    two = ShardIndex.of(str(one), 0, "", known.starts[:1], known.starts[2:3])
    with IndexedDataset(one, index=[two]) as dataset, pytest.raises(CorruptShard, match=r"\['a0', 'a1'\]"):
        dataset[0]
    beyond = ShardIndex.of(str(one), 0, "", [1 << 20], [(1 << 20) + 1024])
    with IndexedDataset(one, index=[beyond]) as dataset, pytest.raises(TruncatedShard, match=r"one\.tar"):
        dataset[0]


def test_a_shard_that_was_replaced_is_an_error(served: tuple[list[str], Nginx], tmp_path: Path) -> None:
    urls, _ = served
    path = tmp_path / "data" / "shard-000002.tar"
    with IndexedDataset(urls) as dataset:
        assert dataset[18]["__key__"] == "000018"
        path.write_bytes(path.read_bytes() + bytes(10240))
        os.utime(path, (1, 1))
        assert dataset[0]["__key__"] == "000000"
    with IndexedDataset(urls) as dataset:
        with pytest.raises(ObjectChanged, match=r"shard-000002\.tar.*wds-async index"):
            dataset[[0, 18]]
        assert dataset[0]["__key__"] == "000000"
    local = [str(path)]
    known = indexes(local)
    os.utime(path, (2, 2))
    with IndexedDataset(local, index=known) as dataset, pytest.raises(ObjectChanged, match="wds-async index"):
        dataset[0]


def test_compressed_shards_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(make_shard({"a": {"txt": b"1"}})))
    with pytest.raises(ShardFormatError, match=r"compressed.*ShardListDataset"):
        IndexedDataset(path, index=indexes([str(path)]))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_indices_with_any_gap_give_the_samples_of_a_stream(tmp_path: Path, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=6), min_size=1, max_size=3))
    paths = []
    for shard, lengths in enumerate(sizes):
        path = tmp_path / f"{shard}.tar"
        path.write_bytes(make_shard({f"{shard}/{n}": {"a": bytes(size), "b": b"x"} for n, size in enumerate(lengths)}))
        paths.append(str(path))
    expected = streamed(paths)
    chosen = data.draw(st.lists(st.integers(-len(expected), len(expected) - 1), max_size=12))
    gap = data.draw(st.sampled_from([0, 512, 2048, 1 << 20]))
    with IndexedDataset(paths, index=indexes(paths), gap_bytes=gap) as dataset:
        found = dataset.__getitems__(chosen)
    for sample in expected:
        sample.pop("__local_path__")
    assert found == [expected[i] for i in chosen]


# ------------------------------------------------------------------ processes and threads


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_in_dataloader_workers(start: str, served: tuple[list[str], Nginx]) -> None:
    from torch.utils.data import DataLoader

    urls, _ = served
    dataset = IndexedDataset(urls, transformations=[key_of, int])
    if start == "fork":
        assert dataset[0] == 0  # connections are open before the fork
    sampler = WeightedSampler([1.0] * 36, seed=3)
    loader = DataLoader(
        dataset, batch_size=5, sampler=sampler, num_workers=2, multiprocessing_context=start, persistent_workers=True
    )
    epochs = [[int(x) for batch in loader for x in batch] for _ in range(2)]
    del loader
    assert [sorted(epoch) for epoch in epochs] == [list(range(36))] * 2
    assert epochs[0] != epochs[1]
    assert dataset[35] == 35  # the parent's own connections still work
    dataset.close()


def test_threads_share_one_and_copies_are_their_own(served: tuple[list[str], Nginx]) -> None:
    urls, _ = served
    with IndexedDataset(urls, transformations=[key_of, int]) as dataset:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(dataset.__getitem__, range(36))) == list(range(36))
        for other in (pickle.loads(pickle.dumps(dataset)), copy.copy(dataset)):
            with other:
                assert other[3] == 3
        assert dataset[4] == 4
    assert dataset[5] == 5  # opened again
    dataset.close()
    dataset.close()


def test_nothing_runs_before_the_first_sample_or_behind_the_last(served: tuple[list[str], Nginx]) -> None:
    urls, _ = served

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("wds-async-ranges")]

    dataset = IndexedDataset(urls)
    assert threads() == []
    dataset[0]
    assert len(threads()) == 1
    del dataset  # without close
    assert threads() == []


def test_close_ends_a_read_of_another_thread(tmp_path: Path, origin: Any) -> None:
    data = make_shard({f"{n}": {"txt": b"1"} for n in range(3)})
    url = origin.add("x.tar", data)
    known = indexes([url])
    origin.forget()
    origin.behave(delay_s=60)
    dataset = IndexedDataset(url, index=known)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(operator.getitem, dataset, 1)
        origin.wait_until(lambda one: len(one.requests) > 0)
        dataset.close()
        with pytest.raises(wds.WdsError, match="closed"):
            read.result(timeout=20)


def test_torch_takes_it_for_its_own(served: tuple[list[str], Nginx]) -> None:
    from torch.utils.data import Dataset, Subset

    urls, _ = served
    with IndexedDataset(urls) as dataset:
        assert isinstance(dataset, Dataset)
        assert Subset(dataset, [4])[0]["__key__"] == "000004"
        assert json.loads(dataset[4]["json"]) == {"number": 4}
