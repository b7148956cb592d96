"""The ledger: what is noted, by which process, where it is kept, and when it is too much."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import json
import logging
import os
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import make_shard, make_tar
from wds_async.errors import ConfigError, ShardNotFound, TooMuchLost
from wds_async.handlers import ignore_and_continue, ignore_and_stop
from wds_async.observe import ledger as ledgers
from wds_async.observe.ledger import BarrenShards, Ledgers, Skipped

GOOD = make_shard({f"{i:03}": {"cls": b"%d" % i} for i in range(30)})


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Good, missing, good."""
    paths = [tmp_path / f"{i}.tar" for i in range(3)]
    for path in paths[::2]:
        path.write_bytes(GOOD)
    return [str(path) for path in paths]


def dataset(urls: Any, **options: Any) -> Any:
    return wds.WebDataset(urls, **{"shardshuffle": False, "handler": ignore_and_continue, **options})


def fussy(sample: dict[str, Any], bad: tuple[str, ...] = ("007", "008")) -> dict[str, Any]:
    if sample["__key__"] in bad:
        raise LookupError(f"no {sample['__key__']}")
    return sample


def test_nothing(urls: list[str], caplog: Any) -> None:
    data = dataset(urls[:1]).map(fussy, handler=ignore_and_continue)
    with caplog.at_level(logging.WARNING, "wds_async"):
        next(iter(data))
    assert (len(data.ledger), data.ledger.entries(), data.ledger.summary()) == (0, [], "nothing was passed over")
    assert not caplog.records
    data = dataset(urls, handler=wds.reraise_exception)
    with pytest.raises(ShardNotFound):
        list(data)
    assert len(data.ledger) == 0  # what a handler raises is not recorded
    nothing = wds.DataPipeline([1, 2]).ledger
    assert (len(nothing), nothing.entries(), nothing.summary()) == (0, [], "nothing was passed over")


def test_shards_and_samples(urls: list[str], caplog: Any) -> None:
    data = dataset(urls).map(fussy, handler=ignore_and_continue)
    with caplog.at_level(logging.WARNING, "wds_async"):
        assert len(list(data)) == 56
    found = [(e.stage, e.kind, e.shard, e.offset, e.samples, e.key, e.rest, e.epoch) for e in data.ledger]
    assert found == [
        ("map", "LookupError", urls[0], 7 * 1024, 1, "007", False, 0),
        ("map", "LookupError", urls[0], 8 * 1024, 1, "008", False, 0),
        ("read", "ShardNotFound", urls[1], 0, None, None, True, 0),
        ("map", "LookupError", urls[2], 7 * 1024, 1, "007", False, 0),
        ("map", "LookupError", urls[2], 8 * 1024, 1, "008", False, 0),
    ]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("epoch 0: passed over 4 samples and 1 shard (")
    assert "4 LookupError, 1 ShardNotFound; first: " in line
    stats = data.statistics()
    assert (stats.bad_samples, stats.passed_shards, stats.samples) == (4, 1, 60)
    list(data)
    assert [e.epoch for e in data.ledger] == [0] * 5 + [1] * 5
    assert "passed over 8 samples and 2 shards" in data.ledger.summary()
    data.set_epoch(7)
    list(data)
    assert data.ledger.entries()[-1].epoch == 7


STAGES: dict[str, Any] = {
    "map": lambda d, h: d.map(fussy, handler=h),
    "map with threads": lambda d, h: d.map(fussy, handler=h, threads=2),
    "select": lambda d, h: d.select(fussy, handler=h),
    "map_dict": lambda d, h: d.map_dict(handler=h, cls=functools.partial(_seven, b"7")),
    "rename": lambda d, h: d.map(_without).rename(handler=h, x="cls"),
    "rename_keys": lambda d, h: d.map(_without).rename_keys(("x", "cls"), handler=h),
    "extract_keys": lambda d, h: d.map(_without).extract_keys("cls", handler=h),
    "to_tuple": lambda d, h: d.map(_without).to_tuple("cls", handler=h),
    "map_tuple": lambda d, h: d.to_tuple("cls").map_tuple(functools.partial(_seven, b"7"), handler=h),
    "decode": lambda d, h: d.decode(_fussy_decoder, handler=h),
    "decode with threads": lambda d, h: d.decode(_fussy_decoder, handler=h, threads=2),
    "positional": lambda d, h: d.compose(wds.map(fussy, h)),
}


def _seven(what: Any, value: Any) -> Any:
    if value in (what, b"8"):
        raise LookupError
    return value


def _fussy_decoder(key: str, data: bytes) -> Any:
    return _seven(b"7", data)


