"""Sizes as programs give them: floats and numpy's numbers are taken, what is no size raises where the stage is made."""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import wds_async as wds
from wds_async import arguments, errors, filters, samplecache, shardlists
from wds_async.filters import threads
from wds_async.indexed import samplers

Make = Callable[[Any], Any]

SIZES: dict[str, Make] = {
    "batched: batchsize": filters.batched,
    "batched: batchsize, fluent": lambda n: pipeline().batched(batchsize=n),
    "batched: batchsize, listed": lambda n: pipeline().listed(n),
    "shuffle: bufsize": filters.shuffle,
    "shuffle: size": lambda n: pipeline().shuffle(n),
    "shuffle: initial": lambda n: pipeline().shuffle(10, initial=n),
    "detshuffle: bufsize": filters.detshuffle,
    "detshuffle: initial": lambda n: filters.detshuffle(10, n),
    "slice: stop": lambda n: pipeline().slice(n),
    "slice: start": lambda n: pipeline().slice(n, None),
    "slice: step": lambda n: filters.slice(0, None, n),
    "info: n": lambda n: filters.info(n=n),
    "info: every": lambda n: filters.info(every=n),
    "info: width": lambda n: filters.info(width=n),
    "map: threads": lambda n: pipeline().map(str, threads=n),
    "decode: threads": lambda n: pipeline().decode(threads=n),
    "decode: min_size": lambda n: filters.decode("rgb", min_size=n),
    "resampled: n": shardlists.resampled,
    "with_epoch: nsamples": lambda n: pipeline().with_epoch(n),
    "with_epoch: nbatches": lambda n: pipeline().with_epoch(nbatches=n),
    "with_length: n": lambda n: pipeline().with_length(n, silent=True),
    "repeat: nepochs": lambda n: pipeline().repeat(n),
    "repeat: nbatches": lambda n: pipeline().repeat(nbatches=n),
    "WebDataset: shardshuffle": lambda n: wds.WebDataset("x.tar", shardshuffle=n),
    "WebDataset: repeat": lambda n: wds.WebDataset("x.tar", shardshuffle=False, repeat=n),
    "with_length: n, of WebDataset": lambda n: wds.WebDataset("x.tar", shardshuffle=False, length=n),
    "ResampledShards: nshards": lambda n: wds.ResampledShards("x.tar", n),
    "ResampledShards: max_urls": lambda n: wds.ResampledShards("x.tar", max_urls=n),
    "MockDataset: length": lambda n: wds.MockDataset({}, n),
    "with_epoch: length": lambda n: wds.with_epoch([], n),
    "with_length: length": lambda n: wds.with_length([], n),
    "LMDBCached: map_size": lambda n: wds.LMDBCached("x", n),
    "LMDBCached: chunksize": lambda n: wds.LMDBCached("x", chunksize=n),
    "DBCache: size": lambda n: samplecache.SQLiteCache("x", n),
    "ShardWriter: maxcount": lambda n: wds.ShardWriter("x-%d.tar", n),
    "ShardWriter: maxsize": lambda n: wds.ShardWriter("x-%d.tar", maxsize=n),
    "ChunkedSampler: chunksize": lambda n: samplers.ChunkedSampler(range(9), chunksize=n),
    "ordered_map: threads": lambda n: threads.ordered_map([], str, n),
}  # fmt: skip

GOOD = (16 / 1, np.int64(16), np.float32(15.5), np.float64(15.2), np.array(16), Fraction(31, 2), Decimal("15.5"))
NO_NUMBERS = ("16", b"16", [16], np.array([16, 16]), np.str_("16"), 16j, {})


def pipeline() -> Any:
    return wds.WebDataset("x.tar", shardshuffle=False)


