"""Orders of epochs: loaders announce which shards they read in which order, by the list and the seed. The cache then
knows when each object is needed again, and a service of a cluster fetches what is its own in that order."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async.errors import WdsError
from wds_async.filters.shuffling import detshuffle, permutation
from wds_async.redact import redact
from wds_async.service import names
from wds_async.service.allowlist import Allowed
from wds_async.service.cache.cache import ChunkCache
from wds_async.service.cache.index import CHUNK_BYTES, key_of
from wds_async.service.cache.origin import Client, Urgency
from wds_async.service.config import ServiceConfig
from wds_async.service.peers import Peers
from wds_async.service.refusals import Refusal
from wds_async.storage.base import Call
from wds_async.storage.order import unpacked

__all__ = ["EpochOrder", "EpochOrders", "OrderRule"]

logger = logging.getLogger("wds_async")
ORDERS_AT_MOST, ORDERS_OF_TENANT = 64, 16
NAMES_AT_MOST, NAMES_OF_ALL = 250_000, 500_000
_RANKS_AT_MOST, _WORLDS_AT_MOST = 1 << 16, 16
_LARGE = (1 << 31) - 1
_NUMBERS = (
    ("seed", -1 << 128, 1 << 128), ("size", 0, NAMES_AT_MOST), ("initial", 0, _LARGE), ("epoch", 0, _LARGE),
    ("rank", 0, _LARGE), ("world", 1, _LARGE),
)  # fmt: skip
_LIFETIME = 10  # times the lifetime of a plan
_RUNNING_S, _RUNNING = 10.0, 4  # an object counts as being read for so long after a request, or so many times its pace
_PACE_WEIGHT = 0.3
_LOOK_EVERY_S, _GATHER_S, _AT_ONCE = 0.5, 0.05, 4
_SHARE_OF_CACHE = 8  # what is fetched ahead takes at most this fraction of the cache, from what is needed last


@dataclass(frozen=True, slots=True)
class OrderRule:
    """Rule by which the order of an epoch follows from the list: ``listed`` as it is, ``epoch`` by a permutation of
    all, or ``buffer`` through a buffer of ``size`` items that is left when it holds ``initial``."""

    kind: str
    seed: int = 0
    size: int = 0
    initial: int = 0

    def order(self, count: int, epoch: int) -> array[int]:
        """Return the numbers below ``count`` as that epoch has them."""
        if self.kind == "epoch":
            return array("i", permutation(count, self.seed, epoch))
        if self.kind == "buffer":
            return array("i", detshuffle(self.size, self.initial, self.seed, epoch - 1).run(range(count)))
        return array("i", range(count))


def _places(order: array[int]) -> array[int]:
    places = array("i", bytes(order.itemsize * len(order)))
    for place, item in enumerate(order):
        places[item] = place
    return places


class EpochOrder:
    """The order of one data set's epochs, and how far its readers are: see `need`. ``urls``: the objects in the order
    of the list; ``keys``: their names in the cache. ``clock``: seconds, monotonic. It may take a while to make one."""

    def __init__(
        self, urls: list[str], keys: list[str], rule: OrderRule, epoch: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.urls, self.rule = urls, rule
        self._items = {key: item for item, key in enumerate(keys)}
        self.ranks: dict[int, dict[int, tuple[int, str]]] = {}
        """Last announcement of each rank that reads it, by the number of all ranks: the epoch, and an identity."""
        self.pace_s = 1.0
        """Seconds that a shard takes all readers together, about."""
        self.chunks = 1
        """Chunks of its objects, of those that were seen."""
        self.fetched: dict[int, int] = {}
        """Bytes that were fetched ahead of objects that were not requested yet, by the item."""
        self._clock = clock
        self._slack = max(64, len(urls) // 16)
        self.begin(epoch, self.prepared(epoch))

    def prepared(self, epoch: int) -> tuple[array[int], array[int]]:
        """Return the orders of an epoch and of the one after it, for `begin`. It may take a while."""
        count = len(self.urls)
        return self.rule.order(count, epoch), self.rule.order(count, epoch + 1)

    def begin(self, epoch: int, prepared: tuple[array[int], array[int]]) -> None:
        """Begin an epoch."""
        self.epoch = epoch
        self.order, following = prepared
        self._here, self._next = _places(self.order), _places(following)
        self._done = bytearray(len(self.urls))
        self._read_at: dict[int, float] = {}
        self.fetched.clear()
        self.position, self._moved_at = 0, self._clock()
        self.heard_at = self._moved_at

    def heard(self, key: str) -> None:
        """Note that an object is being read."""
        item = self._items.get(key)
        if item is None:
            return
        now, place = self._clock(), self._here[item]
        self.heard_at = self._read_at[item] = now
        self._done[item] = 1
        self.fetched.pop(item, None)
        if place > self.position:
            took_s = (now - self._moved_at) / (place - self.position)
            self.pace_s += _PACE_WEIGHT * (took_s - self.pace_s)
            self.position, self._moved_at = place, now

    def need(self, key: str, *, running: bool) -> float | None:
        """Return how many shards from now the object is needed next, in this epoch or the next one; None if it is not
        of the list. ``running``: that it is being read counts as a need; else what comes after that is told."""
        item = self._items.get(key)
        if item is None:
            return None
        if running and item in self._read_at:
            usual_s = _RUNNING * self.pace_s * max(1, self.readers)
            if self._clock() - self._read_at[item] <= min(_RUNNING_S, usual_s):
                return 0.0
        place, count = self._here[item], len(self.urls)
        if not self._done[item] and place + self._slack >= self.position and self._is_read(place):
            return float(max(0, place - self.position))
        following = self._next[item]
        return float(count - self.position + (following if self._is_read(following) else count))

    def ahead(self) -> Iterator[int]:
        """Yield the items that are to be read in this epoch and were not fetched ahead, the next one first. Those that
        were fetched and left behind by all readers count no longer."""
        begin = max(0, self.position - self._slack)
        for item in [item for item in self.fetched if self._here[item] < begin]:
            del self.fetched[item]
        for place in range(begin, len(self.order)):
            item = self.order[place]
            if not self._done[item] and item not in self.fetched and self._is_read(place):
                yield item

    @property
    def readers(self) -> int:
        """Number of ranks that read it."""
        return sum(map(len, self.ranks.values()))

    def _is_read(self, place: int) -> bool:
        return not self.ranks or any(place % world in ranks for world, ranks in self.ranks.items())


@dataclass(frozen=True, slots=True)
class _Announced:
    """A message of a loader, parsed. ``runs``: the list; empty where only its digest (``name``) was sent."""

    name: str
    runs: list[Any]
    rule: OrderRule
    epoch: int
    rank: int
    world: int
    id: str

    @classmethod
    def of(cls, message: Any) -> _Announced:
        """Parse a message. Refusal (400) for a malformed one."""
        if not isinstance(message, Mapping) or message.get("kind") not in ("listed", "epoch", "buffer"):
            raise _malformed("has no kind that is known")
        number: dict[str, int] = {}
        for name, least, most in _NUMBERS:
            value = message.get(name, max(0, least))
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise _malformed(f"has a {name} that is no number from {least} to {most}")
            number[name] = value
        rule = OrderRule(message["kind"], number["seed"], number["size"], number["initial"])
        if rule.kind == "buffer" and not rule.size:
            raise _malformed("has a buffer of no size")
        runs, digest, own = message.get("shards"), message.get("name"), str(message.get("id", ""))[:64]
        place = number["epoch"], number["rank"], number["world"], own
        if isinstance(runs, list) and runs:
            text = json.dumps([runs, rule.kind, rule.seed, rule.size, rule.initial])
            return cls(hashlib.sha256(text.encode()).hexdigest(), runs, rule, *place)
        if isinstance(digest, str):
            return cls(digest, [], rule, *place)
        raise _malformed("has no shards")

    @property
    def brief(self) -> dict[str, Any]:
        """The message with the digest in the place of the list."""
        rule = {"kind": self.rule.kind, "seed": self.rule.seed, "size": self.rule.size, "initial": self.rule.initial}
        return {**rule, "name": self.name, "epoch": self.epoch, "rank": self.rank, "world": self.world, "id": self.id}


@dataclass(eq=False)
class EpochOrders:
    """The orders of all loaders of this node, and of those of others of the cluster. On the loop only."""

    cache: ChunkCache
    config: ServiceConfig
    allowed: Allowed
    call: Call
    peers: Peers | None = None
    clock: Callable[[], float] = time.monotonic
    fetched_bytes: int = 0
    """Bytes fetched for them before they were requested."""
    _orders: dict[tuple[str, str], EpochOrder] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return len(self._orders)

    async def start(self) -> None:
        """Begin to look after the orders."""
        self.cache.foresee(self.need)
        self._spawn(self._tend())

    async def close(self) -> None:
        """End what is fetched for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def announce(self, message: Any, client: Client, *, relayed: bool = False) -> None:
        """Take the order of an epoch that a loader reads. One of this node's loaders is told to the others of the
        cluster; what was ``relayed`` is not. Refusal (400, 429; 404 for the digest of an unknown list)."""
        announced = _Announced.of(message)
        name = client.tenant, announced.name
        order = self._orders.get(name)
        if order is None:
            made = await self._made(announced, client.tenant)
            order = self._orders.setdefault(name, made)
        if await self._goes_on(order, announced) and self.peers is not None and not relayed:
            full = {"order": {**announced.brief, "shards": announced.runs}, "relayed": True}
            brief = {"order": announced.brief, "relayed": True}
            self._spawn(self.peers.tell("/v1/plan", brief, full))
        self._moved.set()

    def note(self, message: Any, client: Client) -> None:
        """Take the order of an epoch soon, and log why if it is refused: what it came with does not wait for it."""

        async def noted() -> None:
            try:
                await self.announce(message, client)
            except Refusal as exn:
                logger.info("orders: that of %s is not taken: %s", redact(str(client)), exn.message)

        self._spawn(noted())

    def heard(self, url: str) -> None:
        """Note that an object is requested, by a client or for one of another node."""
        if self._orders:
            self._moved.set()
            key = key_of(url)
            for order in self._orders.values():
                order.heard(key)

    def need(self, key: str, running: bool) -> float | None:
        """Return in how many seconds, about, an object is needed next; None if no order has it. See
        `EpochOrder.need`."""
        soonest: float | None = None
        for order in self._orders.values():
            need = order.need(key, running=running)
            if need is not None and (soonest is None or need * order.pace_s < soonest):
                soonest = need * order.pace_s
        return soonest

    # -- inside

    async def _goes_on(self, order: EpochOrder, announced: _Announced) -> bool:
        """Begin the epoch of a rank, if that is new, and return whether the rank's announcement is."""
        if announced.world not in order.ranks and len(order.ranks) >= _WORLDS_AT_MOST:
            order.ranks.clear()
        of_world = order.ranks.setdefault(announced.world, {})
        before = of_world.get(announced.rank)
        if before is not None and before[1] == announced.id:
            return False
        epoch = announced.epoch
        if announced.rule.kind == "listed":  # all its epochs are the same, so they are counted here
            epoch = 0 if before is None else before[0] + 1
        if before is not None or order.readers < _RANKS_AT_MOST:
            of_world[announced.rank] = epoch, announced.id
        again = before is not None and epoch <= before[0]  # the job was started again
        if epoch > order.epoch or again:
            prepared = await self.call(order.prepared, epoch)
            order.ranks = {announced.world: of_world}
            order.begin(epoch, prepared)
        return True

    async def _made(self, announced: _Announced, tenant: str) -> EpochOrder:
        if not announced.runs:
            raise Refusal(404, "this list is not known here; send it", "plan")
        of_tenant = sum(own == tenant for own, _ in self._orders)
        known = sum(len(order.urls) for order in self._orders.values())
        if len(self._orders) >= ORDERS_AT_MOST or of_tenant >= ORDERS_OF_TENANT or known >= NAMES_OF_ALL:
            raise Refusal(429, "too many orders of epochs; try again later", "plan", 30)
        order: EpochOrder = await self.call(self._expanded, announced)
        return order

    def _expanded(self, announced: _Announced) -> EpochOrder:
        """Return the order with its names. Blocks."""
        try:
            urls = unpacked(announced.runs, NAMES_AT_MOST)
        except ValueError as exn:
            raise _malformed(str(exn)) from None
        return EpochOrder(urls, [self._key(url) for url in urls], announced.rule, announced.epoch, self.clock)

    def _key(self, url: str) -> str:
        """Return the name in the cache of what clients call ``url``; that itself if it names nothing here."""
        try:
            return key_of(names.name_of_url(url, self.config).url)
        except Refusal:
            return url

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tend(self) -> None:
        while True:
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._moved.wait()
            oldest = self.clock() - _LIFETIME * self.config.plan_lifetime_s
            for name in [name for name, order in self._orders.items() if order.heard_at < oldest]:
                del self._orders[name]
            if self.peers is not None and self.peers.ring.own:
                for (tenant, _), order in list(self._orders.items()):
                    try:
                        await self._fetch_ahead(self.peers, order, tenant)
                    except Exception:
                        logger.exception("orders: nothing is fetched ahead for now")
            await asyncio.sleep(_GATHER_S)

    async def _fetch_ahead(self, peers: Peers, order: EpochOrder, tenant: str) -> None:
        """Fetch this node's chunks of what is needed next, within the limits of plans and while there is room."""
        if not self.cache.fetching.disk.usable:
            return
        share = self.config.ahead_bytes * max(1, order.readers) // max(1, len(peers.ring.members))
        most = min(share, self.cache.limit_bytes // (_SHARE_OF_CACHE * len(self._orders)))
        running: set[asyncio.Task[bool]] = set()
        roomy, epoch = True, order.epoch
        try:
            for item in order.ahead():
                if not roomy or order.epoch != epoch or sum(order.fetched.values()) >= most:
                    break
                numbers = peers.owned(self._key(order.urls[item]), order.chunks)
                order.fetched[item] = len(numbers) * CHUNK_BYTES
                if not numbers:
                    continue
                running.add(asyncio.create_task(self._fetch(order, item, numbers[0], tenant)))
                if len(running) >= _AT_ONCE:
                    ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    roomy = all(task.result() for task in ended)
        finally:
            for task in running if epoch != order.epoch else ():
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _fetch(self, order: EpochOrder, item: int, number: int, tenant: str) -> bool:
        """Fetch this node's chunks of one object, of which ``number`` is one if the object is as large as others.
        Return whether there was room for them."""
        client = Client(tenant, "order", node=True)
        try:
            named = names.name_of_url(order.urls[item], self.config)
            if not self.allowed.known(named):
                await self.allowed.admit(named)
            # What is not known here comes with its chunk: no request is spent on its size.
            with await self.cache.open(named.url, client=client, start=number * CHUNK_BYTES) as held:
                order.chunks = max(1, -(-(held.size or 0) // CHUNK_BYTES))
                before = 0 if held.discovered else held.owned_bytes()
                whole = await held.fetch_owned(Urgency.PLAN)
                count = held.owned_bytes()
        except (WdsError, OSError, Refusal) as exn:
            logger.debug("orders: %s is not fetched ahead: %s", redact(order.urls[item]), exn)
            return True
        self.fetched_bytes += max(0, count - before)
        if item in order.fetched:
            order.fetched[item] = count
            if not whole:  # once there is room
                del order.fetched[item]
        return whole


def _malformed(why: str) -> Refusal:
    return Refusal(400, f"the order of an epoch {why}", "plan")
