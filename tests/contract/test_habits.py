"""Side by side with webdataset 1.0.2: how pipelines behave, habit by habit, as programs rely on it."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_async as ours
from tests.contract.common import agree, outcome, read, same, samples, without_path
from tests.servers import make_shards

theirs = pytest.importorskip("webdataset")

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

BOTH = (theirs, ours)


@pytest.fixture
def shards(tmp_path: Path) -> str:
    make_shards(tmp_path, 5, 9)
    return str(tmp_path / "shard-{000000..000004}.tar")


STEPS: list[Any] = [
    lambda d: d,
    lambda d: d.decode(),
    lambda d: d.decode("rgb8"),
    lambda d: d.decode("rgb").to_tuple("png", "cls").batched(4),
    lambda d: d.shuffle(20, seed=1).decode("l8").rename(image="png").slice(30),
    lambda d: d.decode("torchrgb8", partial=True).map_dict(png=lambda x: x.numpy()).batched(7, partial=False),
    lambda d: d.shuffle(5, seed=2).to_tuple("__key__", "json").with_epoch(193),
    lambda d: d.batched(4).unbatched().select(lambda s: s["cls"] != b"3"),
    lambda d: d.listed(4).unlisted(),
    lambda d: d.listed(4),
    lambda d: d.shuffle(0),
    lambda d: d.shuffle(7, initial=3, seed=0).slice(5, 30, 2),
    lambda d: d.decode(only="cls").map(lambda s: {"n": s["cls"]}),
    lambda d: d.rename_keys(("__key__", "__key__"), image="png").decode("rgb8"),
    lambda d: d.extract_keys("*.cls", "json;txt"),
    lambda d: d.xdecode(png=lambda s: len(s.read()), must_decode=False),
    lambda d: d.to_tuple("png;jpg", "cls", "json").map_tuple(len, int),
    lambda d: d.mcached().repeat(2),
    lambda d: d.map(lambda s: s["cls"] if s["cls"] != b"1" else None).batched(3, collation_fn=None),
    lambda d: d.compose(lambda source: (s["__key__"] for s in source)),
    lambda d: d.repeat(nbatches=60),
    lambda d: d.batched(2).with_epoch(nbatches=50),
]


@pytest.mark.parametrize("steps", STEPS)
def test_fluent_chains(shards: str, steps: Any) -> None:
    expected, got = [list(without_path(read(w, shards, steps))) for w in BOTH]
    assert len(expected) > 5
    assert same(
        [dict(x) if isinstance(x, dict) else x for x in expected], [dict(x) if isinstance(x, dict) else x for x in got]
    )


@pytest.mark.parametrize("buffer", [1, 2, 3, 100, True])
@pytest.mark.parametrize("detshuffle", [True, False])
@pytest.mark.parametrize("seed", [0, 11])
def test_shard_order_of_a_seed(shards: str, buffer: Any, detshuffle: bool, seed: int) -> None:
    """The first epoch of one process is webdataset's."""
    orders = [
        [s["__key__"] for s in read(w, shards, shardshuffle=buffer, seed=seed, detshuffle=detshuffle)] for w in BOTH
    ]
    assert orders[0] == orders[1]


def test_datasets_are_added_as_torch_adds_them(shards: str) -> None:
    from torch.utils.data import ChainDataset, DataLoader

    runs = []
    for wds in BOTH:
        first, second = [wds.WebDataset(shards, shardshuffle=False).to_tuple("__key__", "cls").slice(3) for _ in "ab"]
        mixed = wds.RoundRobin([first, second])
        for added in (first + second, first + mixed, mixed + second, wds.SimpleShardList("a.tar") + first):
            assert type(added) is ChainDataset
        both = first + second
        runs.append([list(both), list(both), list(both + mixed), list(DataLoader(both, batch_size=None))])
    assert runs[0] == runs[1]
    assert len(runs[1][0]) == 6


@pytest.mark.filterwarnings("ignore:DataPipeline takes stages only")
def test_keyword_arguments_of_pipelines_have_no_effect(shards: str) -> None:
    runs = []
    for wds in BOTH:
        stages = (wds.SimpleShardList(shards), wds.tarfile_to_samples(), wds.to_tuple("__key__"))
        runs.append(list(wds.DataPipeline(*stages, handler=wds.warn_and_continue, length=3)))
    assert runs[0] == runs[1] != []


