"""Looking after a folder from outside."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.service.cache.doubles import CHUNK, Bytes, content, get, run, running
from wds_async.errors import ConfigError
from wds_async.service.cache import upkeep

NAMES = ["gs://a/1", "s3://b/1", "s3://b/2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    async def main() -> None:
        origin = Bytes()
        for number, name in enumerate(NAMES):
            origin.put(name, content(4 * CHUNK + number, number))
        async with running(tmp_path, origin) as cache:
            for name in NAMES:
                await get(cache, name)

    run(main())
    return tmp_path


def test_listed(folder: Path) -> None:
    assert [row.key for row in upkeep.listed(folder)] == NAMES
    assert [row.key for row in upkeep.listed(folder, "s3://")] == NAMES[1:]


def test_removed(folder: Path) -> None:
    assert [row.key for row in upkeep.remove(folder, lambda key: key.endswith("/1"))] == NAMES[:2]
    assert [row.key for row in upkeep.listed(folder)] == NAMES[2:]
    assert len([path for path in (folder / "data").rglob("*") if path.is_file()]) == 1


def test_bad_chunks_are_dropped_and_fetched_again(folder: Path) -> None:
    first = next(upkeep.listed(folder)).id
    path = next(path for path in (folder / "data").rglob(f"{first:x}") if path.is_file())
    data = bytearray(path.read_bytes())
    data[2 * CHUNK] ^= 255
    path.write_bytes(data)
    found = list(upkeep.verify(folder, chunk_bytes=CHUNK))
    assert [(one.key, one.good, one.bad) for one in found] == [(NAMES[0], 3, 1), (NAMES[1], 5, 0), (NAMES[2], 5, 0)]
    assert next(upkeep.listed(folder)).held == 3 * CHUNK
    assert all(one.bad == 0 for one in upkeep.verify(folder, chunk_bytes=CHUNK))

    async def main() -> None:
        origin = Bytes()
        origin.put(NAMES[0], content(4 * CHUNK, 0))
        async with running(folder, origin) as cache:
            assert await get(cache, NAMES[0]) == content(4 * CHUNK, 0)
            assert origin.bytes == CHUNK
            assert cache.statistics().bad_chunks == 0
            with pytest.raises(ConfigError, match="another process"):
                await asyncio.to_thread(list, upkeep.verify(folder))

    run(main())


def test_what_is_gone_is_forgotten(folder: Path) -> None:
    for path in (folder / "data").rglob("*"):
        if path.is_file():
            path.unlink()
    assert {(one.good, one.bad > 0) for one in upkeep.verify(folder, "s3://", chunk_bytes=CHUNK)} == {(0, True)}
    assert [row.key for row in upkeep.listed(folder)] == NAMES[:1]
