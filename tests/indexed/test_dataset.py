"""`ShardListDataset`: samples by number, from files and over HTTP, in one process and in DataLoader workers."""

from __future__ import annotations

import copy
import gzip
import io
import json
import logging
import os
import pickle
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.servers import make_shard, png
from wds_async.errors import (
    ConfigError,
    CorruptShard,
    DecodingError,
    MissingExtra,
    ShardFormatError,
    ShardNotFound,
    TransferError,
    UnsafeContent,
    UrlError,
)
from wds_async.indexed.dataset import ShardListDataset
from wds_async.indexed.samplers import ChunkedSampler, ShardedSampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

PER_SHARD = (4, 0, 3, 5)
TOTAL = sum(PER_SHARD)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS", "WIDS_CACHE", "WDS_SECURE", "WDS_ALLOW_PICKLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "cache"))


def fields(number: int) -> dict[str, bytes]:
    return {"png": png(number), "cls": str(number).encode(), "bin": number.to_bytes(4, "big")}


def shard_bytes() -> list[bytes]:
    numbers, shards = iter(range(TOTAL)), []
    for size in PER_SHARD:
        shards.append(make_shard({f"k{n}": fields(n) for n in [next(numbers) for _ in range(size)]}))
    return shards


@pytest.fixture
def listed(tmp_path: Path) -> list[dict[str, Any]]:
    entries = []
    for number, (data, size) in enumerate(zip(shard_bytes(), PER_SHARD, strict=True)):
        path = tmp_path / f"s{number}.tar"
        path.write_bytes(data)
        entries.append({"url": str(path), "nsamples": size})
    return entries


@pytest.fixture
def served(origin: Any) -> list[dict[str, Any]]:
    return [
        {"url": origin.add(f"s{number}.tar", data), "nsamples": size}
        for number, (data, size) in enumerate(zip(shard_bytes(), PER_SHARD, strict=True))
    ]


def number_of(sample: dict[str, Any]) -> int:
    """At module level, so that spawned workers can import it."""
    return int(sample[".cls"].read())


# ------------------------------------------------------------------ samples


def test_a_sample_is_what_wids_made_of_it(listed: list[dict[str, Any]]) -> None:
    listed[2]["dataset"] = "third"
    with ShardListDataset(listed) as dataset:
        assert len(dataset) == TOTAL
        sample = dataset[5]
    assert set(sample) == {".png", ".cls", ".bin"} | {
        f"__{name}__" for name in ("key", "dataset", "index", "shard", "shardindex")
    }
    assert (sample["__key__"], sample["__dataset__"], sample["__index__"]) == ("k5", "third", 5)
    assert (sample["__shard__"], sample["__shardindex__"]) == (listed[2]["url"], 1)
    assert sample[".cls"] == 5
    assert (sample[".png"].mode, sample[".png"].size) == ("RGB", (8, 8))
    assert sample[".bin"].read() == (5).to_bytes(4, "big")  # unknown to wids: a stream


def test_every_index_and_the_lengths(listed: list[dict[str, Any]]) -> None:
    dataset = ShardListDataset(listed, transformations=number_of)
    assert [dataset[i] for i in range(TOTAL)] == list(range(TOTAL))
    assert [dataset[-i] for i in range(1, TOTAL + 1)] == list(reversed(range(TOTAL)))
    assert dataset[np.int64(3)] == 3
    assert list(dataset) == list(range(TOTAL))  # Python's old protocol: ends at the first IndexError
    for beyond in (TOTAL, -TOTAL - 1):
        with pytest.raises(IndexError, match=str(beyond)):
            dataset[beyond]
    with pytest.raises(TypeError):
        dataset["k1"]  # type: ignore[index]
    assert dataset.lengths == list(PER_SHARD)
    assert list(dataset.cum_lengths) == [4, 4, 7, 12]
    assert dataset.total_length == TOTAL
    shard, inner, described = dataset.get_shard(7)
    assert (len(shard), inner, described) == (5, 0, listed[3])
    dataset.close()


@pytest.mark.parametrize("nothing", [None, []])
def test_without_transformations_fields_are_streams(listed: list[dict[str, Any]], nothing: Any) -> None:
    sample = ShardListDataset(listed, transformations=nothing)[3]
    assert {name: value.read() for name, value in sample.items() if name.startswith(".")} == {
        f".{name}": value for name, value in fields(3).items()
    }


