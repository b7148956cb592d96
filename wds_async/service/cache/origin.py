"""Protocols of the cache: the origin of its objects, and the scheduler of fetches."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wds_async.errors import WdsError

if TYPE_CHECKING:
    from wds_async.transfer.ranges import Facts

__all__ = ["NO_CLIENT", "ChunkRequest", "Client", "FetchScheduler", "FetchedRange", "ForwardedFetch", "NodePart",
           "Nodes", "ObjectOrigin", "UnlimitedScheduler", "Urgency"]  # fmt: skip


class Client(NamedTuple):
    """A client of the cache: its tenant ("" for none) and its name within that tenant."""

    tenant: str = ""
    name: str = ""
    node: bool = False  # true for another node's service: what it requests is never requested from a third one

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


class ForwardedFetch(WdsError):
    """Another node requests a chunk that this one is itself requesting from a node: the two might wait for each
    other."""


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """Bytes ``[start, stop)`` of ``url``: its chunk ``number``, for which ``key`` names the object. ``facts``: those of
    the version that is wanted; None: any."""

    url: str
    key: str
    number: int
    start: int
    stop: int
    facts: Facts | None
    client: Client
    urgency: Urgency


class NodePart(Protocol):
    """Protocol: a chunk from another node. ``age_s``: how long ago its version was confirmed. `release` it."""

    age_s: float

    @property
    def view(self) -> memoryview: ...

    @property
    def facts(self) -> Facts: ...

    def release(self) -> None: ...


class Nodes(Protocol):
    """Protocol: the other nodes that share the work, each with chunks of its own."""

    @property
    def crowded(self) -> bool:
        """True if parts wait for the memory of others."""
        ...

    def owns(self, key: str, number: int) -> bool:
        """Return whether a chunk is this node's to keep."""
        ...

    def owned(self, key: str, count: int) -> Sequence[int]:
        """Return the numbers of those of ``count`` chunks that are this node's to keep."""
        ...

    def candidates(self, key: str, number: int) -> Sequence[str]:
        """Return the nodes to request a chunk from, in order; none if this node is to fetch it from the store."""
        ...

    def slot(self, client: Client, urgency: Urgency, node: str) -> Any:
        """Return a context manager that is held while a chunk is requested from ``node``."""
        ...

    async def request(self, node: str, wanted: ChunkRequest) -> NodePart | None:
        """Return a chunk from ``node``; None if it does not give it, in time."""
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
