"""The training script of the images and manifests: killed, it resumes from its checkpoint, on other ranks too."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_manifests import DEPLOY, manifests, pods

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


def train(folder: Path, name: str, ranks: int, save_every: int) -> list[subprocess.Popen[bytes]]:
    """Start the ranks, as torchrun does."""
    script = [str(ROOT / "docker" / "train.py"), str(folder / "shards" / "train-{000000..000003}.tar")]
    numbers = ["--samples=192", "--batch=4", "--epochs=2", "--workers=1", f"--save-every={save_every}"]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
        "OMP_NUM_THREADS": "1",
        **{"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    with open(folder / "output", "ab") as output:
        return [
            subprocess.Popen(
                [sys.executable, *script, *numbers, f"--checkpoint={folder / name}"],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]


def finished(folder: Path, processes: list[subprocess.Popen[bytes]]) -> str:
    """Wait for all ranks, and return what was written until then."""
    try:
        codes = [process.wait(timeout=100) for process in processes]
    finally:
        kill(processes)
    output = (folder / "output").read_text()
    assert set(codes) == {0}, output
    return output


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def saved(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_resumes_where_it_was_killed(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    from sampledata import write_pictures

    write_pictures(str(tmp_path / "shards"))
    finished(tmp_path, train(tmp_path, "whole", 2, save_every=8))
    killed = train(tmp_path, "killed", 2, save_every=1)
    while not (tmp_path / "killed").exists() or saved(tmp_path / "killed")["step"] < 5:
        assert killed[0].poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.01)
    kill(killed)
    assert saved(tmp_path / "killed")["step"] < 48, "it came to its end"
    (tmp_path / "fewer").write_bytes((tmp_path / "killed").read_bytes())
    finished(tmp_path, train(tmp_path, "killed", 2, save_every=8))
    whole, resumed = saved(tmp_path / "whole"), saved(tmp_path / "killed")
    assert whole["step"] == resumed["step"] == 48
    assert all(torch.equal(value, resumed["model"][name]) for name, value in whole["model"].items())
    assert resumed["loader"].keys() == whole["loader"].keys()

    lines = finished(tmp_path, train(tmp_path, "fewer", 1, save_every=8)).splitlines()  # 48 batches an epoch, not 24
    assert lines[-1].startswith("epoch 1: 192 samples")


@pytest.mark.parametrize("name", ["indexed", "trainjob", "socket"])
def test_the_manifests_save_where_all_ranks_read(name: str) -> None:
    found = manifests(DEPLOY / "training" / name)
    ((_, template),) = pods(found)
    (container,) = template["spec"]["containers"]
    jobs = [one["spec"]["trainer"]["args"] for one in found if one["kind"] == "TrainJob"]
    arguments = jobs[0] if jobs else container["args"]
    (path,) = [word.partition("=")[2] for word in arguments if word.startswith("--checkpoint=")]
    (mount,) = [one for one in container["volumeMounts"] if path.startswith(one["mountPath"] + "/")]
    (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == mount["name"]]
    (claim,) = [one for one in found if one["kind"] == "PersistentVolumeClaim"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert template["spec"]["securityContext"]["fsGroup"] == template["spec"]["securityContext"]["runAsUser"]
