"""Requests under way: how many there are, and how many each client has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from wds_async.service.refusals import Refusal

__all__ = ["Underway"]


class Underway:
    """At most ``limit`` requests of one client at a time; all belong to one loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._of: Counter[str] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    @property
    def clients(self) -> int:
        """How many have a request under way."""
        return len(self._of)

    def enter(self, client: str) -> bool:
        """Count one more of ``client``; False, and nothing is counted, where it has as many as it may."""
        if self._of[client] >= self.limit:
            return False
        self._of[client] += 1
        self._total += 1
        return True

    def leave(self, client: str) -> None:
        """One that `enter` let in is over."""
        self._total -= 1
        if self._of[client] <= 1:
            del self._of[client]
        else:
            self._of[client] -= 1

    @contextmanager
    def one(self, client: str) -> Iterator[None]:
        """A request from its beginning to its end. Refusal (429) where the client has as many as it may."""
        if not self.enter(client):
            words = f"you have {self.limit} requests under way, as many as one client may (client_requests)"
            raise Refusal(429, words, "client-requests", retry_after_s=1)
        try:
            yield
        finally:
            self.leave(client)
