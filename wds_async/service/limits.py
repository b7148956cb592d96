"""Limits of the service: fair queues, concurrent fetches, rates, requests in flight, cost."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from wds_async.errors import ConfigError
from wds_async.observe.cost_limit import ServiceCostLimit
from wds_async.service.cache.origin import Client, Urgency
from wds_async.service.refusals import Refusal
from wds_async.transfer.rate_limits import TokenBucket

__all__ = ["Counts", "FairQueue", "FairScheduler", "FetchSlot", "InFlightRequests", "RateLimit", "SpentFile"]

logger = logging.getLogger("wds_async")
T = TypeVar("T")
_SHARE = 7  # times the free places are the most that one client, tenant or store may have
_BURST_S, _BURST_AT_LEAST_BYTES = 0.25, 256 << 10
_CLIENTS, _LOOKED_AT = 4096, 4


class FairQueue(Generic[T]):
    """A queue for each client, served round-robin: first by tenant, then by client."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[Client, deque[T]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, client: Client, item: T) -> None:
        """Append to the queue of ``client``; a new tenant or client goes to the end."""
        self._tenants.setdefault(client.tenant, OrderedDict()).setdefault(client, deque()).append(item)
        self._count += 1

    def pop(self, may: Callable[[T], bool] = lambda _: True) -> T | None:
        """Remove and return the next item that ``may`` go, among the first of each client; None if there is none. Those
        skipped keep their places."""
        for tenant, queues in self._tenants.items():
            for client, queue in queues.items():
                if may(item := queue[0]):
                    queues.move_to_end(client)
                    self._tenants.move_to_end(tenant)
                    self.remove(client, item)
                    return item
        return None

    def remove(self, client: Client, item: T) -> bool:
        """Remove ``item`` before its turn; False if it is not queued."""
        queues = self._tenants.get(client.tenant, OrderedDict())
        queue = queues.get(client, deque())
        if item not in queue:
            return False
        queue.remove(item)
        self._count -= 1
        if not queue:
            del queues[client]
            if not queues:
                del self._tenants[client.tenant]
        return True


class Counts(Counter[Any]):
    """Counters that are forgotten at 0."""

    def add(self, more: int, key: object) -> None:
        """Add ``more`` to the counter of ``key``."""
        self[key] += more
        if not self[key]:
            del self[key]


