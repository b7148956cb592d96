"""Positioned reads: whole, from many threads, and never of another file than the one that was opened."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.transfer.reading import data, open_fds
from wds_async.storage.base import LocalFile
from wds_async.storage.local import file_version
from wds_async.transfer.files import FileReader, FileReplaced


def _file(path: Path, content: bytes) -> LocalFile:
    path.write_bytes(content)
    status = os.stat(path)
    return LocalFile(str(path), status.st_size, file_version(status))


def test_many_threads_share_one_descriptor(tmp_path: Path) -> None:
    content = data(1_000_000)
    before = open_fds()
    reader = FileReader(_file(tmp_path / "x", content))
    pieces = {offset: bytearray(min(37_000, len(content) - offset)) for offset in range(0, len(content), 37_000)}
    threads = [threading.Thread(target=reader.read, args=(memoryview(into), offset)) for offset, into in pieces.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert b"".join(pieces[offset] for offset in sorted(pieces)) == content
    assert open_fds() <= before + 1
    reader.close()
    reader.close()
    assert open_fds() <= before


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    reader = FileReader(_file(tmp_path / "x", b"12345"))
    reader.read(memoryview(bytearray(2)), 0)
    os.truncate(tmp_path / "x", 3)
    into = bytearray(4)
    with pytest.raises(FileReplaced, match="ended at byte 3; it had 5 bytes"):
        reader.read(memoryview(into), 1)
    reader.close()


def test_a_file_that_is_written_over_while_it_is_read(tmp_path: Path) -> None:
    """One size, one descriptor: only its time tells."""
    path = tmp_path / "x"
    reader = FileReader(_file(path, b"12345"))
    reader.read(memoryview(bytearray(2)), 0)
    with open(path, "r+b") as file:
        file.write(b"54321")
    os.utime(path, ns=(1, 1))  # whatever the clock's steps are
    with pytest.raises(FileReplaced, match="and is now"):
        reader.read(memoryview(bytearray(3)), 2)
    reader.close()


@pytest.mark.parametrize("how", ["replaced", "grown", "touched"])
def test_a_file_that_changed_before_it_was_opened(tmp_path: Path, how: str) -> None:
    path = tmp_path / "x"
    file = _file(path, b"12345")
    if how == "replaced":
        (tmp_path / "y").write_bytes(b"54321")
        (tmp_path / "y").replace(path)
    elif how == "grown":
        path.write_bytes(b"123456")
    else:
        os.utime(path, ns=(1, 1))
    before = open_fds()
    with pytest.raises(FileReplaced, match="and is now"):
        FileReader(file).read(memoryview(bytearray(5)), 0)
    assert open_fds() == before


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    file = _file(tmp_path / "x", b"1")
    (tmp_path / "x").unlink()
    with pytest.raises(FileNotFoundError):
        FileReader(file).read(memoryview(bytearray(1)), 0)
