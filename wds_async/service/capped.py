"""An origin that may cost only so much: every question is preceded by one about money."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from wds_async.costs import Spending

if TYPE_CHECKING:
    from wds_async.transfer.ranges import Facts, Part, RangeFetcher

__all__ = ["Capped"]


class Capped:
    """``origin`` (a `transfer.ranges.RangeFetcher`) while ``spending`` allows it. Behind the limit each method raises
    CostLimitReached and asks for nothing; what is under way then ends as it would."""

    def __init__(self, origin: RangeFetcher, spending: Spending) -> None:
        self._origin = origin
        self._spending = spending

    @property
    def crowded(self) -> bool:
        """Whether its parts wait for memory."""
        return self._origin.crowded

    async def facts(self, url: str) -> Facts:
        """What the origin says of an object."""
        self._spending.check()
        return await self._origin.facts(url)

    def part(self, url: str, start: int, stop: int, facts: Facts | None = None) -> AbstractAsyncContextManager[Part]:
        """A range of its bytes."""
        self._spending.check()
        return self._origin.part(url, start, stop, facts)

    def stream(self, url: str) -> AbstractAsyncContextManager[tuple[Facts, AsyncIterator[memoryview]]]:
        """All of its bytes, in order."""
        self._spending.check()
        return self._origin.stream(url)

    def entries(self, url: str) -> AsyncIterator[Any]:
        """What is in a folder."""
        self._spending.check()
        return self._origin.entries(url)

    async def close(self) -> None:
        """Close the origin."""
        await self._origin.close()