class FairScheduler:
    """Limits fetches to ``limit`` at once for one client or store, a seventh more for one tenant, and a seventh more
    than that for all. Fetches that no reader waits for leave places free, plans a quarter and read-ahead an eighth, so
    that a reader never waits for a whole round of them."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: at least one fetch at once")
        of_tenant = limit + -(-limit // _SHARE)
        most = limit, of_tenant, of_tenant + -(-of_tenant // _SHARE)
        self._most = {
            Urgency.DEMAND: most,
            Urgency.AHEAD: tuple(places - places // 8 for places in most),
            Urgency.PLAN: tuple(places - places // 4 for places in most),
        }
        """Most fetches of a client or store, of a tenant, and of all."""
        self.running = 0
        """Fetches in progress."""
        self._queues: dict[Urgency, FairQueue[FetchSlot]] = {urgency: FairQueue() for urgency in Urgency}
        self._clients, self._tenants, self._stores = Counts(), Counts(), Counts()

    @property
    def waiting(self) -> int:
        """Fetches that wait for a place."""
        return sum(map(len, self._queues.values()))

    def slot(self, client: Client, urgency: Urgency, url: str = "") -> FetchSlot:
        """Return a context manager that waits for a place and holds it. ``url``: the object to fetch, if known; its
        bucket or host is the store that may be slow."""
        return FetchSlot(self, client, urgency, "/".join(url.split("/", 3)[:3]))

    def push(self, slot: FetchSlot) -> None:
        """Queue ``slot``, which may be admitted at once."""
        self._queues[slot.urgency].push(slot.client, slot)
        self.admit()

    def remove(self, slot: FetchSlot) -> bool:
        """Remove ``slot`` from its queue; False if it was admitted."""
        return self._queues[slot.urgency].remove(slot.client, slot)

    def admit(self) -> None:
        """Admit all that may be fetched now."""
        for urgency, queue in self._queues.items():  # the less urgent have fewer places, so they overtake no other
            while self.running < self._most[urgency][2] and (slot := queue.pop(self.may)) is not None:
                self.count(slot, 1)
                slot.begin()

    def count(self, slot: FetchSlot, more: int) -> None:
        """Count a fetch that begins (1) or has ended (-1)."""
        self.running += more
        self._clients.add(more, slot.client)
        self._tenants.add(more, slot.client.tenant)
        self._stores.add(more, slot.store)

    def may(self, slot: FetchSlot) -> bool:
        """Return whether the tenant, the client and the store of ``slot`` leave enough to others."""
        of_one, of_tenant, of_all = self._most[slot.urgency]
        of_tenant = min(of_tenant, _SHARE * (of_all - self.running))
        most = min(of_one, _SHARE * (of_tenant - self._tenants[slot.client.tenant]))
        return self._clients[slot.client] < most and (not slot.store or self._stores[slot.store] < most)


class FetchSlot:
    """The place of one fetch. `hasten` moves it forward while it waits."""

    def __init__(self, scheduler: FairScheduler, client: Client, urgency: Urgency, store: str) -> None:
        self.client, self.urgency, self.store = client, urgency, store
        self._scheduler = scheduler
        self._begun: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        self._begun = asyncio.get_running_loop().create_future()
        self._scheduler.push(self)
        try:
            await self._begun
        except BaseException:
            if not self._scheduler.remove(self):
                self._scheduler.count(self, -1)  # its turn had come in the same moment
            self._scheduler.admit()
            raise

    async def __aexit__(self, *exc: object) -> None:
        self._scheduler.count(self, -1)
        self._scheduler.admit()

    def begin(self) -> None:
        """Let it begin: it has its place."""
        assert self._begun is not None
        if not self._begun.done():
            self._begun.set_result(None)

    def hasten(self, urgency: Urgency, client: Client | None = None) -> None:
        """Queue among the more urgent from now on, for ``client`` if one is given. Does nothing once it is admitted, or
        if ``urgency`` is not higher than its own."""
        waited = self._begun is not None
        if urgency >= self.urgency or (waited and not self._scheduler.remove(self)):
            return
        self.urgency, self.client = urgency, client or self.client
        if waited:
            self._scheduler.push(self)


Later = Callable[[float, Callable[[], None]], Any]
"""``later(seconds, function)`` calls the function then."""


class _Gate:
    """The token bucket of one client or tenant, and the answers that wait for it in a fair queue. The bucket holds a
    quarter of a second's bytes, 256 KiB at least."""

    def __init__(self, rate: float, clock: Callable[[], float], later: Later | None) -> None:
        self._bucket = TokenBucket(rate, clock, burst=max(rate * _BURST_S, float(_BURST_AT_LEAST_BYTES)))
        self._later = later
        self._waiting: FairQueue[tuple[int, asyncio.Future[None]]] = FairQueue()
        self._timed = False

    @property
    def idle(self) -> bool:
        return not self._waiting and self._bucket.full

    async def take(self, client: Client, count: int) -> None:
        if not self._waiting and self._bucket.wait_s() <= 0:
            self._bucket.take(count)
            return
        turn = count, asyncio.get_running_loop().create_future()
        self._waiting.push(client, turn)
        self._set_timer()
        try:
            await turn[1]
        except BaseException:
            self._waiting.remove(client, turn)  # unless it had its turn already: its bytes cost only time
            raise

    def _set_timer(self) -> None:
        if self._waiting and not self._timed:
            self._timed = True
            later = self._later or asyncio.get_running_loop().call_later
            later(self._bucket.wait_s(), self._admit)

    def _admit(self) -> None:
        self._timed = False
        while self._bucket.wait_s() <= 0 and (turn := self._waiting.pop()) is not None:
            count, future = turn
            if not future.done():
                self._bucket.take(count)
                future.set_result(None)
        self._set_timer()


