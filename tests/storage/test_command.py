"""WebDataset's ``Pipe``: reading, writing, statuses, and leaving early."""

from __future__ import annotations

import gc
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.servers import make_shard
from wds_async.errors import FetchTimeout, PipeError
from wds_async.storage.command import Pipe


def _children() -> set[str]:
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@pytest.fixture(autouse=True)
def no_child_left():  # type: ignore[no-untyped-def]
    before = _children()
    yield
    gc.collect()
    assert not _children() - before


def test_reading() -> None:
    with Pipe("printf 'a\\nb\\n'", mode="rb", shell=True) as pipe:
        assert (pipe.readable(), pipe.writable()) == (True, False)
        assert pipe.readline() == b"a\n"
        assert list(pipe) == [b"b\n"]
        assert (pipe.read(), pipe.status) == (b"", 0)
    assert pipe.closed
    pipe.close()
    with Pipe(["printf", "abc"], mode="rb", bufsize=8192) as pipe:
        buffer = bytearray(2)
        assert (pipe.readinto(buffer), buffer, pipe.read(9), pipe.readinto(buffer)) == (2, bytearray(b"ab"), b"c", 0)
        assert pipe.readLine() == b""


def test_it_is_what_tarfile_reads_and_writes(tmp_path: Path) -> None:
    with Pipe(["cat"], mode="wb", stdout=subprocess.DEVNULL) as pipe, tarfile.open(fileobj=pipe, mode="w|") as tar:
        tar.addfile(tarfile.TarInfo("x"), io.BytesIO())
    (tmp_path / "x.tar").write_bytes(make_shard({"a": {"txt": b"1"}}))
    with Pipe(["cat", tmp_path / "x.tar"], mode="rb") as pipe, tarfile.open(fileobj=pipe, mode="r|") as tar:
        assert tar.getnames() == ["a.txt"]


def test_writing(tmp_path: Path) -> None:
    with Pipe(f"cat > {tmp_path}/x", mode="wb", shell=True) as pipe:
        assert pipe.write(b"abc") == 3
        pipe.flush()
    assert (tmp_path / "x").read_bytes() == b"abc"
    assert pipe.status == 0


def test_a_bad_status_is_raised_behind_the_bytes() -> None:
    pipe = Pipe("printf abc; exit 3", mode="rb", shell=True)
    assert pipe.read(3) == b"abc"
    with pytest.raises(PipeError, match="status 3"):
        pipe.read(1)
    pipe.close()  # said once
    with Pipe("printf abc; exit 3", mode="rb", shell=True, ignore_status=[3]) as pipe:
        assert (pipe.read(), pipe.status) == (b"abc", 3)
    with Pipe("exit 3", mode="rb", shell=True, ignore_errors=True) as pipe:
        assert pipe.read() == b""
    pipe = Pipe("exit 4", mode="wb", shell=True)
    with pytest.raises(PipeError, match="status 4"):
        pipe.close()


def test_leaving_early_kills_it_and_says_nothing() -> None:
    for close in (True, False):
        pipe = Pipe("yes | cat; sleep 1000", mode="rb", shell=True)
        assert pipe.read(2) == b"y\n"
        if close:
            pipe.close()
            assert pipe.status == -9
        del pipe
        gc.collect()


def test_one_that_does_not_end_is_killed_after_its_time() -> None:
    pipe = Pipe("exec sleep 60", mode="wb", shell=True, timeout=0.1)
    with pytest.raises(FetchTimeout, match=r"0\.1 s"):
        pipe.close()


def test_secrets_are_not_shown_and_the_mode_is_known() -> None:
    pipe = Pipe("exit 1 # --account-key SECRET", mode="rb", shell=True)
    with pytest.raises(PipeError) as caught:
        pipe.read()
    assert "SECRET" not in str(caught.value)
    pipe.close()
    with pytest.raises(ValueError, match="x: unknown mode"):
        Pipe("true", mode="x")
    with pytest.raises(FileNotFoundError):
        Pipe(["no-such-command-here"], mode="rb")
