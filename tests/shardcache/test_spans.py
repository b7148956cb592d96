"""Spans of shards and the disk cache: read there where the whole shard is, and never kept."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.shardcache.processes import leftovers
from tests.transfer.reading import data, quick, snapshot
from wds_async.errors import ObjectChanged, WdsError
from wds_async.shardcache.cache import DiskCache
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters, Stats

CONTENT = data(700_000)
SPANS: list[dict[str, Any]] = [{"start": 0, "stop": 100_000}, {"start": 100_000}, {"start": 600_000, "stop": 900_000}]


def read(shards: list[Any], cache: DiskCache, **config: Any) -> tuple[list[bytes], list[str | None], list[str], Stats]:
    """Bytes, local paths and versions of the shards, and what was counted."""
    counters, found, paths, versions = Counters(), [], [], []
    with open_shards(shards, config=quick(**config), stats=counters, cache=cache) as reader:
        for shard in reader:
            got = bytearray()
            paths.append(shard.local_path)
            while (piece := shard.read()) is not None:
                got += piece
            found.append(bytes(got))
            versions.append(shard.version)
    return found, paths, versions, snapshot(counters)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("verify", ["auto", "always"])
def test_a_span_is_never_kept(origin: Origin, tmp_path: Path, verify: str) -> None:
    url, cache = origin.add("x.tar", CONTENT), DiskCache(tmp_path)
    shards = [{"url": url, **span} for span in SPANS]
    right = [CONTENT[shard["start"] : shard.get("stop")] for shard in shards]
    found, paths, versions, stats = read(shards, cache, verify=verify)
    assert (found, paths, files(tmp_path)) == (right, [None] * 3, [])
    assert (stats.cache_hits, stats.cache_misses) == (0, 3)
    assert read([url], cache)[0] == [CONTENT]  # which fills it
    assert len(files(tmp_path)) == 1
    origin.forget()
    found, paths, copied, stats = read(shards, cache, verify=verify)
    assert (found, set(paths)) == (right, {str(cache.find(url))})
    assert (stats.cache_hits, stats.cache_misses, len(origin.requests)) == (3, 0, 0)
    # A copy says nothing of the object's version but its size, and is not refused for it.
    assert copied == [f"{len(CONTENT)} bytes"] * 3
    assert read([{**shards[0], "version": versions[0]}, {**shards[0], "version": copied[0]}], cache)[0] == right[:1] * 2


def test_a_copy_of_another_size_is_not_the_object_that_is_expected(origin: Origin, tmp_path: Path) -> None:
    url, cache = origin.add("x.tar", CONTENT), DiskCache(tmp_path)
    cache.fetch(url)
    with pytest.raises(ObjectChanged, match=r"it was 5 bytes and is now 700000 bytes"):
        read([{"url": url, "start": 1, "version": "5 bytes"}], cache)


def test_a_span_does_not_wait_for_the_process_that_fills_the_cache(origin: Origin, tmp_path: Path) -> None:
    url, cache = origin.add("x.tar", CONTENT), DiskCache(tmp_path)
    with open_shards([url], config=quick(), cache=cache) as reader:
        whole = next(reader)
        assert whole.read()
        others: list[Any] = []
        thread = threading.Thread(target=lambda: others.append(read([{"url": url, **SPANS[1]}], DiskCache(tmp_path))))
        thread.start()
        thread.join()
        assert others[0][0] == [CONTENT[100_000:]]
        while whole.read() is not None:
            pass
    assert cache.find(url) is not None
    assert leftovers(tmp_path) == []


def test_a_copy_that_was_cut_is_left_in_the_middle_of_a_span(origin: Origin, tmp_path: Path) -> None:
    url, cache = origin.add("x.tar", CONTENT), DiskCache(tmp_path)
    path = cache.fetch(url)
    assert path is not None
    config = quick(part_bytes=64 << 10, budget_bytes=256 << 10, connections=1)
    got = bytearray()
    with open_shards([{"url": url, "start": 1000, "stop": 699_000}], config=config, cache=cache) as reader:
        shard = next(reader)
        while (piece := shard.read()) is not None:
            got += piece
            with path.open("r+b") as file:
                file.truncate(10)
    assert got == CONTENT[1000:699_000]


def test_a_changed_copy_is_refused_for_a_span_too(origin: Origin, tmp_path: Path) -> None:
    url, cache = origin.add("x.tar", CONTENT), DiskCache(tmp_path, check=True)
    cache.fetch(url)
    origin.add("x.tar", changed := CONTENT[::-1] + b"x")
    found, _, _, _ = read([{"url": url, "start": 5}], cache)
    assert (found, files(tmp_path)) == ([changed[5:]], [])


def test_an_error_keeps_nothing(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("x.tar", CONTENT)
    origin.behave(status=404)
    with pytest.raises(WdsError):
        read([{"url": url, "start": 5}], DiskCache(tmp_path))
    assert files(tmp_path) == []
