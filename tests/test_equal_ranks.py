"""Equal steps in real ranks of torch.distributed (gloo) with unequal shards: no rank waits for ever for another."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers import make_shard
from wds_async.checkpoint.merge import merge_states
from wds_async.dataset import WebDataset
from wds_async.errors import ConfigError, StateError
from wds_async.loader import WebLoader

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 240.0
SIZES = [40, 9, 23]
KEYS = [f"{shard}{number:03d}" for shard, size in enumerate(SIZES) for number in range(size)]

CELLS: list[tuple[int, dict[str, Any]]] = [
    (0, {"equal": "drop"}),
    (1, {"equal": "drop", "split": "bytes"}),
    (0, {"equal": "pad", "split": "bytes"}),
    (0, {"equal": "repeat"}),
    (1, {"equal": "repeat", "split": "bytes"}),
    (2, {"steps": 7, "split": "bytes"}),
    (-2, {"equal": "drop"}),
]
"""Numbers of workers, negative ones of threads, and arguments of the dataset."""
RANK = """
import json, sys
import torch, torch.distributed as dist
import wds_async as wds

rank, folder, cells = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
for workers, kw in cells:
    dataset = wds.WebDataset(f"{folder}/{{0..2}}.tar", shardshuffle=3, seed=1, empty_check=False, **kw)
    keys = dataset.map(lambda sample: sample["__key__"]).batched(4, collation_fn=list)
    loader = wds.WebLoader(keys, batch_size=None, num_workers=max(0, workers), threads=max(0, -workers))
    epochs = []
    for epoch in range(2):
        steps = []
        for keys in loader:
            model(torch.ones(len(keys), 1)).sum().backward()  # waits for the other rank
            steps.append(list(keys))
        epochs.append(steps)
    print(json.dumps(epochs), flush=True)
"""


def write_shards(folder: Path) -> Path:
    for shard, size in enumerate(SIZES):
        keys = [f"{shard}{number:03d}" for number in range(size)]
        (folder / f"{shard}.tar").write_bytes(make_shard({key: {"cls": b"1"} for key in keys}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path)


@pytest.fixture(scope="module")
def of_all_cells(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[list[list[str]]]]]:
    """By rank and cell: the batches of each epoch. Ranks that wait for ever are killed, and fail. The same two go
    through all cells, for most of a rank's time is the import of torch."""
    folder = write_shards(tmp_path_factory.mktemp("ranks"))
    env = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            command = [sys.executable, "-c", RANK, str(rank), str(folder), json.dumps(CELLS)]
            ranks.append(
                stack.enter_context(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                )
            )
            stack.callback(ranks[-1].kill)
        found = []
        for rank in ranks:
            out, err = rank.communicate(timeout=TIMEOUT_S)
            assert rank.returncode == 0, err.decode()
            found.append([json.loads(line) for line in out.splitlines()])
    return found


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("cell", range(len(CELLS)), ids=[str(cell) for cell in CELLS])
def test_ranks_take_as_many_steps(cell: int, of_all_cells: list[list[list[list[list[str]]]]]) -> None:
    ranks, (_, kw) = [rank[cell] for rank in of_all_cells], CELLS[cell]
    for first, second in zip(*ranks, strict=True):  # of an epoch
        assert len(first) == len(second) > 0
        if "steps" in kw:
            assert len(first) == kw["steps"]
            continue
        keys = [[key for batch in batches for key in batch] for batches in (first, second)]
        if kw["equal"] == "drop":
            assert len(set(keys[0] + keys[1])) == len(keys[0] + keys[1])  # none twice
        else:
            assert sorted(set(keys[0] + keys[1])) == KEYS  # all of them


def test_workers_of_a_plain_loader_cannot_compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import DataLoader

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = WebDataset(str(folder / "{0..2}.tar"), shardshuffle=False, equal="drop", empty_check=False)
    with pytest.raises(ConfigError, match="use WebLoader in place of DataLoader"):
        list(DataLoader(dataset, batch_size=None, num_workers=1))
    with pytest.raises(ConfigError, match=r"torch\.distributed"):
        list(dataset)


