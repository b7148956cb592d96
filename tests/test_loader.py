"""`WebDataset` under torch's DataLoader and `WebLoader`: workers, start methods, epochs, statistics."""

from __future__ import annotations

import ast
import gc
import itertools
import multiprocessing
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_async as wds
from tests.servers import Origin, make_shard
from wds_async.dataset import WebDataset
from wds_async.errors import ConfigError, ReaderClosed
from wds_async.loader import WebLoader
from wds_async.pipeline import DataPipeline
from wds_async.shardlists import ResampledShards
from wds_async.tariterators import tarfile_to_samples

# torch advises against more workers than processors, wherever these tests run.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SHARDS, PER_SHARD = 8, 10
EVERYTHING = Counter(f"{s}/{i}" for s in range(SHARDS) for i in range(PER_SHARD))


@pytest.fixture
def spec(tmp_path: Path) -> str:
    for s in range(SHARDS):
        shard = {f"{s}/{i}": {"cls": b"1", "bin": bytes(30_000)} for i in range(PER_SHARD)}
        (tmp_path / f"{s}.tar").write_bytes(make_shard(shard))
    return str(tmp_path / f"{{0..{SHARDS - 1}}}.tar")


def key_of(sample: dict[str, Any]) -> str:
    """At module level, so that spawned workers can import it."""
    return str(sample["__key__"])


def read_all(loader: Any) -> list[Any]:
    """Everything, and no worker left behind: after an error, torch ends them only when garbage is collected."""
    iterator = iter(loader)
    try:
        return list(iterator)
    finally:
        iterator._shutdown_workers()


def shards_of(keys: list[str]) -> list[str]:
    return [key.split("/")[0] for key in keys if key.endswith("/0")]


CASES = [(0, None, False)]
CASES += [(n, "fork", persistent) for n in (1, 2, 4) for persistent in (False, True)]
CASES += [(2, "spawn", True)]


@pytest.mark.parametrize(("workers", "method", "persistent"), CASES)
def test_epochs_are_complete_and_each_has_its_order(spec: str, workers: int, method: Any, persistent: bool) -> None:
    from torch.utils.data import DataLoader

    ds = WebDataset(spec, shardshuffle=100, seed=7).map(key_of)
    loader = DataLoader(
        ds, batch_size=None, num_workers=workers, multiprocessing_context=method, persistent_workers=persistent
    )
    reference = WebDataset(spec, shardshuffle=100, seed=7).map(key_of)
    orders = []
    for epoch in (1, 2):
        keys = list(loader)
        assert Counter(keys) == EVERYTHING
        stats = ds.statistics()
        assert stats.samples == epoch * SHARDS * PER_SHARD
        assert stats.bytes >= epoch * SHARDS * PER_SHARD * 30_000
        assert ds.traffic().origins["file"].bytes == stats.wire_bytes
        whole = shards_of(list(reference))
        n = max(1, workers)
        for worker in range(n):
            # Worker w gets the w-th share of the one order that all of them compute.
            assert [s for s in shards_of(keys) if s in whole[worker::n]] == whole[worker::n]
        orders.append(whole)
    assert orders[0] != orders[1]


def test_resampled_workers_draw_different_shards(spec: str) -> None:
    from torch.utils.data import DataLoader

    pipeline = DataPipeline(ResampledShards(spec, deterministic=True), tarfile_to_samples()).with_epoch(100)
    keys = [s["__key__"] for s in DataLoader(pipeline, batch_size=None, num_workers=2)]
    assert len(keys) == 200
    assert shards_of(keys[::2]) != shards_of(keys[1::2])