class RateLimit:
    """Limits the bytes a second of one client (``rate``) and of one tenant (``tenant_rate``); None: no limit. ``clock``
    gives seconds, ``later`` calls back (the running loop's, unless given). ValueError for an invalid rate."""

    def __init__(
        self,
        rate: float | None = None,
        tenant_rate: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        later: Later | None = None,
    ) -> None:
        self._rate, self._tenant_rate = rate, tenant_rate
        self._clock, self._later = clock, later
        self._gates: OrderedDict[Client | str, _Gate] = OrderedDict()
        for one in (rate, tenant_rate):
            TokenBucket(one, clock)  # raises for a number that is no rate

    def of(self, client: Client) -> Callable[[int], Awaitable[None]] | None:
        """Return the function that waits until so many bytes may go to ``client``; None without a limit."""
        if self._rate is None and self._tenant_rate is None:
            return None
        return lambda count: self.take(client, count)

    async def take(self, client: Client, count: int) -> None:
        """Wait until ``count`` bytes may be sent to ``client``. Small pieces make an even flow."""
        for gate_of, rate in ((client, self._rate), (client.tenant, self._tenant_rate)):
            if rate is not None:
                await self._gate(gate_of, rate).take(client, count)

    def _gate(self, gate_of: Client | str, rate: float) -> _Gate:
        if gate_of not in self._gates:
            self._gates[gate_of] = _Gate(rate, self._clock, self._later)
            if len(self._gates) > _CLIENTS:
                for name in list(itertools.islice(self._gates, _LOOKED_AT)):  # the least recently used
                    if self._gates[name].idle:
                        del self._gates[name]
        self._gates.move_to_end(gate_of)
        return self._gates[gate_of]


class SpentFile:
    """``costs.json`` in a cache's folder: what was spent so far, so that a limit outlives the process. It holds that
    folder open until `close`, wherever its path leads later."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "costs.json"
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._written: dict[str, Any] = {}
        self._failed = False

    def load(self, spending: ServiceCostLimit) -> None:
        """Restore what earlier processes have spent. ConfigError for a file that cannot be read: a limit that begins at
        nothing again is none. Blocks."""
        try:
            spending.restore(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as exn:
            advice = "Remove it to begin at nothing"
            raise ConfigError(f"{self._path}: what was spent until now cannot be read: {exn}. {advice}") from exn

    def save(self, state: dict[str, Any]) -> None:
        """Write ``state`` if it has changed. A failure is logged once. Blocks."""
        if state == self._written:
            return
        at, flags = self._folder, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            with open(os.open("costs.part", flags, 0o600, dir_fd=at), "w", encoding="utf-8") as file:
                json.dump(state, file)
            os.replace("costs.part", self._path.name, src_dir_fd=at, dst_dir_fd=at)
        except OSError as exn:
            if not self._failed:
                logger.warning("%s cannot be written: %s; a restart forgets what is spent from now on", self._path, exn)
            self._failed = True
        else:
            self._written, self._failed = dict(state), False

    def close(self) -> None:
        """Close the folder."""
        os.close(self._folder)


class InFlightRequests:
    """Counts requests in flight: at most ``limit`` of one client, and ``tenant_limit`` (None: any number) of one
    tenant."""

    def __init__(self, limit: int, tenant_limit: int | None = None) -> None:
        self.limit, self.tenant_limit = limit, tenant_limit
        self._clients, self._tenants = Counts(), Counts()

    def __len__(self) -> int:
        return self._clients.total()

    @contextmanager
    def one(self, client: Client) -> Iterator[None]:
        """Count a request inside the ``with``. Refusal (429) if its client or tenant is at its limit."""
        if self._clients[client] >= self.limit:
            words = f"you have {self.limit} requests in flight, as many as one client may (client_requests)"
            raise Refusal(429, words, "client-requests", retry_after_s=1)
        if self.tenant_limit is not None and self._tenants[client.tenant] >= self.tenant_limit:
            words = f"{self.tenant_limit} requests of your tenant are in flight, as many as one may (tenant_requests)"
            raise Refusal(429, words, "tenant-requests", retry_after_s=1)
        self._clients.add(1, client)
        self._tenants.add(1, client.tenant)
        try:
            yield
        finally:
            self._clients.add(-1, client)
            self._tenants.add(-1, client.tenant)
