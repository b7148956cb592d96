"""``wds-async run``: unedited scripts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
import webdataset as wds
from webdataset.filters import pipelinefilter

@pipelinefilter
def double(source):
    for x in source:
        yield x
        yield x

if __name__ == "__main__":
    dataset = wds.WebDataset(sys.argv[1:], shardshuffle=False).compose(double())
    print(wds.__name__, len(list(dataset)), sys.argv[0])
"""


def write(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_script_with_arguments(program: Any, shards: Any, tmp_path: Path) -> None:
    script = write(tmp_path, SCRIPT)
    done = program("run", script, *shards(2, 3))
    assert done.stderr == b""
    assert done.stdout.decode().split() == ["wds_async", "12", str(script)]


def test_its_options_are_its_own(program: Any, tmp_path: Path) -> None:
    script = write(tmp_path, "import sys; print(sys.argv[1:])")
    done = program("run", script, "--help", "--json", "-m", "x")
    assert done.stdout.decode().strip() == "['--help', '--json', '-m', 'x']"


def test_modules_beside_it_are_found(program: Any, tmp_path: Path) -> None:
    write(tmp_path, "import webdataset\nname = webdataset.__name__", "beside.py")
    script = write(tmp_path, "import beside; print(beside.name)")
    assert program("run", script).stdout.strip() == b"wds_async"


def test_a_module(program: Any, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    write(tmp_path / "pack", "", "__init__.py")
    write(tmp_path / "pack", "import webdataset, sys; print(webdataset.__name__, sys.argv[1:])", "main.py")
    done = program("run", "-m", "pack.main", "a", cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.stdout.decode().strip() == "wds_async ['a']"


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_see_the_same(start: str, program: Any, shards: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if os.name != "posix" and start == "fork":
        pytest.skip("no fork here")
    text = """
import sys
import webdataset as wds

def name(sample):
    import webdataset
    return webdataset.WebDataset.__module__

if __name__ == "__main__":
    dataset = wds.WebDataset(sys.argv[2:], shardshuffle=False).map(name)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=sys.argv[1])
    names = list(loader)
    print(sorted(set(names)), len(names))
"""
    done = program("run", write(tmp_path, text), start, *shards(2, 3))
    assert done.stdout.decode().strip() == "['wds_async.dataset'] 6", done.stderr.decode()


def test_its_exit_status_is_ours(program: Any, tmp_path: Path) -> None:
    assert program("run", write(tmp_path, "import sys; sys.exit(7)")).returncode == 7
    done = program("run", write(tmp_path, "import sys; sys.exit('sorry')"))
    assert (done.returncode, done.stderr) == (1, b"sorry\n")


def test_its_error_is_shown_as_python_does(program: Any, tmp_path: Path) -> None:
    done = program("run", write(tmp_path, "def f():\n    raise KeyError('lost')\nf()"))
    assert done.returncode == 1
    text = done.stderr.decode()
    assert text.startswith("Traceback")
    assert "KeyError: 'lost'" in text
    assert "script.py" in text
    assert "runpy" not in text
    assert "cli/run.py" not in text
