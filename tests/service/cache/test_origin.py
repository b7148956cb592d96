"""What the cache asks of the world."""

from __future__ import annotations

import asyncio

from tests.service.cache.doubles import Bytes
from wds_async.service.cache.origin import FetchScheduler, ObjectOrigin, UnlimitedScheduler, Urgency
from wds_async.transfer.ranges import RangeFetcher


def test_who_waits_now_comes_first() -> None:
    assert sorted(Urgency) == [Urgency.DEMAND, Urgency.AHEAD, Urgency.PLAN]


def test_everybody_at_once() -> None:
    async def main() -> None:
        scheduler: FetchScheduler = UnlimitedScheduler()
        async with scheduler.slot("a", Urgency.PLAN), scheduler.slot("a", Urgency.DEMAND):
            pass

    asyncio.run(main())


def test_what_fits() -> None:
    """The engine's and the tests' origins are what the cache takes (mypy looks at the first, this at the names)."""
    asked = {name for name in vars(ObjectOrigin) if not name.startswith("_")}
    assert asked == {"crowded", "facts", "part", "reachable", "stream"}
    for one in (RangeFetcher, Bytes):
        assert asked <= set(dir(one))
