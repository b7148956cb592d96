"""Lengths that are known before anything is read, held against what then comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.servers import make_shard
from wds_async import filters, lengths
from wds_async.dataset import WebDataset
from wds_async.handlers import ignore_and_continue
from wds_async.loader import WebLoader
from wds_async.shardlists import split_by_node, split_by_worker

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

EVEN, UNEVEN = [5] * 8, [1, 2, 3, 4, 5, 6, 7, 8]


def index(folder: Path, counts: list[int]) -> dict[str, Any]:
    """A JSON shard list as a dict, over shards of so many samples each."""
    shards = []
    for s, count in enumerate(counts):
        path = folder / f"{len(counts)}-{s}-{count}.tar"
        path.write_bytes(make_shard({f"{s}/{i}": {"cls": b"1", "txt": b"x"} for i in range(count)}))
        shards.append({"url": str(path), "nsamples": count})
    return {"wids_version": 1, "shardlist": shards}


PIPELINES = {
    "raw": lambda d: d,
    "keeping": lambda d: d.shuffle(10).decode().rename(text="txt").to_tuple("text", "cls").map_tuple(str),
    "batched": lambda d: d.to_tuple("cls").batched(3),
    "whole batches": lambda d: d.to_tuple("cls").batched(3, partial=False),
    "slice": lambda d: d.slice(2, 7),
    "cached": lambda d: d.mcached(),
}


@pytest.mark.parametrize("counts", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("shardshuffle", [False, 100])
def test_a_known_length_is_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: list[int], pipeline: str, rank: int, shardshuffle: Any
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "3")
    dataset = PIPELINES[pipeline](WebDataset(index(tmp_path, counts), shardshuffle=shardshuffle))
    if shardshuffle and counts is UNEVEN:
        with pytest.raises(TypeError, match="with_length"):  # it changes from epoch to epoch
            len(dataset)
    else:
        assert len(dataset) == sum(1 for _ in dataset) == sum(1 for _ in dataset)


@pytest.mark.parametrize("counts", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_loader_counts_what_its_workers_give(
    tmp_path: Path, counts: list[int], workers: int, batch_size: int | None
) -> None:
    dataset = WebDataset(index(tmp_path, counts), shardshuffle=False).decode().to_tuple("cls")
    if batch_size is None:
        dataset = dataset.batched(4)
    loader = WebLoader(dataset, batch_size=batch_size, num_workers=workers)
    assert len(loader) == sum(1 for _ in loader)


@pytest.mark.parametrize("counts", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("partial", [True, False])
def test_samples_that_are_batched_again_behind_the_loader_are_counted(
    tmp_path: Path, counts: list[int], workers: int, partial: bool
) -> None:
    """WebDataset's own advice for mixing the samples of several workers."""
    dataset = (
        WebDataset(index(tmp_path, counts), shardshuffle=False).decode().to_tuple("cls").batched(4, partial=partial)
    )
    loader = WebLoader(dataset, batch_size=None, num_workers=workers)
    again = loader.unbatched().shuffle(10).batched(3)
    assert len(again) == sum(1 for _ in again)
    listed = WebLoader(dataset, batch_size=None, num_workers=workers).unbatched()
    assert len(listed) == sum(1 for _ in listed)


def test_what_a_collation_of_the_programs_own_leaves_in_a_batch_is_not_known(tmp_path: Path) -> None:
    dataset = WebDataset(index(tmp_path, EVEN), shardshuffle=False).decode().to_tuple("cls")
    halved = dataset.batched(4, collation_fn=lambda samples: [samples[:2]]).unbatched()
    changed = dataset.batched(4).map(lambda batch: [batch[0][:2]]).unbatched()
    for one in (halved, changed):
        with pytest.raises(TypeError, match="with_length"):
            len(one)


def test_the_total_is_known_where_only_the_shares_change(tmp_path: Path) -> None:
    dataset = WebDataset(index(tmp_path, UNEVEN), shardshuffle=100)
    loader = WebLoader(dataset, batch_size=None, num_workers=2)
    assert len(loader) == sum(1 for _ in loader) == sum(UNEVEN)
    with pytest.raises(TypeError):
        len(WebLoader(dataset.batched(4), batch_size=None, num_workers=2))


def test_several_sources(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    spec = {"dataset": [index(tmp_path, EVEN), index(tmp_path / "a", UNEVEN)]}
    dataset = WebDataset(spec, shardshuffle=False)
    assert len(dataset) == sum(1 for _ in dataset) == sum(EVEN) + sum(UNEVEN)


@pytest.mark.parametrize(
    "method",
    [
        lambda d: d.map(str),
        lambda d: d.select(bool),
        lambda d: d.rsample(0.5),
        lambda d: d.decode(handler=ignore_and_continue),
        lambda d: d.compose(filters.map_dict(ignore_and_continue, cls=int)),
        lambda d: d.compose(filters.rename(ignore_and_continue, label="cls")),
        lambda d: d.compose(iter),
        lambda d: d.compose(split_by_worker),
    ],
)
def test_a_stage_that_may_drop_items_ends_the_knowledge(tmp_path: Path, method: Any) -> None:
    with pytest.raises(TypeError):
        len(method(WebDataset(index(tmp_path, EVEN), shardshuffle=False)))


def test_shards_that_no_index_counts() -> None:
    assert lengths.of_shards(["a", "b"], {"a": 1}, [], False, 1) is None
    assert lengths.of_shards(["a", "b"], {"a": 1, "b": 2}, [], False, 2) == lengths.Length(6, (3, 3))
    assert lengths.of_shards(["a", "b"], {"a": 1, "b": 2}, [split_by_node, iter], False, 1) is None
