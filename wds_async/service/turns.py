"""Who may ask an origin next: readers before what they will read soon, that before plans; within each, tenants in turn,
and the clients of a tenant in turn.

A fetch whose origin does not answer holds its place for a minute or more. So no tenant may hold more than
seven times the places that are then still free (Choudhury and Hahne, "Dynamic queue length thresholds", 1998), and no
client, and no store, more than seven times what is left of its tenant's. One that is alone has all but a rest, which
grows again whenever another takes of it. There are a seventh more places for a tenant than ``limit``, and a seventh
more than that in all, so that the rests cost nothing to a client that is alone; connections have a limit of their own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType

from wds_async.chunkcache.origin import Client, Urgency
from wds_async.service.rotation import Rotation

__all__ = ["Turn", "Turns"]

_SHARE = 7


class Turns:
    """At most ``limit`` fetches at once of one client, or from one store, a seventh more of one tenant, and a seventh
    more than that of all together. What no reader waits for yet leaves some of the places free, a quarter for plans and
    an eighth for reading ahead, so that a reader never waits for a whole round of them."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: at least one fetch at once")
        self.limit = limit
        self._most_of_one = _by_urgency(limit)
        of_tenant = limit + -(-limit // _SHARE)
        self._most_of_tenant = _by_urgency(of_tenant)
        self._most = _by_urgency(of_tenant + -(-of_tenant // _SHARE))
        self._waiting: dict[Urgency, Rotation[Turn]] = {urgency: Rotation() for urgency in Urgency}
        self._running = 0
        self._of_client: Counter[Client] = Counter()
        self._of_tenant: Counter[str] = Counter()
        self._of_store: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """Fetches under way."""
        return self._running

    @property
    def waiting(self) -> int:
        """Those that wait for their turn."""
        return sum(len(line) for line in self._waiting.values())

    def turn(self, client: Client, urgency: Urgency, url: str = "") -> Turn:
        """``async with turns.turn(…):`` waits for the turn, and holds a place until its end. ``url``: what will be
        asked for, where that is known; its bucket or host is the store that may be slow to answer."""
        return Turn(self, client, urgency, "/".join(url.split("/", 3)[:3]))

    def _enter(self, turn: Turn) -> asyncio.Future[None] | None:
        """None where it is its turn already; what it waits for otherwise."""
        self._waiting[turn.urgency].push(turn.client, turn)
        begins = turn._begins = asyncio.get_running_loop().create_future()
        self._admit()
        return None if begins.done() else begins

    def _leave(self, turn: Turn) -> None:
        self._running -= 1
        self._count(turn, -1)
        self._admit()

    def _admit(self) -> None:
        for urgency in Urgency:  # the less urgent have fewer places, so nobody passes who waits for one
            line = self._waiting[urgency]
            while line and self._running < self._most[urgency]:
                turn = line.pop_if(self._may)
                if turn is None:
                    break
                self._running += 1
                self._count(turn, 1)
                turn._begin()

    def _may(self, turn: Turn) -> bool:
        """Whether its tenant, its client and its store leave enough to others."""
        of_tenant, urgency = self._of_tenant[turn.client.tenant], turn.urgency
        most_of_tenant = min(self._most_of_tenant[urgency], _SHARE * (self._most[urgency] - self._running))
        most = min(self._most_of_one[urgency], _SHARE * (most_of_tenant - of_tenant))
        return self._of_client[turn.client] < most and (not turn.store or self._of_store[turn.store] < most)

    def _count(self, turn: Turn, more: int) -> None:
        self._of_client[turn.client] += more
        self._of_tenant[turn.client.tenant] += more
        self._of_store[turn.store] += more
        if more < 0:
            if not self._of_client[turn.client]:
                del self._of_client[turn.client]
            if not self._of_tenant[turn.client.tenant]:
                del self._of_tenant[turn.client.tenant]
            if not self._of_store[turn.store]:
                del self._of_store[turn.store]


def _by_urgency(places: int) -> dict[Urgency, int]:
    return {Urgency.DEMAND: places, Urgency.AHEAD: places - places // 8, Urgency.PLAN: places - places // 4}


class Turn:
    """One fetch's. `hasten` while it waits: somebody needs it sooner."""

    def __init__(self, turns: Turns, client: Client, urgency: Urgency, store: str) -> None:
        self.client = client
        self.urgency = urgency
        self.store = store
        self._turns = turns
        self._begins: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        begins = self._turns._enter(self)
        if begins is None:
            return
        try:
            await begins
        except BaseException:
            if not self._turns._waiting[self.urgency].remove(self.client, self):
                self._turns._leave(self)  # its turn had come in the same moment
            else:
                self._turns._admit()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, exn: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns._leave(self)

    def hasten(self, urgency: Urgency, client: Client | None = None) -> None:
        """Wait among the more urgent from now on, as ``client`` where one is named. Nothing where its turn has come,
        or ``urgency`` is not more than its own. Before it began to wait, it says how it will."""
        if urgency >= self.urgency:
            return
        waited = self._begins is not None
        if waited and not self._turns._waiting[self.urgency].remove(self.client, self):
            return
        self.urgency, self.client = urgency, client or self.client
        if waited:
            self._turns._waiting[urgency].push(self.client, self)
            self._turns._admit()

    def _begin(self) -> None:
        assert self._begins is not None
        if not self._begins.done():
            self._begins.set_result(None)
