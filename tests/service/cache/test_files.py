"""The files."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import pytest
from crc32c import crc32c

from tests.service.cache.doubles import content
from tests.service.cache.test_machine import full_disk
from wds_async.service.cache.disk import DataFile, DataFolder, crc_of

DATA = content(300_000)


def test_write_anywhere_and_compare(tmp_path: Path) -> None:
    file = DataFile(tmp_path / "b", create=True)
    assert file.write(1 << 20, memoryview(DATA)) == crc32c(DATA)
    assert file.crc(1 << 20, len(DATA)) == crc32c(DATA)
    assert file.crc(1 << 20, len(DATA) + 1) is None
    assert crc_of(file.fd, 0, 0) == 0
    assert os.stat(tmp_path / "b").st_mode & 0o777 == 0o600
    assert os.stat(tmp_path / "b").st_blocks * 512 < 1 << 20  # sparse
    file.close()
    file.close()


def test_punching_gives_blocks_back(tmp_path: Path) -> None:
    file = DataFile(tmp_path / "a", create=True)
    file.write(0, memoryview(bytes(10 * 8192)))
    assert file.punch(8192, 4 * 8192)
    assert os.fstat(file.fd).st_blocks * 512 == 6 * 8192
    file.trim([(0, 8192), (9 * 8192, 10 * 8192)])
    assert os.fstat(file.fd).st_blocks * 512 == 2 * 8192
    file.trim([(0, 8192), (9 * 8192, 10 * 8192)])
    assert os.fstat(file.fd).st_size == 10 * 8192
    file.close()


def test_no_hole_under_a_reader_that_was_handed_the_file(tmp_path: Path) -> None:
    file = DataFile(tmp_path / "a", create=True)
    file.write(0, memoryview(DATA))
    handed = os.open(tmp_path / "a", os.O_RDONLY)
    fcntl.flock(handed, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert not file.punch(0, 8192)
    file.trim([])
    assert os.pread(handed, len(DATA), 0) == DATA
    os.close(handed)
    assert file.punch(0, 8192)
    with (tmp_path / "a").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for no longer than it takes
    file.close()


def test_a_hole_writes_to_no_page_that_is_in_a_socket(tmp_path: Path) -> None:
    file = DataFile(tmp_path / "a", create=True)
    file.write(0, memoryview(DATA[:10_001]))
    ours, theirs = socket.socketpair()
    assert os.sendfile(ours.fileno(), file.fd, 0, 10_001) == 10_001
    assert file.punch(0, 10_001)
    got = b""
    while len(got) < 10_001:
        got += theirs.recv(1 << 16)
    assert got == DATA[:10_001]
    for one in (ours, theirs, file):
        one.close()


def test_a_removed_file_is_read_on(tmp_path: Path) -> None:
    files = DataFolder(tmp_path)
    file = files.create(7)
    file.write(0, memoryview(DATA))
    files.remove(7)
    files.remove(7)
    assert os.pread(file.fd, 10, 5) == DATA[5:15]
    with pytest.raises(FileNotFoundError):
        files.open(7)
    file.close()
    files.close()


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    file = DataFile(tmp_path / "a", create=True)
    with full_disk(), pytest.raises(OSError):
        file.write(0, memoryview(DATA))
    file.close()


def test_sweeping_finds_what_nobody_knows(tmp_path: Path) -> None:
    files = DataFolder(tmp_path)
    for number in (3, 10, 12, 500, 9000):
        files.create(number).close()
    assert files.sweep(10, most=600) == 3
    assert [path.name for path in sorted(tmp_path.rglob("*")) if path.is_file()] == ["3", f"{9000:x}"]
    files.close()


def test_a_new_file_is_never_anothers(tmp_path: Path) -> None:
    """Where the folder was replaced, two processes may give the same number: none writes into what the other serves."""
    files = DataFolder(tmp_path)
    first = files.create(7)
    first.write(0, memoryview(DATA))
    second = files.create(7)
    second.write(0, memoryview(b"other"))
    assert first.crc(0, len(DATA)) == crc32c(DATA)
    assert (tmp_path / files.path(7)).read_bytes() == b"other"
    files.close()
    first.close()
    second.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    files = DataFolder(tmp_path)
    link = tmp_path / files.path(7)
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        files.open(7)
    made = files.create(7)
    made.write(0, memoryview(b"mine"))
    made.close()
    assert victim.read_bytes() == b"precious"
    assert not link.is_symlink()
    files.close()


def test_a_folder_that_was_replaced_is_left_alone(tmp_path: Path) -> None:
    """Another disk, or another service, may be where the path leads now."""
    cache, moved = tmp_path / "cache", tmp_path / "moved"
    cache.mkdir()
    files = DataFolder(cache)
    files.create(7).close()
    cache.rename(moved)
    (cache / "data" / "07").mkdir(parents=True)
    (cache / files.path(7)).write_bytes(b"another's")
    files.create(8).close()
    files.touch("note")
    assert files.stored_crc(7, 0, 1) is None
    files.remove(7)
    assert files.sweep(0) == 1
    files.close()
    files.close()
    assert (cache / files.path(7)).read_bytes() == b"another's"
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["7"]
    assert [path.name for path in moved.rglob("*") if path.is_file()] == ["note"]
