"""Prefetch plans: clients announce the shards that they will read, and the cache fetches them ahead."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async.errors import CostLimitReached, WdsError
from wds_async.redact import redact
from wds_async.service import names
from wds_async.service.allowlist import Allowed
from wds_async.service.cache.cache import ChunkCache
from wds_async.service.cache.origin import Client, Urgency
from wds_async.service.config import ServiceConfig
from wds_async.service.refusals import Refusal

__all__ = ["PLANS_AT_MOST", "SHARDS_AT_MOST", "PrefetchPlans"]

logger = logging.getLogger("wds_async")
SHARDS_AT_MOST = 50_000
"""Of one plan: more than a message of 1 MiB holds."""
PLANS_AT_MOST = 4096
_AHEAD, _AHEAD_AT_MOST = 8, 10_000
_NAMES_LIMIT_BYTES, _NAME_OVERHEAD_BYTES, _NAMES_KEPT = 256 << 20, 57, 1 << 16
_AT_ONCE = 8
_CHECKED_AT_ONCE, _LOOK_AHEAD, _LEFT_BEHIND, _REMEMBERED = 256, 512, 64, 64  # shards of a plan
_SHARE_OF_CACHE, _SHARE_OF_PLACES = 0.5, 7
_PACE_S, _PACE_WEIGHT = 1.0, 0.3
_PAUSE_S, _LOOK_EVERY_S = 30.0, 2.0


@dataclass(slots=True)
class _Plan:
    """The plan of one client. ``position`` is the shard that it reads now, or next."""

    client: Client
    job: str
    shards: list[str]
    ahead: int
    ahead_bytes: int
    position: int
    heard_at: float
    moved_at: float
    bound: Hashable
    names_bytes: int
    following: int
    """The first shard that has not been looked at for fetching."""
    pace_s: float = _PACE_S
    """Seconds for one shard; a guess until it was ``measured``."""
    measured: bool = False
    requested: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """URLs that were requested lately, the last one first."""
    taken: dict[str, int] = field(default_factory=dict)
    """Shards that are fetched, or being fetched, for it and were not requested yet: URL and index."""
    usual_bytes: int = 0
    """Usual bytes of its shards; 0 until one was opened, and only one is opened (``looking``) until then, so
    that a small budget goes to what is needed first."""
    looking: bool = False
    full: bool = False
    """True if the next shard has to wait until others were read."""

    def move(self, index: int, now: float) -> None:
        """Move ahead to ``index`` and measure the client's pace."""
        if index <= self.position:
            return
        took_s = (now - self.moved_at) / (index - self.position)
        self.pace_s = took_s if not self.measured else self.pace_s + _PACE_WEIGHT * (took_s - self.pace_s)
        self.measured = True
        self.position, self.moved_at = index, now
        self.following = max(self.following, index)

    def due(self) -> float:
        """Return the estimated time at which the next shard to fetch will be requested."""
        return self.moved_at + (self.following - self.position) * self.pace_s

    @property
    def wants_more(self) -> bool:
        """True if there is a shard to fetch now."""
        waits = self.full or (self.looking and not self.usual_bytes)
        return not waits and self.following < min(len(self.shards), self.position + 1 + self.ahead)


@dataclass(slots=True)
class _HeldShard:
    """A shard that plans hold or are fetching: ``size`` is 0 until it is known."""

    url: str
    clients: set[Client]
    size: int
    task: asyncio.Task[None] | None = None


