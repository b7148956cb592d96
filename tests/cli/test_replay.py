"""``wds-async replay`` and ``wds-async seen``."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wds_async.writer import TarWriter

torch = pytest.importorskip("torch")

PROGRAM = """
import glob
import wds_async as wds

def make_loader(pattern="{pattern}"):
    samples = wds.WebDataset(sorted(glob.glob(pattern)) if "http" not in pattern else pattern, shardshuffle=3, seed=4)
    samples = samples.shuffle(6, seed=2).to_tuple("__key__", "txt").batched(3)
    return wds.WebLoader(samples, batch_size=None, num_workers=2)

def other():
    return wds.WebDataset(sorted(glob.glob("{pattern}")), shardshuffle=False)

def number():
    return [1, 2]
"""

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


class Job:
    """Files of a job of one rank: its program, the state behind four of its steps, and all batches."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self.program = folder / "train_it.py"
        self.program.write_text(PROGRAM.replace("{pattern}", pattern))
        scope: dict[str, Any] = {}
        exec(self.program.read_text(), scope)
        self.loader = scope["make_loader"]()
        iterator = iter(self.loader)
        self.batches = list(itertools.islice(iterator, 4))
        self.content = self.loader.state_dict()
        self.state = folder / "state.json"
        self.state.write_text(json.dumps(self.content))
        self.batches += iterator

    @property
    def by_file(self) -> list[str]:
        return ["--pipeline", f"{self.program}:make_loader"]


def write_shards(folder: Path) -> None:
    for shard in range(4):
        with TarWriter(str(folder / f"part-{shard}.tar")) as sink:
            for number in range(5):
                sink.write({"__key__": f"{shard}-{number}", "txt": f"text {shard} {number}"})


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    write_shards(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Job(tmp_path, str(tmp_path / "part-*.tar"))
    sys.modules.pop("train_it", None)


def test_the_batch_of_a_step(job: Job, call: Any, rows: Any, tmp_path: Path) -> None:
    for step in (1, 5):
        *samples, batch = rows("replay", job.state, "--step", step, *job.by_file, "-o", tmp_path / "batch.pickle")
        assert sorted(sample["key"] for sample in samples) == sorted(job.batches[step][0])
        assert (batch["step"], batch["rank"], batch["world_size"], batch["worker"]) == (step, 0, 1, step % 2)
        assert pickle.loads((tmp_path / "batch.pickle").read_bytes()) == job.batches[step]
    shown = call("replay", job.state, "--step", 5, "--rank", 0, "--pipeline", "train_it:make_loader").output
    assert "step 5 of rank 0 of 1, worker 1: 3 samples" in shown
    for key in job.batches[5][0]:
        assert key in shown
    assert "0: list of 3" in shown


def test_what_was_seen(job: Job, call: Any, rows: Any) -> None:
    came = sorted(key for batch in job.batches[:4] for key in batch[0])
    listed = rows("seen", job.state, *job.by_file)
    assert sorted(row["key"] for row in listed) == came
    assert {row["times"] for row in listed} == {1}
    assert all(Path(row["url"]).name == f"part-{row['key'][0]}.tar" for row in listed)
    shown = call("seen", job.state, *job.by_file)
    assert all(key in shown.stdout for key in came)
    assert shown.stderr.endswith("12 samples\n")
    ranges = rows("seen", job.state, *job.by_file, "--ranges")
    assert all(row["key"] is None for row in ranges)
    assert len(rows("seen", job.state, "-n", 2)) == 2


def test_a_checkpoint_of_torch_and_a_merged_state(job: Job, rows: Any, tmp_path: Path) -> None:
    import wds_async as wds

    path = tmp_path / "checkpoint.pt"
    state = wds.merge_states([job.content])
    torch.save({"model": {"weight": torch.ones(2)}, "loops": [{"loader": state}], "step": 4}, path)
    assert rows("replay", path, "--step", 2, *job.by_file) == rows("replay", job.state, "--step", 2, *job.by_file)


def test_errors(job: Job, call: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"model": [1, 2]}')
    (tmp_path / "broken.json").write_text("{")
    for arguments, status, text in (
        (["replay", job.state, "--step", 1], 2, "--pipeline is missing"),
        (["replay", tmp_path / "other.json", "--step", 1, *job.by_file], 1, "no state of a pipeline or loader"),
        (["replay", tmp_path / "broken.json", "--step", 1, *job.by_file], 1, "neither JSON nor a checkpoint"),
        (["seen", tmp_path / "missing.json"], 2, "No such file"),
        (["replay", job.state, "--step", 99, *job.by_file], 1, "there is no step 99"),
        (["replay", job.state, "--step", 1, "--rank", 3, *job.by_file], 1, "no state of rank 3"),
        (["replay", job.state, "--step", 1, "--pipeline", f"{job.program}:other"], 1, "is of a pipeline with stages"),
        (["replay", job.state, "--step", 1, "--pipeline", f"{job.program}:number"], 2, "gives a list"),
        (["replay", job.state, "--step", 1, "--pipeline", "gone.py:make"], 2, "there is no file gone.py"),
        (["replay", job.state, "--step", 1, "--pipeline", "train"], 2, "module:function or file.py:function"),
        (["seen", job.state, job.state], 1, "of each rank once"),
    ):
        done = call(*arguments)
        assert done.exit_code == status, (arguments, done.output)
        assert text in done.output


def test_a_shard_that_was_replaced(job: Job, call: Any, tmp_path: Path) -> None:
    write_shards(tmp_path)
    done = call("replay", job.state, "--step", 9, *job.by_file)
    assert done.exit_code == 1
    assert ".tar" in done.output


def test_over_http_in_a_process_of_its_own(tmp_path: Path, origin: Any) -> None:
    write_shards(tmp_path)
    for path in sorted(tmp_path.glob("*.tar")):
        origin.add(path.name, path.read_bytes())
    job = Job(tmp_path, f"{origin.base}/part-{{0..3}}.tar")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def lines(*arguments: Any) -> list[Any]:
        line = [sys.executable, "-m", "wds_async", *map(str, arguments), "--json"]
        done = subprocess.run(line, capture_output=True, timeout=100, check=True, cwd=tmp_path, env=environment)
        return [json.loads(one) for one in done.stdout.splitlines()]

    *samples, batch = lines("replay", job.state, "--step", 6, "--pipeline", "train_it.py:make_loader")
    assert sorted(sample["key"] for sample in samples) == sorted(job.batches[6][0])
    assert batch["worker"] == 0
    came = keys_of(job.batches[:4])
    assert sorted(row["key"] for row in lines("seen", job.state, "--pipeline", "train_it:make_loader")) == came


def keys_of(batches: Any) -> list[str]:
    return sorted(key for batch in batches for key in batch[0])
