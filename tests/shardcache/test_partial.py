"""One writer for each shard, readers behind it, nothing left of the dead."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.shardcache.processes import held, leftovers
from wds_async.shardcache.partial import PartialReader, PartialWriter, sweep

_DIE_HOLDING = """
import sys, os
from pathlib import Path
from wds_async.shardcache.partial import PartialWriter
filling = PartialWriter.begin(Path(sys.argv[1]), sys.argv[2])
filling.write(memoryview(b"half"))
os._exit(0)
"""


def begun(folder: Path, name: str = "a/x.tar") -> PartialWriter:
    filling = PartialWriter.begin(folder, name)
    assert filling is not None
    return filling


def die_holding(folder: Path, name: str = "a/x.tar") -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", _DIE_HOLDING, str(folder), name], check=True)


def test_a_shard_appears_whole(tmp_path: Path) -> None:
    filling = begun(tmp_path)
    filling.write(memoryview(b"hello "))
    filling.write(memoryview(b"world"))
    assert not (tmp_path / "a").exists()
    assert filling.publish() == tmp_path / "a/x.tar"
    assert (tmp_path / "a/x.tar").read_bytes() == b"hello world"
    assert (leftovers(tmp_path), held(tmp_path)) == ([], [])


def test_a_shard_appears_with_its_time_of_change(tmp_path: Path) -> None:
    """A reader that finds the file at once pins it by that time, and would take a later change for another file."""
    seen: set[float] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):
                seen.update(path.stat().st_mtime for path in (tmp_path / "a").iterdir())

    watching = threading.Thread(target=look)
    watching.start()
    for number in range(50):
        filling = begun(tmp_path, f"a/{number}.tar")
        filling.write(memoryview(b"hello"))
        filling.publish(1e9)
    done.set()
    watching.join()
    assert seen <= {1e9}
    assert {path.stat().st_mtime for path in (tmp_path / "a").iterdir()} == {1e9}


def test_one_writer(tmp_path: Path) -> None:
    filling = begun(tmp_path)
    assert PartialWriter.begin(tmp_path, "a/x.tar") is None
    assert PartialWriter.begin(tmp_path, "a/x.tar", 0.05) is None
    begun(tmp_path, "a/y.tar").drop()
    filling.drop()
    filling.drop()
    begun(tmp_path).drop()
    forgotten = begun(tmp_path)
    forgotten.write(memoryview(b"x"))
    del forgotten
    gc.collect()
    assert (leftovers(tmp_path), held(tmp_path)) == ([], [])


def test_a_part_with_bytes_of_another_writer_is_not_published(tmp_path: Path) -> None:
    filling = begun(tmp_path)
    filling.write(memoryview(b"mine"))
    (part,) = (tmp_path / ".partial").glob("*.part")
    with open(part, "ab") as file:
        file.write(b" and yours")
    with pytest.raises(OSError, match="4 bytes were written and 14 are there"):
        filling.publish()
    assert not (tmp_path / "a/x.tar").exists()
    assert leftovers(tmp_path) == []


def test_a_name_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    filling = begun(tmp_path)
    with pytest.raises(OSError):
        filling.publish()
    assert (leftovers(tmp_path), held(tmp_path)) == ([], [])


def test_following(tmp_path: Path) -> None:
    following, into = PartialReader(tmp_path, "a/x.tar"), memoryview(bytearray(4))
    assert not following.exists()
    with pytest.raises(FileNotFoundError):
        following.open()
    filling = begun(tmp_path)
    assert following.exists()
    following.open()
    assert (following.read(into, 0), following.ended(0)) == (0, None)
    filling.write(memoryview(b"hello"))
    assert (following.read(into, 0), bytes(into)) == (4, b"hell")
    assert following.ended(4) is None
    assert (following.read(into, 4), bytes(into[:1])) == (1, b"o")
    assert following.ended(5) is None
    filling.publish()
    assert following.ended(4) is None  # one byte is left
    assert following.ended(5) is True
    following.close()
    following.close()
    assert held(tmp_path) == []


def test_following_one_that_leaves(tmp_path: Path) -> None:
    filling, following = begun(tmp_path), PartialReader(tmp_path, "a/x.tar")
    filling.write(memoryview(b"hello"))
    following.open()
    filling.drop()
    assert following.ended(5) is False
    assert following.ended(0) is None  # its bytes are as good as before
    other = begun(tmp_path)  # another writer begins anew: another file
    other.write(memoryview(b"hello and more"))
    assert following.read(memoryview(bytearray(20)), 0) == 5
    other.publish()
    assert following.ended(5) is False
    following.close()


def test_a_new_writer_clears_up_after_a_dead_one(tmp_path: Path) -> None:
    die_holding(tmp_path)
    following = PartialReader(tmp_path, "a/x.tar")
    following.open()
    assert any(name.endswith(".lock") for name in leftovers(tmp_path))
    assert following.ended(4) is False
    assert not any(name.endswith(".lock") for name in leftovers(tmp_path))
    filling = begun(tmp_path)
    filling.write(memoryview(b"whole"))
    assert following.read(memoryview(bytearray(20)), 0) == 4  # the dead one's, not a byte of the other's
    following.close()
    for content in (b"", b" twice"):  # the second replaces the first
        filling.write(memoryview(content))
        filling.publish()
        filling = begun(tmp_path)
        filling.write(memoryview(b"whole"))
    filling.drop()
    assert (tmp_path / "a/x.tar").read_bytes() == b"whole twice"
    assert leftovers(tmp_path) == []


def test_sweeping_spares_the_living(tmp_path: Path) -> None:
    assert sweep(tmp_path) == 0
    die_holding(tmp_path, "a/dead.tar")
    filling = begun(tmp_path)
    filling.write(memoryview(b"alive"))
    (tmp_path / ".partial" / "eviction.lock").touch()
    (tmp_path / ".partial" / "something else").touch()
    assert len(leftovers(tmp_path)) == 5
    assert sweep(tmp_path) == 1
    assert len(leftovers(tmp_path)) == 3
    filling.publish()
    assert leftovers(tmp_path) == ["something else"]
    assert sweep(tmp_path) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX only")
def test_a_forked_child_holds_nothing(tmp_path: Path) -> None:
    filling = begun(tmp_path)
    filling.write(memoryview(b"hello"))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            clean = held(tmp_path) == []
            filling.drop()  # the parent's: nothing happens
            del filling
            gc.collect()
            status = 0 if clean and len(leftovers(tmp_path)) == 2 else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert PartialWriter.begin(tmp_path, "a/x.tar") is None
    assert filling.publish().read_bytes() == b"hello"
