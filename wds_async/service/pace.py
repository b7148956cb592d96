"""How many bytes a second each client and each tenant is sent, over all of their connections."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from wds_async.chunkcache.origin import Client
from wds_async.service.rotation import Rotation

__all__ = ["Bucket", "Pace"]

_BURST_S = 0.25
_BURST_AT_LEAST_BYTES = 256 << 10
_CLIENTS = 4096
_LOOKED_AT = 4

Clock = Callable[[], float]
Later = Callable[[float, Callable[[], None]], Any]
"""``later(seconds, function)`` calls the function then."""


class Bucket:
    """Fills with ``rate`` bytes a second, up to a quarter of a second's (256 KiB at least). It may be overdrawn by what
    is taken at once, so that pieces of any size pass, and is then waited for."""

    def __init__(self, rate: float, clock: Clock) -> None:
        if not rate > 0:
            raise ValueError(f"rate={rate}: more than 0 bytes a second")
        self.rate = rate
        self._clock = clock
        self._most = max(rate * _BURST_S, float(_BURST_AT_LEAST_BYTES))
        self._level = self._most
        self._at = clock()

    def wait_s(self) -> float:
        """Seconds until something may be taken; 0 now."""
        self._fill()
        return 0.0 if self._level > -1.0 else -self._level / self.rate  # less than a byte is nobody's debt

    def take(self, count: int) -> None:
        """Take ``count`` bytes out."""
        self._fill()
        self._level -= count

    @property
    def full(self) -> bool:
        """Whether nothing was taken lately."""
        self._fill()
        return self._level >= self._most

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self.rate)
        self._at = now


class _Gate:
    """The bucket of one client or tenant, and the answers that wait for it; clients take turns."""

    def __init__(self, bucket: Bucket, later: Later | None) -> None:
        self.bucket = bucket
        self._later = later
        self._waiting: Rotation[tuple[int, asyncio.Future[None]]] = Rotation()
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


class Pace:
    """``rate`` is bytes a second of one client, ``tenant_rate`` of one tenant; None for no limit. ``clock`` gives
    seconds, ``later`` calls back (the running loop's, unless given). ValueError for a rate that is none."""

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
                Bucket(one, clock)  # says what is wrong with the number

    @property
    def limited(self) -> bool:
        """Whether there is a limit: where not, nobody need ask."""
        return self._rate is not None or self._tenant_rate is not None

    async def take(self, client: Client, count: int) -> None:
        """Return when ``count`` bytes may be sent to ``client``. Small pieces make an even flow."""
        if self._rate is not None:
            await self._gate(client, self._rate).take(client, count)
        if self._tenant_rate is not None:
            await self._gate(client.tenant, self._tenant_rate).take(client, count)

    def _gate(self, of: Client | str, rate: float) -> _Gate:
        gate = self._gates.get(of)
        if gate is None:
            gate = self._gates[of] = _Gate(Bucket(rate, self._clock), self._later)
            self._forget()
        self._gates.move_to_end(of)
        return gate

    def _forget(self) -> None:
        """Where there are too many: those of the ones not here for longest that owe nothing."""
        if len(self._gates) > _CLIENTS:
            for name in list(itertools.islice(self._gates, _LOOKED_AT)):
                if self._gates[name].idle:
                    del self._gates[name]
