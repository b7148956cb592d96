"""Shards to samples through the engine: streams, handlers, counters, closing."""

from __future__ import annotations

import gc
import itertools
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import make_shard, make_tar
from wds_async.errors import CorruptShard, NotATar, ShardNotFound, TruncatedShard
from wds_async.handlers import ignore_and_continue, ignore_and_stop
from wds_async.pipeline import DataPipeline
from wds_async.tariterators import tarfile_samples, tarfile_to_samples

GOOD_A = make_shard({f"a{i}": {"txt": b"a%d" % i, "cls": b"1"} for i in range(3)})
GOOD_B = make_shard({f"a{i}": {"cls": b"2"} for i in range(2, 5)})  # begins with the key that GOOD_A ends with
BIG = make_shard({f"big{i}": {"bin": bytes(300_000), "cls": b"3"} for i in range(20)})


def keys(samples: Any) -> list[str]:
    return [sample["__key__"] for sample in samples]


def test_samples_of_several_shards(put: Any) -> None:
    urls = put(GOOD_A, GOOD_B, BIG)
    samples = list(tarfile_samples({"url": u} for u in urls))
    assert keys(samples)[:6] == ["a0", "a1", "a2", "a2", "a3", "a4"]
    assert samples[2] == {
        "__key__": "a2", "__url__": urls[0], "__local_path__": urls[0], "txt": b"a2", "cls": b"1"
    }  # fmt: skip
    assert set(samples[3]) == {"__key__", "__url__", "__local_path__", "cls"}
    assert samples[3].offset == 0
    assert samples[3].shard == urls[1]
    assert len(samples) == 26
    assert all(len(s["bin"]) == 300_000 for s in samples[6:])
    assert samples == list(tarfile_samples(urls))


BROKEN = [
    (None, ShardNotFound, 0),
    (b"", NotATar, 0),
    (b"<html>" + bytes(5000), NotATar, 0),
    (BIG[:700_000], TruncatedShard, 2),  # inside big2.bin
    (GOOD_A[:3072] + b"\xff" * 2048, CorruptShard, 1),
]


@pytest.mark.parametrize(("data", "error", "before"), BROKEN, ids=lambda x: getattr(x, "__name__", None))
def test_a_broken_shard_in_the_middle(put: Any, data: bytes | None, error: Any, before: int) -> None:
    urls = put(GOOD_A, data, GOOD_B)
    seen: list[str] = []
    with pytest.raises(error) as caught:
        _read_into(seen, tarfile_samples(urls))
    assert urls[1] in str(caught.value)
    assert len(seen) == 3 + before

    went_on = list(tarfile_samples(urls, ignore_and_continue))
    assert len(went_on) == 3 + before + 3
    assert keys(went_on)[-3:] == ["a2", "a3", "a4"]
    assert all("bin" not in s and "txt" not in s for s in went_on[-3:])
    assert keys(tarfile_samples(urls, ignore_and_stop)) == seen


def test_keys_case_and_suffixes(put: Any) -> None:
    urls = put(make_tar([("v1.0.x.JPG", b"1"), ("v1.0.x.cls", b"2"), ("v1.0.y.JPG", b"3")]))
    stage = tarfile_to_samples(keys=last_dot, lcase=False, suffixes={"JPG"})
    assert [(s["__key__"], s["JPG"], "cls" in s) for s in pickle.loads(pickle.dumps(stage))(urls)] == [
        ("v1.0.x", b"1", False),
        ("v1.0.y", b"3", False),
    ]
    assert keys(tarfile_samples(urls)) == ["v1"]


def last_dot(name: str) -> tuple[str, str]:
    key, _, field = name.rpartition(".")
    return key, field


def test_a_key_that_returns_is_warned_of_once_a_shard(put: Any) -> None:
    split = make_tar([(f"{i}.{ext}", b"1") for ext in ("a", "b") for i in range(5)])
    urls = put(*[GOOD_A] * 16, split)
    assert len(keys(tarfile_samples(urls[1:]))) == 15 * 3 + 10  # not looked at
    with pytest.warns(UserWarning, match=rf"{urls[16]}: the key '0' returns at byte 5120") as caught:
        assert len(keys(tarfile_samples(urls))) == 16 * 3 + 10
    assert len(caught) == 1


