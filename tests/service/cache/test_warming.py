"""Filling a folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.service.cache.doubles import Bytes, content
from wds_async.service.cache import upkeep
from wds_async.service.cache.index import CHUNK_BYTES
from wds_async.service.cache.upkeep import Warmed, warm


def test_what_is_warm_is_there(tmp_path: Path) -> None:
    origin, told = Bytes(), list[Warmed]()
    for number in range(3):
        origin.put(f"s3://b/{number}", content(CHUNK_BYTES + number, number))
    origin.put("s3://b/pipe", content(1000), ranged=False, told=False)
    urls = [*origin.things, "s3://b/none"]
    asyncio.run(warm(tmp_path, 64 << 20, urls, origin, told.append, at_once=2))
    assert {one.url for one in told if one.whole} == set(origin.things)
    (missing,) = (one for one in told if one.error)
    assert "not there" in missing.error
    assert not missing.whole
    assert {row.key: row.size for row in upkeep.listed(tmp_path)} == {u: len(t.data) for u, t in origin.things.items()}
    fetched = origin.bytes
    asyncio.run(warm(tmp_path, 64 << 20, urls[:3], origin, told.append))
    assert origin.bytes == fetched
