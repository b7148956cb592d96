"""The state of a loader counts the batches that came out of it, whatever its workers have made ahead."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.checkpoint.pipelines import augmented, dataset, doubled, mixed, shown, taken, urls_in
from wds_async.errors import ConfigError, StateError

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'pin_memory'"),
]

LOADERS: dict[str, tuple[Callable[[list[str]], Any], int | None]] = {
    "samples": (lambda urls: dataset(urls, shardshuffle=3, seed=1).shuffle(5, seed=1), None),
    "batches": (lambda urls: dataset(urls).shuffle(5, seed=3).map(augmented).to_tuple("cls", "drawn").batched(3), None),
    "batches of torch": (lambda urls: dataset(urls).shuffle(4, seed=1).to_tuple("__key__", "cls"), 3),
    "a mix": (lambda urls: mixed(urls, probs=[1, 2]), None),
    "resampled": (lambda urls: dataset(urls, resampled=True, seed=2).map(augmented).with_epoch(11), None),
    "a stage of the user's": (lambda urls: dataset(urls).map(augmented).compose(one_by_one), None),
}


def one_by_one(source: Any) -> Any:
    """A stage that declares nothing."""
    yield from source


def loader_of(name: str, urls: list[str], workers: int, **kw: Any) -> wds.WebLoader:
    make, batch_size = LOADERS[name]
    return wds.WebLoader(make(urls), batch_size=batch_size, num_workers=workers, **kw)


def state_of(loader: wds.WebLoader) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return urls_in(tmp_path / "shards")


CELLS = [
    *itertools.product(LOADERS, [2]),
    ("samples", 0),
    ("batches of torch", 0),
    ("batches of torch", 1),
    ("batches", 3),
]


@pytest.mark.parametrize(("name", "workers"), CELLS)
def test_goes_on_exactly(name: str, workers: int, urls: list[str]) -> None:
    loader = loader_of(name, urls, workers)
    taken(iter(loader), 2)
    states, batches = [], []
    for batch in loader:
        batches += shown([batch])
        states.append(state_of(loader))
    later = shown(loader)
    for count in (1, len(batches) // 2, len(batches) - 1, len(batches)):
        resumed = loader_of(name, urls, workers)
        resumed.load_state_dict(states[count - 1])
        assert shown(resumed) == batches[count:], count
        if count == len(batches) // 2:
            assert shown(resumed) == later


def ahead(urls: list[str], batch_size: int | None = 2, **kw: Any) -> wds.WebLoader:
    """A loader whose functions draw nothing, some of them not known to, over several passes."""
    samples = dataset(urls, shardshuffle=3, seed=1).shuffle(5, seed=1).decode().map(doubled).map(tens)
    keys = samples.map_dict(double=str).to_tuple("__key__", "double", "ten").map_tuple(None, int)
    return wds.WebLoader(keys.repeat(2), batch_size=batch_size, **kw).unbatched()


@pytest.mark.parametrize("kw", [{"num_workers": 2}, {"threads": 2}, {"num_workers": 0}], ids=str)
def test_a_loader_that_was_started(kw: dict[str, Any], urls: list[str]) -> None:
    epochs = [shown(items) for items in itertools.repeat(ahead(urls, **kw), 3)]
    loader = ahead(urls, **kw)
    loader.start()
    loader.start()
    assert shown(loader) == epochs[0]
    loader.start()
    state = state_of(loader)
    taken(iterator := iter(loader), 4)
    assert shown(iterator) == epochs[1][4:]
    loader.start()
    loader.set_epoch(2)  # each iteration is two passes
    assert shown(loader) == epochs[1]
    loader.start()
    loader.load_state_dict(state)
    assert shown(loader) == epochs[1]
    loader.start()
    loader.close()


def test_what_comes_too_late_for_a_loader_that_was_started(urls: list[str]) -> None:
    loader = ahead(urls, num_workers=1, persistent_workers=True)
    loader.start()
    with pytest.raises(ConfigError, match="before start"):
        loader.set_epoch(3)
    with pytest.raises(ConfigError, match="before start"):
        loader.with_epoch(3)


def tens(sample: Any) -> Any:
    return {**sample, "ten": 10 * sample["double"]}


@pytest.mark.parametrize("threads", [1, 3])
def test_goes_on_exactly_with_threads_and_without(threads: int, urls: list[str]) -> None:
    loader = ahead(urls, threads=threads)
    states, items = [], []
    for item in loader:
        items += shown([item])
        states.append(state_of(loader))
    assert items == shown(ahead(urls))
    later = shown(loader)
    for count in (1, 6, len(items) // 2 + 3, len(items)):
        for other in ({"threads": threads}, {"threads": 4 - threads}, {}):
            resumed = ahead(urls, **other)
            resumed.load_state_dict(states[count - 1])
            iterator = iter(resumed)
            assert shown(iterator) == items[count:], (count, other)
        assert shown(resumed) == later
    without = ahead(urls)
    taken(iterator := iter(without), 9)
    resumed = ahead(urls, threads=threads)
    resumed.load_state_dict(state_of(without))
    assert shown(resumed) == shown(iterator)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "kw",
    [
        {"multiprocessing_context": "spawn"},
        {"persistent_workers": True, "prefetch_factor": 5, "pin_memory": True},
    ],
    ids=str,
)
def test_goes_on_with_workers_of_every_kind(kw: dict[str, Any], urls: list[str]) -> None:
    workers = 1 if "multiprocessing_context" in kw else 2  # one that starts from nothing imports torch, for seconds
    loader = spawnable(urls, workers, **kw)
    iterator = iter(loader)
    taken(iterator, 7)
    state, rest = state_of(loader), shown(iterator)
    later = shown(loader)
    resumed = spawnable(urls, workers, **kw)
    resumed.load_state_dict(state)
    assert shown(resumed) == rest
    assert shown(resumed) == later


def spawnable(urls: list[str], workers: int, **kw: Any) -> wds.WebLoader:
    samples = dataset(urls, shardshuffle=3, seed=1).shuffle(5, seed=1).map(augmented)
    return wds.WebLoader(samples, batch_size=None, num_workers=workers, **kw)


def test_without_the_shared_memory(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_HANDOVER", "0")
    test_goes_on_exactly("batches", 2, urls)


def test_stages_behind_the_workers_have_their_state(urls: list[str]) -> None:
    def make() -> Any:
        return loader_of("samples", urls, 2).shuffle(6, seed=4).listed(3)

    loader = make()
    iterator = iter(loader)
    taken(iterator, 3)
    state, rest = state_of(loader), shown(iterator)
    resumed = make()
    resumed.load_state_dict(state)
    assert shown(resumed) == rest


def test_the_epoch_of_a_loader_goes_on(urls: list[str]) -> None:
    def make() -> Any:
        return loader_of("samples", urls, 2).with_epoch(50)

    loader = make()
    iterator = iter(loader)
    taken(iterator, 41)
    state, rest = state_of(loader), shown(iterator)
    assert len(rest) == 9
    resumed = make()
    resumed.load_state_dict(state)
    assert shown(resumed) == rest


def test_a_state_goes_on_from_one_that_went_on(urls: list[str]) -> None:
    loader = loader_of("batches", urls, 3)
    iterator = iter(loader)
    taken(iterator, 1)
    state, rest = state_of(loader), shown(iterator)
    while len(rest) > 1:
        loader = loader_of("batches", urls, 3)
        loader.load_state_dict(state)
        iterator = iter(loader)
        assert taken(iterator, 2) == rest[:2]
        state, rest = state_of(loader), rest[2:]
    loader = loader_of("batches", urls, 3)
    loader.load_state_dict(state)
    assert shown(loader) == rest


def test_between_epochs_the_next_one_comes(urls: list[str]) -> None:
    loader = loader_of("samples", urls, 2)
    shown(loader)
    state, second = state_of(loader), shown(loader)
    resumed = loader_of("samples", urls, 2)
    resumed.load_state_dict(state)
    assert shown(resumed) == second


def test_another_number_of_workers_is_refused(urls: list[str]) -> None:
    loader = loader_of("samples", urls, 2)
    next(iter(loader))
    resumed = loader_of("samples", urls, 3)
    resumed.load_state_dict(state_of(loader))
    with pytest.raises(StateError, match="2 workers"):
        next(iter(resumed))


def test_persistent_workers_that_run_take_no_state(urls: list[str]) -> None:
    loader = loader_of("samples", urls, 1, persistent_workers=True)
    shown(loader)
    with pytest.raises(StateError, match="persistent"):
        loader.load_state_dict(state_of(loader))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_by_torchdatas_loader(workers: int, urls: list[str]) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        samples = dataset(urls, shardshuffle=3, seed=1).shuffle(5, seed=1).map(augmented)
        return stateful.StatefulDataLoader(samples, batch_size=None, num_workers=workers)

    loader = make()
    iterator = iter(loader)
    taken(iterator, 11)
    state, rest = loader.state_dict(), shown(iterator)
    resumed = make()
    resumed.load_state_dict(state)
    assert shown(resumed) == rest
