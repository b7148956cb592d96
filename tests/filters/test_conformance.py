"""The contract of every stage: it pickles and copies, is lazy, obeys its handler, has the length that it declares, and
closes its source.

A new stage is one entry of ``CASES``.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cbor2
import msgpack
import pytest

import wds_async as wds
from tests.servers import make_shard
from tests.servers.shards import png
from wds_async import filters
from wds_async.errors import DecodingError
from wds_async.handlers import ignore_and_continue, ignore_and_stop
from wds_async.mix import Mix
from wds_async.reading.parts import group_by_keys, tar_file_expander, url_opener
from wds_async.samplecache import SQLiteCache
from wds_async.shardlists.lists import DirectoryShardList, MultiShardSample, ResampledShards, SimpleShardList
from wds_async.shardlists.mixture import Mixture
from wds_async.shardlists.spec import load
from wds_async.stages import FilterFunction, RestCurried, Sourced, traits_of


def number(x: Any) -> Any:
    """Return ``x``, or the number in it; odd ones raise."""
    n = int(x["n"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x)
    if n % 2:
        raise ZeroDivisionError(n)
    return x


def number_of(sample: dict[str, int]) -> int:
    """Return the number in a sample; odd ones raise."""
    return int(number(sample)["n"])


def read_number(stream: Any) -> Any:
    """Return the number in a stream; odd ones raise."""
    return number(stream.read())


def keyed(name: str) -> tuple[str, str]:
    """Return key and field of a member's name; names that begin with ``bad`` raise."""
    if name.startswith("bad"):
        raise ZeroDivisionError(name)
    key, _, ext = name.partition(".")
    return key, ext


@dataclass(frozen=True)
class Case:
    """A stage and what goes in.

    ``make(folder, **kw)`` makes a new stage; ``kw`` may hold a ``handler``. ``good(folder, i)`` is the i-th item of its
    source; None is for stages that begin a pipeline. ``bad(folder)`` is an item that goes to the handler. ``ordered``:
    every iteration yields the same.
    """

    make: Callable[..., Any]
    good: Callable[[Path, int], Any] | None
    bad: Callable[[Path], Any] | None = None
    ordered: bool = True


@dataclass(frozen=True)
class Setup:
    """A case in a folder of its own."""

    case: Case
    folder: Path
    taken: list[int] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)

    def stage(self, **kw: Any) -> Any:
        return self.case.make(self.folder, **kw)

    def items(self, n: int) -> Iterator[Any]:
        """Return ``n`` good items, whose taking and closing is noted."""
        assert self.case.good is not None
        try:
            for i in range(n):
                self.taken.append(i)
                yield self.case.good(self.folder, i)
        finally:
            self.closed.append(True)

    def mixed(self) -> list[Any]:
        """Return good and bad items in turn."""
        assert self.case.good is not None
        assert self.case.bad is not None
        good, bad = (functools.partial(self.case.good, self.folder), functools.partial(self.case.bad, self.folder))
        return [good(0), bad(), good(1), bad(), good(2)]

    def open(self, stage: Any, items: Iterable[Any] | None = None, n: int = 5) -> Iterator[Any]:
        """Run ``stage`` over ``items``, by default ``n`` good ones."""
        if self.case.good is None:
            return iter(stage)
        run = stage.run if hasattr(stage, "run") else stage
        return iter(run(self.items(n) if items is None else items))

    def output(self, stage: Any, items: Iterable[Any] | None = None, n: int = 5) -> list[str]:
        return [shown(item) for item in self.open(stage, items, n)]


def shown(item: Any) -> str:
    stream = item.get("stream") if isinstance(item, dict) else None
    return str({**item, "stream": stream.read()} if stream is not None else item)


def filtering(name: str, good: Any, bad: Any = None, *args: Any, **options: Any) -> Case:
    """Return the case of a filter with arguments, whose items are copies of ``good`` and ``bad``."""

    def make(folder: Path, **kw: Any) -> Any:
        return getattr(filters, name)(*args, **options, **kw)

    missing = None if bad is None else lambda folder: copy.deepcopy(bad)
    return Case(make, lambda folder, i: copy.deepcopy(good), missing)


def file(folder: Path, name: str, data: bytes) -> str:
    path = folder / name
    if not path.exists():
        path.write_bytes(data)
    return str(path)


def reading(maker: Callable[..., Any], data: bytes) -> Case:
    """Return the case of a stage that reads files of these bytes; a bad file is one that is not there."""
    return Case(
        lambda folder, **kw: maker(folder, **kw) if maker is cached else maker(**kw),
        lambda folder, i: {"url": file(folder, "good", data)},
        lambda folder: {"url": str(folder / "missing")},
    )


