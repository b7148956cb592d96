"""What ``ls`` shows of folders; the command itself is tested in ``test_ls``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wds_async.cli import folder
from wds_async.cli.folder import folder_of, show, within
from wds_async.storage.base import Entry

ROOT = Path(__file__).parents[2]


def test_what_a_folder_is(tmp_path: Path) -> None:
    (tmp_path / "x.tar").touch()
    assert folder_of(str(tmp_path)) == f"{tmp_path}/"
    assert folder_of("s3://b/") == "s3://b/"
    for given in (f"{tmp_path}/x.tar", "s3://b/x.tar", "s3://b/{a,b}/", "s3://b/*/", "-", "pipe:ls /", "http://h/?a/"):
        assert folder_of(given) is None, given


def test_a_small_folder_is_sorted(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    (tmp_path / "a").touch()
    assert [entry.url for entry in within(f"{tmp_path}/", recursive=False)] == [f"{tmp_path}/z/", f"{tmp_path}/a"]


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [Entry("s3://b/d/", None), Entry("s3://b/x", 999_900_000, 0.0), Entry("s3://b/?X-Amz-Signature=hush", 1)]
    show(entries, below="s3://b/", limit=None, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["d/"]
    assert lines[1] == " 999.9 MB  1970-01-01 00:00  x"
    assert "hush" not in lines[2]
    assert len({line.rindex(" ") for line in lines}) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals")
@pytest.mark.parametrize(
    ("arguments", "last"), [([], "1 folder, 2 objects, 1.5 kB"), (["-n", "2"], "1 folder, 1 object,")]
)
def test_a_total_on_a_terminal(tmp_path: Path, arguments: list[str], last: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"1" * 1000)
    (tmp_path / "b").write_bytes(b"1" * 500)
    ours, theirs = os.openpty()
    line = [sys.executable, "-m", "wds_async", "ls", str(tmp_path), *arguments]
    process: Any = subprocess.Popen(line, stdout=theirs, stdin=theirs, cwd=ROOT)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # how a terminal ends
        pass
    os.close(ours)
    assert process.wait(30) == 0
    assert last in shown.decode().splitlines()[-1]


def test_all_is_there() -> None:
    assert all(hasattr(folder, name) for name in folder.__all__)
