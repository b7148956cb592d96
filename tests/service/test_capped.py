"""An origin behind a limit of cost: all is asked while there is money, and nothing afterwards."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from tests.service.serving import Inside, ask
from tests.transfer.reading import data, quick
from wds_async.errors import ConfigError, CostLimitReached
from wds_async.observe.cost_limit import ServiceCostLimit
from wds_async.observe.prices import PriceTable
from wds_async.transfer.ranges import RangeFetcher
from wds_async.transfer.traffic import Traffic

CONTENT = data(300_000)


@asynccontextmanager
async def capped(tmp_path: Path, limit: float | None) -> AsyncIterator[tuple[RangeFetcher, ServiceCostLimit]]:
    prices = tmp_path / "prices.yaml"
    prices.write_text("origins: {'http://127.0.0.1': {internet: 1}}")  # a dollar a GB
    traffic = Traffic()
    now = iter(range(10**6))  # each look is a second later
    spending = ServiceCostLimit(traffic, PriceTable.load(prices), limit=limit, clock=lambda: float(next(now)))
    origin = RangeFetcher(quick(), memory_bytes=8 << 20, traffic=traffic, before_request=spending.check)
    try:
        yield origin, spending
    finally:
        await origin.close()


async def whole(origin: RangeFetcher, url: str) -> bytes:
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
                await anext(found.entries(f"{origin.base}/a/"))
            assert len(origin.requests) == asked
            assert spending.exhausted

    asyncio.run(go())


def test_a_limit_outlives_the_process(origin: Origin, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("origins: {'http://127.0.0.1': {internet: 1}}")
    for number in range(3):
        origin.add(f"/{number}.tar", CONTENT)
    settings: dict[str, Any] = {"folder": tmp_path / "cache", "buckets": {"b": f"{origin.base}/"}, "private": True}
    settings |= {"prices": str(prices), "cost_limit": 0.0004}
    with Inside(**settings) as service:
        assert ask(f"{service.base}/ais/b/0.tar")[0] == 200
        assert json.loads(ask(f"{service.base}/v1/stats")[2])["cost"]["spent"][1] >= 0.0003
    with Inside(**settings) as service:
        assert ask(f"{service.base}/ais/b/1.tar")[0] == 200  # 0.0006 dollars now
        service.stored()
    asked = len(origin.requests)
    with Inside(**settings) as service:
        assert ask(f"{service.base}/ais/b/2.tar")[0] == 402
        assert ask(f"{service.base}/ais/b/1.tar")[0] == 200  # what is cached is served on
        page = ask(f"{service.base}/metrics")[2].decode()
        assert float(re.search(r'wds_cost_spent_dollars{bound="high"} (\S+)', page)[1]) >= 0.0006  # type: ignore[index]
    assert len(origin.requests) == asked
    costs = tmp_path / "cache" / "costs.json"
    state = json.loads(costs.read_text())
    costs.write_text(json.dumps({**state, "day": "2020-01-01"}))
    with Inside(**settings, cost_limit_per="day") as service:  # nothing was spent today
        assert ask(f"{service.base}/ais/b/2.tar")[0] == 200
    costs.write_text("{")
    with pytest.raises(ConfigError, match=r"costs\.json: what was spent until now cannot be read"):
        Inside(**settings).__enter__()


async def _stream(origin: RangeFetcher, url: str) -> Any:
    async with origin.stream(url) as (facts, _):
        return facts
