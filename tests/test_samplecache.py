"""Samples kept in LMDB and SQLite: what is replayed, when, by whom, and what is refused."""

from __future__ import annotations

import functools
import io
import itertools
import multiprocessing
import os
import pickle
import sqlite3
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
import webdataset

from wds_async.dataset import WebDataset
from wds_async.errors import ConfigError, MissingExtra, UnsafeContent
from wds_async.pipeline import DataPipeline
from wds_async.samplecache import LMDBCached, SQLiteCache


class Source:
    """``n`` samples, counting how often they were asked for."""

    def __init__(self, n: int = 5, start: int = 0) -> None:
        self.samples = [{"__key__": f"{i:03}", "cls": i} for i in range(start, start + n)]
        self.begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        return (dict(sample) for sample in self.samples)


class Private:
    """A class that no restricted unpickler knows."""


def by_worker(samples: Iterable[Any]) -> Iterator[Any]:
    info = torch.utils.data.get_worker_info()
    return itertools.islice(samples, info.id if info else 0, None, info.num_workers if info else 1)


def loaded(dataset: Any, workers: int = 2, **kw: Any) -> list[Any]:
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, **kw)
    return sorted((dict(sample) for sample in loader), key=lambda sample: str(sample["__key__"]))


KINDS: dict[str, Any] = {
    "lmdb": lambda path, size, **how: LMDBCached(path, **how),
    "sqlite": SQLiteCache,
}
both = pytest.mark.parametrize("kind", KINDS)


