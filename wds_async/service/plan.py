"""What one client will read, and what is held for it."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field

from wds_async.chunkcache.origin import Client
from wds_async.service.itinerary import Itinerary

__all__ = ["Held", "Plan"]

_PACE_S = 1.0
_PACE_WEIGHT = 0.3
_REMEMBERED = 64


@dataclass(slots=True)
class Plan:
    """One client's. ``position`` is the shard that it reads now, or next."""

    client: Client
    job: str
    shards: Itinerary
    ahead: int
    ahead_bytes: int
    position: int
    heard_at: float
    moved_at: float
    bound: Hashable = None
    following: int = 0
    """The first shard that has not been looked at for fetching."""
    pace_s: float = _PACE_S
    """Seconds for one shard; a guess until it was ``measured``."""
    measured: bool = False
    heard: dict[str, None] = field(default_factory=dict)
    """What was asked for lately."""
    taken: dict[str, int] = field(default_factory=dict)
    """What is fetched, or being fetched, for it and was not asked for yet: URL and index."""
    usual_bytes: int = 0
    """What its shards were found to hold; 0 until one was opened, and only one is opened (``looking``) until then, so
    that a small budget goes to what is needed first."""
    looking: bool = False
    full: bool = False
    """Whether the next shard has to wait until others were read."""

    def ask(self, url: str) -> bool:
        """Note that ``url`` was asked for; whether it was not, lately."""
        if url in self.heard:
            return False
        self.heard[url] = None
        if len(self.heard) > _REMEMBERED:
            del self.heard[next(iter(self.heard))]
        return True

    def move(self, index: int, now: float) -> bool:
        """The client is at ``index``: how long it took for what is behind it is its pace. Whether it went on."""
        if index <= self.position:
            return False
        took_s = (now - self.moved_at) / (index - self.position)
        self.pace_s = took_s if not self.measured else self.pace_s + _PACE_WEIGHT * (took_s - self.pace_s)
        self.measured = True
        self.position, self.moved_at = index, now
        self.following = max(self.following, index)
        return True

    def due(self) -> float:
        """When the next shard to fetch will be asked for, as far as one can tell."""
        return self.moved_at + (self.following - self.position) * self.pace_s

    @property
    def hungry(self) -> bool:
        """Whether there is a shard to fetch now."""
        if self.full or (self.looking and not self.usual_bytes):
            return False
        return self.following < min(len(self.shards), self.position + 1 + self.ahead)


@dataclass(slots=True)
class Held:
    """A shard that plans have, or are getting: ``size`` is 0 until it is known."""

    url: str
    clients: set[Client]
    size: int = 0
    task: asyncio.Task[None] | None = None
