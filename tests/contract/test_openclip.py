"""A loader built as OpenCLIP builds its own, on the parts that it takes from webdataset's submodules.

Its shape is that of open_clip's ``training/data.py``: shard lists and shuffles of its own whose epoch is a shared
value, tars read through `url_opener` and `tar_file_expander` with a grouping that never raises, `_shuffle`
called with a generator, and `WebLoader` with epochs counted in batches. It must run as it is, on 2 workers.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import make_tar, png
from wds_async.filters import _shuffle
from wds_async.tariterators import base_plus_ext, tar_file_expander, url_opener, valid_sample

torch = pytest.importorskip("torch")

SHARDS, SAMPLES, BATCH, WORKERS = 6, 10, 4, 2


class Epoch:
    """An epoch that the workers see change."""

    def __init__(self, epoch: int = 0) -> None:
        self.shared = multiprocessing.Value("i", epoch)

    def __int__(self) -> int:
        return int(self.shared.value)


def worker_seed(increment: int = 0) -> int:
    info = torch.utils.data.get_worker_info()
    if info is None:
        return int(wds.utils.pytorch_worker_seed())
    return int(info.seed + increment * max(1, info.num_workers))


class ShardShuffle(wds.PipelineStage):
    """Shards in an order that follows from seed and shared epoch, by webdataset's own buffer."""

    def __init__(self, bufsize: int, initial: int, seed: int, epoch: Epoch) -> None:
        self.bufsize, self.initial, self.seed, self.epoch = bufsize, initial, seed, epoch

    def run(self, src: Any) -> Any:
        rng = random.Random(worker_seed(int(self.epoch)) if self.seed < 0 else self.seed + int(self.epoch))
        return _shuffle(src, self.bufsize, self.initial, rng)


class WeightedShards(torch.utils.data.IterableDataset):
    """Shards drawn with replacement, by weight."""

    def __init__(self, urls: str, weights: list[float] | None = None, epoch: Epoch | None = None) -> None:
        super().__init__()
        self.urls = wds.shardlists.expand_urls(urls)
        self.weights = weights
        self.epoch = epoch or Epoch()
        assert isinstance(self.urls[0], str)

    def __iter__(self) -> Iterator[dict[str, str]]:
        rng = random.Random(worker_seed(int(self.epoch)))
        for _ in range(sys.maxsize):
            yield {"url": rng.choices(self.urls, weights=self.weights)[0]}


def log_and_continue(exn: Exception) -> bool:
    logging.getLogger("loader").info("ignored: %r", exn)
    return True


def group_without_raising(data: Any, keys: Any = base_plus_ext, handler: Any = None) -> Iterator[dict[str, Any]]:
    """Members to samples; a field met twice begins a new sample instead of raising. Every item has a name."""
    sample: dict[str, Any] | None = None
    for member in data:
        assert isinstance(member, dict)
        key, field = keys(member["fname"])
        if key is None:
            continue
        if sample is None or key != sample["__key__"] or field.lower() in sample:
            if valid_sample(sample):
                assert sample is not None
                yield sample
            sample = {"__key__": key, "__url__": member["__url__"]}
        sample[field.lower()] = member["data"]
    if valid_sample(sample):
        assert sample is not None
        yield sample


def read_without_raising(src: Any, handler: Any = log_and_continue) -> Iterator[dict[str, Any]]:
    streams = url_opener(src, handler=handler)
    return group_without_raising(tar_file_expander(streams, handler=handler), handler=handler)


def complete(sample: dict[str, Any]) -> bool:
    return "txt" in sample and any(kind in sample for kind in ("png", "jpg", "jpeg", "webp"))


def to_tensor(image: Any) -> Any:
    return torch.tensor(list(image.resize((2, 2)).tobytes()))


def tokens(text: str) -> Any:
    return torch.tensor([int(text)])