@pytest.mark.parametrize("name", SIZES)
def test_numbers_of_any_kind_are_sizes_and_nothing_else_is(name: str) -> None:
    make = SIZES[name]
    for value in GOOD:
        make(value)
    argument = name.split(",", maxsplit=1)[0]
    for value in NO_NUMBERS:
        with pytest.raises(TypeError, match=rf"{argument}=.*{type(value).__name__}; it must be a number"):
            make(value)
    with pytest.raises(errors.ConfigError, match=rf"{argument}=nan is not a number of items"):
        make(float("nan"))


@pytest.mark.parametrize(
    "name",
    [
        "batched: batchsize", "slice: stop", "slice: start", "map: threads", "decode: min_size", "with_length: n",
        "WebDataset: shardshuffle", "ResampledShards: max_urls", "LMDBCached: chunksize", "ChunkedSampler: chunksize",
    ],
)  # fmt: skip
def test_a_size_out_of_range_raises_where_the_stage_is_made(name: str) -> None:
    stage, argument = name.split(": ")
    with pytest.raises(errors.ConfigError, match=rf"{stage}: {argument}=-1: it must be at least [01]"):
        SIZES[name](-1)


def test_a_fraction_is_rounded_up() -> None:
    items = list(range(20))
    assert [len(batch) for batch in filters.batched(7.5, collation_fn=None)(items)] == [8, 8, 4]
    assert list(filters.slice(1.5, 9 / 2)(items)) == [2, 3, 4]
    assert list(filters.shuffle(4.5, 2.5, seed=1)(items)) == list(filters.shuffle(5, 3, seed=1)(items))
    assert len(list(wds.MockDataset({}, 2.5))) == 3
    assert len(list(wds.DataPipeline(lambda: items).with_epoch(2.5))) == 3
    assert list(wds.DataPipeline(lambda: [1, 2]).repeat(1.5)) == [1, 2, 1, 2]
    assert len(wds.DataPipeline(lambda: items).with_length(2.5, silent=True)) == 3


def test_infinity_is_no_bound() -> None:
    items = list(range(20))
    assert list(filters.batched(float("inf"), collation_fn=None)(items)) == [items]
    assert filters.detshuffle(float("inf")).bufsize == sys.maxsize
    assert arguments.check_size("stage", "n", 1 << 100) == sys.maxsize
    assert arguments.check_size("stage", "n", 1e300) == sys.maxsize
    assert arguments.check_size("stage", "n", float("-inf")) < 0


@pytest.mark.parametrize("values", [(), (1, 2, 3, 4)])
def test_a_slice_has_one_to_three_arguments(values: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=r"slice\(start, stop, step\)"):
        filters.slice(*values)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_a_probability_is_checked_where_the_stage_is_made(p: float) -> None:
    with pytest.raises(errors.ConfigError, match=f"rsample: p={p} is not a probability"):
        pipeline().rsample(p)
    with pytest.raises(TypeError, match=r"rsample: p='0\.5' is of type str"):
        filters.rsample("0.5")


def test_a_stage_of_checked_arguments_looks_and_pickles_as_written() -> None:
    stage = pickle.loads(pickle.dumps(filters.batched(16 / 1, partial=False)))
    assert repr(stage) == "<_batched (16,) {'partial': False}>"
    assert repr(filters.slice(3.0)) == "<islice (3,) {}>"
    maker = wds.pipelinefilter(_every, {"n": arguments.size(at_least=1)})
    assert list(pickle.loads(pickle.dumps(maker))(2.0)(range(5))) == [0, 2, 4]
    with pytest.raises(errors.ConfigError, match="every: n=0: it must be at least 1"):
        pickle.loads(pickle.dumps(maker))(n=0)


def _every(source: Any, n: int) -> Any:
    return list(source)[::n]


def test_no_length() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = pipeline().with_length(5, silent=True).with_length(None, silent=True)
    with pytest.raises(TypeError, match=r"has no len\(\): with_length.*wds-async index"):
        len(dataset)


