"""Rank, worker, seeds, the shared epoch, and being an IterableDataset without importing torch."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from wds_async import world
from wds_async.pipeline import DataPipeline
from wds_async.shardlists import SimpleShardList, split_by_node


def test_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "WORKER": "1", "NUM_WORKERS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert world.place() == world.Place(rank=3, world_size=4, worker=1, num_workers=2)
    assert world.worker_seed() == 3001
    monkeypatch.setenv("WDS_RANK", "1")
    monkeypatch.setenv("WDS_WORLD_SIZE", "2")  # of processes that read the same data
    assert world.place() == world.Place(rank=1, world_size=2, worker=1, num_workers=2)


def test_slurm_says_the_rank_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert world.place() == (0, 1, 0, 1)  # a batch script, which srun did not start: alone, whatever the job's size
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert world.place() == (3, 4, 0, 1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert world.place() == (0, 1, 0, 1)


class XlaDouble:
    """What torch_xla offers of its runtime: where it was started, and the ordinal of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = False
        self.asked = 0
        package, runtime = ModuleType("torch_xla"), ModuleType("torch_xla.runtime")
        package._XLAC = SimpleNamespace(_xla_runtime_is_initialized=lambda: self.started)  # type: ignore[attr-defined]
        runtime.global_ordinal = self.ordinal  # type: ignore[attr-defined]
        runtime.world_size = lambda: 8  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch_xla", package)
        monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
        monkeypatch.setattr(world, "_xla_rank", None)

    def ordinal(self) -> int:
        assert self.started, "asking would start the runtime"
        self.asked += 1
        return 5


def test_xla_says_the_rank_once_its_runtime_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    xla = XlaDouble(monkeypatch)
    assert world.place()[:2] == (0, 1)
    xla.started = True
    assert world.place()[:2] == (5, 8)


def test_a_forked_worker_knows_the_rank_on_xla_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import DataLoader

    xla = XlaDouble(monkeypatch)
    shards = DataPipeline(SimpleShardList([f"{i}.tar" for i in range(16)]), split_by_node)
    xla.started = True
    loader = DataLoader(shards, batch_size=None, num_workers=1, multiprocessing_context="fork")
    xla.started = False  # a worker that asks fails now
    assert [shard["url"] for shard in loader] == ["5.tar", "13.tar"]


def test_seeds_are_stable_across_processes() -> None:
    values = (17, "shards/a.tar", b"x", 2.5)
    script = f"from wds_async.world import make_seed; print(make_seed(*{values!r}))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(other.stdout) == world.make_seed(*values)
    assert 0 <= world.make_seed(-5, 1 << 70) < 1 << 31
    assert world.make_seed(1, 2) != world.make_seed(2, 1)


def test_epoch_counts_and_can_be_set() -> None:
    epoch = world.SharedEpoch()
    assert [epoch.get(), epoch.next(), epoch.next(), epoch.get()] == [-1, 0, 1, 1]
    epoch.set(7)
    assert epoch.next() == 8
    assert copy.copy(epoch).next() == 9
    assert epoch.get() == 9


def test_pickled_epoch_has_the_number_and_counts_for_itself() -> None:
    epoch = world.SharedEpoch(3)
    epoch.next()
    twin = pickle.loads(pickle.dumps(epoch))
    assert twin.get() == 4
    twin.next()
    assert epoch.get() == 4


def _begin_epoch(epoch: world.SharedEpoch) -> None:
    epoch.next()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_processes_count_in_shared_memory(method: str) -> None:
    epoch = world.SharedEpoch()
    context = multiprocessing.get_context(method)
    for expected in (0, 1):
        child = context.Process(target=_begin_epoch, args=(epoch,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert epoch.get() == expected


class Counting(world.TorchDataset):
    def __init__(self) -> None:
        self.epoch = world.SharedEpoch()

    def __iter__(self) -> Any:
        yield self.epoch.next()


def test_workers_go_on_from_the_passes_of_their_parent() -> None:
    from torch.utils.data import DataLoader

    counting = Counting()
    fresh = DataLoader(counting, batch_size=None, num_workers=2)
    assert [next(iter(counting)), next(iter(counting))] == [0, 1]
    assert list(fresh) == [2, 2]
    assert counting.epoch.latest() == 2
    assert next(iter(pickle.loads(pickle.dumps(counting)))) == 2
    lasting = DataLoader(counting, batch_size=None, num_workers=2, persistent_workers=True)
    assert list(lasting) == [3, 3]
    assert next(iter(counting)) == 2
    assert list(lasting) == [4, 4]  # all alike, whenever the parent began its pass
    counting.epoch.set(9)
    assert list(lasting) == [10, 10]
    assert next(iter(counting)) == 10
    assert list(DataLoader(counting, batch_size=None, num_workers=2, multiprocessing_context="spawn")) == [12, 12]
    assert list(lasting) == [12, 12]


class Stream(world.TorchDataset):
    def __iter__(self) -> Any:
        return iter(range(6))


class Substream(Stream):
    pass


def test_is_an_iterable_dataset() -> None:
    from torch.utils.data import DataLoader, IterableDataset

    assert isinstance(Stream(), IterableDataset)
    assert isinstance(Substream(), IterableDataset)
    assert type(Substream()) is Substream
    assert Substream().__class__ is Substream
    assert list(DataLoader(Substream(), batch_size=None)) == list(range(6))
    assert list(pickle.loads(pickle.dumps(Stream()))) == list(range(6))


def test_is_an_iterable_dataset_when_torch_comes_later_and_never_imports_it() -> None:
    script = """
import sys
from wds_async.pipeline import DataPipeline
from wds_async.shardlists import ResampledShards
built = [DataPipeline(range(1, 4)), ResampledShards("a.tar")]
assert isinstance(built[0], DataPipeline) and list(built[0]) == [1, 2, 3]
assert "torch" not in sys.modules
from torch.utils.data import DataLoader, IterableDataset
assert all(isinstance(b, IterableDataset) for b in built)
assert list(DataLoader(built[0], batch_size=None)) == [1, 2, 3]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Squares(world.TorchMapDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return i * i


def test_is_a_map_style_dataset() -> None:
    from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

    squares = Squares(3)
    assert isinstance(squares, Dataset)
    assert isinstance(squares, Squares)
    assert not isinstance(squares, IterableDataset)
    assert type(squares) is type(pickle.loads(pickle.dumps(squares))) is Squares
    both = squares + Squares(2)
    assert isinstance(both, ConcatDataset)
    assert list(DataLoader(both, batch_size=None)) == [0, 1, 4, 0, 1]

    class Users(Squares, Dataset[int]):
        pass

    assert Users(1).__class__ is Users


def test_spawned_worker_keeps_its_parents_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_inherited_rank", None)
    world.inherit_rank(None)
    assert world.place().world_size == 1
    world.inherit_rank((2, 3))
    assert world.place()[:2] == (2, 3)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert world.place()[:2] == (0, 5)
