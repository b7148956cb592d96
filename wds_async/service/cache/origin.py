"""Protocols of the cache: the origin of its objects, and the scheduler of fetches."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from wds_async.transfer.ranges import Facts

__all__ = ["NO_CLIENT", "Client", "FetchScheduler", "FetchedRange", "ObjectOrigin", "UnlimitedScheduler", "Urgency"]


class Client(NamedTuple):
    """A client of the cache: its tenant ("" for none) and its name within that tenant."""

    tenant: str = ""
    name: str = ""

    def __str__(self) -> str:
        """Return a label for logs; it identifies nothing."""
        return f"{self.tenant}/{self.name}" if self.tenant else self.name


NO_CLIENT = Client()


class Urgency(enum.IntEnum):
    """Priority of a fetch; lower values come first."""

    DEMAND = 0  # A reader waits for it
    AHEAD = 1  # A reader will need it soon: the rest of its object
    PLAN = 2  # it will be read later, as a plan says


class FetchedRange(Protocol):
    """Protocol: a byte range that has arrived."""

    @property
    def view(self) -> memoryview:
        """Exactly the requested bytes (fewer only at the end of the object)."""
        ...

    @property
    def facts(self) -> Facts:
        """The object's facts from its answer."""
        ...


class ObjectOrigin(Protocol):
    """Protocol: the source of objects. Errors are those of `wds_async.errors`; an implementation bounds the memory of
    its parts."""

    @property
    def crowded(self) -> bool:
        """True if parts wait for the memory of others."""
        ...

    async def facts(self, url: str, *, deadline_s: float | None = None) -> Facts:
        """Return the object's present facts. With ``deadline_s``: by one attempt within that time, and by none while
        its store is known to be down; then TransferError."""
        ...

    def reachable(self, url: str) -> bool:
        """Return whether its store is not known to be down; without I/O."""
        ...

    def part(
        self, url: str, start: int, stop: int, facts: Facts | None = None
    ) -> AbstractAsyncContextManager[FetchedRange]:
        """Return bytes ``[start, stop)``, valid inside the ``async with``. `ObjectChanged` if the object is not that of
        ``facts`` (None: any version); `Unranged` if it has no ranges."""
        ...

    def stream(self, url: str) -> AbstractAsyncContextManager[tuple[Facts, AsyncIterator[memoryview]]]:
        """Return the whole object in order; a piece is valid until the next one is requested."""
        ...


class FetchScheduler(Protocol):
    """Protocol: order and limit of fetches from origins."""

    def slot(self, client: Client, urgency: Urgency, url: str = "") -> AbstractAsyncContextManager[None]:
        """Return a context manager that is held while a chunk of ``url`` is fetched."""
        ...


class UnlimitedScheduler:
    """A scheduler without limits."""

    def slot(self, client: Client, urgency: Urgency, url: str = "") -> AbstractAsyncContextManager[None]:
        return nullcontext()
