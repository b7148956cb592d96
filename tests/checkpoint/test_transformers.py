"""Hugging Face's Trainer over our loader: killed and resumed, it has the losses of one run, to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import wds_async as wds
from tests.checkpoint.pipelines import dataset, urls_in
from tests.packages import need_package
from tests.servers import make_shards
from wds_async.errors import ConfigError, StateError

pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent.parent

TRAIN = """
import json, os, signal, sys
sys.path[:0] = [sys.argv[1] + "/examples", sys.argv[1]]
import transformers_resume as example

class Kill(example.Stop):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

example.Stop = Kill
folder, options = sys.argv[2], json.loads(sys.argv[3])
url = folder + "/shards/train-{000000..000003}.tar"
if sys.argv[4] == "killed":
    example.train(url, folder + "/killed", stop=int(sys.argv[5]), **options)
print(json.dumps([
    example.train(url, folder + "/whole", **options), example.train(url, folder + "/killed", resume=True, **options)
]))
"""
"""A training that is killed at a step; else one run, and one that resumes."""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("options", "kill_at"),
    [
        ({"save_steps": 5}, 19),
        ({"save_steps": 3, "gradient_accumulation_steps": 2}, 7),  # a checkpoint at the end of the first epoch
    ],
)
def test_the_losses_of_a_trainer_that_was_killed(options: dict[str, Any], kill_at: int, tmp_path: Path) -> None:
    need_package("transformers")
    sys.path.insert(0, str(ROOT / "examples"))
    from sampledata import write_pictures

    write_pictures(str(tmp_path / "shards"))
    command = [sys.executable, "-c", TRAIN, str(ROOT), str(tmp_path), json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([*command, "killed", str(kill_at)], env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = subprocess.run([*command, "resumed"], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    whole, resumed = json.loads(done.stdout.splitlines()[-1])
    assert len(whole) > kill_at
    assert resumed == whole


def arguments(folder: Path, **options: Any) -> Any:
    return SimpleNamespace(
        **{
            "output_dir": str(folder),
            "ignore_data_skip": True,
            "gradient_accumulation_steps": 1,
            "should_save": True,
            **options,
        }
    )


def loader_of(urls: list[str]) -> wds.WebLoader:
    return wds.WebLoader(dataset(urls).to_tuple("__key__").batched(5), batch_size=None).with_epoch(7)


def test_what_cannot_be_resumed_is_an_error(tmp_path: Path) -> None:
    need_package("transformers")
    from wds_async.integrations.transformers import LoaderCallback

    urls, callback = urls_in(tmp_path), LoaderCallback()
    loader, fresh = wds.AllRanks(loader_of(urls)), SimpleNamespace(global_step=0)

    def begin(loader: Any, state: Any = fresh, **options: Any) -> None:
        callback.on_train_begin(arguments(tmp_path, **options), state, None, train_dataloader=loader)

    begin(loader)
    begin(loader, gradient_accumulation_steps=7)
    with pytest.raises(ConfigError, match="multiple"):
        begin(loader, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="ignore_data_skip=True"):
        begin(loader, ignore_data_skip=False)
    with pytest.raises(ConfigError, match="WebLoader"):
        begin(loader.loader)
    with pytest.raises(ConfigError, match="with_epoch"):
        begin(wds.AllRanks(wds.WebLoader(dataset(urls))))
    with pytest.raises(StateError, match="checkpoint-3"):
        begin(loader, SimpleNamespace(global_step=3))


def test_another_folder_than_that_of_the_output(tmp_path: Path) -> None:
    need_package("transformers")
    from wds_async.integrations.transformers import LoaderCallback

    urls = [str(path) for path in make_shards(tmp_path / "shards", shards=5, samples=7)]
    whole = list(loader_of(urls))
    loader, state = wds.AllRanks(loader_of(urls)), SimpleNamespace(global_step=3, epoch=0.0)
    iterator = iter(loader)
    begun = [next(iterator) for _ in range(3)]
    (tmp_path / "checkpoint-3").mkdir()
    LoaderCallback().on_save(arguments(tmp_path), state, None, train_dataloader=loader)
    again = wds.AllRanks(loader_of(urls))
    callback = LoaderCallback(tmp_path / "checkpoint-3")
    callback.on_train_begin(arguments(tmp_path / "elsewhere"), state, None, train_dataloader=again)
    callback.on_step_end(arguments(tmp_path), state, None, train_dataloader=again)
    assert state.epoch == 3 / 7
    assert [*begun, *again] == whole