def cached(folder: Path, **kw: Any) -> Any:
    return wds.cached_tarfile_to_samples(cache_dir=str(folder / "cache"), **kw)


def sample(folder: Path, i: int) -> Any:
    return {"__key__": f"k{i}", "n": i}


def pipeline(shards: Any) -> wds.DataPipeline:
    return wds.DataPipeline(shards, wds.tarfile_to_samples())


def mixture(folder: Path) -> Mixture:
    return Mixture(load({"dataset": [{"shards": file(folder, name, SHARD)} for name in ("1.tar", "2.tar")]}), pipeline)


def directory(folder: Path) -> DirectoryShardList:
    for name in URLS:
        file(folder, name, b"")
    return DirectoryShardList(folder, mode=None, poll=None, select="oldest")


SHARD = make_shard({key: {"txt": b"x", "cls": b"1"} for key in "ab"})
SAMPLE = {"__key__": "k", "n": 2}
URLS = [f"{i}.tar" for i in range(4)]
CASES: dict[str, Case] = {
    "associate": filtering("associate", SAMPLE, None, {}),
    "batched": filtering("batched", (2,), None, 3),
    "bucketed": filtering("bucketed", {"n": 2}, {"n": 1}, number_of, [3], 1),
    "bucketed, held": filtering("bucketed", {"n": 2}, None, "n", [3], 5),
    "decode": filtering("decode", {"cls": b"2"}, {"cls": b"?"}),
    "decode_batch": filtering("decode_batch", {"png": [png(1)]}, {"png": [b"?"]}, "png", "cpu"),
    "extract_keys": filtering("extract_keys", {"n": 2}, {"m": 1}, "n"),
    "info": filtering("info", SAMPLE, n=0),
    "log_keys": filtering("log_keys", SAMPLE),
    "map": filtering("map", 2, 1, number),
    "map_dict": filtering("map_dict", {"n": 2}, {"n": 1}, n=number),
    "map_tuple": filtering("map_tuple", (2,), (1,), number),
    "rename": filtering("rename", {"n": 2}, {"x": 1}, m="n"),
    "rename_keys": filtering("rename_keys", {"n": 2}, {"x": 1}, ("m", "n")),
    "resampled": Case(lambda folder: wds.resampled(9, seed=1), sample),
    "rsample": filtering("rsample", 2, None, 0.5, seed=1),
    "select": filtering("select", 2, 1, number),
    "shuffle": filtering("shuffle", 2, None, 10, seed=1),
    "slice": filtering("slice", 2, None, 1, 4),
    "to_tuple": filtering("to_tuple", {"n": 2}, {"x": 1}, "n"),
    "unbatched": filtering("unbatched", ((1, 2),)),
    "unlisted": filtering("unlisted", [1, 2]),
    "xdecode": filtering("xdecode", {"n": b"2"}, {"n": b"1"}, n=read_number),
    "decode, threads": filtering("decode", {"cls": b"2"}, {"cls": b"?"}, threads=2),
    "map, threads": filtering("map", 2, 1, number, threads=2),
    "Cached": Case(lambda folder: filters.Cached(), sample),
    "LMDBCached": Case(lambda folder: wds.LMDBCached(folder / "lmdb", map_size=1e8), sample),
    "SQLiteCache": Case(lambda folder: Sourced(SQLiteCache(folder / "samples.db", 100)), sample),
    "detshuffle": Case(lambda folder: wds.detshuffle(10, seed=1), sample, ordered=False),
    "epochshuffle": Case(lambda folder: filters.epochshuffle(seed=1), sample, ordered=False),
    "tarfile_to_samples": reading(wds.tarfile_to_samples, SHARD),
    "cbors_to_samples": reading(wds.cbors_to_samples, cbor2.dumps({"n": 1}) * 3),
    "msgpacks_to_samples": reading(wds.msgpacks_to_samples, msgpack.packb({"n": 1}) * 3),
    "cached_tarfile_to_samples": reading(cached, SHARD),
    "url_opener": reading(functools.partial(functools.partial, url_opener), SHARD),
    "tar_file_expander": Case(
        lambda folder, **kw: functools.partial(tar_file_expander, eof_value=None, **kw),
        lambda folder, i: {"url": "u", "stream": io.BytesIO(SHARD)},
        lambda folder: {"url": "u", "stream": io.BytesIO(b"x" * 1000)},
    ),
    "group_by_keys": Case(
        lambda folder, **kw: functools.partial(group_by_keys, keys=keyed, **kw),
        lambda folder, i: {"fname": f"{i}.x", "data": b"", "__url__": "u"},
        lambda folder: {"fname": "bad.x", "data": b"", "__url__": "u"},
    ),
    "RandomMix": Case(lambda folder: wds.RandomMix([range(3), range(9)], longest=True, seed=1), None),
    "RoundRobin": Case(lambda folder: wds.RoundRobin([range(3), range(9)], longest=True), None),
    "Mixture": Case(mixture, None, ordered=False),
    "DirectoryShardList": Case(directory, None),
    "SimpleShardList": Case(lambda folder: SimpleShardList(URLS), None),
    "ResampledShards": Case(lambda folder: ResampledShards(URLS, 9, deterministic=True), None, ordered=False),
    "MultiShardSample": Case(lambda folder: MultiShardSample({"dataset": [{"shards": URLS}]}), None, ordered=False),
}
BEHIND_A_SOURCE = [name for name, case in CASES.items() if case.good is not None]
HANDLING = [name for name, case in CASES.items() if case.bad is not None]