def _without(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"] in ("007", "008"):
        del sample["cls"]
    return sample


@pytest.mark.parametrize("stage", STAGES)
def test_stages(urls: list[str], stage: str) -> None:
    build = STAGES[stage]
    on, off = build(dataset(urls[:1]), ignore_and_continue), build(dataset(urls[:1]), ignore_and_stop)
    assert (len(list(on)), len(on.ledger)) == (28, 2)
    assert (len(list(off)), len(off.ledger)) == (7, 1)
    entry = on.ledger.entries()[0]
    assert entry.stage == stage.split(maxsplit=1)[0].replace("positional", "map")
    assert entry.samples == 1
    if "threads" not in stage and stage != "map_tuple":  # which know less
        assert (entry.shard, entry.key) == (urls[0], "007")
    if stage == "decode":
        assert (entry.field, entry.kind, entry.offset) == ("cls", "DecodingError", 7 * 1024)
    raising = build(dataset(urls[:1]), wds.reraise_exception)
    with pytest.raises(Exception, match=r".*"):
        list(raising)
    assert len(raising.ledger) == 0


def test_batches_count_their_samples(urls: list[str]) -> None:
    def no(batch: Any) -> Any:
        raise LookupError

    data = dataset(urls[:1]).batched(10).map(no, handler=ignore_and_continue).unbatched().map(no, ignore_and_continue)
    assert list(data) == []
    assert [e.samples for e in data.ledger] == [10] * 3


def test_a_duplicate_field_and_a_predicate(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(make_tar([("a.txt", b"1"), ("a.TXT", b"2"), ("b.txt", b"1"), ("c.txt", b"1")]))
    data = dataset(str(path), select_files=lambda name: 1 // (name != "b.txt"))
    assert [s["__key__"] for s in data] == ["a", "c"]
    assert [(e.kind, e.key, e.field, e.samples) for e in data.ledger] == [
        ("DuplicateField", "a", "txt", 1),
        ("ZeroDivisionError", None, None, 1),
    ]


def test_workers(urls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WDS_LEDGER", str(tmp_path / "lost-{rank}.jsonl"))
    data = dataset(urls, empty_check=False).map(fussy, handler=ignore_and_continue)
    loader = wds.WebLoader(data, batch_size=None, num_workers=2)
    for epoch in range(2):
        assert len(list(loader)) == 56
        assert len(loader.ledger) == 5 * (epoch + 1)
    assert loader.ledger is data.ledger
    behind = loader.map(functools.partial(fussy, bad=("001",)), handler=ignore_and_continue)  # in this process
    assert sorted(e.epoch for e in data.ledger) == [0] * 5 + [1] * 5
    assert {e.worker for e in data.ledger} == {0, 1}
    assert data.statistics().bad_samples == 8
    lines = [json.loads(line) for line in (tmp_path / "lost-0.jsonl").read_text().splitlines()]
    assert sorted(line["shard"] for line in lines) == sorted([urls[0], urls[1], urls[2]] * 2 + [urls[0], urls[2]] * 2)
    assert len(list(behind)) == 54
    assert [e.epoch for e in data.ledger if e.key == "001"] == [None, None]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_worker_leaves_what_it_noted(urls: list[str]) -> None:
    data = dataset(urls).map(fussy, handler=ignore_and_continue)
    pid = os.fork()
    if pid == 0:
        try:
            for sample in data:
                if sample["__key__"] == "020":
                    os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert [e.key for e in data.ledger] == ["007", "008"]
    assert data.ledger.summary().startswith("passed over 2 samples")


def test_entries_are_bounded(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "KEPT", 3)
    data = dataset(urls[:1]).map(lambda s: fussy(s, (s["__key__"],)), handler=ignore_and_continue)
    list(data)
    assert (len(data.ledger), len(data.ledger.entries())) == (30, 3)
    assert data.ledger.summary().endswith("27 of 30 are counted but not kept (WDS_LEDGER)")
    pid = os.fork() if not list(data) else 0
    if pid == 0:
        list(data)
        os._exit(0)
    os.waitpid(pid, 0)
    assert (len(data.ledger), len(data.ledger.entries())) == (90, 6)
    assert data.ledger.counts().reasons == {"LookupError": 90}


def test_pickles_carry_the_counts(urls: list[str]) -> None:
    data = dataset(urls)
    list(data)
    for other in (pickle.loads(pickle.dumps(data)), copy.deepcopy(data)):
        assert (len(other.ledger), other.ledger.entries()) == (1, [])
        list(other)
        assert (len(other.ledger), len(other.ledger.entries())) == (2, 1)
    assert len(data.ledger) == 1
    assert pickle.loads(pickle.dumps(data.ledger)).counts() == data.ledger.counts()


def test_several_readers(urls: list[str]) -> None:
    sources = [dataset(urls), dataset(urls)]
    mixed = wds.FluidWrapper(wds.RoundRobin(sources, longest=True)).map(fussy, handler=ignore_and_continue)
    assert len(list(mixed)) == 112
    assert isinstance(mixed.ledger, Ledgers)
    assert len(mixed.ledger) == 10
    assert mixed.ledger.summary().startswith("passed over 8 samples and 2 shards")
    spec = dataset({"datasets": [{"shards": urls[:2], "weight": 1}, {"shards": urls[1:], "weight": 1}]})
    assert len(list(spec)) == 60
    assert len(spec.ledger) == 2


def test_the_file_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    for bad in (tmp_path, tmp_path / "no" / "x.jsonl"):
        monkeypatch.setenv("WDS_LEDGER", str(bad))
        with pytest.raises(ConfigError, match="WDS_LEDGER"):
            dataset("x.tar")
    folder = tmp_path / "later"
    folder.mkdir()
    monkeypatch.setenv("WDS_LEDGER", str(folder / "x.jsonl"))
    data = dataset([str(tmp_path / f"{i}.tar") for i in range(2)], empty_check=False)
    assert not list(folder.iterdir())
    folder.rmdir()
    with caplog.at_level(logging.WARNING, "wds_async"):
        assert list(data) == []
    assert sum("cannot be written any more" in record.getMessage() for record in caplog.records) == 1
    assert len(data.ledger) == 2


def test_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "lost.jsonl"
    monkeypatch.setenv("WDS_LEDGER", str(path))
    url = f"{tmp_path}/x.tar&token=hunter2"
    data = dataset(url, empty_check=False)
    assert list(data) == []
    assert "hunter2" not in path.read_text() + repr(data.ledger) + data.ledger.entries()[0].reason


@pytest.fixture
def many(tmp_path: Path) -> list[str]:
    """12,000 samples in two shards."""
    shard = make_shard({f"{i:05}": {"cls": b""} for i in range(6000)})
    for name in "ab":
        (tmp_path / f"{name}.tar").write_bytes(shard)
    return [str(tmp_path / f"{name}.tar") for name in "ab"]


def _every(n: int, sample: dict[str, Any]) -> dict[str, Any]:
    return fussy(sample, (sample["__key__"],)) if int(sample["__key__"]) % n == 0 else sample


def test_max_bad_fraction(many: list[str], caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.WARNING, "wds_async"):
        data = dataset(many).map(functools.partial(_every, 50), handler=ignore_and_continue)
        assert len(list(data)) == 12_000 * 49 // 50
    assert sum("more than 1 % is lost" in record.getMessage() for record in caplog.records) == 1
    ended = dataset(many, max_bad_fraction=0.015).map(functools.partial(_every, 50), handler=ignore_and_continue)
    # A stage behind it with a handler of its own is not asked.
    ended = ended.map(fussy, handler=ignore_and_continue)
    seen: list[Any] = []
    with pytest.raises(TooMuchLost, match=r"max_bad_fraction=0.015: .* \(2.00%\): 201 LookupError.*: .*a\.tar") as e:
        seen.extend(ended)
    assert 9_700 < len(seen) < 9_900
    assert isinstance(pickle.loads(pickle.dumps(e.value)), TooMuchLost)
    fine = dataset(many, max_bad_fraction=0.03).map(functools.partial(_every, 50), handler=ignore_and_continue)
    assert len(list(fine)) == 12_000 * 49 // 50
    monkeypatch.setenv("WDS_MAX_BAD_FRACTION", "0")
    with pytest.raises(TooMuchLost):
        list(dataset(many).map(functools.partial(_every, 5999), handler=ignore_and_continue))
    with pytest.raises(ConfigError, match="max_bad_fraction=2"):
        dataset(many, max_bad_fraction=2)


def test_losses_before_enough_was_read_are_judged_later(many: list[str]) -> None:
    """The first shard is gone; nothing more is lost when 10,000 samples have been read."""
    data = dataset([many[0] + ".gone", *many], max_bad_fraction=0.1)
    seen: list[Any] = []
    with pytest.raises(TooMuchLost, match="ShardNotFound"):
        seen.extend(data)
    assert 9_900 <= len(seen) <= 10_100


@pytest.mark.parametrize("case", ["resampled", "a long list", "they fail later", "nothing is selected"])
def test_nothing_but_failing_shards_ends(tmp_path: Path, urls: list[str], case: str) -> None:
    """With shards that are drawn without end it would go on for ever."""
    missing = [str(tmp_path / f"missing-{i}.tar") for i in range(1100)]
    data = {
        "resampled": lambda: dataset(missing, resampled=True),
        "a long list": lambda: dataset(missing, empty_check=False),
        "they fail later": lambda: dataset(urls, resampled=True),
        "nothing is selected": lambda: dataset(urls, resampled=True, select_files=lambda name: "misspelt" in name),
    }[case]()
    iterator = iter(data)
    if case == "they fail later":
        next(iterator)
        for url in urls[::2]:
            os.unlink(url)
    with pytest.raises(TooMuchLost, match=r"shards in a row \([\d,]+ different ones\) gave no sample") as caught:
        list(iterator)
    assert ("× no sample in it" in str(caught.value)) == (case == "nothing is selected")
    if data.ledger.entries()[0].shard in missing:
        assert len(data.ledger) == 1000


def _broken_shards(tmp_path: Path) -> list[str]:
    """Three that are missing, and two that are no tar."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for number in (3, 4):
        (folder / f"{number}.tar").write_bytes(b"<html>" * 200)
    return [str(folder / f"{number}.tar") for number in range(5)]


def _drawn(urls: list[str]) -> Iterator[dict[str, str]]:
    rng = random.Random(1)
    while True:
        yield {"url": rng.choice(urls)}


def _shuffled(urls: list[str]) -> Iterator[dict[str, str]]:
    rng = random.Random(1)
    while True:
        yield from ({"url": url} for url in rng.sample(urls, len(urls)))


ENDLESS: dict[str, Callable[[list[str]], Any]] = {
    "resampled": lambda urls: dataset(urls, resampled=True),
    "ResampledShards": lambda urls: wds.DataPipeline(wds.ResampledShards(urls), READ),
    "cycle": lambda urls: wds.DataPipeline(lambda: itertools.cycle({"url": url} for url in urls), READ),
    "drawn": lambda urls: wds.DataPipeline(functools.partial(_drawn, urls), READ),
    "shuffled": lambda urls: wds.DataPipeline(functools.partial(_shuffled, urls), wds.split_by_worker, READ),
    "filter": lambda urls: wds.DataPipeline(wds.SimpleShardList(urls), wds.shardlists.resampled(), READ),
    "mixed": lambda urls: wds.RandomMix([dataset(urls, resampled=True)]),
    "records": lambda urls: wds.DataPipeline(wds.ResampledShards(urls), wds.cbors_to_samples(ignore_and_continue)),
}
READ = wds.tarfile_to_samples(ignore_and_continue)


@pytest.mark.parametrize("source", ENDLESS)
def test_an_endless_source_of_failing_shards_ends(tmp_path: Path, source: str) -> None:
    with pytest.raises(TooMuchLost) as caught:
        next(iter(ENDLESS[source](_broken_shards(tmp_path))))
    said = str(caught.value)
    assert "shards in a row (5 different ones) gave no sample" in said
    assert "× ShardNotFound\n" in said
    assert f"{'× NotATar' if source != 'records' else '× CorruptShard'}\n" in said
    assert all(f"{number}.tar" in said for number in range(5))
    assert said.count("\n") < 12


@pytest.mark.parametrize("options", [{"repeat": True}, {"repeat": True, "empty_check": False}], ids=str)
def test_a_repeated_list_of_failing_shards_ends(tmp_path: Path, options: dict[str, Any]) -> None:
    """A pass without a sample is the last one, with or without `empty_check`."""
    data = dataset(_broken_shards(tmp_path), **options)
    with pytest.raises(ConfigError) if "empty_check" not in options else contextlib.nullcontext():
        assert list(data) == []
    assert len(data.ledger) == 5


def test_one_good_shard_keeps_an_endless_source_going(tmp_path: Path, urls: list[str]) -> None:
    data = dataset([*_broken_shards(tmp_path), urls[0]], resampled=True, seed=1)
    assert len(list(itertools.islice(data, 2000))) == 2000
    assert len(data.ledger) > 300


def test_a_long_list_of_failing_shards_is_no_endless_one(tmp_path: Path, urls: list[str]) -> None:
    """Each is read once, so that something may follow."""
    shards = [str(tmp_path / f"missing-{number}.tar") for number in range(900)]
    assert len(list(dataset([*shards, *urls]))) == len(list(dataset(urls)))


def test_barren_shards_by_chance() -> None:
    """Nine of ten shards fail, drawn at random: that is no reason to stop, at any time."""
    rng, barren = random.Random(5), BarrenShards()
    entry = Skipped(stage="read", reason="ShardNotFound: gone")
    assert not any(
        barren.add(str(number), 0 if number else 5, entry if number else None)
        for number in rng.choices(range(10), k=100_000)
    )


def test_a_pass_tells_when_it_is_left(urls: list[str], caplog: Any) -> None:
    data = dataset(urls).map(fussy, handler=ignore_and_continue)
    gc.collect()  # what other tests have left would tell of itself
    with caplog.at_level(logging.WARNING, "wds_async"):
        iterator = iter(data)
        for _ in range(8):
            next(iterator)
        assert not caplog.records
        del iterator
        gc.collect()
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == ["epoch 0: passed over 2 samples"]
