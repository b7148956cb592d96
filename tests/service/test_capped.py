"""An origin behind a limit of cost: all is asked while there is money, and nothing afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.transfer.reading import data, quick
from wds_async.costs import Spending
from wds_async.errors import CostLimitReached
from wds_async.pricetable import PriceTable
from wds_async.service.capped import Capped
from wds_async.transfer.ranges import RangeFetcher
from wds_async.transfer.traffic import Traffic

CONTENT = data(300_000)


@asynccontextmanager
async def capped(tmp_path: Path, limit: float | None) -> AsyncIterator[tuple[Capped, Spending]]:
    prices = tmp_path / "prices.yaml"
    prices.write_text("origins: {'http://127.0.0.1': {internet: 1}}")  # a dollar a GB
    traffic = Traffic()
    now = iter(range(10**6))  # each look is a second later
    spending = Spending(traffic, PriceTable.load(prices), limit=limit, clock=lambda: float(next(now)))
    origin = Capped(RangeFetcher(quick(), memory_bytes=8 << 20, traffic=traffic), spending)
    try:
        yield origin, spending
    finally:
        await origin.close()


async def whole(origin: Capped, url: str) -> bytes:
    async with origin.part(url, 0, len(CONTENT)) as part:
        return bytes(part.view)


def test_without_a_limit_it_is_the_origin(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("a/b.tar", CONTENT)

    async def go() -> None:
        async with capped(tmp_path, None) as (found, spending):
            assert (await found.facts(url)).size == len(CONTENT)
            assert await whole(found, url) == CONTENT
            async with found.stream(url) as (facts, pieces):
                assert facts.size == len(CONTENT)
                assert b"".join([bytes(piece) async for piece in pieces]) == CONTENT
            assert spending.dollars().high >= 2 * len(CONTENT) / 1e9

    asyncio.run(go())


def test_behind_the_limit_nothing_is_asked(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("a/b.tar", CONTENT)

    async def go() -> None:
        async with capped(tmp_path, 0.0002) as (found, spending):
            assert await whole(found, url) == CONTENT
            asked = len(origin.requests)
            for call in (found.facts, lambda url: whole(found, url), lambda url: _stream(found, url)):
                with pytest.raises(CostLimitReached, match=r"cost_limit of \$0.0002 is reached"):
                    await call(url)
            with pytest.raises(CostLimitReached):
                found.entries(f"{origin.base}/a/")
            assert len(origin.requests) == asked
            assert spending.reached

    asyncio.run(go())


async def _stream(origin: Capped, url: str) -> Any:
    async with origin.stream(url) as (facts, _):
        return facts
