"""Stages in a row: invoking, epochs, lengths, copies, closing, pickling, DataLoader workers."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from wds_async import filters, shardlists, world
from wds_async.errors import ConfigError, ReaderClosed
from wds_async.filters import shuffle
from wds_async.pipeline import DataPipeline
from wds_async.reading.records import RecordStage, cbors_to_samples
from wds_async.shardlists import split_by_worker
from wds_async.stages import FilterFunction, PipelineStage, Sourced, pipelinefilter, stage_of
from wds_async.tariterators import TarStage, tarfile_to_samples


def numbers() -> Iterator[int]:
    return iter(range(5))


def doubled(source: Iterable[int]) -> Iterator[int]:
    return (2 * x for x in source)


@pipelinefilter
def plus(source: Iterable[int], amount: int = 1) -> Iterator[int]:
    """Add."""
    for x in source:
        yield x + amount


class Total(PipelineStage):
    def run(self, source: Iterable[int]) -> Iterator[int]:
        return itertools.accumulate(source)


@pytest.mark.parametrize("first", [range(5), numbers, (0, 1, 2, 3, 4), DataPipeline(numbers), [range(5)]])
def test_kinds_of_stages(first: Any) -> None:
    pipeline = DataPipeline(first, None, doubled, plus(amount=3), Total())
    assert list(pipeline) == [3, 8, 15, 24, 35]
    assert list(pipeline) == [3, 8, 15, 24, 35]
    assert len(pipeline.pipeline) == 4
    assert pipeline.stage(1) is doubled


def test_what_is_no_stage() -> None:
    with pytest.raises(ConfigError, match=r"shuffle stands in the pipeline without its call: write shuffle\("):
        list(DataPipeline((1,), filters.shuffle))
    with pytest.raises(ConfigError, match="of type str is not a first stage"):
        list(DataPipeline("train.tar"))
    with pytest.raises(ConfigError, match="3 of type int is not a stage"):
        iter(DataPipeline(range(5), 3))
    with pytest.raises(ConfigError, match="first stage"):
        iter(DataPipeline(3))
    with pytest.raises(ConfigError, match="without stages"):
        iter(DataPipeline())
    with pytest.raises(NotImplementedError, match="run"):
        iter(DataPipeline(range(5), PipelineStage()))


def test_an_empty_source_does_not_repeat_for_ever() -> None:
    assert list(DataPipeline(range(0)).repeat()) == []
    assert list(DataPipeline(range(0)).with_epoch(10)) == []


def test_leaving_early_closes_the_generators() -> None:
    closed = []

    def source() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    for epoch in (DataPipeline(source, plus()), DataPipeline(source, plus()).with_epoch(5)):
        iterator = iter(epoch)
        next(iterator)
        del iterator
    assert closed == [True, True]


def test_close() -> None:
    class Closable:
        closed = 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def close(self) -> None:
            self.closed += 1

    source = Closable()
    with DataPipeline(source) as pipeline:
        assert list(pipeline) == [0, 1, 2]
    assert source.closed == 1
    with pytest.raises(ReaderClosed, match="closed"):
        iter(pipeline)


def test_curried_filter() -> None:
    stage = plus(2)
    assert isinstance(stage, FilterFunction)
    assert list(stage([1])) == list(stage.run([1])) == [3]
    assert str(stage) == repr(stage) == "<plus (2,) {}>"
    assert plus.__doc__ == "Add."
    twin = pickle.loads(pickle.dumps(stage))
    assert list(twin([1])) == [3]
    assert pickle.loads(pickle.dumps(plus)) is plus
    assert pickle.loads(pickle.dumps(filters.map(str))).f is filters._map


def test_set_epoch_reaches_the_stages_that_know_epochs() -> None:
    inner = DataPipeline(range(50), filters.detshuffle(100, seed=1))
    pipeline = DataPipeline(inner, shardlists.split_by_worker)
    first = list(pipeline)
    assert list(pipeline) != first
    pipeline.set_epoch(0)
    assert list(pipeline) == first


def test_statistics_of_a_pipeline_that_reads_no_shards() -> None:
    assert DataPipeline(range(3)).statistics() is None
    assert DataPipeline(range(3)).traffic() is None


class Placed(DataPipeline):
    """Yields where its worker stands; at module level so that a spawned worker can import it."""

    def __iter__(self) -> Iterator[Any]:
        yield list(world.place())


def test_a_worker_knows_the_rank_of_its_parents_process_group(tmp_path: Any) -> None:
    import torch.distributed as dist
    import torch.multiprocessing as mp

    mp.spawn(_rank_main, args=(f"file://{tmp_path}/store", str(tmp_path)), nprocs=2)
    assert not dist.is_initialized()
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == repr([[rank, 2, 0, 1]])


def _rank_main(rank: int, store: str, out: str) -> None:
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    loader = DataLoader(Placed(range(1)), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    with open(f"{out}/{rank}", "w") as file:
        file.write(repr(list(loader)))
    dist.destroy_process_group()


def secure(source: Any) -> Any:
    """A stage at module level, so that spawned workers can import it."""
    from wds_async import config

    for _ in source:
        yield config.settings().secure


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("enforced", [True, False])
def test_a_spawned_worker_obeys_the_security_that_its_parent_set(
    enforced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.data import DataLoader

    from wds_async import utils

    monkeypatch.setattr(utils, "enforce_security", enforced, raising=False)
    loader = DataLoader(DataPipeline((1,), secure), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert list(loader) == [enforced]


def add(source: Iterable[int], n: int, *, times: int = 1) -> Iterator[int]:
    for x in source:
        yield x + n * times


class Doubling:
    """A dataset of users' own that takes its source by `source_`."""

    def __init__(self, by: int = 2) -> None:
        self.by = by
        self.source: Any = None

    def source_(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        return (self.by * x for x in self.source)


def test_stage_of() -> None:
    def run(stage: Any, source: Any = (1, 2, 3)) -> list[Any]:
        return list(getattr(stage, "run", stage)(iter(source)))

    assert run(stage_of(add, 1, times=2)) == [3, 4, 5]
    assert run(stage_of(add, 1)) == [2, 3, 4]
    assert run(stage_of(filters.map, str)) == ["1", "2", "3"]
    assert run(stage_of(filters.batched, 2, collation_fn=None)) == [[1, 2], [3]]
    assert run(stage_of(filters.map(str))) == ["1", "2", "3"]
    assert run(stage_of(split_by_worker)) == [1, 2, 3]
    assert run(stage_of(itertools.islice, 2)) == [1, 2]
    assert run(stage_of(enumerate)) == [(0, 1), (1, 2), (2, 3)]
    assert run(stage_of(filters.Cached)) == [1, 2, 3]
    assert sorted(run(stage_of(filters.detshuffle, 10))) == [1, 2, 3]
    assert run(stage_of(Doubling, 3)) == [3, 6, 9]
    assert isinstance(stage_of(tarfile_to_samples), TarStage)
    assert isinstance(stage_of(cbors_to_samples), RecordStage)
    stage = filters.Cached()
    assert stage_of(stage) is stage
    for nothing in (7, "shuffle", None):
        with pytest.raises(ConfigError, match="no function"):
            stage_of(nothing)


def test_stages_pickle() -> None:
    stages = [stage_of(add, 1), stage_of(shuffle, 5, seed=1), stage_of(Doubling, 3), stage_of(filters.Cached)]
    copied = pickle.loads(pickle.dumps(DataPipeline(range(3), stages)))
    assert sorted(copied) == [3, 6, 9]


def test_sourced_shares_nothing_between_runs() -> None:
    stage = Sourced(Doubling())
    one, two = stage.run([1, 2]), stage.run([5])
    assert (list(one), list(two)) == ([2, 4], [10])
    assert stage.dataset.source is None


def test_wrong_arguments_of_a_stage_are_told_where_it_is_made() -> None:
    from wds_async import filters

    with pytest.raises(TypeError, match=r"^shuffle\(\): .*seedd"):
        filters.shuffle(10, seedd=3)
    with pytest.raises(TypeError, match=r"^to_tuple\(\): .*missing_is_eror"):
        filters.to_tuple("txt", missing_is_eror=False)
    assert list(filters.slice(2)(iter(range(5)))) == [0, 1]


def test_keyword_arguments_of_a_pipeline_warn() -> None:
    with pytest.warns(UserWarning, match="takes stages only; handler, length has no effect here") as caught:
        pipeline = DataPipeline([1, 2, 3].__iter__, handler=print, length=3)
    assert caught[0].filename == __file__
    assert list(pipeline) == [1, 2, 3]
    assert not hasattr(pipeline, "handler")


def test_a_list_of_dicts_is_a_source_and_not_a_list_of_stages() -> None:
    shards = [{"url": "a.tar"}, {"url": "b.tar"}]
    pipeline = DataPipeline(shards, lambda source: (shard["url"] for shard in source))
    assert list(pipeline) == list(pipeline) == ["a.tar", "b.tar"]


def test_samples_have_no_number_and_the_error_names_the_index() -> None:
    with pytest.raises(TypeError, match="ShardListDataset with an index"):
        DataPipeline([1, 2])[0]


def test_each_stage_is_a_range_of_the_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    with wds.TarWriter(tmp_path / "a.tar") as sink:
        for n in range(20):
            sink.write({"__key__": str(n), "cls": n})
    dataset = wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode().to_tuple("cls").batched(5)
    expected = [batch[0].tolist() for batch in dataset]

    def ranges() -> dict[str, int]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert [batch[0].tolist() for batch in dataset] == expected
        return {event.key: event.count for event in profile.key_averages() if event.key.startswith("wds.")}

    assert ranges() == {}
    monkeypatch.setenv("WDS_PROFILE", "1")
    found = ranges()
    assert {"wds.decode", "wds.to_tuple", "wds.batched"} <= set(found)
    assert found["wds.batched"] == 5  # four batches, and the end
    assert found["wds.decode"] == 21
