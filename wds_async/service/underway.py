"""Requests under way: how many there are, and how many each client and each tenant has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from wds_async.chunkcache.origin import Client
from wds_async.service.refusals import Refusal

__all__ = ["Underway"]


class Underway:
    """At most ``limit`` requests of one client at a time, and ``tenant_limit`` (None: any number) of all clients of one
    tenant; all belong to one loop."""

    def __init__(self, limit: int, tenant_limit: int | None = None) -> None:
        self.limit = limit
        self.tenant_limit = tenant_limit
        self._of: Counter[Client] = Counter()
        self._of_tenant: Counter[str] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    @property
    def clients(self) -> int:
        """How many have a request under way."""
        return len(self._of)

    @contextmanager
    def one(self, client: Client) -> Iterator[None]:
        """A request from its beginning to its end. Refusal (429) where its client or tenant has as many as it may."""
        if self._of[client] >= self.limit:
            words = f"you have {self.limit} requests under way, as many as one client may (client_requests)"
            raise Refusal(429, words, "client-requests", retry_after_s=1)
        if self.tenant_limit is not None and self._of_tenant[client.tenant] >= self.tenant_limit:
            words = f"{self.tenant_limit} requests of your tenant are under way, as many as one may (tenant_requests)"
            raise Refusal(429, words, "tenant-requests", retry_after_s=1)
        self._count(client, 1)
        try:
            yield
        finally:
            self._count(client, -1)

    def _count(self, client: Client, more: int) -> None:
        self._total += more
        self._of[client] += more
        self._of_tenant[client.tenant] += more
        if not self._of[client]:
            del self._of[client]
        if not self._of_tenant[client.tenant]:
            del self._of_tenant[client.tenant]