class PrefetchPlans:
    """The plans of all clients, on one loop. ``clock``: seconds, monotonic; ``at_once``: concurrent fetches."""

    def __init__(
        self,
        cache: ChunkCache,
        config: ServiceConfig,
        allowed: Allowed,
        clock: Callable[[], float] = time.monotonic,
        at_once: int = _AT_ONCE,
    ) -> None:
        self._cache, self._config, self._allowed = cache, config, allowed
        self._clock, self._at_once = clock, at_once
        self._plans: dict[Client, _Plan] = {}
        self._held: dict[str, _HeldShard] = {}
        self._running: dict[asyncio.Task[None], str] = {}
        """Running fetches, and the tenant of each."""
        self._named = functools.lru_cache(_NAMES_KEPT)(self._parse)
        self._paused_until = 0.0
        self._tending: asyncio.Task[None] | None = None
        self._closed = False
        self.fetched_bytes = 0
        """Bytes that plans had fetched, ever."""

    async def start(self) -> None:
        """Begin to look for plans whose clients have gone."""
        self._tending = asyncio.create_task(self._tend(), name="plans")

    async def close(self) -> None:
        """Drop all plans, and return when nothing is fetched for them any more."""
        self._closed = True
        for client in list(self._plans):
            self.drop(client)
        ending = [*self._running, *([self._tending] if self._tending is not None else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def configure(self, config: ServiceConfig) -> None:
        """Use ``config`` from now on; present plans keep their ``ahead_bytes``."""
        self._config = config
        self._named.cache_clear()

    # -- what clients send ------------------------------------------------------------------------------

    async def answer(self, message: Any, *, client: Client, bound: Hashable = None) -> dict[str, Any]:
        """Apply a message (``shards``, ``ahead``, ``ahead_bytes``, ``position``, ``job``) to the plan of ``client``;
        without ``shards`` it moves the present plan. ``bound``: the process that the plan ends with (`left`). Refusal
        (400) for a malformed message, 403 for shards that may not be read."""
        if not isinstance(message, Mapping):
            raise _malformed("is no JSON object")
        position, now = _number(message, "position", 0, SHARDS_AT_MOST), self._clock()
        plan = present = self._plans.get(client)
        if "shards" in message:
            shards = self._checked(message["shards"])
            of_tenant = sum(other.tenant == client.tenant for other in self._plans)
            if present is None and of_tenant >= _SHARE_OF_PLACES * (PLANS_AT_MOST - len(self._plans)):
                raise Refusal(429, "too many plans of your tenant, or in all; try again later", "plan", 30)
            most, job = self._config.ahead_bytes, str(message.get("job") or "")[:128]
            ahead = _number(message, "ahead", _AHEAD, _AHEAD_AT_MOST)
            ahead_bytes = min(most, _number(message, "ahead_bytes", most, 1 << 62))
            size = _bytes_of(shards)
            plan = _Plan(client, job, shards, ahead, ahead_bytes, position, now, now, bound, size, following=position)
            if present is not None:
                self._take_over(present, plan)
            self._plans[client] = plan
            self._pump()
        elif plan is None:
            raise Refusal(404, "no plan of yours is known; announce its shards", "plan")
        else:
            plan.heard_at = now
            plan.ahead = _number(message, "ahead", plan.ahead, _AHEAD_AT_MOST)
            self._move(plan, position)
        return {
            "shards": len(plan.shards),
            "ahead_bytes": min(plan.ahead_bytes, self._most_bytes()),
            "lifetime_s": self._config.plan_lifetime_s,
        }

    def heard(self, client: Client, url: str) -> None:
        """Note that ``client`` has requested ``url``, and advance its plan to it."""
        plan = self._plans.get(client)
        if plan is None:
            return
        plan.heard_at = self._clock()
        if url in plan.requested:
            return
        plan.requested.appendleft(url)
        index = plan.taken[url] if url in plan.taken else self._find(plan, url)
        if index is not None:
            self._let_go(plan, url)
            self._move(plan, index)

    def drop(self, client: Client) -> bool:
        """Remove the plan of ``client`` and return whether there was one. Shards of other plans are fetched on."""
        plan = self._plans.pop(client, None)
        if plan is not None:
            for url in list(plan.taken):
                self._let_go(plan, url, ends=True)
            self._retry_full_plans()  # there may be fewer tenants
        self._pump()
        return plan is not None

    def left(self, bound: Hashable) -> None:
        """Remove the plans that were bound to a process."""
        for client in [name for name, plan in self._plans.items() if plan.bound == bound and bound is not None]:
            self.drop(client)

    def sweep(self) -> None:
        """Drop the plans of clients that were silent for `ServiceConfig.plan_lifetime_s`."""
        oldest = self._clock() - self._config.plan_lifetime_s
        for client in [name for name, plan in self._plans.items() if plan.heard_at < oldest]:
            logger.info("the plan of %s is dropped: nothing was heard of it", redact(str(client)))
            self.drop(client)
        self._pump()

    def __len__(self) -> int:
        return len(self._plans)

    def as_list(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """Return the plans of ``tenant`` (None: of all) for ``/v1/stats``: ``client``, ``job``, ``shards`` (how many),
        ``done``, ``ahead_bytes`` (fetched for it and not read yet)."""
        return [
            {
                "client": str(plan.client) if tenant is None else plan.client.name,
                "job": plan.job,
                "shards": len(plan.shards),
                "done": min(plan.position, len(plan.shards)),
                "ahead_bytes": self._ahead_bytes(plan),
            }
            for plan in self._plans.values()
            if tenant in (None, plan.client.tenant)
        ]

    # -- names and positions ----------------------------------------------------------------------------

    def _checked(self, shards: Any) -> list[str]:
        """Return the announced shards. Each is authorized like a request for it before it is fetched, and skipped
        if that is refused; the first ones now, so that the client learns if none may be read."""
        if not isinstance(shards, list) or not all(isinstance(url, str) for url in shards):
            raise _malformed('has no "shards": [URL, …]')
        if len(shards) > SHARDS_AT_MOST:
            raise Refusal(413, f"a plan of {len(shards)} shards; {SHARDS_AT_MOST} at most", "plan")
        if any("\0" in url or len(url) > names.NAME_LIMIT_BYTES for url in shards):
            raise _malformed("has shards that are no URLs")
        first = [self._named(url) for url in shards[:_CHECKED_AT_ONCE]]
        if first and not any(named is not None and self._may_be_read(named) for named in first):
            self._allowed.locate(names.name_of_url(shards[0], self._config))  # raises the reason
        if _bytes_of(shards) + sum(plan.names_bytes for plan in self._plans.values()) > _NAMES_LIMIT_BYTES:
            raise Refusal(429, "the plans of all clients are too long together", "plan", 30)
        return shards

    def _parse(self, url: str) -> names.ObjectName | None:
        """Return the object that ``url`` names; None if malformed."""
        try:
            return names.name_of_url(url, self._config)
        except Refusal as exn:
            logger.debug("a plan's %s is left out: %s", redact(url), exn.message)
            return None

    def _may_be_read(self, named: names.ObjectName) -> bool:
        try:
            return self._allowed.known(named) or bool(self._allowed.locate(named))
        except Refusal as exn:
            logger.debug("a plan's %s is left out: %s", redact(named.url), exn.message)
            return False

    def _find(self, plan: _Plan, url: str) -> int | None:
        """Return the first index of the object ``url`` among the next shards of ``plan``."""
        for index in range(plan.position, min(len(plan.shards), plan.position + _LOOK_AHEAD)):
            if (named := self._named(plan.shards[index])) is not None and named.url == url:
                return index
        return None

    def _take_over(self, old: _Plan, new: _Plan) -> None:
        """Keep what ``old``, of the same client, has fetched and ``new`` needs too."""
        new.pace_s, new.measured, new.usual_bytes = old.pace_s, old.measured, old.usual_bytes
        for url in list(old.taken):
            index = self._find(new, url)
            if index is None:
                self._let_go(old, url)
            else:
                new.taken[url] = index

    def _move(self, plan: _Plan, index: int) -> None:
        """Move a plan to ``index`` and release shards far behind it."""
        plan.move(index, self._clock())
        for url in [url for url, at in plan.taken.items() if at < index - _LEFT_BEHIND]:
            self._let_go(plan, url)
        self._pump()

    def _let_go(self, plan: _Plan, url: str, *, ends: bool = False) -> None:
        """Release ``url`` from ``plan``. Without another plan it is an ordinary entry of the cache. A running fetch
        goes on for the reader that requested it; ``ends``: it is cancelled."""
        if plan.taken.pop(url, None) is None:
            return
        held = self._held[url]
        held.clients.discard(plan.client)
        if not held.clients:
            del self._held[url]
            if held.task is not None and ends:
                held.task.cancel()
        self._retry_full_plans()

    def _retry_full_plans(self) -> None:
        for plan in self._plans.values():
            plan.full = False

    # -- fetching ---------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, self._config.plan_lifetime_s / 4))
            self.sweep()

    def _pump(self) -> None:
        """Fetch the shards that are needed soonest, a few at once; tenants with fewer running fetches come first."""
        if self._closed or self._clock() < self._paused_until or not self._most_bytes():
            return
        while len(self._running) < self._at_once:
            wants_more = [plan for plan in self._plans.values() if plan.wants_more]
            if not wants_more:
                return
            tenants = list(self._running.values())
            self._begin(min(wants_more, key=lambda plan: (tenants.count(plan.client.tenant), plan.due())))

    def _begin(self, plan: _Plan) -> None:
        """Fetch the next shard of ``plan``, or share it if another plan has it."""
        index, plan.following = plan.following, plan.following + 1
        named = self._named(plan.shards[index])
        if named is None or named.url in plan.taken or named.url in plan.requested or not self._may_be_read(named):
            return
        held = self._held.get(named.url)
        if held is not None:
            held.clients.add(plan.client)
        elif plan.usual_bytes and not self._fits(plan, plan.usual_bytes):
            plan.following, plan.full = index, True
            return
        else:
            plan.looking = not plan.usual_bytes
            held = self._held[named.url] = _HeldShard(named.url, {plan.client}, plan.usual_bytes)
            held.task = asyncio.create_task(self._fetch(plan, held), name="plan")
            self._running[held.task] = plan.client.tenant
            held.task.add_done_callback(self._ended)
        plan.taken[named.url] = index

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (exn := task.exception()) is not None:
            logger.error("a plan's fetch failed", exc_info=exn)
        self._pump()

    async def _fetch(self, plan: _Plan, held: _HeldShard) -> None:
        try:
            # Where it is known how large they are, there is room for it: its first chunk comes along with its facts.
            start = 0 if plan.usual_bytes else None
            with await self._cache.open(held.url, client=plan.client, start=start) as opened:
                size = min(opened.size or 0, plan.ahead_bytes) if opened.facts.ranged else 0
                held.size = 0
                if not size:
                    return  # in order only: that cannot be kept ahead of a reader
                plan.usual_bytes = size
                if not self._fits(plan, size):
                    self._give_back(held)
                    return
                held.size = size
                self._pump()
                before = 0 if opened.discovered else opened.ready(0, size)
                held.size = await opened.fetch(0, size, Urgency.PLAN)
                self.fetched_bytes += max(0, held.size - before)
        except (WdsError, OSError, Refusal) as exn:
            held.size = 0
            if isinstance(exn, CostLimitReached):
                self._paused_until = self._clock() + _PAUSE_S
                logger.warning("plans are paused for %g s: %s", _PAUSE_S, exn)
            else:
                logger.info("%s is not fetched ahead: %s", redact(held.url), exn)
        finally:
            held.task, plan.looking = None, False

    def _ahead_bytes(self, plan: _Plan) -> int:
        return sum(self._held[url].size for url in plan.taken)

    def _most_bytes(self) -> int:
        return int(self._cache.statistics().limit_bytes * _SHARE_OF_CACHE)

    def _fits(self, plan: _Plan, size: int) -> bool:
        """Return whether ``size`` more bytes may be held, by all and by the plan's tenant, which has an equal share. A
        plan or tenant that holds nothing may have one shard beyond its own limit."""
        tenant, most = plan.client.tenant, self._most_bytes()
        if sum(held.size for held in self._held.values()) + size > most:
            return False
        tenants = {client.tenant for client in self._plans} | {tenant}
        mine = sum(held.size for held in self._held.values() if any(one.tenant == tenant for one in held.clients))
        if len(tenants) > 1 and mine and mine + size > most // len(tenants):
            return False
        own = self._ahead_bytes(plan)
        return own == 0 or own + size <= plan.ahead_bytes

    def _give_back(self, held: _HeldShard) -> None:
        """Postpone a shard until something was read."""
        if self._held.get(held.url) is held:
            del self._held[held.url]
        for client in held.clients:
            plan = self._plans[client]
            plan.following = min(plan.following, plan.taken.pop(held.url))
            plan.full = True


def _bytes_of(shards: list[str]) -> int:
    return sum(map(len, shards)) + _NAME_OVERHEAD_BYTES * len(shards)


def _number(message: Mapping[str, Any], name: str, default: int, most: int) -> int:
    value = message.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise _malformed(f"has a {name} that is no number from 0 to {most}")
    return value


def _malformed(why: str) -> Refusal:
    return Refusal(400, f'the plan {why}; write {{"shards": [URL, …], "ahead": 8, "position": 0}}', "plan")