def test_transformations_in_turn(listed: list[dict[str, Any]]) -> None:
    dataset = ShardListDataset(listed, transformations=["numpy", lambda sample: sample[".png"]])
    assert dataset[0].shape == (8, 8, 3)
    assert dataset.add_transform(lambda image: image.dtype) is dataset
    assert dataset[0] == np.uint8
    torch = ShardListDataset(listed, transformations="torchrgb8")[0]
    assert tuple(torch[".png"].shape) == (3, 8, 8)
    assert torch[".bin"].getvalue() == bytes(4)
    with pytest.raises(ConfigError, match="transformation"):
        ShardListDataset(listed, transformations=[3])
    with pytest.raises(ValueError, match="torchrgb"):
        ShardListDataset(listed, transformations="rgbtorch")


def test_the_fields_that_wids_decodes(tmp_path: Path) -> None:
    import msgpack
    import torch
    from PIL import Image

    def saved(save: Any, value: Any) -> bytes:
        buffer = io.BytesIO()
        save(buffer, value)
        return buffer.getvalue()

    gray = io.BytesIO()
    Image.new("L", (2, 3), 7).save(gray, "png")
    raw = {
        "png": gray.getvalue(),
        "txt": "é".encode(),
        "text": b"t",
        "cls2": b"2",
        "json": b"[1]",
        "npy": saved(np.save, np.arange(3)),
        "mp": msgpack.packb({"a": 1}),
        "pt": saved(lambda file, value: torch.save(value, file), torch.ones(2)),
        "pickle": pickle.dumps({"p": 1}),
        "pkl": pickle.dumps([2]),
        "a.json.gz": gzip.compress(b"[2]"),
        "other": b"o",
        "other.gz": gzip.compress(b"o"),
        "PNG": gray.getvalue(),
    }
    (tmp_path / "x.tar").write_bytes(make_shard({"k": raw}))
    sample = ShardListDataset([{"url": str(tmp_path / "x.tar"), "nsamples": 1}])[0]
    assert (sample[".png"].mode, sample[".png"].size) == ("L", (2, 3))
    assert (sample[".txt"], sample[".text"], sample[".cls2"], sample[".json"]) == ("é", "t", 2, [1])
    assert sample[".npy"].tolist() == [0, 1, 2]
    assert sample[".mp"] == {"a": 1}
    assert sample[".pt"].tolist() == [1, 1]
    assert (sample[".pickle"], sample[".pkl"], sample[".a.json.gz"]) == ({"p": 1}, [2], [2])
    for name in (".other", ".other.gz", ".PNG"):
        assert sample[name].read() == raw[name[1:]]


def test_pickles_of_any_class_are_refused(tmp_path: Path) -> None:
    evil = b"cposix\nsystem\n(S'true'\ntR."
    (tmp_path / "x.tar").write_bytes(make_shard({"k": {"pkl": evil}}))
    with pytest.raises(DecodingError, match=r"x\.tar.*\.pkl.*'k'.*posix") as caught:
        ShardListDataset([str(tmp_path / "x.tar")])[0]
    assert isinstance(caught.value.__cause__, UnsafeContent)


# ------------------------------------------------------------------ where shards come from


def test_from_an_index_beside_its_shards(listed: list[dict[str, Any]], tmp_path: Path) -> None:
    relative = [{**entry, "url": os.path.basename(entry["url"])} for entry in listed]
    path = tmp_path / "index.json"
    path.write_text(json.dumps({"wids_version": 1, "name": "mine", "shardlist": relative}))
    for source in (str(path), path):
        dataset = ShardListDataset(source, transformations=number_of)
        assert [dataset[i] for i in range(TOTAL)] == list(range(TOTAL))
        assert (dataset.dataset_name, dataset.base, dataset.spec["wids_version"]) == ("mine", f"{tmp_path}/", 1)
    with path.open() as file:
        assert ShardListDataset(file, base=str(tmp_path), transformations=number_of)[11] == 11
    assert ShardListDataset(str(path), dataset_name="yours").dataset_name == "yours"


