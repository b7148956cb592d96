"""`Processor` and its relatives, in the calls that users wrote."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from multiprocessing import context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wds_async import filters, world
from wds_async.autodecode import Decoder, handle_extension, torch_video
from wds_async.dataset import WebDataset
from wds_async.errors import ConfigError, ShardNotFound
from wds_async.filters import batched, map, shuffle
from wds_async.fluid import FluidInterface
from wds_async.legacy.datasets import Chain, Composable, DBCache, Processor, ShardList, Shorthands
from wds_async.reading import parts
from wds_async.shardlists import SimpleShardList, split_by_worker
from wds_async.tariterators import tarfile_to_samples

OLD = pytest.mark.filterwarnings("ignore:(Processor|ShardList|DBCache) is deprecated")


class Numbers(torch.utils.data.IterableDataset[Any]):
    """A dataset of a user's own."""

    def __init__(self, n: int = 5) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.n))


def add_noise(source: Iterable[float], noise: float = 0.01, *, sign: int = 1) -> Iterator[float]:
    for x in source:
        yield x + sign * noise


def my_shares(source: Iterable[Any]) -> Iterator[Any]:
    return split_by_worker(source)


def chain(urls: list[str]) -> Any:
    """The whole way from URLs to samples, as it was written in 2020."""
    dataset: Any = ShardList(urls)
    dataset = Processor(dataset, parts.url_opener)
    dataset = Processor(dataset, parts.tar_file_expander)
    return Processor(dataset, parts.group_by_keys)


@pytest.fixture
def urls(shards: Any) -> list[str]:
    return [str(path) for path in shards(4, 3)]


def test_warns_at_the_users_line() -> None:
    with pytest.warns(DeprecationWarning, match="^Processor is deprecated; use DataPipeline") as caught:
        Processor(add_noise)
    assert [warning.filename for warning in caught] == [__file__]


@OLD
def test_function_first() -> None:
    assert list(Processor(add_noise, noise=0.5)(Numbers(2))) == [0.5, 1.5]
    assert list(Processor(add_noise, 0.5, sign=-1)(Numbers(2))) == [-0.5, 0.5]
    assert sorted(Processor(shuffle, 100)(Numbers())) == [0, 1, 2, 3, 4]
    assert list(Processor(map, str)(Numbers(2))) == ["0", "1"]
    (batch,) = Processor(batched, 16)(({"x": np.float32(1)}, {"x": np.float32(2)}))
    assert batch == {"x": [1.0, 2.0]}
    assert list(Processor(filters.map(str))(Numbers(2))) == ["0", "1"]


@OLD
def test_source_first() -> None:
    assert list(Processor(Numbers(2), add_noise, 0.5)) == [0.5, 1.5]
    assert list(Processor(Numbers(2), add_noise, _kwa={"noise": 1, "sign": -1})) == [-1, 0]
    assert list(Processor(Numbers(2), map, str)) == ["0", "1"]
    assert list(Processor(None, map, str).source_(Numbers(2))) == ["0", "1"]
    assert list(Processor(source=Numbers(2), f=add_noise, noise=1)) == [1, 2]
    assert list(Processor(add_noise, source=Numbers(2), noise=1)) == [1, 2]


@OLD
def test_a_processor_is_not_changed_by_a_call() -> None:
    processor = Processor(add_noise, 1)
    two, three = processor(Numbers(2)), processor(Numbers(3))
    assert (list(two), list(three), list(two)) == ([1, 2], [1, 2, 3], [1, 2])
    with pytest.raises(ConfigError, match="no source"):
        list(processor)
    with pytest.raises(ConfigError, match="no function"):
        Processor(Numbers())


@OLD
def test_the_old_chain_gives_webdatasets_samples(urls: list[str]) -> None:
    expected = [dict(sample) for sample in WebDataset(urls, shardshuffle=False)]
    dataset = chain(urls)
    for _ in range(2):
        found = list(dataset)
        assert [{k: v for k, v in sample.items() if k != "__local_path__"} for sample in found] == [
            {k: v for k, v in sample.items() if k != "__local_path__"} for sample in expected
        ]
    assert isinstance(dataset, torch.utils.data.IterableDataset)
    assert len(list(Processor(SimpleShardList(urls), tarfile_to_samples))) == len(expected)


