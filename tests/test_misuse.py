"""What is probably not meant is warned of once, and what is meant is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from wds_async import rewrite

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")


def dataset(shards: Any, count: int = 11, **more: Any) -> wds.WebDataset:
    return wds.WebDataset([str(path) for path in shards(count, 2)], shardshuffle=False, **more)


def said(iterable: Any, times: int = 1) -> list[str]:
    """The warnings of iterating that often, in this process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            for _, _ in zip(range(30), iterable, strict=False):
                pass
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


# -- uneven ranks ---------------------------------------------------------------------------------------------------


def test_uneven_ranks_are_warned_of_once_with_the_numbers_and_the_cure(two_ranks: None, shards: Any) -> None:
    (text,) = said(dataset(shards).map(dict).batched(2), times=3)
    assert text.startswith("11 shards for 2 ranks: 6 on rank 0, 5 on rank 1. ")
    assert "loader.with_epoch(n) with n = samples // (batch size * 2)" in text
    assert "a multiple of 2" in text


def test_an_index_tells_the_samples(two_ranks: None, shards: Any, tmp_path: Path) -> None:
    listed = [{"url": str(path), "nsamples": 2} for path in shards(3, 2)]
    (tmp_path / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": listed}))
    (text,) = said(wds.WebDataset(str(tmp_path / "index.json"), shardshuffle=False))
    assert text.startswith("3 shards for 2 ranks: 2 on rank 0, 1 on rank 1 (4 samples against 2). ")


MEANT = {
    "even": lambda shards: dataset(shards, 10),
    "with_epoch": lambda shards: dataset(shards).with_epoch(3),
    "resampled": lambda shards: wds.WebDataset(
        [str(path) for path in shards(11, 2)], resampled=True, shardshuffle=False
    ).with_epoch(3),
    "repeat": lambda shards: dataset(shards, repeat=True),
    "not split": lambda shards: dataset(shards, nodesplitter=None),
    "sliced": lambda shards: dataset(shards).slice(4),
    "with_epoch on a loader": lambda shards: wds.WebLoader(dataset(shards), batch_size=None).with_epoch(3),
    "equalized": lambda shards: equalized(dataset(shards)),
}


def equalized(data: Any) -> Any:
    with pytest.warns(DeprecationWarning, match="with_epoch"):
        return data.ddp_equalize(8)


@pytest.mark.parametrize("name", MEANT)
def test_nothing_is_said_where_ranks_have_as_many_steps(name: str, two_ranks: None, shards: Any) -> None:
    assert said(MEANT[name](shards)) == []


def test_nothing_is_said_on_other_ranks(shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert said(dataset(shards)) == []


PROGRAM = """
import sys
import wds_async as wds
from torch.utils.data import DataLoader

def main(kind, paths):
    data = wds.WebDataset(paths, shardshuffle=False).to_tuple("__key__").batched(2)
    if kind == "torch":
        loader = DataLoader(data, batch_size=None, num_workers=2)
    elif kind == "batches":
        loader = DataLoader(data, num_workers=2)
    else:
        loader = wds.WebLoader(data, batch_size=None, num_workers=2)
        loader = loader.with_epoch(4) if kind == "epoch" else loader
    for epoch in range(3):
        for batch in loader:
            pass

main(sys.argv[1], sys.argv[2:])
"""


def in_workers(kind: str, shards: Any, tmp_path: Path, **environment: str) -> list[str]:
    """The warnings of a program with DataLoader workers, which are processes of their own."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This DataLoader", str(program), kind, *map(str, shards(5, 4))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(wds.__file__).parents[1]), **environment},
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "UserWarning" in line]


@pytest.mark.parametrize("kind", ["torch", "web"])
def test_loaders_with_workers_warn_once_of_uneven_ranks(kind: str, shards: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (line,) = in_workers(kind, shards, tmp_path, RANK="0", WORLD_SIZE="2")
    assert "program.py:16: UserWarning: 5 shards for 2 ranks: 3 on rank 0, 2 on rank 1." in line


def test_a_loader_that_cuts_its_epochs_says_nothing(shards: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert in_workers("epoch", shards, tmp_path, RANK="0", WORLD_SIZE="2") == []


# -- batches of batches ---------------------------------------------------------------------------------------------


def test_torchs_loader_over_batches_warns_once(shards: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (line,) = in_workers("batches", shards, tmp_path)
    assert "program.py:16: UserWarning: the dataset makes batches (.batched), and the DataLoader makes" in line


CHANGES = {
    "batched": (lambda data: data.batched(2), True),
    "batched, and more": (lambda data: data.batched(2).map(list), True),
    "listed": (lambda data: data.listed(2), True),
    "not batched": (lambda data: data.map(dict), False),
    "batched and not": (lambda data: data.batched(2).unbatched(), False),
    "a stage of the program's": (lambda data: data.batched(2).compose(iter), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_loader_over_batches_wants_batch_size_none(name: str, shards: Any) -> None:
    pytest.importorskip("torch")
    change, warned = CHANGES[name]
    data = change(dataset(shards, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wds.WebLoader(data, batch_size=None)
    assert not caught
    data = change(dataset(shards, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wds.WebLoader(data)
    assert [warning.filename for warning in caught] == [__file__] * warned
    assert all("pass batch_size=None" in str(warning.message) for warning in caught)


def test_batches_of_batches_may_be_meant(shards: Any) -> None:
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wds.WebLoader(dataset(shards, 2).batched(2), batch_size=4)


# -- rules that match nothing ---------------------------------------------------------------------------------------


def test_rules_that_match_no_shard_are_logged_once(
    shards: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rewrite, "_settled", set())
    folder = shards(2, 2)[0].parent
    rules = f"made:/={folder};valid:/={folder};gs://old/=https://u:SECRET@new/"
    monkeypatch.setenv("WDS_REWRITE", rules)
    train = wds.WebDataset("made://shard-{000000..000001}.tar", shardshuffle=False)
    valid = wds.WebDataset({"dataset": [{"shards": "valid://shard-000001.tar"}]}, shardshuffle=False)
    for _ in range(2):
        assert (len(list(train.map(dict))), len(list(valid))) == (4, 2)
    (text,) = caplog.messages
    assert text.startswith("WDS_REWRITE: these rules match none of 2 shards: gs://old/=https://u")
    assert "SECRET" not in text
    caplog.clear()
    monkeypatch.setattr(rewrite, "_settled", set())
    lists = ["gs://old/x.tar", "valid://shard-000001.tar", "made://shard-000000.tar"]
    *_, last = [wds.WebDataset(url, shardshuffle=False) for url in lists]
    assert list(last)
    assert not caplog.records