def warned(make: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [re.sub(r"[^a-z_]+", " ", str(w.message).lower()) for w in caught if w.category is UserWarning]


@pytest.mark.parametrize(
    "arguments",
    [
        *({"shardshuffle": value} for value in (None, True, False, 0, 5)),
        {},
        {"resampled": True},
        {"resampled": True, "shardshuffle": 5},
        {"mode": "resampled", "shardshuffle": False},
    ],
)
def test_warnings_about_the_shard_shuffle(shards: str, arguments: dict[str, Any]) -> None:
    """One is given where webdataset gives one."""
    told = [warned(lambda w=w: w.WebDataset(shards, **arguments)) for w in BOTH]
    assert [bool(texts) for texts in told] == [bool(told[0])] * 2
    assert all("shardshuffle" in text for texts in told for text in texts)


def test_the_length_is_the_users(shards: str) -> None:
    for wds in BOTH:
        dataset = wds.WebDataset(shards, shardshuffle=False)
        with pytest.raises(TypeError):
            len(dataset)
        assert warned(lambda d=dataset: d.with_length(7))
        assert not warned(lambda d=dataset: d.with_length(17, silent=True))
        assert len(dataset) == 17
        assert len(dataset.repeat(3).with_length(19, silent=True)) == 19
        assert len(list(dataset)) == 3 * 45


def plus_one(source: Iterator[int]) -> Iterator[int]:
    return (x + 1 for x in source)


def count() -> Iterator[int]:
    return iter(range(47))


CHANGES: list[Any] = [
    lambda p: p,
    lambda p: p.with_epoch(193),
    lambda p: p.with_epoch(5),
    lambda p: p.with_epoch(nbatches=50),
    lambda p: p.with_epoch(10, 20),
    lambda p: p.with_epoch(),
    lambda p: p.repeat(3),
    lambda p: p.repeat(3, nbatches=100),
    lambda p: p.repeat(nbatches=60),
    lambda p: p.repeat(1),
    lambda p: p.repeat(1, 5),
    lambda p: p.with_epoch(7).repeat(2),
    lambda p: p.repeat(2).with_epoch(70).compose(plus_one),
    lambda p: p.compose(lambda source: (2 * x for x in source)),
]


@pytest.mark.parametrize("change", CHANGES)
def test_epochs(change: Any) -> None:
    runs = []
    for wds in BOTH:
        pipeline = change(wds.DataPipeline(count, plus_one))
        runs.append([[x for x, _ in zip(pipeline, range(500), strict=False)] for _ in range(3)])
    assert runs[0] == runs[1]


def test_in_place_and_not() -> None:
    for wds in BOTH:
        pipeline = wds.FluidWrapper(count)
        assert pipeline.with_epoch(5) is pipeline
        assert pipeline.repeat(2) is pipeline
        assert pipeline.with_length(3, silent=True) is pipeline
        assert pipeline.shuffle(0) is pipeline
        composed = pipeline.map(str)
        assert composed is not pipeline
        assert (len(pipeline.pipeline), len(composed.pipeline)) == (1, 2)
        assert pipeline.append(plus_one) is None
        assert len(composed.pipeline) == 2


def test_the_list_of_stages_is_a_list(shards: str) -> None:
    """Programs pop, append, insert and look at it."""
    for wds in BOTH:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset = wds.WebDataset(shards, shardshuffle=False, nodesplitter=None)
        assert type(dataset.pipeline) is list
        assert dataset.stage(0) is dataset.pipeline[0]
        dataset.append(lambda source: (s["cls"] for s in source))
        assert len(list(dataset)) == 45
        dataset.pipeline.pop()
        assert isinstance(next(iter(dataset)), dict)
        dataset.pipeline.append(wds.slice(3))
        assert len(list(dataset)) == 3
        del dataset.pipeline[1:]
        assert [shard["url"][-10:] for shard in dataset] == [f"00000{i}.tar" for i in range(5)]
        dataset.pipeline.insert(1, wds.split_by_worker)
        dataset.pipeline[0] = wds.SimpleShardList(["only"])
        assert list(dataset) == [{"url": "only"}]


def test_the_shuffle_is_found_by_its_name(shards: str) -> None:
    for wds in BOTH:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset = wds.WebDataset(shards, shardshuffle=100, seed=4, nodesplitter=None, workersplitter=None)
        index = ["shuffle" in str(stage) for stage in dataset.pipeline].index(True)
        del dataset.pipeline[index + 1 :]
        assert sorted(shard["url"] for shard in dataset) == wds.shardlists.expand_urls(shards)


class Twice(ours.PipelineStage):
    def run(self, source: Any) -> Iterator[Any]:
        return (x for x in source for _ in range(2))


class TheirTwice(theirs.PipelineStage):  # type: ignore[name-defined, misc]
    run = Twice.run


@pytest.mark.parametrize(
    "stages",
    [
        lambda w: [count],
        lambda w: [[count, plus_one], plus_one],
        lambda w: [None, count, None, plus_one],
        lambda w: [count, Twice() if w is ours else TheirTwice()],
        lambda w: [w.SimpleShardList(["a", "b"])],
        lambda w: [w.DataPipeline(count, plus_one), plus_one],
        lambda w: [count, lambda source: []],
        lambda w: [count, 7],
        lambda w: [7],
        lambda w: [],
        lambda w: [lambda: [1, 2], list],
        lambda w: [w.MockDataset({"a": 1}, 5), w.batched(2)],
    ],
)
def test_stages(stages: Any) -> None:
    runs = [outcome(lambda w=w: w.DataPipeline(*stages(w))) for w in BOTH]
    if isinstance(runs[0][1], (IndexError, TypeError)):  # from the depths
        assert isinstance(runs[1][1], (ValueError, IndexError, TypeError))
    else:
        agree(*runs)


def test_methods_of_pipelines() -> None:
    for wds in BOTH:
        pipeline = wds.DataPipeline(count, plus_one).repeat(2)
        assert len(list(pipeline.iterator1())) == 47
        assert len(list(pipeline.iterator())) == 94
        assert list(pipeline.invoke(plus_one, iter([1]))) == [2]
        assert list(pipeline.invoke(count)) == list(range(47))


def test_context_managers(shards: str) -> None:
    for wds in BOTH:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with wds.WebDataset(shards, shardshuffle=False).to_tuple("cls") as dataset:
                assert len(list(dataset)) == 45


def test_copies_and_pickles(shards: str) -> None:
    """A pipeline without lambdas goes through pickle, before and after it was read."""
    for wds in BOTH:
        dataset = read_later(wds, shards)
        before = pickle.loads(pickle.dumps(dataset))
        expected = list(without_path(outcome(lambda d=dataset: d)[0]))
        after = pickle.loads(pickle.dumps(dataset))
        for one in (before, after, copy.copy(dataset)):
            assert same(expected, list(without_path(outcome(lambda o=one: o)[0])))


def read_later(wds: Any, shards: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = wds.WebDataset(shards, shardshuffle=False)
    return dataset.shuffle(10, seed=1).decode("rgb8").to_tuple("png", "cls").map_tuple(None, float).batched(5)


def test_empty_checks(tmp_path: Path) -> None:
    make_shards(tmp_path, 1, 0)
    url = str(tmp_path / "shard-000000.tar")
    for check in (True, False):
        agree(*[outcome(lambda w=w, c=check: w.WebDataset(url, shardshuffle=False, empty_check=c)) for w in BOTH])


def test_wrong_arguments() -> None:
    """Where webdataset has an assertion, ours is a ValueError or TypeError that says what is wrong."""
    wrong: list[Any] = [
        lambda w: w.filters._rsample([1], 1.5),
        lambda w: w.filters._map_dict([{}], a=3),
        lambda w: w.filters._unlisted([7]),
    ]
    for make in wrong:
        expected, got = [outcome(lambda w=w, m=make: m(w)) for w in BOTH]
        assert isinstance(expected[1], AssertionError)
        assert isinstance(got[1], ValueError | TypeError)
        assert len(str(got[1])) > 20


@pytest.mark.parametrize("url", ["x.json", "no/such/spec.yaml"])
def test_specifications_that_are_none(url: str) -> None:
    """An error, at once and not a tar error."""
    for wds in BOTH:
        with pytest.raises((ValueError, OSError)):
            wds.WebDataset(url, shardshuffle=False)


@pytest.mark.parametrize("handler", ["ignore_and_continue", "ignore_and_stop", "warn_and_continue", "warn_and_stop"])
def test_exception_handlers(handler: str) -> None:
    answers = []
    for wds in BOTH:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answers.append((getattr(wds, handler)(ValueError("v")), len(caught)))
    assert answers[0] == answers[1]
    for wds in BOTH:
        with pytest.raises(KeyError):
            wds.reraise_exception(KeyError("k"))


def test_samples_are_plain_dicts(shards: str) -> None:
    """Programs change them, copy them and give them on."""
    for wds in BOTH:
        first = next(iter(read(wds, shards)))
        assert isinstance(first, dict)
        first["more"] = 1
        assert {**first}["more"] == 1
        assert all(type(v) in (bytes, str, int) for v in first.values())
        assert list(first)[:2] == ["__key__", "__url__"]


def test_arrays_in_samples_stay_theirs() -> None:
    """A stage gives the very objects on, it does not copy them."""
    for wds in BOTH:
        given = samples()
        passed = list(wds.DataPipeline(lambda given=given: iter(given), wds.select(bool), wds.shuffle(1, seed=0)))
        assert all(a is b for a, b in zip(given, passed, strict=True))
        assert np.shares_memory(given[0]["v"], passed[0]["v"])