def test_an_error_in_a_worker_reaches_the_parent(spec: str) -> None:
    from torch.utils.data import DataLoader

    from wds_async.errors import ShardNotFound

    with pytest.raises(ShardNotFound, match=r"8\.tar"):
        read_all(DataLoader(WebDataset(spec.replace("..7", "..8")), batch_size=None, num_workers=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_the_loader_early(spec: str, workers: int) -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(WebDataset(spec).repeat(), batch_size=None, num_workers=workers)
    for _ in range(2):
        assert len(list(itertools.islice(loader, 7))) == 7
        gc.collect()


def test_workers_that_hang_are_left_soon(spec: str) -> None:
    items = iter(WebLoader(WebDataset(spec).compose(first_then_wait), batch_size=None, num_workers=3))
    next(items)
    workers = multiprocessing.active_children()
    items.close()  # type: ignore[attr-defined]
    assert len(workers) == 3
    assert not any(worker.is_alive() for worker in workers)


def first_then_wait(source: Any) -> Iterator[str]:
    yield key_of(next(iter(source)))
    threading.Event().wait(300)


def test_web_loader(spec: str) -> None:
    ds = WebDataset(spec).decode().to_tuple("__key__", "cls").batched(5)
    loader = WebLoader(ds, batch_size=None, num_workers=2)
    assert type(loader.stage(0)).__name__ == "DataLoader"
    rebatched = loader.unbatched().shuffle(1000, seed=1).batched(8)
    batches = list(rebatched)
    assert [len(keys) for keys, _ in batches] == [8] * 10
    assert Counter(key for keys, _ in batches for key in keys) == EVERYTHING
    assert all(len(labels) == 8 and set(map(int, labels)) == {1} for _, labels in batches)
    assert loader.statistics().samples == rebatched.statistics().samples == SHARDS * PER_SHARD
    epoch = loader.with_epoch(40).with_length(40)
    assert len(epoch) == 40
    assert len(list(epoch)) == len(list(epoch)) == 40


def test_the_length_of_a_loader(spec: str) -> None:
    keys = WebDataset(spec).map(key_of)
    with pytest.raises(TypeError):
        len(WebLoader(keys, batch_size=None))
    loader = WebLoader(keys.compose().with_length(SHARDS * PER_SHARD), batch_size=None, num_workers=2)
    assert len(loader) == len(list(loader)) == SHARDS * PER_SHARD
    batches = WebLoader(keys.compose().with_length(SHARDS * PER_SHARD), batch_size=16, num_workers=0)
    assert len(batches) == len(list(batches)) == SHARDS * PER_SHARD // 16
    assert len(loader.batched(3)) == len(list(loader.batched(3))) == 27
    with pytest.raises(TypeError):
        len(loader.map(len).batched(3))  # map may drop some
    assert len(loader.batched(3).with_epoch(11)) == len(list(loader.batched(3).with_epoch(11))) == 11


def test_set_epoch_through_the_loader(spec: str) -> None:
    loader = WebLoader(
        WebDataset(spec, shardshuffle=100).map(key_of), batch_size=None, num_workers=2, persistent_workers=True
    )
    epochs = [list(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    loader.set_epoch(1)
    assert list(loader) == epochs[1]
    assert list(loader) == epochs[2]


def test_forked_workers_need_not_import_the_engine(spec: str) -> None:
    """Importing it takes 0.1 s of CPU, which eight workers would each pay before their first sample."""
    script = """
import sys, warnings
from torch.utils.data import DataLoader
from wds_async import WebDataset

def new(source):
    for _ in source:
        loaded = set(sys.modules) - before
        yield sorted(name for name in loaded if name.startswith(("uvloop", "wds_async.", "PIL", "simplejpeg")))

dataset = WebDataset(sys.argv[1], shardshuffle=False).decode("rgb8", only=[]).compose(new)
before = set(sys.modules)
print(next(iter(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"))))
"""
    done = subprocess.run([sys.executable, "-c", script, spec], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == []


def test_a_closed_loader_says_so_at_once(spec: str) -> None:
    loader = WebLoader(WebDataset(spec), batch_size=None)
    loader.close()
    with pytest.raises(ReaderClosed):
        iter(loader)


# -- threads --------------------------------------------------------------------------------------------------------


def fails_at(key: str) -> Any:
    def f(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] == key:
            raise ZeroDivisionError(key)
        return sample

    return f


def test_threads_give_the_stream_of_no_workers(spec: str) -> None:
    def loader(**kw: Any) -> WebLoader:
        samples = WebDataset(spec, shardshuffle=8, seed=3).shuffle(20, seed=4).decode().map(dict)
        arrays = samples.map_dict(bin=lambda data: np.frombuffer(data, np.uint8) + 1).to_tuple("__key__", "bin")
        return WebLoader(arrays.batched(7), batch_size=None, **kw)

    threads, without = loader(threads=3), loader()
    for _ in range(2):
        batches, expected = list(threads), list(without)
        assert [keys for keys, _ in batches] == [keys for keys, _ in expected]
        assert all((ones == 1).all() for _, ones in batches)  # held all at once, in memory that is used again
    assert threads.statistics().samples == 2 * SHARDS * PER_SHARD


def test_functions_run_on_so_many_threads_at_once(spec: str) -> None:
    together = threading.Barrier(3)
    names: set[str] = set()

    def f(sample: Any) -> str:
        if sample["__key__"].startswith("0/"):
            together.wait(20)
            names.add(threading.current_thread().name)
        return key_of(sample)

    keys = WebDataset(spec, shardshuffle=False).slice(9).map(f)
    assert len(list(WebLoader(keys, batch_size=9, threads=3))) == 1
    assert len(names) == 3


def test_an_error_on_a_thread_comes_at_its_place(spec: str) -> None:
    samples = WebDataset(spec, shardshuffle=False).map(fails_at("2/4")).map(key_of)
    items = iter(WebLoader(samples, batch_size=None, threads=2))
    assert list(itertools.islice(items, 24)) == [f"{n // 10}/{n % 10}" for n in range(24)]
    with pytest.raises(ZeroDivisionError) as caught:
        next(items)
    assert any("2/4" in note for note in caught.value.__notes__)
    with pytest.raises(StopIteration):
        next(items)
    ignoring = WebDataset(spec, shardshuffle=False).map(fails_at("2/4"), handler=wds.ignore_and_continue)
    assert len(list(WebLoader(ignoring, batch_size=None, threads=2))) == SHARDS * PER_SHARD - 1


@pytest.mark.parametrize("how", ["closed", "dropped", "not begun", "in a function"])
def test_threads_end_where_the_loader_is_left(how: str, origin: Origin, shards: Any) -> None:
    """While one waits for bytes that do not come, or for the functions of the others."""
    first, second = shards(2, 5)
    urls = [origin.add(path.name, path.read_bytes()) for path in (first, second)]
    origin.behave(path="*000001.tar", stall_after=0)
    before = set(threading.enumerate())
    running, goes_on = threading.Event(), threading.Event()

    def f(sample: Any) -> str:
        if how == "in a function" and sample["__key__"].endswith("3"):
            running.set()
            assert goes_on.wait(20)
        return key_of(sample)

    items: Any = iter(WebLoader(WebDataset(urls, shardshuffle=False).map(f), batch_size=None, threads=2))
    if how != "not begun":
        next(items)
        next(items)
    if how == "in a function":
        assert running.wait(20)
        threading.Timer(0.2, goes_on.set).start()
    else:
        origin.wait_until(lambda server: any(path.path.endswith("1.tar") for path in server.requests))
    if how == "closed":
        items.close()
    del items
    assert [thread.name for thread in set(threading.enumerate()) - before if thread.name == "wds-async-ahead"] == []


def test_threads_and_workers_at_once_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        WebLoader(WebDataset(spec), batch_size=None, num_workers=1, threads=1)


# -- set_epoch ------------------------------------------------------------------------------------------------------


def orders(items: Any) -> list[str]:
    return [key for batch in items for key in batch]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("torchs", [False, True])
def test_set_epoch_of_the_dataset_reaches_the_loader_that_was_built_on_it(
    persistent: bool, torchs: bool, shards: Any
) -> None:
    from torch.utils.data import DataLoader

    def made() -> tuple[Any, Any]:
        dataset = wds.WebDataset([str(path) for path in shards(8, 2)], shardshuffle=8, seed=1)
        batches = dataset.to_tuple("__key__").map(lambda sample: sample[0]).batched(2, collation_fn=list)
        maker: Any = DataLoader if torchs else wds.WebLoader
        return dataset, maker(batches, batch_size=None, num_workers=1, persistent_workers=persistent)

    dataset, loader = made()
    first, second, third = (orders(loader) for _ in range(3))
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    for epoch, expected in ((2, third), (0, first), (1, second)):
        dataset.set_epoch(epoch)
        assert orders(loader) == expected
    assert orders(loader) == third  # it counts on from there


def test_a_derived_pipeline_counts_for_itself_and_does_not_set_its_parent(shards: Any) -> None:
    dataset = wds.WebDataset([str(path) for path in shards(8, 2)], shardshuffle=8)
    derived = dataset.map(dict)
    list(derived)
    derived.set_epoch(7)
    assert (dataset.pipeline[1].epoch, derived.pipeline[1].epoch) == (-1, 6)
    dataset.set_epoch(3)
    assert (dataset.pipeline[1].epoch, derived.pipeline[1].epoch) == (2, 2)


def test_set_epoch_looks_into_what_a_loaders_dataset_is_made_of(shards: Any) -> None:
    paths = [str(path) for path in shards(8, 2)]
    parts = [wds.WebDataset(paths, shardshuffle=8) for _ in range(2)]
    wds.WebLoader(wds.with_length(parts[0] + parts[1], 32), batch_size=None).set_epoch(5)
    assert [part.pipeline[1].epoch for part in parts] == [4, 4]


def test_a_dataset_that_set_epoch_cannot_reach_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"set_epoch\(3\) reaches nothing: the loader's dataset is a list") as caught:
        wds.WebLoader([1, 2], batch_size=None).set_epoch(3)
    assert caught[0].filename == __file__
    wds.DataPipeline([1, 2]).set_epoch(3)
