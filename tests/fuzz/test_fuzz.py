"""The corpus and some thousands of changed inputs, in every run; `python -m tests.fuzz` looks for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import CORPUS
from tests.fuzz.mutate import Mutations
from tests.fuzz.targets import TARGETS, run

_CHANGED = 300


def test_every_target_has_a_corpus_that_stays_small() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200_000


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_corpus_and_what_is_made_of_it(name: str) -> None:
    mutations = Mutations(CORPUS / name, seed=len(name))
    for data in mutations.corpus:
        run(name, data)
    for _ in range(_CHANGED):
        data = mutations.next()
        try:
            run(name, data)
        except Exception as exn:
            raise AssertionError(f"{name} answers {data[:2000]!r} wrongly") from exn


def test_a_find_is_told_and_kept(tmp_path: Path) -> None:
    """The runner itself: a target that is wrong ends it with 1 and leaves the input."""
    script = (
        "import sys; from tests.fuzz import targets, __main__ as runner\n"
        "targets.TARGETS['tar'] = lambda data: 1 / 0\n"
        "sys.argv = ['fuzz', '--child', 'tar', '--seconds', '5', '--without-atheris']\n"
        "runner.main()\n"
    )
    root = str(Path(__file__).parents[2])
    environment = {"PYTHONPATH": root, "PATH": "/usr/bin:/bin"}
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False
    )
    assert found.returncode == 1
    assert b"ZeroDivisionError" in found.stderr
    assert (tmp_path / "out" / "fuzz" / "tar-random").exists()
