"""Every example runs, as a user would start it, without a warning, on the data it makes."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.packages import need_package

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
# torch_xla wants a TPU, so its example gets a double; Accelerate would take that for a TPU.
DOUBLES = {"xla_train.py": ROOT / "tests" / "doubles"}
# Ray warns of its own settings when it is imported.
WARNS = {"ray_dataset.py": ["-W", "ignore::DeprecationWarning"]}
# One wants an older huggingface_hub, and many packages for its logs and data sets; the other 424 MB and a GPU.
NOT_IN_CI = {"torchtitan": "torchtitan", "nvidia": "nvidia.dali"}


def packages_of(example: Path) -> set[str]:
    """Return the names of the packages that an example imports."""
    nodes = list(ast.walk(ast.parse(example.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def need_packages(example: Path, of_extra: set[str]) -> None:
    """Skip the test where a framework is not installed; fail where CI installs it, by ``of_extra``."""
    for name in sorted(packages_of(example)):
        if name in of_extra:
            need_package(name)
        elif name in NOT_IN_CI and not is_installed(NOT_IN_CI[name]):
            pytest.skip(f"{NOT_IN_CI[name]} is not installed")


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def extra_examples() -> set[str]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["examples"]
    return {re.split(r"\W", requirement)[0] for requirement in extra}


def run(command: list[str], example: Path, cwd: Path) -> str:
    """Run the example; what it writes to its stderr."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=cwd,  # nothing may depend on where it is started, or be left behind in the tree
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, DOUBLES.get(example.name, ROOT)])),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return done.stderr


@pytest.mark.timeout(180)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    need_packages(example, extra_examples() | {"ray"})
    options = ["-W", "error", *WARNS.get(example.name, [])]
    assert run([sys.executable, *options, str(example)], example, tmp_path) == ""
    assert not list(tmp_path.iterdir()), "an example leaves files in the folder it is started in"


RESUMED = ["accelerate_resume.py", "lightning_resume.py", "transformers_resume.py"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", RESUMED)
def test_two_ranks_go_on_in_the_middle_of_an_epoch(name: str, tmp_path: Path) -> None:
    example = ROOT / "examples" / name
    need_packages(example, extra_examples())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    sys.path.insert(0, str(ROOT / "examples"))
    from sampledata import write_pictures

    run([*torchrun, str(example), write_pictures(str(tmp_path / "shards")), str(tmp_path)], example, tmp_path)


def test_every_example_says_how_to_start_it() -> None:
    for example in EXAMPLES:
        opening = example.read_text(encoding="utf-8").split('"""')[1]
        assert f"examples/{example.relative_to(ROOT / 'examples')}" in opening, example.name