def test_many_keys_are_looked_at_in_bounded_memory(put: Any) -> None:
    near = make_tar([(f"{i % 60000:05}.{i // 60000}", b"") for i in range(60001)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(keys(tarfile_samples(put(near)))) == 60001  # too long ago to be remembered


def _read_into(seen: list[str], samples: Iterator[Any]) -> None:
    for sample in samples:
        seen.append(sample["__key__"])


def test_the_handler_is_asked_once_an_error(put: Any) -> None:
    asked: list[Exception] = []

    def handler(exn: Exception) -> bool:
        asked.append(exn)
        return True

    list(tarfile_samples(put(None, GOOD_A, b"x" * 2000, BIG[:400_000], None), handler))
    assert [type(exn) for exn in asked] == [ShardNotFound, NotATar, TruncatedShard, ShardNotFound]


def test_what_a_handler_raises_is_raised_once(put: Any) -> None:
    asked = []

    def handler(exn: Exception) -> bool:
        asked.append(exn)
        raise KeyError("mine")

    for shard in (make_tar([("a.txt", b"1"), ("a.txt", b"2")]), b"x" * 2000):
        asked.clear()
        with pytest.raises(KeyError, match="mine"):
            list(tarfile_samples(put(shard, GOOD_A), handler))
        assert len(asked) == 1


def test_an_error_of_the_shard_list_is_raised_in_its_place(put: Any) -> None:
    def shards() -> Iterator[str]:
        yield from put(GOOD_A)
        raise LookupError("no more")

    seen: list[str] = []
    with pytest.raises(LookupError, match="no more"):
        _read_into(seen, tarfile_samples(shards(), ignore_and_continue))
    assert seen == ["a0", "a1", "a2"]


def test_an_endless_shard_list(put: Any) -> None:
    source = itertools.cycle(put(GOOD_A))
    assert keys(itertools.islice(tarfile_samples(source), 1000)) == (["a0", "a1", "a2"] * 334)[:1000]


def test_counters_and_statistics(put: Any) -> None:
    stage = tarfile_to_samples(ignore_and_continue)
    pipeline = DataPipeline(tuple(put(GOOD_A, GOOD_B, b"x" * 2000, None)), stage)
    assert pipeline.statistics().samples == 0
    list(pipeline)
    stats = pipeline.statistics()
    assert (stats.samples, stats.bad_samples, stats.bad_shards, stats.epochs) == (6, 0, 1, 1)
    assert stats.passed_shards == 2
    assert stats.bytes >= len(GOOD_A) + len(GOOD_B)
    next(iter(pipeline))
    assert pipeline.statistics().samples == 7
    assert pipeline.statistics().epochs == 1


def test_many_samples_are_counted_when_the_consumer_leaves(put: Any) -> None:
    stage = tarfile_to_samples()
    urls = put(make_shard({f"{i:04}": {"cls": b"1"} for i in range(500)}))
    for n in (1, 63, 64, 65, 130):
        before = stage.statistics().samples
        iterator = stage(urls)
        assert len(list(itertools.islice(iterator, n))) == n
        del iterator
        gc.collect()
        assert stage.statistics().samples - before == n


def test_close_ends_open_iterators(put: Any) -> None:
    stage = tarfile_to_samples()
    pipeline = DataPipeline(tuple(put(BIG, BIG)), stage)
    iterator = iter(pipeline)
    assert next(iterator)["__key__"] == "big0"
    pipeline.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(iterator)


def test_leaving_early_warns_of_nothing(put: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (1, 5):
            iterator = tarfile_samples(put(BIG, BIG))
            list(itertools.islice(iterator, n))
            del iterator
            gc.collect()


def test_the_stage_pickles_and_counts_on_the_same_board(put: Any) -> None:
    stage = tarfile_to_samples()
    twin = pickle.loads(pickle.dumps(stage))
    assert len(list(twin(put(GOOD_A)))) == 3
    assert twin.board.total().samples == 3
    assert str(stage).startswith("<tarfile_samples ()")
