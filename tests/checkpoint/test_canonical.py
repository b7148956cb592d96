"""Global batches are the same for every number of ranks and workers, and go on so in every other one."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wds_async as wds
from tests.checkpoint import jobs
from tests.servers import Origin, make_shards
from tests.servers.shards import make_shard, sample_fields
from wds_async import logs, world
from wds_async.errors import ConfigError, StateError
from wds_async.indexed.scan import scan_shards
from wds_async.shardlists.canonical import CanonicalSplit, CanonicalState, GlobalBatches
from wds_async.shardlists.spans import SampleOffsets

SIZES = (11, 30, 1, 40, 17, 9, 21)
GLOBAL = 24
TOTAL = sum(SIZES)


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return written(tmp_path)


def written(folder: Path) -> list[str]:
    """Return shards of several sizes in ``folder``, with indexes beside them."""
    numbers, found = itertools.count(), []
    for shard, size in enumerate(SIZES):
        path = folder / f"{shard:03d}.tar"
        path.write_bytes(make_shard({f"{n:06d}": sample_fields(n) for n in itertools.islice(numbers, size)}))
        found.append(str(path))
    write_indexes(found)
    return found


def write_indexes(urls: Sequence[str]) -> None:
    for scanned in scan_shards(urls):
        assert scanned.index is not None
        Path(f"{scanned.url}.index").write_bytes(scanned.index.to_bytes())


def dataset(urls: list[str], ranks: int, **kw: Any) -> wds.WebDataset:
    kw = {"canonical": GLOBAL, "index": True, "shardshuffle": "epoch", "seed": 7, **kw}
    size = kw["canonical"] // ranks
    return wds.WebDataset(urls, **kw).to_tuple("__key__").map(key_of).batched(size, collation_fn=None)


def key_of(sample: tuple[str]) -> str:
    return sample[0]


def job_of(make: Callable[[int], Any], ranks: int, *args: Any) -> jobs.Job:
    """Return a job whose datasets are ``make(ranks)``."""
    return jobs.Job(functools.partial(make, ranks), ranks, *args)


@pytest.fixture
def whole(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The global batches of the first epoch."""
    found = job_of(lambda ranks: dataset(urls, ranks), 1, None, monkeypatch).batches()
    assert [len(batch) for batch in found] == [GLOBAL] * (TOTAL // GLOBAL)
    assert len(set(itertools.chain(*found))) == TOTAL // GLOBAL * GLOBAL
    return found


# -- the plan ---------------------------------------------------------------------------------------------------------


def samples(batches: GlobalBatches, number: int, first: int, behind: int) -> list[int]:
    return [n for run in batches.runs(number, first, behind) for n in range(*run)]


@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 6), st.sampled_from(["drop", "pad", "repeat"]))
def test_every_sample_is_in_one_batch(total: int, each: int, places: int, equal: str) -> None:
    batches = GlobalBatches(total, each * places, equal, places)
    size = each * places
    found = [samples(batches, number, 0, size) for number in range(len(batches))]
    assert all(len(batch) == size for batch in found)
    taken = sorted(itertools.chain(*found))
    if equal == "drop":
        assert taken == list(range(total - batches.left_out))
        assert batches.left_out < size
    else:
        assert set(taken) == set(range(total))
        assert len(taken) - total < size
    for parts in (n for n in range(1, size + 1) if size % n == 0):
        part = size // parts
        for number, batch in enumerate(found):
            runs = [samples(batches, number, n * part, (n + 1) * part) for n in range(parts)]
            assert list(itertools.chain(*runs)) == batch


def offsets(size: int) -> SampleOffsets:
    import numpy as np

    return SampleOffsets(np.arange(size, dtype=np.int64) * 1024, np.full(size, 1024, np.uint32), "v")


