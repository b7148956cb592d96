"""A sink publishes everything at once, or nothing."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.writing import memory
from wds_async.errors import AccessDenied, ConfigError, PipeError, ShardNotFound, StorageError, UnsafeContent, UrlError
from wds_async.storage.sink import LocalSink, open_sink
from wds_async.storage.user_openers import gopen_schemes


def put(url: str, data: bytes = b"all of it", **kw: Any) -> None:
    sink = open_sink(url, **kw)
    assert sink.write(data) == len(data)
    sink.flush()
    sink.commit()
    sink.commit()
    sink.abort()  # after a commit it takes nothing back


@pytest.mark.parametrize("url", ["{0}/x.bin", "file:{0}/x.bin", "file://{0}/x.bin", "file://localhost{0}/x.bin"])
def test_local_files(tmp_path: Path, url: str) -> None:
    put(url.format(tmp_path))
    assert (tmp_path / "x.bin").read_bytes() == b"all of it"
    put(url.format(tmp_path), b"again")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x.bin", b"again")]


@pytest.mark.parametrize("url", ["{0}/x.bin", "memory://x.bin", "pipe:cat > {0}/part && mv {0}/part {0}/x.bin"])
def test_after_abort_nothing_is_there(tmp_path: Path, url: str) -> None:
    files = memory()
    sink = open_sink(url.format(tmp_path))
    sink.write(b"x" * 100_000)
    sink.abort()
    sink.abort()
    sink.commit()
    assert not (tmp_path / "x.bin").exists()
    assert not list(tmp_path.glob(".x.bin*"))
    assert files.find("/") == []
    with pytest.raises(ValueError):
        sink.write(b"more")


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    sink = open_sink(str(tmp_path / "a" / "b" / "x.tar"))
    sink.write(b"x")
    sink.commit()
    assert (tmp_path / "a" / "b" / "x.tar").read_bytes() == b"x"


def test_a_folder_that_cannot_be_made_or_may_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(ShardNotFound, match="cannot be made") as missing:
        open_sink("/proc/missing/x.tar")
    assert missing.value.errno == errno.ENOENT
    (tmp_path / "file").write_bytes(b"")
    for below in ("x.tar", "folder/x.tar"):
        with pytest.raises(StorageError, match="a file is in its place"):
            open_sink(str(tmp_path / "file" / below))
    with pytest.raises(IsADirectoryError):
        open_sink(str(tmp_path))
    with pytest.raises(StorageError):
        open_sink("/proc/x.tar")
    if os.getuid():
        tmp_path.chmod(0o500)
        with pytest.raises(AccessDenied, match="permissions of the folder"):
            open_sink(str(tmp_path / "x.tar"))


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_full_disk_says_where(size: int) -> None:
    sink = LocalSink("/dev/full")
    with pytest.raises(StorageError, match=r"/dev/full: at byte \d+: No space left on device") as info:
        sink.write(bytes(size)) and sink.commit()
    assert info.value.errno == errno.ENOSPC
    sink.abort()
    assert os.path.exists("/dev/full")


def test_a_commit_that_fails_leaves_nothing(tmp_path: Path) -> None:
    sink = LocalSink(str(tmp_path / "x.bin"))
    sink.write(b"x")
    (tmp_path / "x.bin" / "in the way").mkdir(parents=True)
    with pytest.raises(StorageError, match="at byte 1"):
        sink.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", out)
    put("-")
    assert out.buffer.getvalue() == b"all of it"  # type: ignore[attr-defined]
    assert not out.closed


@pytest.mark.parametrize(
    ("command", "size", "why"),
    [
        ("cat > /dev/null; exit 3", 10, "at byte 10: the command ended with status 3"),
        ("exit 4", 10_000_000, r"at byte \d+: the command ended with status 4"),
        ("kill -9 $$", 10_000_000, "signal SIGKILL"),
        ("head -c 10 > /dev/null", 10_000_000, "before it had read everything"),
    ],
)
def test_a_command_that_fails(command: str, size: int, why: str) -> None:
    with pytest.raises(PipeError, match=why):
        put(f"pipe:{command}", bytes(size))


def test_abort_kills_what_the_command_started(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    sink = open_sink(f"pipe:(sleep 1000 > {fifo}) & cat > /dev/null")
    with open(fifo, "rb") as alive:  # opens when the child has opened it
        sink.abort()
        assert alive.read() == b""  # which ends when the child has


def test_no_command_and_no_scheme() -> None:
    with pytest.raises(UrlError, match="no command"):
        open_sink("pipe:")
    with pytest.raises(UrlError, match="unknown scheme 'nowhere'") as info:
        open_sink("nowhere://h/x?token=hush")
    assert "hush" not in str(info.value)
    for url in ("x.bin", "-", "pipe:cat"):
        with pytest.raises(ConfigError, match=r"takes the options \['token'\]"):
            open_sink(url, options={"token": "hush"})


def test_rules_rewrite_what_is_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REWRITE", f"gs://bucket=file:{tmp_path}")
    put("gs://bucket/x.bin")
    assert (tmp_path / "x.bin").exists()


@pytest.mark.parametrize("url", ["{0}/x.bin", "pipe:cat > {0}/x.bin", "local://{0}/x.bin"])
def test_secure_mode_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeContent, match="unsafe_gopen is False"):
        open_sink(url.format(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def scheme(tmp_path: Path) -> Iterator[list[tuple[str, str, int]]]:
    calls: list[tuple[str, str, int]] = []

    def opener(url: str, mode: str, bufsize: int, **kw: Any) -> Any:
        calls.append((url, mode, bufsize))
        return open(tmp_path / url.rpartition("/")[2], mode)

    gopen_schemes["ours"] = opener
    yield calls
    del gopen_schemes["ours"]


def test_the_programs_opener_is_called(tmp_path: Path, scheme: list[tuple[str, str, int]]) -> None:
    put("ours://a/x.bin")
    assert (tmp_path / "x.bin").read_bytes() == b"all of it"
    assert scheme == [("ours://a/x.bin", "wb", 8192)]
    with pytest.raises(UrlError, match="unknown scheme"):
        open_sink("ours://a/x.bin", final=True)
