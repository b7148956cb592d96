"""Limits of the service: fair queues, concurrent fetches, rates, requests in flight, cost."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from wds_async.errors import ConfigError
from wds_async.observe.cost_limit import ServiceCostLimit
from wds_async.service.cache.origin import Client, Urgency
from wds_async.service.refusals import Refusal
from wds_async.transfer.rate_limits import TokenBucket

if TYPE_CHECKING:
    from wds_async.transfer.ranges import Facts, RangeFetcher, RangePart

__all__ = [
    "CostLimitedOrigin",
    "FairQueue",
    "FairScheduler",
    "FetchSlot",
    "InFlightRequests",
    "RateLimit",
    "SpentFile",
]

T = TypeVar("T")


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

    def pop(self) -> T:
        """Remove and return the next item. LookupError if the queue is empty."""
        item = self.pop_if(lambda _: True)
        if item is None:
            raise LookupError("nothing waits")
        return item

    def pop_if(self, may: Callable[[T], bool]) -> T | None:
        """Remove and return the next item that ``may`` go, among the first of each client; None if there is none. Those
        skipped keep their places."""
        for tenant, queues in self._tenants.items():
            for client, queue in queues.items():
                if may(queue[0]):
                    item = queue.popleft()
                    queues.move_to_end(client)
                    self._tenants.move_to_end(tenant)
                    self._taken(client, queue)
                    return item
        return None

    def remove(self, client: Client, item: T) -> bool:
        """Remove ``item`` before its turn; False if it is not queued."""
        queue = self._tenants.get(client.tenant, OrderedDict()).get(client)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        self._taken(client, queue)
        return True

    def _taken(self, client: Client, queue: deque[T]) -> None:
        """Count a removed item, and delete empty queues."""
        self._count -= 1
        if not queue:
            queues = self._tenants[client.tenant]
            del queues[client]
            if not queues:
                del self._tenants[client.tenant]


_SHARE = 7


class FairScheduler:
    """Limits fetches to ``limit`` at once for one client or store, a seventh more for one tenant, and a seventh more
    than that for all. Fetches that no reader waits for leave places free, plans a quarter and read-ahead an eighth, so
    that a reader never waits for a whole round of them."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: at least one fetch at once")
        self.limit = limit
        self._most_of_one = _by_urgency(limit)
        of_tenant = limit + -(-limit // _SHARE)
        self._most_of_tenant = _by_urgency(of_tenant)
        self._most = _by_urgency(of_tenant + -(-of_tenant // _SHARE))
        self._waiting: dict[Urgency, FairQueue[FetchSlot]] = {urgency: FairQueue() for urgency in Urgency}
        self._running = 0
        self._of_client: Counter[Client] = Counter()
        self._of_tenant: Counter[str] = Counter()
        self._of_store: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """Fetches in progress."""
        return self._running

    @property
    def waiting(self) -> int:
        """Fetches that wait for a place."""
        return sum(len(line) for line in self._waiting.values())

    def slot(self, client: Client, urgency: Urgency, url: str = "") -> FetchSlot:
        """Return a context manager that waits for a place and holds it. ``url``: the object to fetch, if known; its
        bucket or host is the store that may be slow."""
        return FetchSlot(self, client, urgency, "/".join(url.split("/", 3)[:3]))

    def _enter(self, slot: FetchSlot) -> asyncio.Future[None] | None:
        """Queue a slot. Return the future to wait for; None if it is admitted at once."""
        self._waiting[slot.urgency].push(slot.client, slot)
        begins = slot._begins = asyncio.get_running_loop().create_future()
        self._admit()
        return None if begins.done() else begins

    def _leave(self, slot: FetchSlot) -> None:
        self._running -= 1
        self._count(slot, -1)
        self._admit()

    def _admit(self) -> None:
        for urgency in Urgency:  # the less urgent have fewer places, so they overtake no other
            line = self._waiting[urgency]
            while line and self._running < self._most[urgency]:
                slot = line.pop_if(self._may)
                if slot is None:
                    break
                self._running += 1
                self._count(slot, 1)
                slot._begin()

    def _may(self, slot: FetchSlot) -> bool:
        """Return whether its tenant, its client and its store leave enough to others."""
        of_tenant, urgency = self._of_tenant[slot.client.tenant], slot.urgency
        most_of_tenant = min(self._most_of_tenant[urgency], _SHARE * (self._most[urgency] - self._running))
        most = min(self._most_of_one[urgency], _SHARE * (most_of_tenant - of_tenant))
        return self._of_client[slot.client] < most and (not slot.store or self._of_store[slot.store] < most)

    def _count(self, slot: FetchSlot, more: int) -> None:
        self._of_client[slot.client] += more
        self._of_tenant[slot.client.tenant] += more
        self._of_store[slot.store] += more
        if more < 0:
            if not self._of_client[slot.client]:
                del self._of_client[slot.client]
            if not self._of_tenant[slot.client.tenant]:
                del self._of_tenant[slot.client.tenant]
            if not self._of_store[slot.store]:
                del self._of_store[slot.store]


def _by_urgency(places: int) -> dict[Urgency, int]:
    return {Urgency.DEMAND: places, Urgency.AHEAD: places - places // 8, Urgency.PLAN: places - places // 4}


class FetchSlot:
    """The place of one fetch. `hasten` moves it forward while it waits."""

    def __init__(self, scheduler: FairScheduler, client: Client, urgency: Urgency, store: str) -> None:
        self.client = client
        self.urgency = urgency
        self.store = store
        self._scheduler = scheduler
        self._begins: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        begins = self._scheduler._enter(self)
        if begins is None:
            return
        try:
            await begins
        except BaseException:
            if not self._scheduler._waiting[self.urgency].remove(self.client, self):
                self._scheduler._leave(self)  # its turn had come in the same moment
            else:
                self._scheduler._admit()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, exn: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scheduler._leave(self)

    def hasten(self, urgency: Urgency, client: Client | None = None) -> None:
        """Queue among the more urgent from now on, for ``client`` if one is given. Does nothing once it is admitted, or
        if ``urgency`` is not higher than its own."""
        if urgency >= self.urgency:
            return
        waited = self._begins is not None
        if waited and not self._scheduler._waiting[self.urgency].remove(self.client, self):
            return
        self.urgency, self.client = urgency, client or self.client
        if waited:
            self._scheduler._waiting[urgency].push(self.client, self)
            self._scheduler._admit()

    def _begin(self) -> None:
        assert self._begins is not None
        if not self._begins.done():
            self._begins.set_result(None)


_BURST_S = 0.25
_BURST_AT_LEAST_BYTES = 256 << 10
_CLIENTS = 4096
_LOOKED_AT = 4
Clock = Callable[[], float]
Later = Callable[[float, Callable[[], None]], Any]
"""``later(seconds, function)`` calls the function then."""


def _bucket(rate: float, clock: Clock) -> TokenBucket:
    """Return a bucket that holds a quarter of a second's bytes, 256 KiB at least."""
    return TokenBucket(rate, clock, burst=max(rate * _BURST_S, float(_BURST_AT_LEAST_BYTES)))


class _Gate:
    """The token bucket of one client or tenant, and the answers that wait for it in a fair queue."""

    def __init__(self, bucket: TokenBucket, later: Later | None) -> None:
        self.bucket = bucket
        self._later = later
        self._waiting: FairQueue[tuple[int, asyncio.Future[None]]] = FairQueue()
        self._timed = False

    @property
    def idle(self) -> bool:
        return not self._waiting and self.bucket.full

    async def take(self, client: Client, count: int) -> None:
        if not self._waiting and self.bucket.wait_s() <= 0:
            self.bucket.take(count)
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
            later(self.bucket.wait_s(), self._admit)

    def _admit(self) -> None:
        self._timed = False
        while self._waiting and self.bucket.wait_s() <= 0:
            count, future = self._waiting.pop()
            if not future.done():
                self.bucket.take(count)
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
        clock: Clock = time.monotonic,
        later: Later | None = None,
    ) -> None:
        self._rate, self._tenant_rate = rate, tenant_rate
        self._clock = clock
        self._later = later
        self._gates: OrderedDict[Client | str, _Gate] = OrderedDict()
        for one in (rate, tenant_rate):
            if one is not None:
                _bucket(one, clock)  # raises for a number that is no rate

    def of(self, client: Client) -> Callable[[int], Awaitable[None]] | None:
        """Return the function that waits until so many bytes may go to ``client``; None without a limit."""
        if self._rate is None and self._tenant_rate is None:
            return None
        return lambda count: self.take(client, count)

    async def take(self, client: Client, count: int) -> None:
        """Wait until ``count`` bytes may be sent to ``client``. Small pieces make an even flow."""
        if self._rate is not None:
            await self._gate(client, self._rate).take(client, count)
        if self._tenant_rate is not None:
            await self._gate(client.tenant, self._tenant_rate).take(client, count)

    def _gate(self, of: Client | str, rate: float) -> _Gate:
        gate = self._gates.get(of)
        if gate is None:
            gate = self._gates[of] = _Gate(_bucket(rate, self._clock), self._later)
            self._forget()
        self._gates.move_to_end(of)
        return gate

    def _forget(self) -> None:
        """Drop idle gates, the least recently used first, when there are too many."""
        if len(self._gates) > _CLIENTS:
            for name in list(itertools.islice(self._gates, _LOOKED_AT)):
                if self._gates[name].idle:
                    del self._gates[name]


logger = logging.getLogger("wds_async")


class CostLimitedOrigin:
    """``origin`` with a cost limit: once that is reached, each method raises CostLimitReached and requests nothing;
    running requests end as usual."""

    def __init__(self, origin: RangeFetcher, spending: ServiceCostLimit) -> None:
        self._origin = origin
        self._spending = spending

    @property
    def crowded(self) -> bool:
        """Whether its parts wait for memory."""
        return self._origin.crowded

    async def facts(self, url: str, *, deadline_s: float | None = None) -> Facts:
        """Return the facts of an object."""
        self._spending.check()
        return await self._origin.facts(url, deadline_s=deadline_s)

    def reachable(self, url: str) -> bool:
        """Return whether the origin is not known to be down."""
        return self._origin.reachable(url)

    def part(
        self, url: str, start: int, stop: int, facts: Facts | None = None
    ) -> AbstractAsyncContextManager[RangePart]:
        """Return a range of an object."""
        self._spending.check()
        return self._origin.part(url, start, stop, facts)

    def stream(self, url: str) -> AbstractAsyncContextManager[tuple[Facts, AsyncIterator[memoryview]]]:
        """Return an object in order."""
        self._spending.check()
        return self._origin.stream(url)

    def entries(self, url: str) -> AsyncIterator[Any]:
        """Return the entries of a folder."""
        self._spending.check()
        return self._origin.entries(url)

    async def close(self) -> None:
        """Close the origin."""
        await self._origin.close()


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
            raise ConfigError(
                f"{self._path}: what was spent until now cannot be read: {exn}. Remove it to begin at nothing"
            ) from exn

    def save(self, state: dict[str, Any]) -> None:
        """Write ``state`` if it has changed. A failure is logged once. Blocks."""
        if state == self._written:
            return
        name, part, at = self._path.name, "costs.part", self._folder
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=at)
            with open(fd, "w", encoding="utf-8") as file:
                json.dump(state, file)
            os.replace(part, name, src_dir_fd=at, dst_dir_fd=at)
        except OSError as exn:
            if not self._failed:
                logger.warning("%s cannot be written: %s; a restart forgets what is spent from now on", self._path, exn)
            self._failed = True
            return
        self._written, self._failed = dict(state), False

    def close(self) -> None:
        """Close the folder; idempotent."""
        fd, self._folder = self._folder, -1
        if fd >= 0:
            os.close(fd)


class InFlightRequests:
    """Counts requests in flight: at most ``limit`` of one client, and ``tenant_limit`` (None: any number) of one
    tenant."""

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
        """Number of clients with a request in flight."""
        return len(self._of)

    @contextmanager
    def one(self, client: Client) -> Iterator[None]:
        """Count a request inside the ``with``. Refusal (429) if its client or tenant is at its limit."""
        if self._of[client] >= self.limit:
            words = f"you have {self.limit} requests in flight, as many as one client may (client_requests)"
            raise Refusal(429, words, "client-requests", retry_after_s=1)
        if self.tenant_limit is not None and self._of_tenant[client.tenant] >= self.tenant_limit:
            words = f"{self.tenant_limit} requests of your tenant are in flight, as many as one may (tenant_requests)"
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
