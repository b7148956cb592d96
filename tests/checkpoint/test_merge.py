"""States of all ranks, shared out among other numbers of ranks and workers: each sample that is left comes once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.checkpoint.jobs import Job
from tests.checkpoint.pipelines import (
    PIPELINES,
    augmented,
    dataset,
    doubled,
    is_sample,
    lmdb_beside,
    mixed,
    number,
    one_more,
    packed,
)
from tests.servers import make_shards
from wds_async.errors import StateError
from wds_async.handlers import ignore_and_stop

SHARDS, SAMPLES = 24, 11

MAKERS: dict[str, Callable[[list[str]], Any]] = {
    "plain": lambda urls: dataset(urls, empty_check=False),
    "shuffle": lambda urls: dataset(urls, shardshuffle=9, seed=3, empty_check=False).shuffle(30, seed=1),
    "random map, shuffle": lambda urls: dataset(urls, empty_check=False).map(augmented).shuffle(9, seed=2),
    "threads": lambda urls: dataset(urls).shuffle(5, seed=2).map(doubled, threads=2),
    "a mix": lambda urls: mixed(urls, probs=[1, 3], seed=5),
    "a pipeline in a pipeline": lambda urls: wds.DataPipeline(dataset(urls).shuffle(5, seed=1), wds.shuffle(9, seed=2)),
    "shards permuted": lambda urls: dataset(urls, shardshuffle="epoch", seed=5).shuffle(9, seed=1),
    "bucketed": lambda urls: dataset(urls).bucketed(number, [3, 7], 4, collation_fn=None).compose(wds.unlisted()),
    "bucketed by tokens": lambda urls: (
        dataset(urls).map(augmented).bucketed(one_more, [], max_tokens=25, collation_fn=None).compose(wds.unlisted())
    ),
    "records": lambda urls: packed(urls, wds.select(is_sample), wds.shuffle(20, seed=1)),
    "cached": lambda urls: dataset(urls, shardshuffle=9, seed=3).mcached().shuffle(9, seed=1),
    "cached behind a mix": PIPELINES["cached behind a mix"],
    "LMDB": lambda urls: dataset(urls, shardshuffle=9, seed=3).compose(lmdb_beside(urls)).shuffle(9, seed=1),
    "interleaved": lambda urls: dataset(urls, interleave=4, seed=3, empty_check=False),
    "interleaved, shuffle": lambda urls: dataset(urls, interleave=3, shardshuffle=9, seed=3).shuffle(30, seed=1),
    "interleaved, not in order": lambda urls: dataset(urls, interleave=4, ordered=False, seed=3, empty_check=False),
    "interleaved, random map": lambda urls: dataset(urls, interleave=2).map(augmented).shuffle(9, seed=2),
    "unlisted": lambda urls: dataset(urls).listed(4).compose(wds.unlisted()),
}


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return [str(path) for path in make_shards(tmp_path / "shards", shards=SHARDS, samples=SAMPLES)]


def check(taken: Sequence[str]) -> None:
    assert Counter(taken) == Counter(f"{number:06d}" for number in range(SHARDS * SAMPLES))


@pytest.mark.parametrize("name", MAKERS)
def test_every_sample_comes_once(name: str, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: MAKERS[name](urls)  # noqa: E731
    job = Job(make, 4, None, monkeypatch)
    taken = job.take(13)
    for ranks in (3, 1, 5, 2):
        state = job.merged()
        job, again = Job(make, ranks, None, monkeypatch, state), Job(make, ranks, None, monkeypatch, state)
        step = job.take(9)
        assert step == again.take(9) or "not in order" in name
        taken += step
    check(taken + job.take())


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("name", ["random map, shuffle", "a mix"])
def test_with_workers_there_and_back(name: str, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    make = lambda: MAKERS[name](urls)  # noqa: E731
    job = Job(make, 4, 3, monkeypatch)
    taken = job.take(5)
    for ranks, workers in ((3, 2), (4, 3), (1, 0), (2, 3)):
        job = Job(make, ranks, workers, monkeypatch, job.merged())
        taken += job.take(6)
    check(taken + job.take())


def test_batches_that_workers_made_ahead_of_the_state(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("wds_async.shared_batches._SAVE_EVERY", 10**9)
    make = lambda: MAKERS["shuffle"](urls)  # noqa: E731
    job = Job(make, 2, 2, monkeypatch)
    taken = job.take(31)
    job = Job(make, 3, 1, monkeypatch, job.merged())
    check(taken + job.take())


def test_an_order_of_buckets_begins_anew(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return dataset(urls, empty_check=False).bucketed(number, [5], 2, collation_fn=None, same_shape=True)

    def buckets(job: Job, count: int | None) -> list[list[bool]]:
        ranks = []
        for rank, iterator in enumerate(job.iterators):
            job.be(rank)
            batches = list(itertools.islice(iterator, count))
            seen.extend(sample["__key__"] for batch in batches for sample in batch)
            ranks.append([number(batch[0]) < 5 for batch in batches])
        return ranks

    seen: list[str] = []
    job = Job(make, 2, None, monkeypatch)
    first, second = buckets(job, 7)
    assert first == second
    job = Job(make, 3, None, monkeypatch, job.merged())
    ranks = buckets(job, 5)
    assert ranks[0] == ranks[1] == ranks[2]
    buckets(job, None)
    check(seen)


@pytest.mark.parametrize("arguments", [(20,), (3, 40), (2, 50, 3), (5, None)])
def test_slices_give_as_many_in_all(arguments: Any, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return dataset(urls, empty_check=False).slice(*arguments).shuffle(4, seed=1)

    expected = len(Job(make, 4, None, monkeypatch).take())
    job = Job(make, 4, None, monkeypatch)
    taken = job.take(7)
    for ranks in (3, 1, 5):
        job = Job(make, ranks, None, monkeypatch, job.merged())
        taken += job.take(2)
    taken += job.take()
    assert len(taken) == len(set(taken)) == expected


def test_what_a_handler_ended_is_not_read_by_others(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(sample: Any) -> Any:
        if number(sample) == 4 and sample["__key__"] > "000100":
            raise ValueError
        return sample

    def make() -> Any:
        samples = dataset(urls, empty_check=False).shuffle(4, seed=2)
        return samples.map(stop, handler=ignore_and_stop).shuffle(60, initial=60, seed=1)

    job = Job(make, 4, None, monkeypatch)
    taken = job.take(3)
    state = job.merged()
    rest = job.take()
    assert len(taken) + len(rest) < SHARDS * SAMPLES
    assert sorted(Job(make, 3, None, monkeypatch, state).take()) == sorted(rest)


def test_draws_go_on_with_others(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return dataset(urls, resampled=True, seed=4)

    job = Job(make, 2, None, monkeypatch)
    first = job.take(200)
    state = job.merged()
    again = [Job(make, 3, None, monkeypatch, state).take(200) for _ in range(2)]
    assert again[0] == again[1]
    assert first[20:200] != again[0][20:200]
    assert len({tuple(again[0][n : n + 200]) for n in (0, 200, 400)}) == 3


def test_samples_in_buffers_are_not_chosen_again(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return dataset(urls).rsample(0.5, seed=1).shuffle(400, initial=400, seed=1)

    job = Job(make, 2, None, monkeypatch)
    taken = job.take(1)
    state = job.merged()
    rest = job.take()
    assert sorted(Job(make, 3, None, monkeypatch, state).take()) == sorted(rest)
    assert len({*taken, *rest}) == len(taken) + len(rest)


@pytest.mark.parametrize("name", ["mix of shards that both have", "mix of mixes", "mix with records"])
def test_all_that_is_left_of_a_mix_comes(name: str, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lambda: PIPELINES[name](urls), 4, None, monkeypatch)
    job.take(9)
    state = job.merged()
    rest = job.take()
    assert sorted(Job(lambda: PIPELINES[name](urls), 3, None, monkeypatch, state).take()) == sorted(rest)


def test_the_next_epoch_is_whole(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: MAKERS["shuffle"](urls)  # noqa: E731
    job = Job(make, 4, None, monkeypatch)
    taken = job.take(20)
    job = Job(make, 3, None, monkeypatch, job.merged())
    check(taken + job.take())
    job.begin()
    check(job.take())


@pytest.mark.parametrize("name", ["cached", "cached behind a mix", "LMDB"])
def test_what_a_cache_has_still_to_give_is_shared(name: str, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: MAKERS[name](urls)  # noqa: E731
    job = Job(make, 3, None, monkeypatch)
    job.take()
    job.begin()  # from the caches
    taken = job.take(25)
    for ranks in (2, 4):
        job = Job(make, ranks, None, monkeypatch, job.merged())
        taken += job.take(12)
    check(taken + job.take())
    for _ in range(2):
        job.begin()
        check(job.take())


def test_a_merged_state_needs_every_rank_once(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lambda: dataset(urls), 3, None, monkeypatch)
    job.take(4)
    states = job.merged()["merged"]
    for wrong in (states[1:], [*states, states[0]], []):
        with pytest.raises(StateError):
            wds.merge_states(wrong)


def test_stages_that_declare_nothing_cannot_be_shared_out(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return dataset(urls).compose(iter)

    job = Job(make, 2, None, monkeypatch)
    job.take(4)
    with pytest.raises(StateError, match="cannot be shared out"):
        Job(make, 3, None, monkeypatch, job.merged())


def test_a_state_of_another_rank_is_refused(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lambda: dataset(urls), 2, None, monkeypatch)
    job.take(4)
    job.be(1)
    state = job.loaders[0].state_dict()
    with pytest.raises(StateError, match="rank"):
        job.loaders[1].load_state_dict({**state, "place": [0, 2]})