def test_from_shards_themselves_whose_samples_are_counted(
    listed: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pattern = str(tmp_path / "s{0..3}.tar")
    with caplog.at_level(logging.INFO, "wds_async"):
        assert ShardListDataset(pattern).lengths == list(PER_SHARD)
    assert "wds-async index" in caplog.text
    assert "4 of 4" in caplog.text
    assert ShardListDataset([entry["url"] for entry in listed]).lengths == list(PER_SHARD)
    assert ShardListDataset([Path(listed[0]["url"]), {"url": listed[2]["url"]}, listed[3]]).lengths == [4, 3, 5]
    assert ShardListDataset(["s0.tar", "s2.tar"], base=str(tmp_path)).get_stats() == (0, 0)


@pytest.mark.parametrize("wrong", [[], [{"nsamples": 3}]])
def test_what_names_no_shards(wrong: Any) -> None:
    with pytest.raises((UrlError, ConfigError)):
        ShardListDataset(wrong)


def test_over_http_each_shard_once_and_then_offline(served: list[dict[str, Any]], origin: Any, tmp_path: Path) -> None:
    origin.add("d/index.json", json.dumps({"wids_version": 1, "base": "..", "shardlist": served}).encode())
    cache = tmp_path / "own"
    dataset = ShardListDataset(f"{origin.base}/d/index.json", cache_dir=cache, transformations=number_of)
    assert not [request for request in origin.requests if request.path != "/d/index.json"]  # nothing ahead of need
    assert [dataset[i] for i in (11, 0, 5, 11)] == [11, 0, 5, 11]
    begun = Counter(r.path for r in origin.requests if r.headers.get("range", "").startswith("bytes=0-"))
    assert begun == {"/d/index.json": 1, "/s0.tar": 1, "/s2.tar": 1, "/s3.tar": 1}
    origin.stop()
    again = ShardListDataset(served, cache_dir=str(cache), transformations=number_of)
    assert [again[i] for i in range(4, TOTAL)] == list(range(4, TOTAL))
    origin.start()


def test_a_server_that_is_gone_is_an_error(served: list[dict[str, Any]], origin: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("WDS_RETRIES", "1")
    origin.stop()
    with pytest.raises(TransferError, match=r"s0\.tar"):
        ShardListDataset(served)[0]
    origin.start()


def test_wrong_numbers_in_the_index(listed: list[dict[str, Any]]) -> None:
    for wrong in (3, 5):
        listed[0]["nsamples"] = wrong
        dataset = ShardListDataset(listed, transformations=number_of)
        with pytest.raises(ShardFormatError, match=rf"s0\.tar holds 4 samples, but the index says {wrong}"):
            dataset[0]
        assert dataset[-1] == TOTAL - 1


def test_a_corrupt_shard_and_a_missing_one(listed: list[dict[str, Any]]) -> None:
    first, third = Path(listed[0]["url"]), Path(listed[2]["url"])
    damaged = bytearray(first.read_bytes())
    damaged[1024:1536] = b"garbage!" * 64
    first.write_bytes(damaged)
    third.unlink()
    dataset = ShardListDataset(listed, transformations=number_of)
    with pytest.raises(CorruptShard, match=r"s0\.tar.*byte"):
        dataset[0]
    with pytest.raises(ShardNotFound, match=r"s2\.tar"):
        dataset[4]
    assert dataset[7] == 7


def test_misses_are_counted_and_warned_about_once(
    listed: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = ShardListDataset(listed, lru_size=1, transformations=None)
    for _ in range(60):
        dataset[0], dataset[11]
    assert dataset.get_stats() == (120, 120)
    assert len([r for r in caplog.records if "ShardedSampler" in r.getMessage()]) == 1
    near = ShardListDataset(listed, lru_size=1, transformations=number_of)
    for index in ShardedSampler(near):
        near[index]
    assert near.get_stats() == (TOTAL, 3)
    with pytest.raises(ConfigError):
        ShardListDataset(listed, lru_size=0)
    with pytest.warns(UserWarning, match="descriptor"):
        ShardListDataset(listed, lru_size=500)


def test_keep_and_cache_size(served: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> int:
        return len(list((tmp_path / "cache").glob("*@*/*.tar")))

    size = len(shard_bytes()[0])
    small = ShardListDataset(served, cache_size=size, transformations=number_of)
    assert [small[i] for i in (0, 4, 7, 0)] == [0, 4, 7, 0]
    assert kept() == 1
    every = ShardListDataset(served, cache_size=size, keep=True, transformations=number_of)
    assert [every[i] for i in (0, 4, 7)] == [0, 4, 7]
    assert kept() == 3
    monkeypatch.setenv("WDS_CACHE_SIZE", str(size))
    more = [{"url": served[0]["url"] + "?v=2", "nsamples": 4}]
    assert ShardListDataset(more, transformations=number_of)[0] == 0
    assert kept() == 1


# ------------------------------------------------------------------ threads, processes, torch


def test_threads_share_one(served: list[dict[str, Any]]) -> None:
    with ShardListDataset(served, lru_size=1, transformations=number_of) as dataset:
        wanted = [i * 7 % TOTAL for i in range(200)]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(dataset.__getitem__, wanted)) == wanted


def test_copies_and_pickles(listed: list[dict[str, Any]]) -> None:
    import torch.utils.data  # noqa: F401 (with it, ``__class__`` is another class)

    dataset = ShardListDataset(listed, transformations=number_of)
    assert dataset[3] == 3
    for other in (pickle.loads(pickle.dumps(dataset)), copy.copy(dataset), copy.deepcopy(dataset)):
        assert type(other) is ShardListDataset
        assert [other[i] for i in range(TOTAL)] == list(range(TOTAL))


def test_torch_takes_it_for_its_own(listed: list[dict[str, Any]]) -> None:
    from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

    class Mine(ShardListDataset):
        pass

    for cls in (ShardListDataset, Mine):
        dataset = cls(listed, transformations=number_of)
        assert isinstance(dataset, Dataset)
        assert isinstance(dataset, cls)
        assert not isinstance(dataset, IterableDataset)
        assert type(dataset) is cls
        both = dataset + dataset
        assert isinstance(both, ConcatDataset)
        assert (len(both), both[TOTAL + 1]) == (2 * TOTAL, 1)
        assert Subset(dataset, [5])[0] == 5
        assert pickle.loads(pickle.dumps(ShardListDataset(listed)))[0][".cls"] == 0


def test_isinstance_holds_whatever_is_imported_first(listed: list[dict[str, Any]]) -> None:
    code = (
        "import sys; from wds_async.indexed.dataset import ShardListDataset as D\n"
        f"d = D([{listed[0]!r}]); assert d[1]['.cls'] == 1 and isinstance(d, D)\n"
        "assert 'torch' not in sys.modules\n"
        "import torch.utils.data as data\n"
        "assert isinstance(d, data.Dataset) and isinstance(d, D)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_in_dataloader_workers(start: str, served: list[dict[str, Any]], origin: Any) -> None:
    from torch.utils.data import DataLoader

    dataset = ShardListDataset(served, transformations=number_of)
    if start == "fork":
        assert dataset[0] == 0  # a shard is open, and the engine was used, before the fork
    sampler = ChunkedSampler(dataset, chunksize=4, seed=1)
    loader = DataLoader(
        dataset, batch_size=5, sampler=sampler, num_workers=2, multiprocessing_context=start, persistent_workers=True
    )
    assert len(loader) == 3
    epochs = [[int(x) for batch in loader for x in batch] for _ in range(2)]
    del loader
    assert [sorted(epoch) for epoch in epochs] == [list(range(TOTAL))] * 2
    assert epochs[0] != epochs[1]
    begun = Counter(r.path for r in origin.requests if r.headers["range"].startswith("bytes=0-"))
    assert begun == {"/s0.tar": 1, "/s2.tar": 1, "/s3.tar": 1}


def test_no_descriptor_is_left(listed: list[dict[str, Any]]) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("counts descriptors in /proc")
    before = len(os.listdir("/proc/self/fd"))
    dataset = ShardListDataset(listed, transformations=number_of)
    for i in range(TOTAL):
        dataset[i]
    assert len(os.listdir("/proc/self/fd")) == before + 3
    dataset.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert dataset[2] == 2  # opened again
    dataset.close()


def test_pillow_is_named_where_it_is_missing(listed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DecodingError, match="pip install") as caught:
        ShardListDataset(listed)[0]
    assert isinstance(caught.value.__cause__, MissingExtra)
