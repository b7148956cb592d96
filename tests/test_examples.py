"""Every example runs, as a user would start it, without a warning, on the data it makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
# torch_xla wants a TPU, so its example gets a double; Accelerate would take that for a TPU.
DOUBLES = {"xla_train.py": ROOT / "tests" / "doubles"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        cwd=tmp_path,  # nothing may depend on where it is started, or be left behind in the tree
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, DOUBLES.get(example.name, ROOT)]))},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert not list(tmp_path.iterdir()), "an example leaves files in the folder it is started in"


def test_every_example_says_how_to_start_it() -> None:
    for example in EXAMPLES:
        opening = example.read_text(encoding="utf-8").split('"""')[1]
        assert f"examples/{example.relative_to(ROOT / 'examples')}" in opening, example.name
