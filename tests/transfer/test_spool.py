"""What is held back comes back as it was, whatever its size, and the memory for it is bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transfer.reading import KIB, MIB, data, open_fds
from wds_async.transfer.checksums import Spool


def fill(spool: Spool, content: bytes, step: int) -> None:
    for at in range(0, len(content), step):
        spool.write(memoryview(content)[at : at + step])


def drain(spool: Spool) -> bytes:
    return b"".join(bytes(piece) for piece in iter(spool.read, None))


@pytest.mark.parametrize("size", [0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 3 * MIB + 5])
def test_round_trips(size: int, tmp_path: Path) -> None:
    spool, before = Spool(64 * KIB, str(tmp_path)), open_fds()
    for seed in range(2):  # the same memory twice
        content = data(size, seed)
        fill(spool, content, 40_000)
        assert spool.size == size
        assert drain(spool) == content
        assert spool.read() is None
        assert not list(tmp_path.iterdir())  # the file has no name
        spool.clear()
    assert open_fds() == before


def test_cleared_before_it_was_read() -> None:
    spool = Spool(64 * KIB)
    fill(spool, data(1 * MIB), 100_000)
    spool.read()
    spool.clear()
    spool.clear()
    assert spool.read() is None
    fill(spool, b"again", 2)
    assert drain(spool) == b"again"
    spool.clear()


def test_no_room(tmp_path: Path) -> None:
    spool = Spool(64 * KIB, str(tmp_path / "missing"))
    fill(spool, data(64 * KIB), 64 * KIB)
    with pytest.raises(OSError, match="missing"):
        spool.write(memoryview(b"x"))
    spool.clear()