@OLD
def test_in_spawned_and_forked_workers(urls: list[str]) -> None:
    dataset = Processor(chain(urls), add_key, "!")
    expected = sorted(dataset)
    for start in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=start)
        assert sorted(loader) == expected


def add_key(source: Iterable[dict[str, Any]], mark: str) -> Iterator[str]:
    return (sample["__key__"] + mark for sample in source)


@OLD
def test_errors_come_through(urls: list[str], tmp_path: Path) -> None:
    with pytest.raises(ShardNotFound, match="missing"):
        list(chain([*urls, str(tmp_path / "missing.tar")]))

    def fails(source: Iterable[Any]) -> Iterator[Any]:
        yield 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(Processor(Numbers(), fails).map(str))


@OLD
def test_shorthands(urls: list[str]) -> None:
    dataset = (
        chain(urls).decode().to_tuple("__key__", "cls").map_tuple(None, lambda c: c + 1).select(lambda t: t[1] > 2)
    )
    assert next(iter(dataset)) == ("000002", 3)
    batches = list(chain(urls).decode(only="cls").to_tuple("cls").batched(5))
    assert [list(batch[0]) for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 1]]
    numbers = Processor(Numbers(), add_noise, 0)
    assert isinstance(numbers, Processor)
    assert list(numbers.batched(2, None).unlisted().slice(3)) == [0, 1, 2]
    assert list(numbers.slice()) == [0, 1, 2, 3, 4]
    assert sorted(numbers.shuffle(10)) == [0, 1, 2, 3, 4]
    assert numbers.shuffle(0) is numbers
    assert list(Processor(({"__key__": "a"},), map, dict).associate({"a": {"x": 1}})) == [{"__key__": "a", "x": 1}]
    for name in ("rename", "map_dict", "rsample", "log_keys", "listed", "rename_keys", "extract_keys"):
        assert hasattr(numbers, name)


@OLD
def test_epochs_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Processor(Numbers(), add_noise, 0)
    assert list(numbers.repeat(2)) == [0, 1, 2, 3, 4] * 2
    assert list(numbers.repeat(nbatches=7)) == [0, 1, 2, 3, 4, 0, 1]
    epochs = numbers.with_epoch(3)
    assert [list(epochs) for _ in range(2)] == [[0, 1, 2], [3, 4, 0]]
    assert len(numbers.with_length(17)) == 17
    assert list(numbers.with_length(17)) == [0, 1, 2, 3, 4]
    with pytest.raises(TypeError):
        len(numbers)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert list(numbers.with_epoch(7, by_node=True)) == [0, 1, 2]
    with pytest.warns(DeprecationWarning, match="ddp_equalize"):
        equal = numbers.ddp_equalize(14, with_length=True)
    assert len(list(equal)) == len(equal) == 7


@OLD
def test_then_and_compose(tmp_path: Path) -> None:
    numbers = Processor(Numbers(3), map, lambda x: {"__key__": str(x)})
    assert [s["__key__"] for s in numbers.compose(DBCache, tmp_path / "c.db", 2)] == ["0", "1"]
    assert isinstance(numbers.compose(DBCache, tmp_path / "c.db", 2), DBCache)
    with pytest.warns(DeprecationWarning, match="dbcache"):
        assert len(list(numbers.dbcache(tmp_path / "c.db", 2).map(str))) == 2
    assert list(Processor(Numbers(3), map, str).then(add_letter, "a").compose(add_letter_b)) == ["0ab", "1ab", "2ab"]
    assert list(numbers.compose(add_key_of).slice(1)) == ["0"]
    assert list(Processor(Numbers(3), add_noise, 0).compose(add_noise, 2, sign=-1)) == [-2, -1, 0]
    assert list(Processor(Numbers(3), add_noise, 0).compose(filters.map(str), add_letter_b)) == ["0b", "1b", "2b"]