def test_steps_need_no_ranks_to_talk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = str(folder / "{0..2}.tar")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        dataset = WebDataset(urls, shardshuffle=3, seed=1, split="bytes", steps=5).batched(4)
        loader = WebLoader(dataset, batch_size=None, num_workers=2)
        for _ in range(2):
            assert len(loader) == len(list(loader)) == len(list(dataset)) == 5


def test_a_share_that_is_begun_again_is_the_same_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another epoch's would have samples of other ranks, and leave this rank an epoch ahead of them."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    kw: dict[str, Any] = {"shardshuffle": 3, "seed": 5, "split": "bytes"}
    plain = WebDataset(str(folder / "{0..2}.tar"), **kw)
    shares = [[sample["__key__"] for sample in plain] for _ in range(3)]
    assert shares[0] != shares[1] or shares[1] != shares[2]
    repeating = WebDataset(str(folder / "{0..2}.tar"), steps=100, **kw)
    for share in shares:
        assert [sample["__key__"] for sample in repeating] == (share * 9)[:100]


def test_one_rank_needs_none_of_it(folder: Path) -> None:
    dataset = WebDataset(str(folder / "{0..2}.tar"), shardshuffle=False, equal="drop")
    assert [sample["__key__"] for sample in dataset] == KEYS
    assert [sample["__key__"] for sample in WebLoader(dataset, batch_size=None, num_workers=1)] == KEYS


@pytest.mark.parametrize("mode", ["repeat", "pad"])
@pytest.mark.parametrize("workers", [0, 2])
def test_steps_go_on_from_a_state(mode: str, workers: int, folder: Path) -> None:
    """In the first pass over the share, at its end, in the second one, and behind all."""

    def made() -> Any:
        kw: dict[str, Any] = {"shardshuffle": 3, "seed": 5, "split": "bytes", "steps": 160, "equal": mode}
        dataset = WebDataset(str(folder / "{0..2}.tar"), **kw).map(key_of)
        return WebLoader(dataset, batch_size=None, num_workers=workers) if workers else dataset

    whole = [list(loader) for loader in [made()] for _ in range(2)]
    assert [len(epoch) for epoch in whole] == [160, 160]
    for taken in (5, 71, 72, 73, 110, 159) if not workers else (5, 100):
        first = made()
        items = iter(first)
        head = list(itertools.islice(items, taken))
        state = json.loads(json.dumps(first.state_dict()))
        del items
        second = made()
        second.load_state_dict(state)
        assert head + list(second) == whole[0], taken
        assert list(second) == whole[1]


def state_of_two(folder: Path, monkeypatch: pytest.MonkeyPatch, **kw: Any) -> Any:
    states = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        dataset = WebDataset(str(folder / "{0..2}.tar"), shardshuffle=False, empty_check=False, **kw)
        list(itertools.islice(dataset, 2))
        states.append(dataset.state_dict())
    return merge_states(states)


def test_steps_that_are_left_are_shared_by_other_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = state_of_two(folder, monkeypatch, steps=9)
    for ranks, expected in ((1, 14), (3, 5)):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        for rank in range(ranks):
            monkeypatch.setenv("RANK", str(rank))
            kw: dict[str, Any] = {"shardshuffle": False, "empty_check": False, "steps": 9}
            dataset = WebDataset(str(folder / "{0..2}.tar"), **kw)
            dataset.load_state_dict(merged)
            assert len(list(dataset)) == expected
            assert len(list(dataset)) == 9


def test_a_state_of_other_equal_steps_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = str(folder / "{0..2}.tar")
    dataset = WebDataset(urls, shardshuffle=False, steps=9)
    next(iter(dataset))
    state = dataset.state_dict()
    other = WebDataset(urls, shardshuffle=False)
    other.load_state_dict(state)
    with pytest.raises(StateError, match="has neither"):
        next(iter(other))


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])
