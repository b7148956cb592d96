"""The batch of any step, made again from a state, is the one that came; and what had come by then is listed."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_async as wds
from tests.checkpoint.pipelines import PIPELINES, augmented, dataset, mixed, number, shown, urls_in
from wds_async.checkpoint import history
from wds_async.checkpoint.replay import replayed
from wds_async.errors import ConfigError, StateError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

DROPPING = {"select", "rsample", "rsample, no seed", "slice", "batched, no rest"}
DROPPING |= {name for name in PIPELINES if "handler" in name}
"""Pipelines that read samples which never come out."""
UNTOLD = {"a list", "a function", "a stage of the user's", "step by step"}
RECORDS = {"records", "records, shuffled", "records, samples only", "records, CBOR", "mix with records"}
NAMELESS = {"shuffle behind to_tuple", "extract_keys", "unbatched", "mix with a list", "steps, padded"}
"""Pipelines whose items have no keys where they are held or come out, or come again without being read again."""


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return urls_in(tmp_path / "shards")


def plain(state: Any) -> Any:
    return json.loads(json.dumps(state))


def keys(item: Any) -> list[str]:
    """Return the keys of the samples in an item."""
    if isinstance(item, dict):
        return list(item["__key__"]) if isinstance(item["__key__"], list) else [item["__key__"]]
    if isinstance(item, str):
        return [item]
    if isinstance(item[0], dict):
        return [key for one in item for key in keys(one)]
    return list(item[0]) if isinstance(item[0], list | tuple) else [item[0]]


def seen(state: Any, pipeline: Any = None) -> Counter[str]:
    counts: Counter[str] = Counter()
    for sample in wds.seen(plain(state), pipeline):
        counts[str(sample.key)] += sample.times
    return counts


def run(pipeline: Any) -> tuple[list[Any], list[Any]]:
    """Return what comes out of ``pipeline``, and the state behind each; the last is that at the end of the epoch."""
    items, states = [], []
    for item in pipeline:
        items.append(item)
        states.append(plain(pipeline.state_dict()))
    states[-1] = plain(pipeline.state_dict())
    return items, states


def some(count: int) -> list[int]:
    return sorted({0, 1, count // 2, count - 1})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline(name: str, urls: list[str]) -> None:
    make = PIPELINES[name]
    pipeline = make(urls)
    next(iter(pipeline))
    items, states = run(pipeline)
    for behind, step in itertools.product(some(len(items)), some(len(items))):
        if name.startswith("LMDB") and step <= behind:
            with pytest.raises(StateError, match=r"(?i)give an earlier state"):
                wds.replay(make(urls), states[behind], step)
            continue
        again = wds.replay(make(urls), states[behind], step)
        assert shown([again]) == shown([items[step]]), (behind, step)


@pytest.mark.parametrize("name", sorted(PIPELINES.keys() - UNTOLD - NAMELESS - RECORDS))
def test_what_was_seen(name: str, urls: list[str]) -> None:
    items, states = run(PIPELINES[name](urls))
    for count in some(len(items)):
        came = Counter(itertools.chain.from_iterable(map(keys, items[: count + 1])))
        listed = seen(states[count])
        if name in DROPPING:
            assert came <= listed
            assert set(listed) <= {f"{n:06d}" for n in range(35)}
        else:
            assert listed == came, count


@pytest.mark.parametrize("name", sorted(UNTOLD | RECORDS))
def test_what_cannot_be_told(name: str, urls: list[str]) -> None:
    _, states = run(PIPELINES[name](urls))
    with pytest.raises(StateError, match=r"declares nothing of what it holds|reads any|no keys to list"):
        list(wds.seen(states[3]))


def test_an_endless_stream_has_a_small_state(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_LOGGED", 40)

    def stream() -> Any:
        return wds.WebDataset(urls, resampled=True, seed=1, handler=wds.reraise_exception).shuffle(5, seed=2)

    items = iter(pipeline := stream())
    few = sum(1 for _ in itertools.islice(items, 30))
    assert sum(seen(pipeline.state_dict()).values()) == few
    for _ in itertools.islice(items, 1000):
        pass
    state = plain(pipeline.state_dict())
    assert state["run"]["states"]["1"]["log"] is None
    with pytest.raises(StateError, match="more shards than a state lists"):
        list(wds.seen(state))
    resumed = stream()
    resumed.load_state_dict(state)
    onward = iter(resumed)
    assert shown(itertools.islice(onward, 50)) == shown(itertools.islice(items, 50))
    with pytest.raises(StateError, match="more shards than a state lists"):
        list(wds.seen(resumed.state_dict()))


def test_items_without_keys_are_warned_of(urls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    _, states = run(PIPELINES["shuffle behind to_tuple"](urls))
    assert sum(seen(states[3]).values()) == 11
    assert "shuffle held 7 items without __key__" in caplog.text


LOADERS: dict[str, Any] = {
    "samples": (lambda urls: dataset(urls, shardshuffle=3, seed=4).shuffle(5, seed=2), None),
    "no seed": (lambda urls: dataset(urls, shardshuffle=3).shuffle(5), None),
    "batches": (
        lambda urls: dataset(urls).shuffle(5, seed=1).map(augmented).to_tuple("__key__", "drawn").batched(3),
        None,
    ),
    "batches of torch": (lambda urls: dataset(urls).shuffle(4, seed=1).map(tensors).to_tuple("__key__", "x"), 3),
    "a mix": (lambda urls: mixed(urls, probs=[1, 2]), None),
    "resampled": (lambda urls: dataset(urls, resampled=True, seed=2).map(augmented).with_epoch(11), None),
    "bucketed": (lambda urls: dataset(urls).bucketed(number, [2, 4], 3, collation_fn=None), None),
    "shards cut": (lambda urls: dataset(urls[:2], split="bytes").shuffle(5, seed=3), None),
    "more passes": (lambda urls: dataset(urls[:3], shardshuffle=2, seed=1).shuffle(3, seed=2).repeat(3), None),
}


def tensors(sample: Any) -> Any:
    """Draw from all generators of the program."""
    return {**sample, "x": torch.rand(3) + random.random() + float(np.random.rand())}


def loader_of(name: str, urls: list[str], workers: int, **kw: Any) -> wds.WebLoader:
    make, batch_size = LOADERS[name]
    return wds.WebLoader(make(urls), batch_size=batch_size, num_workers=workers, **kw)


def compare(make: Any, items: list[Any], states: list[Any], first: int = 0) -> None:
    """Compare what is made again with ``items``, from states of which those from ``first`` on are taken."""
    for behind, step in itertools.product(some(len(items)), some(len(items))):
        if behind < first:
            continue
        again = replayed(make(), states[behind], step)
        assert shown([again.batch]) == shown([items[step]]), (behind, step)
        if behind != step:
            assert Counter(sample.key for sample in again.samples()) == Counter(keys(items[step]))
    for count in some(len(items)):
        came = Counter(itertools.chain.from_iterable(map(keys, items[: count + 1])))
        assert seen(states[count], make()) == came
        assert not seen(states[count]) - came


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers"),
    [*itertools.product(LOADERS, [3]), ("no seed", 0), ("batches of torch", 0), ("batches of torch", 1)],
)
def test_loaders(name: str, workers: int, urls: list[str]) -> None:
    torch.manual_seed(3)
    loader = loader_of(name, urls, workers)
    next(iter(loader))
    compare(lambda: loader_of(name, urls, workers), *run(loader), first=3 if name == "no seed" else 0)


@pytest.mark.slow
def test_persistent_workers_in_a_later_epoch(urls: list[str]) -> None:
    loader = loader_of("batches of torch", urls, 2, persistent_workers=True)
    list(loader)
    compare(lambda: loader_of("batches of torch", urls, 2), *run(loader), first=1)  # both have begun


@pytest.mark.slow
def test_stages_behind_the_workers(urls: list[str]) -> None:
    def make() -> Any:
        return loader_of("samples", urls, 2).shuffle(6, seed=1).listed(3)

    compare(make, *run(make()))


@pytest.mark.slow
def test_an_interrupted_job(urls: list[str]) -> None:
    def make() -> Any:
        return loader_of("batches of torch", urls, 2)

    loader, batches, states = make(), [], []
    while True:
        for batch in itertools.islice(loader, 3):
            batches.append(batch)
            states.append(plain(loader.state_dict()))
        if len(batches) == 12:
            break
        loader = make()
        loader.load_state_dict(states[-1])
    assert [state["history"]["steps"] for state in states] == list(range(1, 13))
    compare(make, batches, states)


@pytest.mark.slow
def test_an_epoch_of_the_loader(urls: list[str]) -> None:
    def make() -> Any:
        return loader_of("samples", urls, 2).with_epoch(50)

    items, states = run(make())
    for behind, step in itertools.product((5, 40, 49), (3, 20, 36, 49)):
        assert shown([wds.replay(make(), states[behind], step)]) == shown([items[step]])


class Ranks:
    """Loaders of the ranks of one job, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, make: Any, count: int, state: Any = None) -> None:
        self.monkeypatch, self.count = monkeypatch, count
        self.loaders, self.iterators = [], []
        self.batches: list[list[Any]] = []
        for _ in self.each():
            self.loaders.append(loader := make())
            if state is not None:
                loader.load_state_dict(plain(state))
            self.iterators.append(iter(loader))
            self.batches.append([])

    def each(self) -> Iterator[int]:
        for rank in range(self.count):
            with self.monkeypatch.context() as environment:
                environment.setenv("RANK", str(rank))
                environment.setenv("WORLD_SIZE", str(self.count))
                yield rank

    def take(self, steps: int) -> None:
        for rank in self.each():
            self.batches[rank] += itertools.islice(self.iterators[rank], steps)

    def states(self) -> list[Any]:
        return [plain(self.loaders[rank].state_dict()) for rank in self.each()]

    def keys(self) -> Counter[str]:
        return Counter(key for batches in self.batches for batch in batches for key in keys(batch))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(ranks: int, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        samples = dataset(urls, shardshuffle="epoch", seed=1, empty_check=False).shuffle(4).map(augmented)
        return wds.WebLoader(samples, batch_size=None, num_workers=2)

    job = Ranks(monkeypatch, make, ranks)
    job.take(4)
    states = job.states()
    job.take(3)
    merged = wds.merge_states(states)
    for rank, step in itertools.product(range(ranks), (1, 3, 4, 6)):
        assert shown([wds.replay(make(), merged, step, rank)]) == shown([job.batches[rank][step]])
        assert shown([wds.replay(make(), states[rank], step)]) == shown([job.batches[rank][step]])
    assert seen(job.states(), make()) == job.keys()
    with pytest.raises(ConfigError, match="say which one"):
        wds.replay(make(), merged, 2)
    with pytest.raises(StateError, match="no state of rank 1, but of"):
        wds.replay(make(), states[0], 2, rank=1)


@pytest.mark.slow
def test_other_numbers_of_ranks(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def make(workers: int = 2) -> Any:
        samples = dataset(urls, empty_check=False).shuffle(6)
        return wds.WebLoader(samples, batch_size=None, num_workers=workers)

    job = Ranks(monkeypatch, make, 3)
    job.take(4)
    came = job.keys()
    for ranks, workers in ((1, 0), (2, 3)):
        job = Ranks(monkeypatch, lambda: make(workers), ranks, wds.merge_states(job.states()))  # noqa: B023
        job.take(3)
        came += job.keys()
        assert seen(job.states(), make(workers)) == came
    first = sum(one["history"]["steps"] for one in job.states()[:1]) - 3
    states = job.states()
    job.take(2)
    for step in (3, 4):
        assert shown([wds.replay(make(3), states[1], first + step)]) == shown([job.batches[1][step]])
    with pytest.raises(StateError, match="how its epoch began"):
        wds.replay(make(3), states[1], 0)


def test_nothing_is_disturbed(urls: list[str]) -> None:
    def make() -> Any:
        return wds.WebLoader(dataset(urls, shardshuffle=3).shuffle(5).map(augmented), batch_size=None, num_workers=0)

    loader = make()
    expected, _ = run(loader)
    loader = make()
    state = plain(loader.state_dict())
    loader.load_state_dict({**state, "sources": state["sources"]})
    iterator = iter(loader)
    first = list(itertools.islice(iterator, 4))
    state, requests = plain(loader.state_dict()), loader.statistics().samples
    draws = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    wds.replay(loader, state, 20)
    wds.replay(loader, state, 2)
    list(wds.seen(state, loader))
    assert draws == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert (plain(loader.state_dict()), loader.statistics().samples) == (state, requests)
    resumed = make()
    resumed.load_state_dict(state)
    assert shown(iterator) == shown(resumed)
    assert len(first) + 31 == len(expected)


def test_what_is_wrong(urls: list[str]) -> None:
    pipeline = dataset(urls).shuffle(4, seed=1)
    items, states = run(pipeline)
    with pytest.raises(StateError, match="35 steps on rank 0: there is no step 35"):
        wds.replay(dataset(urls).shuffle(4, seed=1), states[3], 35)
    with pytest.raises(StateError, match="had 35 steps"):
        wds.replay(dataset(urls).shuffle(4, seed=1), states[-1], 40)
    with pytest.raises(StateError, match="is of a pipeline with stages"):
        wds.replay(dataset(urls), states[3], 4)
    with pytest.raises(StateError, match="no state, or a damaged one"):
        wds.replay(dataset(urls), {"model": 1}, 4)
    with pytest.raises(StateError, match="no state, or a damaged one"):
        list(wds.seen([1, 2]))
    with pytest.raises(StateError, match="of each rank once"):
        wds.seen([states[1], states[2]])
    with pytest.raises(ConfigError, match="count from 0"):
        wds.replay(pipeline, states[3], -1)
    del items


def test_ranges_read_nothing(urls: list[str]) -> None:
    pipeline = dataset(urls).shuffle(4, seed=1)
    iterator = iter(pipeline)
    list(itertools.islice(iterator, 9))
    state = plain(pipeline.state_dict())
    listed = list(wds.seen(state))
    for url in urls:
        Path(url).unlink()
    ranges = list(wds.seen(state, ranges=True))
    for sample in listed:
        assert sample.start is not None
        inside = [r for r in ranges if r.url == sample.url and r.start <= sample.start < (r.stop or 1 << 40)]
        assert len(inside) == 1
    assert len({r.url for r in ranges}) == 2


def test_a_shard_that_was_replaced(urls: list[str]) -> None:
    pipeline = dataset(urls).shuffle(4, seed=1)
    iterator = iter(pipeline)
    list(itertools.islice(iterator, 9))
    state = plain(pipeline.state_dict())
    Path(urls[1]).write_bytes(Path(urls[0]).read_bytes())
    with pytest.raises(wds.WdsError, match="shard-000001"):
        list(wds.seen(state))
    with pytest.raises(wds.WdsError, match="shard-000001"):
        wds.replay(dataset(urls).shuffle(4, seed=1), state, 12)