@both
@pytest.mark.parametrize("listed", [1, 2])
def test_samples_of_shards_are_plain_dicts(kind: str, listed: int, tmp_path: Path, shards: Any) -> None:
    """A cache holds no class of ours, however deep in it."""
    dataset = WebDataset([str(path) for path in shards(1, 4)], shardshuffle=False)
    source = dataset.listed(listed)
    cached = DataPipeline(source, KINDS[kind](tmp_path / "db", 4 // listed))
    assert list(cached) == list(cached) == list(source)
    assert [type(sample) for batch in cached for sample in batch] == [dict] * 4


@both
def test_samples_are_read_by_the_rules_for_pickles(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cache(name: str, **how: Any) -> Any:
        return KINDS[kind](tmp_path / name, 1, **how)

    arrays = {"__key__": "a", "x": np.arange(6.0).reshape(2, 3), "t": torch.arange(3), "s": ("text", b"bytes", None)}
    list(cache("db").run([arrays]))
    (back,) = cache("db").run([])
    np.testing.assert_array_equal(back["x"], arrays["x"])
    assert torch.equal(back["t"], arrays["t"])
    assert back["s"] == arrays["s"]

    private = [{"__key__": "a", "x": Private()}]
    with pytest.raises(UnsafeContent, match=r"not cached.*Private.*the cache takes allow_pickle"):
        list(cache("private").run(private))
    list(cache("private", allow_pickle=True).run(private))
    assert isinstance(next(iter(cache("private", allow_pickle=True).run([])))["x"], Private)
    with pytest.raises(UnsafeContent, match="Private"):
        list(cache("private").run([]))
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeContent, match="not allowed"):
        list(cache("db").run([]))


@pytest.mark.parametrize(("kind", "method"), [("sqlite", "fork"), ("lmdb", "fork"), ("lmdb", "spawn")])
def test_workers_share_the_stream(kind: str, method: str, tmp_path: Path) -> None:
    """webdataset's #445: each worker has its own LMDB file, none is taken for the others'; an SQLite file is common."""
    dataset = DataPipeline(tuple(Source(10)), by_worker, KINDS[kind](tmp_path / "db", 10))
    for _ in range(2):
        assert loaded(dataset, multiprocessing_context=method) == list(Source(10))
        dataset.pipeline[0] = ()
    if kind == "lmdb":
        assert len(list((tmp_path / "db").glob("*/data.mdb"))) == 2
    # Another split: another LMDB cache, of nothing here.
    assert loaded(dataset, 1) == ([] if kind == "lmdb" else list(Source(10)))


# ------------------------------------------------------------------ LMDB


def test_lmdb_stream_is_webdatasets(tmp_path: Path, shards: Any) -> None:
    """The same stream as webdataset's class, which reads our database as we read its."""
    urls = [str(path) for path in shards(2, 5)]
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    samples = list(WebDataset(urls, shardshuffle=False))
    shuffled = [samples[i] for i in (3, 1, 4, 0, 5, 9, 2, 6, 8, 7)]
    first = list(LMDBCached(ours).run(shuffled))
    stage = webdataset.LMDBCached(theirs)
    assert first == list(stage.run(map(dict, shuffled))) == shuffled
    replayed = list(stage.run([]))
    stage.db.close()
    assert list(LMDBCached(ours).run([])) == replayed == sorted(samples, key=lambda s: s["__key__"])
    assert list(LMDBCached(theirs).run([])) == replayed
    stage = webdataset.LMDBCached(ours)
    assert list(stage.run([])) == replayed
    stage.db.close()


def test_lmdb_loses_no_sample_to_its_key(tmp_path: Path) -> None:
    keys = ["a", "a", "_", "", "x" * 600, "x" * 600, "é", "b"]
    samples = [{"__key__": key, "n": i} for i, key in enumerate(keys)]
    stage = LMDBCached(tmp_path / "db", chunksize=3)
    assert list(stage.run(samples)) == samples
    assert sorted(sample["n"] for sample in stage.run([])) == list(range(len(keys)))
    tuples = [(i, "x") for i in range(12)]
    stage = LMDBCached(tmp_path / "tuples")
    assert list(stage.run(tuples)) == tuples
    assert sorted(stage.run([])) == tuples


def test_lmdb_of_two_iterators_at_once(tmp_path: Path) -> None:
    """The later one fills the database, the earlier one goes on without it."""
    stage = LMDBCached(tmp_path / "db", chunksize=1)
    one = stage.run(Source(6))
    head = list(itertools.islice(one, 3))
    other = list(LMDBCached(tmp_path / "db", chunksize=1).run(Source(4, start=50)))
    assert [s["cls"] for s in head + list(one)] == list(range(6))
    assert list(stage.run([])) == other
    replays = [stage.run([]), stage.run([])]
    assert [[next(r)["cls"] for r in replays] for _ in range(4)] == [[50 + i] * 2 for i in range(4)]


def test_lmdb_keeps_a_sample_as_it_passed(tmp_path: Path) -> None:
    stage = LMDBCached(tmp_path / "db")
    for sample in stage.run(Source(3)):
        sample["cls"] = "changed by a later stage"
    assert [sample["cls"] for sample in stage.run([])] == [0, 1, 2]


class Text:
    """A pickler of one's own."""

    @staticmethod
    def dumps(sample: Any) -> bytes:
        return repr(sample).encode()

    @staticmethod
    def loads(data: bytes) -> str:
        return data.decode()


def test_lmdb_with_another_pickler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_SECURE", "1")  # which is about pickles
    stage = LMDBCached(tmp_path / "db", pickler=Text)
    assert list(stage.run([1, 2])) == [1, 2]
    assert list(stage.run([])) == ["1", "2"]


def test_lmdb_too_small(tmp_path: Path) -> None:
    stage = LMDBCached(tmp_path / "db", map_size=1 << 16)
    with pytest.raises(ConfigError, match="map_size=65536"):
        list(stage.run({"__key__": str(i), "x": os.urandom(1000)} for i in range(1000)))
    assert not stage.is_complete()


def test_lmdb_bounds_a_transaction_in_bytes(tmp_path: Path) -> None:
    stage = LMDBCached(tmp_path / "db", chunksize=10**9)
    samples = stage.run({"__key__": str(i), "x": bytes(9 << 20)} for i in range(3))
    next(samples), next(samples), next(samples)
    with lmdb.open(str(tmp_path / "copy")), stage._open(str(tmp_path / "db")).begin() as transaction:
        assert transaction.get(b"1") is not None
        assert transaction.get(b"2") is None
    samples.close()


def test_lmdb_of_one_process_is_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = LMDBCached(tmp_path / "db")
    list(stage.run(Source(10)))
    assert loaded(DataPipeline((), stage)) == list(Source(10))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert [sample["cls"] for sample in stage.run([])] == [1, 3, 5, 7, 9]


def replay_in_child(stage: LMDBCached, queue: Any) -> None:
    queue.put([sample["cls"] for sample in stage.run([])])


def test_lmdb_in_a_forked_child_of_an_open_reader(tmp_path: Path) -> None:
    stage = LMDBCached(tmp_path / "db")
    list(stage.run(Source(4)))
    reading = stage.run([])
    next(reading)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=replay_in_child, args=(stage, queue))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert queue.get() == [0, 1, 2, 3]
    assert [sample["cls"] for sample in reading] == [1, 2, 3]


def test_lmdb_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(MissingExtra, match=r"wds-async\[lmdb\]"):
        list(LMDBCached(tmp_path / "db").run([1]))
    assert not (tmp_path / "db").exists()


# ------------------------------------------------------------------ SQLite


def test_db_fills_then_replays(tmp_path: Path) -> None:
    source = Source(10)
    cache = SQLiteCache(tmp_path / "c.db", 4, source)
    assert [list(cache), list(cache), list(SQLiteCache(tmp_path / "c.db", 4))] == [source.samples[:4]] * 3
    assert source.begun == 1
    assert (cache.total, cache.cachesize()) == (4, 4)
    assert cache.key_exists("003")
    assert not cache.key_exists("004")
    assert isinstance(cache, torch.utils.data.IterableDataset)


def test_db_goes_on_filling(tmp_path: Path) -> None:
    cache = SQLiteCache(tmp_path / "c.db", 4, Source(10))
    part = iter(cache)
    assert [next(part)["cls"], next(part)["cls"]] == [0, 1]
    part.close()
    assert cache.total == 2
    assert [sample["cls"] for sample in cache] == [0, 1, 2, 3]
    short = SQLiteCache(tmp_path / "s.db", 4).source_(source := Source(3))
    assert list(short) == list(short) == source.samples
    assert source.begun == 2  # it never holds four


def test_db_filled_by_another_meanwhile(tmp_path: Path) -> None:
    """Nobody's samples are cut short by the other: what is stored is part of his stream, too."""
    dataset = SQLiteCache(tmp_path / "x.db", 5, Source())
    first, second = iter(dataset), iter(dataset)
    begun = [next(first), next(first)]
    assert [sample["cls"] for sample in second] == [0, 1, 2, 3, 4]
    assert [sample["cls"] for sample in (*begun, *first)] == [0, 1, 2, 3, 4]
    endless = iter(SQLiteCache(tmp_path / "y.db", 3, itertools.cycle(Source().samples[:3])))
    next(endless)
    assert len(list(SQLiteCache(tmp_path / "y.db", 3, Source(3)))) == 3
    assert len(list(endless)) == 3


def test_db_off_and_without_source(tmp_path: Path) -> None:
    source = Source()
    assert list(SQLiteCache(None, 3, source)) == source.samples
    with pytest.raises(ConfigError, match="source"):
        list(SQLiteCache(tmp_path / "c.db", 3))
    with pytest.raises(ConfigError, match="off"):
        SQLiteCache(None, 3).getmeta("x")


def test_db_shuffles(tmp_path: Path) -> None:
    cache = SQLiteCache(tmp_path / "c.db", 100, Source(100), shuffle=True)
    assert [sample["cls"] for sample in cache] == list(range(100))
    first, second = [[sample["cls"] for sample in cache] for _ in range(2)]
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second


def test_db_meta(tmp_path: Path) -> None:
    cache = SQLiteCache(tmp_path / "c.db", 1)
    assert cache.getmeta("a") is None
    cache.setmeta("a", 1)
    cache.setmeta("a", 2)
    assert cache.getmeta("a") == "2"


def test_db_stores_tuples_by_their_content(tmp_path: Path) -> None:
    cache = SQLiteCache(tmp_path / "c.db", 2, [(1, "a"), (1, "a"), (2, "b"), (3, "c")])
    assert list(cache) == [(1, "a"), (1, "a"), (2, "b")]
    assert list(cache) == [(1, "a"), (2, "b")]


def test_db_reads_what_torch_saved(tmp_path: Path) -> None:
    """The files that webdataset's class wrote until 2023."""
    with sqlite3.connect(tmp_path / "c.db") as db:
        db.execute("create table cache (key text primary key, data blob)")
        db.execute("create table meta (key text, value text)")
        for key, sample in (("a", {"x": torch.arange(3)}), ("b", {"x": functools.partial(os.getcwd)})):
            buffer = io.BytesIO()
            torch.save(sample, buffer)
            db.execute("insert into cache values (?, ?)", (key, buffer.getvalue()))
    db.close()
    samples = iter(SQLiteCache(tmp_path / "c.db", 2))
    assert next(samples)["x"].tolist() == [0, 1, 2]
    with pytest.raises((UnsafeContent, pickle.UnpicklingError)):
        next(samples)


def test_db_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "c.db").write_bytes(b"not a database " * 100)
    with pytest.raises(ConfigError, match=r"c\.db.*name another file"):
        list(SQLiteCache(tmp_path / "c.db", 1, [1]))
    with pytest.raises(ConfigError, match="folder"):
        list(SQLiteCache(tmp_path / "no" / "c.db", 1, [1]))


def test_db_keeps_no_more_than_its_size_of_all_workers(tmp_path: Path) -> None:
    dataset = DataPipeline(tuple(Source(40)), by_worker, SQLiteCache(tmp_path / "c.db", 7))
    loaded(dataset)
    assert len(loaded(dataset)) == 7


def test_db_of_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        list(SQLiteCache(tmp_path / "c.db", 3, Source(3, start=int(rank) * 10)))
    assert [sample["cls"] for sample in SQLiteCache(tmp_path / "c.db", 3)] == [10, 11, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.db.0-of-2", "c.db.1-of-2"]


def test_db_in_another_thread(tmp_path: Path) -> None:
    samples = iter(SQLiteCache(tmp_path / "c.db", 3, Source(3)))
    found = [next(samples)]
    thread = threading.Thread(target=lambda: found.extend(samples))
    thread.start()
    thread.join()
    assert [sample["cls"] for sample in found] == [0, 1, 2]