def add_letter(source: Iterable[str], letter: str) -> Iterator[str]:
    return (x + letter for x in source)


def add_letter_b(source: Iterable[str]) -> Iterator[str]:
    return add_letter(source, "b")


def add_key_of(source: Iterable[dict[str, Any]]) -> Iterator[str]:
    return (x["__key__"] for x in source)


def test_dbcache_is_a_dataset(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="^DBCache is deprecated; use LMDBCached") as caught:
        cache = DBCache(str(tmp_path / "c.db"), 2, Numbers())
    assert caught[0].filename == __file__
    assert list(cache) == list(cache) == [0, 1]
    assert list(cache.map(str)) == ["0", "1"]
    assert isinstance(cache, torch.utils.data.IterableDataset)


def test_mixins_of_users() -> None:
    with pytest.warns(DeprecationWarning, match="is deprecated; use DataPipeline with FluidInterface") as caught:

        class Mine(torch.utils.data.IterableDataset[Any], Composable, Shorthands):
            def __iter__(self) -> Iterator[Any]:
                return iter((1, 2, 3))

    assert {str(warning.message).split()[0] for warning in caught} == {"Composable", "Shorthands"}
    assert {warning.filename for warning in caught} == {__file__}
    assert list(Mine().map(str).slice(2)) == ["1", "2"]
    assert list(Mine().then(add_noise, 1)) == [2, 3, 4]
    assert list(Mine().compose(Mine)) == [1, 2, 3]

    class Sized(Processor):
        def __init__(self, source: Any, length: int) -> None:
            self.length = length
            super().__init__(source, filters.map, filters.identity)

        def __len__(self) -> int:
            return self.length

    with pytest.warns(DeprecationWarning, match="Processor"):
        sized = Sized(Numbers(), 17)
    assert len(sized) == 17
    assert list(sized) == [0, 1, 2, 3, 4]


@OLD
def test_decoder_on_a_dataset(urls: list[str]) -> None:
    def lengths(key: str, data: bytes) -> Any:
        return len(data) if key.endswith("json") else None

    with pytest.warns(DeprecationWarning, match="Decoder"):
        decoded = Decoder([lengths, torch_video])(chain(urls))
    sample = next(iter(decoded))
    assert sample["cls"] == 0
    assert sample["json"] == len('{"number": 0}')
    with pytest.warns(DeprecationWarning, match="Decoder"):
        decoded = Decoder(lengths, torch_video)(chain(urls))
    assert [sample["json"] for sample in decoded][:2] == [13, 13]
    with pytest.warns(DeprecationWarning, match="Decoder"):
        decoded = Decoder(handle_extension(".png", lambda data: "a picture"))(WebDataset(urls, shardshuffle=False))
    assert next(iter(decoded))["png"] == "a picture"


@OLD
def test_a_spawned_worker_is_told_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `split_by_node` splits there, too, where only the parent has a process group."""
    monkeypatch.setattr(world, "_inherited_rank", (1, 2))
    dataset = Processor(ShardList("{0..3}.tar", nodesplitter=True), map, str)
    assert "_rank" not in dataset.__getstate__()  # a file says nothing about ranks
    context.set_spawning_popen(object())  # what multiprocessing does around the pickling
    try:
        data = pickle.dumps(dataset)
    finally:
        context.set_spawning_popen(None)
    monkeypatch.setattr(world, "_inherited_rank", None)
    assert list(pickle.loads(data)) == ["{'url': '1.tar'}", "{'url': '3.tar'}"]


@OLD
def test_epoch_and_close_reach_the_source() -> None:
    dataset = Processor(Processor(Numbers(20), filters.detshuffle, 20), map, str)
    dataset.set_epoch(4)
    fourth = list(dataset)
    dataset.set_epoch(4)
    assert list(dataset) == fourth
    assert list(dataset) != fourth
    dataset.close()
    copied = pickle.loads(pickle.dumps(Processor(Numbers(3), add_noise, 1)))
    assert list(copied) == [1, 2, 3]
    assert isinstance(copied, Chain)
    assert isinstance(copied, FluidInterface)