@pytest.fixture
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    return Setup(CASES[request.param], tmp_path)


def each(names: Collection[str] = CASES.keys()) -> Any:
    return pytest.mark.parametrize("setup", names, indirect=True)


def test_every_stage_has_a_case() -> None:
    bases = {"FilterFunction", "PipelineStage", "cbors2_to_samples"}  # to derive from, and another name
    for name in {*wds.__all__, *filters.__all__} - bases:
        stage = getattr(filters if name in filters.__all__ else wds, name)
        runs = isinstance(stage, type) and (hasattr(stage, "run") or issubclass(stage, Mix))
        if runs or isinstance(stage, RestCurried) or getattr(stage, "makes_stages", False):
            assert name in CASES or name.startswith("_"), name


@each()
@pytest.mark.parametrize("twin_of", [lambda s: pickle.loads(pickle.dumps(s)), copy.copy], ids=["pickle", "copy"])
def test_a_twin_does_the_same(setup: Setup, twin_of: Callable[[Any], Any]) -> None:
    stage = setup.stage()
    twin = twin_of(stage)
    assert traits_of(twin) == traits_of(stage)
    assert setup.output(twin) == setup.output(setup.stage())
    assert len(setup.output(twin)) == len(setup.output(stage))


@each()
def test_every_iteration_is_whole(setup: Setup) -> None:
    stage = setup.stage()
    next(abandoned := setup.open(stage))
    del abandoned
    first, second = setup.output(stage), setup.output(stage)
    assert sorted(first) == sorted(second) or not setup.case.ordered
    assert len(first) == len(second)
    if setup.case.ordered:
        assert first == second


@each()
def test_nothing_is_taken_before_the_first_item_is_asked_for(setup: Setup) -> None:
    items = setup.open(setup.stage())
    assert setup.taken == []
    assert next(items) is not None


@each(HANDLING)
def test_the_handler_decides(setup: Setup) -> None:
    of_one = len(setup.output(setup.stage(), n=1))
    assert len(setup.output(setup.stage(handler=ignore_and_continue), setup.mixed())) == 3 * of_one
    assert len(setup.output(setup.stage(handler=ignore_and_stop), setup.mixed())) == of_one
    with pytest.raises((DecodingError, OSError, ValueError, ZeroDivisionError)):
        setup.output(setup.stage(), setup.mixed())
    traits = traits_of(setup.stage())
    assert traits is None or traits.handler == "handler"


@each()
@pytest.mark.parametrize("n", [0, 1, 7])
def test_as_many_come_out_as_it_declares(setup: Setup, n: int) -> None:
    stage = setup.stage()
    traits = traits_of(stage)
    if setup.case.good is None:
        if hasattr(stage, "__len__"):
            assert len(stage) == len(setup.output(stage))
    elif traits is not None:
        count = len(setup.output(stage, n=n))
        assert count == n or not traits.one_to_one
        assert traits.count is None or count == traits.count(n, *stage.args, **stage.kw)
    else:
        assert isinstance(stage, FilterFunction | functools.partial | Sourced | wds.LMDBCached)


@each([name for name in BEHIND_A_SOURCE if name != "slice"])  # islice lets go of it when dropped
def test_a_stage_that_is_left_closes_its_source(setup: Setup) -> None:
    items = setup.open(setup.stage(), n=100)
    next(items)
    items.close()  # type: ignore[attr-defined]
    del items
    assert setup.closed


@each([name for name in BEHIND_A_SOURCE if name not in ("LMDBCached", "SQLiteCache")])  # a database has one writer
def test_two_iterations_at_once_are_independent(setup: Setup) -> None:
    stage = setup.stage()
    both = [setup.open(stage), setup.open(stage)]
    lists: list[list[str]] = [[], []]
    for pair in itertools.zip_longest(*both):
        for items, item in zip(lists, pair, strict=True):
            items.append(shown(item))
    assert len(lists[0]) == len(lists[1]) == len(setup.output(setup.stage()))