def read(split: CanonicalSplit, sizes: Sequence[int], state: CanonicalState) -> Iterator[tuple[int, int]]:
    """The samples that the spans of ``split`` hold, as shard and number."""
    for entry in split.run([{"url": str(n)} for n in range(len(sizes))], state=state):
        shard = int(entry["url"])
        stop = entry.get("stop", sizes[shard] * 1024)
        yield from ((shard, at // 1024) for at in range(entry.get("start", 0), stop, 1024))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 5),
    st.integers(0, 8),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, "pad", "repeat"]),
)
def test_ranks_and_workers_make_the_same_batches(
    sizes: list[int], ranks: int, workers: int, begin: int, places: int, equal: str | None
) -> None:
    split = CanonicalSplit({str(n): offsets(size) for n, size in enumerate(sizes)}, 8, equal, places)
    if sum(sizes) < 8 and equal is None:
        with pytest.raises(ConfigError, match="fewer than a global batch"):
            list(read(split, sizes, CanonicalState()))
        return

    def job(ranks: int, workers: int, begin: int) -> list[list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = {}
        size = 8 // ranks
        for rank, worker in itertools.product(range(ranks), range(workers)):
            state = CanonicalState()
            state.load({"first": begin, "shape": [8, places]})
            with world.standing_at(world.Place(rank, ranks, worker, workers)):
                for n, sample in enumerate(read(split, sizes, state)):
                    found.setdefault(n // size * workers + worker, []).append(sample)
        return [found[number] for number in range(len(found))]

    assert job(ranks, workers, begin) == job(1, 1, 0)[begin:]


def test_runs_that_follow_on_each_other_are_one_span() -> None:
    split = CanonicalSplit({name: offsets(20) for name in "abc"}, 4)
    with world.standing_at(world.Place(0, 1, 0, 1)):
        assert list(split.run(["a", "b", "c"])) == [{"url": name, "version": "v"} for name in "abc"]
    with world.standing_at(world.Place(1, 2, 0, 1)):
        assert [(span["start"], span["stop"]) for span in split.run(["a"])][:2] == [(2048, 4096), (6144, 8192)]


# -- real readers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_same_batches_for_every_number_of_ranks(
    ranks: int, urls: list[str], whole: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(lambda ranks: dataset(urls, ranks), ranks, None, monkeypatch)
    assert job.batches() == whole
    job.begin()
    assert job.batches() != whole  # the next epoch has another order


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("ranks", "workers"), [(1, 3), (2, 2), (4, 1)])
def test_the_same_batches_for_every_number_of_workers(
    ranks: int, workers: int, urls: list[str], whole: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job_of(lambda ranks: dataset(urls, ranks), ranks, workers, monkeypatch).batches() == whole


@pytest.mark.parametrize("places", [2, 4, 8])
def test_batches_from_several_places(places: int, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make: Callable[[int], Any] = lambda ranks: dataset(urls, ranks, interleave=places, shardshuffle=False)  # noqa: E731
    whole = job_of(make, 1, None, monkeypatch).batches()
    each, all_in = GLOBAL // places, TOTAL // GLOBAL * GLOBAL
    assert whole[1] == [f"{place * (all_in // places) + each + n:06d}" for place in range(places) for n in range(each)]
    assert sorted(itertools.chain(*whole)) == [f"{n:06d}" for n in range(all_in)]
    job = job_of(make, 2, None, monkeypatch)
    found = job.batches(2)
    state = job.merged()
    job = job_of(make, 8, None, monkeypatch, state)
    assert found + job.batches() == whole
    for ranks in (2, 8):
        with pytest.raises(StateError, match=f"from {places} places"):
            job_of(lambda n: dataset(urls, n, shardshuffle=False), ranks, None, monkeypatch, state).batches()


@pytest.mark.parametrize("equal", ["drop", "pad", "repeat"])
def test_what_is_behind_the_last_whole_batch(
    equal: str, urls: list[str], whole: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = (
        job_of(lambda ranks: dataset(urls, ranks, equal=equal), ranks, None, monkeypatch).batches()
        for ranks in (1, 2, 8)
    )
    assert all(other == first for other in others)
    assert first[: len(whole)] == whole
    if equal == "drop":
        assert len(first) == len(whole)
        return
    assert len(first) == len(whole) + 1
    assert {key for batch in first for key in batch} == {f"{n:06d}" for n in range(TOTAL)}
    rest = TOTAL % GLOBAL
    filled = {"pad": [first[-1][rest - 1]] * (GLOBAL - rest), "repeat": first[0][: GLOBAL - rest]}
    assert first[-1][rest:] == filled[equal]


def test_samples_that_are_left_out_are_told(
    urls: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_process", logs.Once())
    with caplog.at_level(logging.INFO, "wds_async"):
        list(dataset(urls, 1))
        assert caplog.text.count(f"{TOTAL % GLOBAL} of {TOTAL} samples are left out") == 1
        assert "equal='pad'" in caplog.text
        caplog.clear()
        list(dataset(urls, 1, equal="drop"))
        assert [record.levelname for record in caplog.records if "left out" in record.message] == ["INFO"]


def test_lengths(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for equal in (None, "pad"):
        samples = wds.WebDataset(urls, canonical=GLOBAL, index=True, shardshuffle="epoch", seed=7, equal=equal)
        batches = samples.to_tuple("__key__").batched(GLOBAL // 2)
        assert len(samples) == len(batches) * GLOBAL // 2 == len(list(samples))
        for workers in (0, 2):
            loader = wds.WebLoader(batches, batch_size=None, num_workers=workers)
            assert len(loader) == len(batches) == TOTAL // GLOBAL + bool(equal)


def test_batches_that_the_loader_makes(
    urls: list[str], whole: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loader(ranks: int, size: int) -> wds.WebLoader:
        samples = wds.WebDataset(urls, canonical=GLOBAL, index=True, shardshuffle="epoch", seed=7)
        return wds.WebLoader(samples.to_tuple("__key__").map(key_of), batch_size=size, num_workers=2)

    job = job_of(lambda ranks: loader(ranks, GLOBAL // ranks), 2, None, monkeypatch)
    found = job.batches(3)
    state = job.merged()
    job = job_of(lambda ranks: loader(ranks, GLOBAL // ranks), 4, None, monkeypatch, state)
    assert found + job.batches() == whole
    with pytest.raises(ConfigError, match="have 5"):
        list(loader(1, 5))


# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", range(TOTAL // GLOBAL))
def test_the_same_ranks_go_on_to_the_bit(
    given: int, urls: list[str], whole: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(lambda ranks: dataset(urls, ranks), 3, None, monkeypatch)
    found = job.batches(given)
    job = job_of(lambda ranks: dataset(urls, ranks), 3, None, monkeypatch, job.merged())
    assert found + job.batches() == whole


@pytest.mark.parametrize("given", range(TOTAL // GLOBAL + 1))
def test_other_ranks_go_on_with_the_next_batch(
    given: int, urls: list[str], whole: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Callable[[int], Any] = lambda ranks: dataset(urls, ranks)  # noqa: E731
    job = job_of(make, 2, None, monkeypatch)
    found = job.batches(given)
    for ranks in (8, 1, 4)[: len(whole) - given]:
        job = job_of(make, ranks, None, monkeypatch, job.merged())
        found += job.batches(1)
    job = job_of(make, 3, None, monkeypatch, job.merged())
    assert found + job.batches() == whole


@pytest.fixture(scope="module")
def urls_kept(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return written(tmp_path_factory.mktemp("shards"))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), st.integers(0, 2)), min_size=1, max_size=5),
    st.sampled_from([None, "pad", "repeat"]),
    st.sampled_from([24, 48]),
)
def test_any_ranks_from_any_batch_on(
    urls_kept: list[str], steps: list[tuple[int, int]], equal: str | None, size: int
) -> None:
    def make(ranks: int) -> Any:
        return dataset(urls_kept, ranks, equal=equal, canonical=size)

    with pytest.MonkeyPatch.context() as mp:
        whole = job_of(make, 1, None, mp).batches()
        state, found = None, []
        for ranks, count in steps:
            job = job_of(make, ranks, None, mp, state)
            found += job.batches(min(count, len(whole) - len(found)))
            state = job.merged()
            job.close()
        assert found + job_of(make, 2, None, mp, state).batches() == whole


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("steps", [(2, 0, 3), (0, 3, 2)], ids=str)
def test_other_ranks_and_workers_there_and_back(
    steps: tuple[int, ...], urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kw = {"canonical": 8, "equal": "pad"}
    make: Callable[[int], Any] = lambda ranks: dataset(urls, ranks, **kw)  # noqa: E731
    epochs = job_of(make, 1, None, monkeypatch)
    whole = epochs.batches()
    epochs.begin()
    following = epochs.batches()
    job = job_of(make, 2, 3, monkeypatch)
    found = job.batches(steps[0])
    for (ranks, workers), step in zip([(4, 2), (1, 0), (8, 1)], [*steps[1:], 1], strict=True):
        job = job_of(make, ranks, workers, monkeypatch, job.merged())
        found += job.batches(step)
    job = job_of(make, 2, 3, monkeypatch, job.merged())
    assert found + job.batches() == whole
    job.begin()
    assert job.batches() == following


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 5, 6])
def test_an_epoch_of_the_loader_goes_on_through_passes(
    step: int, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight batches are more than the data has, and its second pass is in another order."""

    def make(ranks: int) -> Any:
        return wds.WebLoader(dataset(urls, ranks), batch_size=None, num_workers=2 if ranks < 4 else 1).with_epoch(8)

    whole = job_of(make, 1, None, monkeypatch).batches()
    job = job_of(make, 2, None, monkeypatch)
    found = job.batches(step)
    job = job_of(make, 4, None, monkeypatch, job.merged())
    assert found + job.batches() == whole
    assert whole[5:] != whole[:3]


def test_ranks_at_different_batches(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(lambda ranks: dataset(urls, ranks), 2, None, monkeypatch)
    next(job.iterators[1])
    with pytest.raises(StateError, match="different global batches"):
        job_of(lambda ranks: dataset(urls, ranks), 4, None, monkeypatch, job.merged())


def test_a_batch_that_was_begun_comes_whole(
    urls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make: Callable[[int], Any] = lambda ranks: wds.WebDataset(  # noqa: E731
        urls, canonical=GLOBAL, index=True, shardshuffle=False
    ).map(lambda sample: sample["__key__"])
    job = job_of(make, 1, None, monkeypatch)
    assert list(itertools.islice(job.iterators[0], 29)) == [f"{n:06d}" for n in range(29)]
    job = job_of(make, 2, None, monkeypatch, job.merged())
    assert "behind 5 of the 24" in caplog.text
    found = [sample for iterator in job.iterators for sample in iterator]
    assert sorted(found) == [f"{n:06d}" for n in range(24, TOTAL // GLOBAL * GLOBAL)]


def test_samples_that_a_stage_holds_come_once(
    urls: list[str], whole: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(ranks: int) -> Any:
        samples = wds.WebDataset(urls, canonical=GLOBAL, index=True, shardshuffle="epoch", seed=7)
        return samples.map(lambda one: one["__key__"], threads=3).batched(GLOBAL // ranks, collation_fn=None)

    job = job_of(make, 2, None, monkeypatch)
    found = job.batches(2)
    job = job_of(make, 4, None, monkeypatch, job.merged())
    assert found + job.batches() == whole


def test_behind_a_shuffle_every_sample_comes_once(
    urls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_process", logs.Once())

    def make(ranks: int) -> Any:
        samples = wds.WebDataset(urls, canonical=GLOBAL, index=True, shardshuffle=False).shuffle(20, seed=1)
        return samples.to_tuple("__key__").map(key_of).batched(GLOBAL // ranks, collation_fn=None)

    job = job_of(make, 2, None, monkeypatch)
    assert "the stage shuffle" in caplog.text
    found = job.batches(2)
    job = job_of(make, 4, None, monkeypatch, job.merged())
    taken = [key for rank in job.iterators for batch in rank for key in batch]
    assert sorted([*itertools.chain(*found), *taken]) == [f"{n:06d}" for n in range(TOTAL // GLOBAL * GLOBAL)]


def test_another_global_batch_is_refused(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(lambda ranks: dataset(urls, ranks), 2, None, monkeypatch)
    job.batches(1)
    with pytest.raises(StateError, match="global batches of 24"):
        job_of(lambda ranks: dataset(urls, ranks, canonical=12), 2, None, monkeypatch, job.merged()).batches()


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kw", "match"),
    [
        ({"canonical": True}, "of how many samples"),
        ({"canonical": 0}, "canonical"),
        ({"index": None}, "needs index"),
        ({"split": "bytes"}, "no split="),
        ({"steps": 3}, "no steps="),
        ({"resampled": True}, "resampled"),
        ({"nodesplitter": None}, "nodesplitter"),
        ({"equal": "never"}, "equal="),
        ({"interleave": 3}, "multiple"),
        ({"ordered": False}, "ordered=False"),
        ({"keys": str.split}, "keys="),
    ],
)
def test_arguments_that_do_not_go_together(kw: dict[str, Any], match: str, urls: list[str]) -> None:
    with pytest.raises((ConfigError, TypeError, ValueError), match=match):
        wds.WebDataset(urls, **{"canonical": 8, "index": True, "shardshuffle": False, **kw})


def test_batches_that_do_not_fit(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"batches of 12; write .batched\(24 // world_size\)"):
        list(dataset(urls, 2))
    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="5 ranks cannot share"):
        list(dataset(urls, 2))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="count epochs"):
        list(dataset(urls, 1).with_epoch(3))
    with pytest.raises(ConfigError, match="fewer than a global batch"):
        list(dataset(urls, 1, canonical=1000))


def test_only_the_bytes_of_a_rank_are_requested(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_shards(tmp_path, shards=2, samples=24, payload=20_000)
    for path in paths:
        origin.add(f"/{path.name}", path.read_bytes())
    urls = [f"{origin.base}/{path.name}" for path in paths]
    for scanned in scan_shards(urls):
        assert scanned.index is not None
        (tmp_path / f"{scanned.url.rpartition('/')[2]}.index").write_bytes(scanned.index.to_bytes())
    origin.forget()
    size = sum(path.stat().st_size for path in paths)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    made = wds.WebDataset(urls, canonical=12, index=tmp_path, shardshuffle=False).to_tuple("__key__").map(key_of)
    assert list(made.batched(4, collation_fn=None)) == [
        [f"{n:06d}" for n in range(12 * batch + 4, 12 * batch + 8)] for batch in range(4)
    ]
    assert len(origin.requests) == 4
    assert sum(sent.body_bytes for sent in origin.sent) < size / 3
