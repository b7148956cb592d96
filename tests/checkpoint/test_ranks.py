"""The state of all ranks in one checkpoint, over a real process group."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest

import wds_async as wds
from tests.checkpoint.pipelines import dataset, shown, taken, urls_in
from tests.checkpoint.processes import kill, started
from tests.servers import make_shards

pytest.importorskip("torch")
RANKS = 2


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("shared", [False, True], ids=["shares of the data", "the same data"])
def test_every_rank_goes_on_where_it_was(shared: bool, tmp_path: Path) -> None:
    from tests.checkpoint import rank

    urls = [str(path) for path in make_shards(tmp_path / "shards", shards=12, samples=10)]
    place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WDS_RANK": "0", "WDS_WORLD_SIZE": "1"} if shared else {}
    jobs = [started(rank.main, tmp_path, urls, **place, RANK=str(number)) for number in range(RANKS)]
    try:
        for job in jobs:
            job.join(120)
            assert job.exitcode == 0
    finally:
        for job in jobs:
            kill(job)
    seen = []
    for number in range(RANKS):
        result = json.loads((tmp_path / f"rank{number}.json").read_text())
        assert len(result["begun"]) == 7
        assert result["begun"] + result["rest"] == result["whole"]
        assert result["rest_by_dcp"] == result["rest"]
        seen += [key for batch in result["whole"] for key in batch]
    state = json.loads((tmp_path / "state.json").read_text())
    assert len(json.loads(state["merged"])) == (1 if shared else RANKS)
    assert sorted(seen) == sorted([f"{number:06d}" for number in range(120)] * (RANKS if shared else 1))


def test_it_is_the_loader_in_all_else(tmp_path: Path) -> None:
    urls = urls_in(tmp_path / "shards")
    inner = dataset(urls, shardshuffle="epoch", seed=1).with_length(35, silent=True)
    outer = wds.AllRanks(inner)
    assert len(outer) == 35
    epochs = [shown(outer) for _ in range(2)]
    outer.set_epoch(0)
    assert shown(outer) == epochs[0]
    for twin in (copy.copy(outer), pickle.loads(pickle.dumps(outer))):
        twin.set_epoch(1)
        iterator = iter(twin)
        begun = taken(iterator, 9)
        state = json.loads(json.dumps(twin.state_dict()))
        other = wds.AllRanks(dataset(urls, shardshuffle="epoch", seed=1))
        other.load_state_dict(state)
        assert [*begun, *shown(other)] == epochs[1]
    with pytest.raises(AttributeError, match="nothing"):
        _ = outer.nothing


def names_in(state: object, name: str = "") -> list[str]:
    """Return the names that torch.distributed.checkpoint gives to what is in ``state``."""
    if isinstance(state, dict):
        return [leaf for key, value in state.items() for leaf in names_in(value, f"{name}.{key}")]
    if isinstance(state, list) and any(isinstance(one, (dict, list)) for one in state):
        return [leaf for key, value in enumerate(state) for leaf in names_in(value, f"{name}.{key}")]
    return [name]


def test_a_state_has_the_same_entries_at_any_time(tmp_path: Path) -> None:
    urls = urls_in(tmp_path)
    loader = wds.AllRanks(wds.WebLoader(dataset(urls).shuffle(9).batched(4), batch_size=None, num_workers=1))
    fresh = names_in(loader.state_dict())
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
        assert names_in(loader.state_dict()) == fresh


def test_the_loader_alone_takes_the_state_of_all_ranks(tmp_path: Path) -> None:
    urls = urls_in(tmp_path)
    outer = wds.AllRanks(dataset(urls).shuffle(9, seed=1))
    whole, iterator = shown(dataset(urls).shuffle(9, seed=1)), iter(outer)
    begun, state = taken(iterator, 8), outer.state_dict()
    inner = dataset(urls).shuffle(9, seed=1)
    inner.load_state_dict(json.loads(json.dumps(state)))
    assert [*begun, *shown(inner)] == whole
    with pytest.raises(wds.StateError, match="damaged"):
        inner.load_state_dict({**state, "merged": state["merged"][:-1]})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("continues", [False, True])
def test_behind_an_epoch_comes_the_next_one(workers: int, continues: bool, tmp_path: Path) -> None:
    urls = urls_in(tmp_path)

    def made() -> wds.AllRanks:
        samples = dataset(urls, shardshuffle="epoch", seed=1).shuffle(9, seed=2).to_tuple("__key__").batched(3)
        loader = wds.WebLoader(samples, batch_size=None, num_workers=workers)
        return wds.AllRanks(loader.with_epoch(4, continue_stream=continues))

    loader = made()
    epochs = [shown(loader) for _ in range(4)]
    loader.close()
    for taken_of_second in (4, 2):
        loader = made()
        assert shown(loader) == epochs[0]
        iterator = iter(loader)
        begun = taken(iterator, taken_of_second)
        state = loader.state_dict()
        del iterator
        loader.close()
        again = made()
        again.load_state_dict(state)
        again.set_epoch(1)  # as the Hugging Face Trainer does: it changes nothing of the epoch that goes on
        rest = shown(again) if taken_of_second < 4 else []
        assert [*begun, *rest] == epochs[1]
        if not continues:
            again.set_epoch(2)
        assert [shown(again), shown(again)] == epochs[2:]
        again.close()
