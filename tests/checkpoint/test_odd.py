"""States at odd moments: between epochs of workers, behind a break, of mixes that end, of loaders that changed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.checkpoint.pipelines import dataset, shown, taken
from tests.checkpoint.test_merge import Job
from tests.servers import make_shard, make_shards
from tests.servers.shards import sample_fields
from wds_async.errors import StateError


def through_json(pipeline: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(pipeline.state_dict()))
    return state


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return [str(path) for path in make_shards(tmp_path / "shards", shards=8, samples=5)]


def loader(urls: list[str], workers: int = 2, **kw: Any) -> wds.WebLoader:
    pytest.importorskip("torch")
    return wds.WebLoader(dataset(urls, shardshuffle=8, seed=1), batch_size=None, num_workers=workers, **kw)


def opaque(source: Any) -> Any:
    yield from source


def drawn(sample: Any) -> Any:
    return {**sample, "r": random.random()}


def specification(urls: list[str], **kw: Any) -> dict[str, Any]:
    return {"dataset": [{"shards": urls[:4], "weight": 1, **kw}, {"shards": urls[4:], "weight": 9}]}


MIXES: dict[str, Callable[[list[str]], Any]] = {
    "one source": lambda urls: wds.WebDataset({"dataset": [{"shards": urls}]}, shardshuffle=False).shuffle(6, seed=1),
    "two sources": lambda urls: wds.WebDataset(specification(urls), shardshuffle=False, seed=3).shuffle(6, seed=1),
    "one drawn": lambda urls: wds.WebDataset(specification(urls, resample=True), shardshuffle=False, seed=3),
    "the shortest": lambda urls: wds.DataPipeline(
        wds.RandomMix([dataset(urls[:3]), dataset(urls[3:])], seed=5), wds.shuffle(6, seed=1)
    ),
    "in turns": lambda urls: wds.DataPipeline(
        wds.RoundRobin([dataset(urls[:3]), dataset(urls[3:])]), wds.shuffle(6, seed=1)
    ),
    "cut": lambda urls: wds.WebDataset(specification(urls), shardshuffle=False, resampled=True, seed=3).with_epoch(10),
    "opaque": lambda urls: wds.WebDataset(specification(urls), shardshuffle=False, seed=3).compose(opaque),
    "opaque behind a pipeline": lambda urls: wds.DataPipeline(dataset(urls, shardshuffle=8, seed=1), opaque),
}


@pytest.mark.parametrize("name", MIXES)
def test_mixes_at_every_point_of_a_later_epoch(name: str, urls: list[str]) -> None:
    pipeline = MIXES[name](urls)
    shown(pipeline)
    iterator = iter(pipeline)
    states, items = [through_json(pipeline)], []
    for item in iterator:
        items += shown([item])
        states.append(through_json(pipeline))
    later = shown(pipeline)
    for count, state in enumerate(states):
        resumed = MIXES[name](urls)
        resumed.load_state_dict(state)
        assert shown(resumed) == items[count:], count
        assert shown(resumed) == later, count


@pytest.mark.parametrize("name", ["two sources", "the shortest", "in turns"])
def test_an_iteration_behind_one_that_was_left(name: str, urls: list[str]) -> None:
    pipeline = MIXES[name](urls)
    taken(iter(pipeline), 7)
    iterator = iter(pipeline)
    taken(iterator, 1)
    state, rest = through_json(pipeline), shown(iterator)
    resumed = MIXES[name](urls)
    resumed.load_state_dict(state)
    assert shown(resumed) == rest


def test_a_loader_goes_on_from_epoch_to_epoch(urls: list[str]) -> None:
    whole = loader(urls)
    epochs = [shown(whole) for _ in range(4)]
    state, one = None, loader(urls)
    for epoch in epochs:
        if state is not None:
            one = loader(urls)
            one.load_state_dict(state)
        assert shown(one) == epoch
        state = through_json(one)


def test_a_stage_behind_the_loader_that_declares_nothing(urls: list[str]) -> None:
    one = loader(urls).compose(opaque)
    shown(one)
    iterator = iter(one)
    taken(iterator, 9)
    state, rest = through_json(one), shown(iterator)
    resumed = loader(urls).compose(opaque)
    resumed.load_state_dict(state)
    assert shown(resumed) == rest


def test_a_state_behind_a_break_with_threads(urls: list[str]) -> None:
    pipeline = dataset(urls).map(drawn, threads=2)
    for number, _ in enumerate(pipeline):
        if number == 5:
            break
    state = through_json(pipeline)
    resumed = dataset(urls).map(drawn, threads=2)
    resumed.load_state_dict(state)
    assert [sample["__key__"] for sample in resumed] == [f"{number:06d}" for number in range(6, 40)]


def test_a_state_behind_an_error_is_refused(urls: list[str]) -> None:
    def fail(sample: Any) -> Any:
        if sample["__key__"] == "000006":
            raise ZeroDivisionError
        return sample

    pipeline = dataset(urls).map(fail).to_tuple("__key__").batched(4)
    with pytest.raises(ZeroDivisionError):
        shown(pipeline)
    with pytest.raises(StateError, match="error"):
        pipeline.state_dict()


@pytest.mark.parametrize("count", [10, 12])
def test_another_order_of_shards_is_found_also_at_the_end_of_one(count: int, urls: list[str]) -> None:
    pipeline = dataset(urls)
    taken(iter(pipeline), count)
    resumed = dataset(urls[::-1])
    resumed.load_state_dict(through_json(pipeline))
    with pytest.raises(StateError, match="list of shards"):
        shown(resumed)


def test_loaders_that_cannot_have_a_state_say_so(urls: list[str]) -> None:
    pytest.importorskip("torch")
    mix = wds.RandomMix([dataset(urls[:4]), dataset(urls[4:])], seed=1)
    for other in (mix, list(range(9))):
        one = wds.WebLoader(other, batch_size=None)
        next(iter(one))
        with pytest.raises(StateError, match="DataPipeline"):
            one.state_dict()
    nested = wds.DataPipeline(wds.RandomMix([mix, dataset(urls)]))
    next(iter(nested))
    one = dataset(urls)
    twice = wds.DataPipeline(wds.RoundRobin([one, one]))
    next(iter(twice))
    for pipeline in (nested, twice):
        with pytest.raises(StateError, match="none is there twice"):
            pipeline.state_dict()


def test_another_size_of_batches_is_refused(urls: list[str]) -> None:
    pytest.importorskip("torch")
    one = wds.WebLoader(dataset(urls).to_tuple("__key__"), batch_size=4, num_workers=2)
    next(iter(one))
    other = wds.WebLoader(dataset(urls).to_tuple("__key__"), batch_size=8, num_workers=2)
    other.load_state_dict(through_json(one))
    with pytest.raises(StateError, match="batch_size"):
        next(iter(other))


def test_a_state_of_the_dataset_is_not_for_each_worker(urls: list[str]) -> None:
    pytest.importorskip("torch")
    samples = dataset(urls)
    taken(iter(samples), 20)
    resumed = dataset(urls)
    resumed.load_state_dict(through_json(samples))
    with pytest.raises(StateError, match="WebLoader"):
        list(wds.WebLoader(resumed, batch_size=None, num_workers=2))


def test_ranks_of_which_one_has_ended_go_on_with_other_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    urls, first = [], 0
    for number, size in enumerate((2, 30, 2, 30)):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(make_shard({f"{n:06d}": sample_fields(n) for n in range(first, first + size)}))
        urls.append(str(path))
        first += size

    def make() -> Any:
        return dataset(urls, empty_check=False)

    job = Job(make, 2, 1, monkeypatch)
    keys = job.take(10)
    job = Job(make, 2, 2, monkeypatch, job.merged())
    keys += job.take()
    assert sorted(keys) == [f"{number:06d}" for number in range(64)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_rest_of_an_epoch_of_all_ranks_is_shared(
    ranks: int, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")

    def make(state: Any, world_size: int) -> list[wds.WebLoader]:
        loaders = []
        for rank in range(world_size):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(world_size))
            one = wds.WebLoader(dataset(urls), batch_size=None).with_epoch(20, all_ranks=True)
            if state is not None:
                one.load_state_dict(state)
            loaders.append(one)
        return loaders

    loaders, states = make(None, 2), []
    for rank, one in enumerate(loaders):
        monkeypatch.setenv("RANK", str(rank))
        taken(iter(one), 4)
        states.append(one.state_dict())
    merged = wds.merge_states(states)
    left = []
    for rank, one in enumerate(make(merged, ranks)):
        monkeypatch.setenv("RANK", str(rank))
        left.append(len(list(one)))
    assert left == [12 // ranks] * ranks


@pytest.mark.parametrize(
    "state", [None, "text", {}, {"version": 1}, {"run": {}}, {"run": {"replayed": False}}], ids=str
)
def test_what_is_no_whole_state_says_so(state: Any, urls: list[str]) -> None:
    pipeline = dataset(urls)
    taken(iter(pipeline), 1)
    whole = through_json(pipeline)
    damaged = {**whole, **state} if isinstance(state, dict) and "run" in state else state
    resumed = dataset(urls)

    def go_on() -> None:
        resumed.load_state_dict(damaged)
        next(iter(resumed))

    with pytest.raises(StateError, match="no state, or a damaged one"):
        go_on()
    if damaged is state:
        with pytest.raises(StateError, match="no state, or a damaged one"):
            wds.merge_states([state])


def test_an_iteration_that_is_open_at_the_end_of_the_program_says_nothing(urls: list[str]) -> None:
    # The function holds the program's names in a cycle, which ends when Python's own have gone.
    code = (
        "import sys, wds_async as wds; d = wds.WebDataset(sys.argv[1:], shardshuffle=False); i = iter(d); next(i)\n"
        "def cycle(): return d"
    )
    done = subprocess.run([sys.executable, "-c", code, *urls], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