@pytest.fixture
def shards(tmp_path: Path) -> str:
    for shard in range(SHARDS):
        members = []
        for i in range(SAMPLES):
            number = shard * SAMPLES + i
            members += [(f"{number:04}.png", png(number)), (f"{number:04}.txt", str(number).encode())]
            if number % 20 == 3:
                members.pop()  # an image without a caption
            if number % 20 == 7:
                members[-2] = (f"{number:04}.png", b"no image")
        (tmp_path / f"{shard:03}.tar").write_bytes(make_tar(members))
    return str(tmp_path / f"{{000..{SHARDS - 1:03}}}.tar")


GOOD = {n for n in range(SHARDS * SAMPLES) if n % 20 not in (3, 7)}


def pipeline(shards: str, epoch: Epoch, resampled: bool, train: bool = True) -> Any:
    stages: list[Any] = [WeightedShards(shards, [1.0] * SHARDS, epoch) if resampled else wds.SimpleShardList(shards)]
    if train and not resampled:
        stages += [ShardShuffle(2000, 500, 7, epoch), wds.split_by_node, wds.split_by_worker]
    if train:
        stages += [read_without_raising, wds.shuffle(bufsize=20, initial=5)]
    else:
        stages += [wds.split_by_worker, wds.tarfile_to_samples(handler=log_and_continue)]
    stages += [
        wds.select(complete),
        wds.decode("pilrgb", handler=log_and_continue),
        wds.rename(image="jpg;png;jpeg;webp", text="txt"),
        wds.map_dict(image=to_tensor, text=tokens),
        wds.to_tuple("image", "text"),
        wds.batched(BATCH, partial=not train),
    ]
    return wds.DataPipeline(*stages)


def load(dataset: Any, persistent: bool) -> Any:
    return wds.WebLoader(
        dataset, batch_size=None, shuffle=False, num_workers=WORKERS, persistent_workers=persistent,
        multiprocessing_context="fork",
    )  # fmt: skip


def numbers(batches: Any) -> list[int]:
    found: list[int] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        for images, texts in batches:
            assert images.shape[1:] == (12,)
            assert len(images) == len(texts)
            found += [int(t) for t in texts[:, 0]]
    return found


def test_what_is_imported() -> None:
    """The parts that the loader takes from submodules do what its grouping expects of them."""
    assert base_plus_ext("a/b.c.d") == ("a/b", "c.d")
    assert not valid_sample({"__bad__": True})
    assert not valid_sample({})


@pytest.mark.parametrize("resampled", [False, True])
def test_training(shards: str, resampled: bool) -> None:
    """Epochs of the same number of whole batches; without resampling, every epoch has each sample at most once."""
    epoch = Epoch()
    batches = math.floor(len(GOOD) / BATCH / WORKERS)
    dataset = pipeline(shards, epoch, resampled).with_epoch(batches)
    loader = load(dataset, persistent=True).with_epoch(batches * WORKERS)
    loader.num_batches = batches * WORKERS
    runs = []
    for number in range(2):
        epoch.shared.value = number
        seen = numbers(loader)
        assert len(seen) == batches * WORKERS * BATCH
        assert set(seen) <= GOOD
        runs.append(seen)
    assert runs[0] != runs[1]
    if not resampled:
        assert all(len(set(run)) >= len(run) - WORKERS * BATCH for run in runs)
    loader.close()


def test_evaluation(shards: str) -> None:
    """Every good sample once, with a shorter last batch for each worker."""
    seen = numbers(load(pipeline(shards, Epoch(), False, train=False), persistent=False))
    assert sorted(seen) == sorted(GOOD)


def test_neighbours_of_one_key(tmp_path: Path) -> None:
    """A shard that ends with the key that the next one begins with: the loader's own grouping sees both samples."""
    for i in range(2):
        (tmp_path / f"{i}.tar").write_bytes(make_tar([("a.txt", b"%d" % i), ("a.cls", b"%d" % i)]))
    found = list(read_without_raising({"url": str(tmp_path / f"{i}.tar")} for i in range(2)))
    assert [(s["__key__"], s["txt"], s["cls"]) for s in found] == [("a", b"0", b"0"), ("a", b"1", b"1")]