# -- types ------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "map: f='no'": (lambda: pipeline().map("no"), "a function"),
    "select: predicate=None": (lambda: pipeline().select(None), "a function"),
    "map_dict: jpg=3": (lambda: pipeline().map_dict(jpg=3), "a function"),
    "map_tuple: args[2]=3": (lambda: pipeline().map_tuple(str, None, 3), "a function or None"),
    "associate: associator=3": (lambda: pipeline().associate(3), "a function of the key, or a mapping"),
    "batched: collation_fn='mean'": (lambda: pipeline().batched(2, "mean"), "a function or None"),
    "decode: args[1]=3": (lambda: filters.decode("rgb", 3), "an image specification or a function f(key, data)"),
    "to_tuple: args[1]=3": (lambda: pipeline().to_tuple("jpg", 3), "the name of a field, or a list of alternatives"),
    "extract_keys: patterns[0]=3": (
        lambda: pipeline().extract_keys(3),
        "the name of a field, or a list of alternatives",
    ),
    "rename: image=3": (lambda: pipeline().rename(image=3), "the name of a field, or a list of alternatives"),
    "rename_keys: args[0]='*.jpg'": (lambda: pipeline().rename_keys("*.jpg"), "a pair of a new name and a pattern"),
    "rename_keys: a=3": (lambda: pipeline().rename_keys(a=3), "a pattern"),
    "xdecode: jpg='rgb'": (lambda: pipeline().xdecode(jpg="rgb"), "a function of a stream, or False"),
    "xdecode: args[0]=('a', 3)": (lambda: pipeline().xdecode(("a", 3)), "a pair of a pattern and a function"),
    "log_keys: logfile=3": (lambda: pipeline().log_keys(3), "a path or None"),
    "info: fmt=3": (lambda: filters.info(3), "a text or None"),
    "tarfile_to_samples: keys=3": (lambda: wds.tarfile_to_samples(keys=3), "a function or None"),
    "WebDataset: nodesplitter=3": (
        lambda: wds.WebDataset("x.tar", shardshuffle=False, nodesplitter=3),
        "a function or None",
    ),
}


@pytest.mark.parametrize("argument", WRONG)
def test_a_value_of_the_wrong_type_raises_where_the_stage_is_made(argument: str) -> None:
    make, what = WRONG[argument]
    with pytest.raises(TypeError) as raised:
        make()
    assert str(raised.value).startswith(f"{argument} is of type ")
    assert str(raised.value).endswith(f"; it must be {what}")


def test_a_handler_by_position_is_checked() -> None:
    with pytest.raises(errors.ConfigError, match="handler='no'"):
        filters.map(str, "no")


def test_decoders_by_position_are_no_threads() -> None:
    assert filters.decode("rgb", str, str, str).args == ("rgb", str, str, str)
    with pytest.raises(ValueError, match="did you mean torchrgb"):
        filters.decode("rgbtorch")


@pytest.mark.parametrize("stage", [3, "shuffle", wds.shuffle])
def test_what_is_no_stage_raises_where_it_is_added(stage: Any) -> None:
    with pytest.raises(errors.ConfigError, match=r"is not a stage of a pipeline|without its call"):
        pipeline().compose(stage)


# -- what is meant otherwise ------------------------------------------------------------------------------------


def test_a_single_list_of_fields_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"tuples of one value.*to_tuple\('jpg', 'cls'\)") as caught:
        pipeline().to_tuple(["jpg", "cls"])
    assert caught[0].filename == __file__
    pipeline().to_tuple(["jpg", "png"], "cls")  # alternatives
    pipeline().to_tuple(["jpg"])


def test_an_epoch_of_nothing_is_warned_of() -> None:
    for change in (lambda: pipeline().with_epoch(0), lambda: pipeline().with_epoch(nbatches=0)):
        with pytest.warns(UserWarning, match=r"with_epoch\(0\) sets no end") as caught:
            change()
        assert caught[0].filename == __file__
    pipeline().with_epoch()
