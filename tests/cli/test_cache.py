"""``wds-async cache``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.service.cache.doubles import Bytes, content, get, running
from wds_async.service.cache.disk import open_folder
from wds_async.service.cache.index import CHUNK_BYTES
from wds_async.service.cache.origin import Client
from wds_async.service.cache.upkeep import Warmed, warm

URLS = [f"s3://bucket/{folder}/{number}.tar" for folder in ("train", "val") for number in range(3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with six objects, one of which is there in part."""
    origin = Bytes()
    for number, url in enumerate(URLS):
        origin.put(url, content(10_000 + number, number))
    origin.put(URLS[0], bytes(CHUNK_BYTES + 10))

    async def main() -> None:
        async with running(tmp_path / "cache", origin, 64 << 20, chunk_bytes=CHUNK_BYTES) as cache:
            for url in URLS:
                await get(cache, url, 0, 10, client=Client("vision"))

    asyncio.run(main())
    return tmp_path / "cache"


def test_ls(call: Any, rows: Any, folder: Path) -> None:
    found = rows("cache", "ls", folder)
    assert [one["url"] for one in found] == URLS
    assert {one["tenant"] for one in found} == {"vision"}
    assert [one["size"] for one in found] == [CHUNK_BYTES + 10, *(10_000 + number for number in range(1, 6))]
    assert [one["url"] for one in rows("cache", "ls", "s3://bucket/val/", "--folder", folder)] == URLS[3:]
    lines = call("cache", "ls", folder).stdout.splitlines()
    assert ["whole" in line for line in lines] == [False, *[True] * 5]
    assert URLS[0] in lines[0]


def test_du(call: Any, rows: Any, folder: Path) -> None:
    sums = rows("cache", "du", "--folder", folder)
    assert [(one["prefix"], one["objects"]) for one in sums] == [
        ("s3://bucket/train/", 3),
        ("s3://bucket/val/", 3),
        ("total", 6),
    ]
    assert sums[-1]["bytes"] == sums[0]["bytes"] + sums[1]["bytes"]
    shallow = call("cache", "du", "--depth", "0", folder).stdout  # the folder may stand where the prefix does
    assert "s3://bucket/\n" in shallow
    assert "6  total" in shallow


def test_rm(call: Any, rows: Any, folder: Path) -> None:
    assert "2 objects" in call("cache", "rm", URLS[1], URLS[2], "s3://bucket/none", "--folder", folder).stderr
    assert "3 objects" in call("cache", "rm", "s3://bucket/val/", "--folder", folder).stderr
    assert [one["url"] for one in rows("cache", "ls", folder)] == URLS[:1]
    assert len([path for path in (folder / "data").rglob("*") if path.is_file()]) == 1
    assert call("cache", "rm", "--all", "--folder", folder).exit_code == 0
    assert rows("cache", "ls", folder) == []


def test_verify(call: Any, rows: Any, folder: Path) -> None:
    assert call("cache", "verify", folder).exit_code == 0
    paths = sorted(path for path in (folder / "data").rglob("*") if path.is_file())
    for path, offset in ((paths[0], 5), (paths[1], 5)):
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
    result = call("cache", "verify", "--folder", folder)
    assert result.exit_code == 1
    assert "4 chunks are good, 2 were bad" in result.stderr
    assert len(rows("cache", "ls", folder)) == 4
    assert call("cache", "verify", "--folder", folder).exit_code == 0


def test_a_folder_that_is_in_use(call: Any, rows: Any, folder: Path) -> None:
    opened = open_folder(folder)
    try:
        assert len(rows("cache", "ls", folder)) == 6
        for arguments in (["rm", "--all"], ["verify"], ["warm", URLS[0]]):
            result = call("cache", *arguments, "--folder", folder)
            assert result.exit_code == 2
            assert "another process works on this cache" in result.stderr
    finally:
        opened.close()


def test_no_folder(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no cache" in call("cache", "du", tmp_path).stderr
    for arguments in (["ls"], ["rm", "--all"], ["verify"]):
        assert "no cache" in call("cache", *arguments, "--folder", tmp_path).stderr
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_the_configuration(call: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder.parent / "serve.yaml"
    path.write_text(f"folder: {folder}\n")
    monkeypatch.setenv("WDS_SERVE_CONFIG", str(path))
    assert len(call("cache", "ls").stdout.splitlines()) == 6


def test_warm_straight_into_the_folder(call: Any, rows: Any, tmp_path: Path) -> None:
    files = {f"/{number}.tar": content(CHUNK_BYTES + number, number) for number in range(3)}
    with Origin(files) as origin:
        pattern = f"{origin.url('/')}{{0..2}}.tar"
        result = call("cache", "warm", pattern, "--folder", tmp_path / "new", "--size", "64M")
        assert result.exit_code == 0, result.stderr
        assert "3 of 3 are there" in result.stderr
        asked = len(origin.requests)
        assert asked == 5  # the facts come with the first chunk
        again = rows("cache", "warm", pattern, "--folder", tmp_path / "new", "--size", "64M")
        assert sorted(row["there"] for row in again) == [len(data) for data in files.values()]
        assert len(origin.requests) == asked  # they are there, and fresh
        missing = call("cache", "warm", origin.url("/no.tar"), "--folder", tmp_path / "new", "--size", "64M")
        assert missing.exit_code == 1
        assert "not there" in missing.stderr
    found = rows("cache", "ls", tmp_path / "new")
    assert [one["size"] for one in found] == [len(data) for data in files.values()]


def test_warming_stops_at_the_size_of_the_cache(tmp_path: Path) -> None:
    origin, told = Bytes(), list[Warmed]()
    for url in URLS:
        origin.put(url, content(2 * CHUNK_BYTES))
    asyncio.run(warm(tmp_path, 6 * CHUNK_BYTES, URLS, origin, told.append, at_once=1))
    assert sum(one.whole for one in told) == 2  # a transit share is kept free
