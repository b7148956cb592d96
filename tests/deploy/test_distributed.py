"""deploy/distributed: numbers that are written twice agree, and images are of the Ray that the manifests name."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from tests.deploy.test_manifests import DEPLOY, manifests, only, parts
from tests.deploy.tools import DOCKER

FOLDER = DEPLOY / "distributed"


def ranked(name: str) -> list[dict[str, Any]]:
    """The specifications of the Jobs of ranks in a folder."""
    if name == "indexed":
        return [only(manifests(FOLDER / name), "Job")["spec"]]
    return [job["spec"] for job in parts(only(manifests(FOLDER / name), "JobSet"), "podFailurePolicy")]


@pytest.mark.parametrize(("name", "steps"), [("indexed", 1), ("jobset", 2)])
def test_ranks_are_numbered_by_their_index(name: str, steps: int) -> None:
    jobs = ranked(name)
    assert len(jobs) == steps
    for job in jobs:
        (container,) = job["template"]["spec"]["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        assert job["completionMode"] == "Indexed", "without an index there is no JOB_COMPLETION_INDEX"
        assert job["completions"] == job["parallelism"] == int(env["WORLD_SIZE"])
        assert not {"RANK", "LOCAL_RANK"} & set(env)
        assert "--engine=rank" in container["args"]
        limits = container["resources"]["limits"]
        assert limits["cpu"] == container["resources"]["requests"]["cpu"], "a rank runs a task on each of its CPUs"
        for rule in job["podFailurePolicy"]["rules"]:
            assert rule.get("onExitCodes", {}).get("containerName", container["name"]) == container["name"]


def test_the_second_step_waits_for_the_first() -> None:
    steps = only(manifests(FOLDER / "jobset"), "JobSet")["spec"]["replicatedJobs"]
    assert [step.get("dependsOn") for step in steps] == [None, [{"name": steps[0]["name"], "status": "Complete"}]]


@pytest.mark.parametrize("name", ["ray-map", "ray-feed"])
def test_ray_is_the_one_of_the_image_and_asks_for_a_token(name: str) -> None:
    cluster = only(manifests(FOLDER / name), "RayJob")["spec"]["rayClusterSpec"]
    locked = re.search(r"^ray==(\S+)", (DOCKER / "requirements-ray.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert locked is not None
    assert cluster["rayVersion"] == locked[1]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert groups[0]["rayStartParams"]["num-cpus"] == "0", "no task on the head"
    for group in groups:
        spec = group["template"]["spec"]
        (shared,) = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
        store = int(group["rayStartParams"]["object-store-memory"])
        assert shared["medium"] == "Memory"
        assert store < int(shared["sizeLimit"].removesuffix("Gi")) << 30, "or Ray puts its objects on the disk"
        for container in spec["containers"]:
            assert store < int(container["resources"]["requests"]["memory"].removesuffix("Gi")) << 29
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"], "there is no autoscaler"


def test_a_training_gets_as_many_decoders_and_ranks_as_fit() -> None:
    cluster = only(manifests(FOLDER / "ray-feed"), "RayJob")["spec"]["rayClusterSpec"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in head["env"]}
    data, gpus = cluster["workerGroupSpecs"]
    (rank,) = gpus["template"]["spec"]["containers"]
    decoding = int(re.findall(r"\d+", data["rayStartParams"]["resources"])[0])
    assert int(env["DECODERS"]) == data["replicas"] * decoding
    assert int(env["RANKS"]) == gpus["replicas"] * rank["resources"]["limits"]["nvidia.com/gpu"]
    assert "resources" not in gpus["rayStartParams"], "no decoder there"
    for group in (data, gpus):
        (container,) = group["template"]["spec"]["containers"]
        assert "SHARDS" in {one["name"] for one in container["env"]}, "decoders read it"


def test_the_slurm_script_parses() -> None:
    script = FOLDER / "slurm" / "map.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    assert script.stat().st_mode & 0o111
