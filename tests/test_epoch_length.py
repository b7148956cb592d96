"""`WebLoader.with_epoch`: epochs cut to a number of batches, of one rank or of all, one after another or anew."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import multiprocessing
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.servers import make_shard
from wds_async.dataset import WebDataset
from wds_async.errors import ConfigError, ReaderClosed
from wds_async.loader import WebLoader

pytestmark = [pytest.mark.filterwarnings("ignore:This DataLoader will create"), pytest.mark.timeout(150)]

SHARDS, PER_SHARD, BATCH, PASS = 8, 10, 5, 16
EVERYTHING = Counter(f"{s}/{i}" for s in range(SHARDS) for i in range(PER_SHARD))
WORKERS = {
    "no workers": {},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "fork, persistent": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "spawn, persistent": {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
}
each_kind = pytest.mark.parametrize("kind", WORKERS)
each_but_spawned = pytest.mark.parametrize("kind", [kind for kind in WORKERS if "spawn" not in kind])


@pytest.fixture
def spec(tmp_path: Path) -> str:
    for s in range(SHARDS):
        shard = {f"{s}/{i}": {"cls": b"1"} for i in range(PER_SHARD)}
        (tmp_path / f"{s}.tar").write_bytes(make_shard(shard))
    return str(tmp_path / f"{{0..{SHARDS - 1}}}.tar")


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def loader_of(spec: str, kind: str) -> WebLoader:
    dataset = WebDataset(spec, shardshuffle="epoch", seed=1).map(key_of).listed(BATCH)
    return WebLoader(dataset, batch_size=None, **WORKERS[kind])


def batches(items: Any) -> list[tuple[str, ...]]:
    return [tuple(batch) for batch in items]


@each_kind
def test_a_stream_that_continues_gives_every_pass_whole_and_in_order(spec: str, kind: str) -> None:
    reference = loader_of(spec, kind.replace("spawn", "fork"))
    passes = [batches(reference) for _ in range(2)]
    assert passes[0] != passes[1]
    with loader_of(spec, kind).with_epoch(7, continue_stream=True) as loader:
        epochs = [batches(loader) for _ in range(2)]
        left = iter(loader)
        epochs.append(batches(itertools.islice(left, 3)))
        left.close()  # type: ignore[attr-defined]
        epochs += [batches(loader) for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [7, 7, 3, 7, 7]
    stream = list(itertools.chain.from_iterable(epochs))
    assert stream == (passes[0] + passes[1])[: len(stream)]
    assert Counter(itertools.chain.from_iterable(stream[:PASS])) == EVERYTHING


@each_but_spawned
def test_by_default_every_epoch_is_a_new_pass(spec: str, kind: str) -> None:
    reference = loader_of(spec, kind.replace("spawn", "fork"))
    passes = [batches(reference) for _ in range(3)]
    loader = loader_of(spec, kind).with_epoch(6)
    assert [batches(loader) for _ in range(2)] == [passes[0][:6], passes[1][:6]]
    loader.set_epoch(0)
    assert batches(loader) == passes[0][:6]
    loader.set_epoch(2)
    assert batches(loader) == passes[2][:6]


@each_but_spawned
def test_set_epoch_numbers_the_next_pass_of_a_stream_that_continues(spec: str, kind: str) -> None:
    reference = loader_of(spec, kind.replace("spawn", "fork"))
    passes = [batches(reference) for _ in range(4)]
    with loader_of(spec, kind).with_epoch(10, continue_stream=True) as loader:
        stream = batches(loader)
        loader.set_epoch(3)
        stream += batches(loader) + batches(loader)
    assert stream == (passes[0] + passes[3])[:30]


@each_but_spawned
def test_the_batches_of_the_whole_job_are_divided_over_the_ranks(
    spec: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen: Counter[str] = Counter()
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with loader_of(spec, kind).with_epoch(9, all_ranks=True, continue_stream=True) as loader:
            assert len(loader) == 4
            epochs = [batches(loader) for _ in range(2)]
        assert [len(epoch) for epoch in epochs] == [4, 4]
        seen.update(key for epoch in epochs for batch in epoch for key in batch)
    assert seen == EVERYTHING  # eight batches of each rank are one pass


def test_fewer_batches_than_ranks_are_an_error(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = loader_of(spec, "no workers").with_epoch(3, all_ranks=True)
    assert len(loader) == len(list(loader)) == 3  # the number of ranks is looked up when it is needed
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for use in (len, iter):
        with pytest.raises(ConfigError, match=r"with_epoch\(3, all_ranks=True\): there are 4 ranks"):
            use(loader)


def test_a_stream_that_failed_begins_anew(spec: str) -> None:
    fails = iter([False] * 7 + [True] + [False] * 1000)

    def check(batch: Any) -> Any:
        if next(fails):
            raise ZeroDivisionError
        return batch

    whole = batches(loader_of(spec, "no workers"))
    loader = loader_of(spec, "no workers").map(check).with_epoch(5, continue_stream=True)
    assert batches(loader) == whole[:5]
    with pytest.raises(ZeroDivisionError):
        list(loader)
    loader.set_epoch(0)
    assert batches(loader) + batches(loader) == whole[:10]


def test_copies_and_pickles_have_streams_of_their_own(spec: str) -> None:
    loader = loader_of(spec, "no workers").with_epoch(5, continue_stream=True)
    first = batches(loader)
    twins = [copy.copy(loader), pickle.loads(pickle.dumps(loader)), loader.map(tuple)]
    for twin in twins:
        twin.set_epoch(0)
        assert batches(twin) == first
    assert not set(batches(loader)) & set(first)


def test_close_ends_the_workers_of_a_stream_that_continues(spec: str) -> None:
    loader = loader_of(spec, "fork").with_epoch(3, continue_stream=True)
    assert len(batches(loader)) == 3
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    loader.close()
    for worker in workers:
        worker.join(10)
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(ReaderClosed):
        list(loader)


def test_a_loader_that_is_dropped_takes_its_workers_along(spec: str) -> None:
    loader = loader_of(spec, "fork").with_epoch(3, continue_stream=True)
    gc.collect()
    gc.disable()
    try:
        assert len(batches(loader)) == 3
        workers = multiprocessing.active_children()
        del loader
        for worker in workers:
            worker.join(10)
        assert len(workers) == 2
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_continues_goes_on_from_its_state(spec: str, workers: int) -> None:
    kind = "fork" if workers else "no workers"
    with loader_of(spec, kind).with_epoch(7, continue_stream=True) as loader:
        whole = [batch for _ in range(4) for batch in batches(loader)]
    for stop in (3, 7, 9, 17):
        with loader_of(spec, kind).with_epoch(7, continue_stream=True) as loader:
            for _ in range(stop // 7):
                batches(loader)
            iterator = iter(loader)
            list(itertools.islice(iterator, stop % 7))
            state = json.loads(json.dumps(loader.state_dict()))
        with loader_of(spec, kind).with_epoch(7, continue_stream=True) as loader:
            loader.load_state_dict(state)
            rest = batches(loader)
            assert len(rest) == 7 - stop % 7
            rest += batches(loader)
        assert rest == whole[stop : stop + len(rest)]


def test_a_program_may_end_with_a_stream_open(spec: str) -> None:
    """The iteration is closed when the interpreter has begun to end, where no thread starts any more."""
    script = """
import sys
import wds_async as wds

dataset = wds.WebDataset(sys.argv[1], shardshuffle="epoch", seed=1).listed(5)
loader = wds.WebLoader(dataset, batch_size=None, num_workers=2).with_epoch(3, continue_stream=True)
print(len(list(loader)))
"""
    done = subprocess.run([sys.executable, "-c", script, spec], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
