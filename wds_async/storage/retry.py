"""Retries of brief requests: a page of a listing, a checksum, a small file to be written.

Parts of shards have a policy of their own (`transfer.retry`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from wds_async.config import RetryPolicy, transfer_config
from wds_async.errors import WdsError
from wds_async.storage.base import Backend, Fault, Location, Verdict, error_for

__all__ = ["Retries", "ask", "ask_backend"]

T = TypeVar("T")

_RENEWALS = 2


class Retries:
    """Count of the failed attempts at one request. ``renewals`` times it is repeated at once where other credentials
    may help. ``exhausted(failures)`` limits all other attempts, by default to the policy's ``brief_attempts``."""

    def __init__(
        self, policy: RetryPolicy, *, renewals: int = _RENEWALS, exhausted: Callable[[int], bool] | None = None
    ) -> None:
        self.failures = 0
        self.fault: Fault | None = None
        """The last one."""
        self._policy, self._rng = policy, random.Random()
        self._renewals_left = renewals
        self._exhausted = exhausted or (lambda failures: failures >= policy.brief_attempts)

    def wait_s(self, fault: Fault) -> float | None:
        """Count ``fault`` and return the seconds to wait before the next attempt; None to give up."""
        self.fault = fault
        if fault.verdict is Verdict.EXPIRED and self._renewals_left > 0:
            self._renewals_left -= 1
            return 0.0
        self.failures += 1
        if not self.retryable or self._exhausted(self.failures):
            return None
        return self._policy.delay_s(self.failures, self._rng, fault.retry_after_s)

    @property
    def retryable(self) -> bool:
        """True if the last fault may pass by itself."""
        return self.fault is not None and self.fault.verdict.retryable and self.fault.verdict is not Verdict.EXPIRED


async def ask(
    call: Callable[[], Awaitable[T]],
    classify: Callable[[BaseException], Fault],
    policy: RetryPolicy,
    *,
    retries: Retries | None = None,
) -> T:
    """Return the result of ``call``, repeated while ``classify`` finds that this may help and ``retries`` (by default
    those of ``policy``) allows it. Raise what the last attempt raised, and a `WdsError` at once."""
    retries = retries or Retries(policy)
    while True:
        try:
            return await call()
        except WdsError:
            raise
        except Exception as exn:
            wait_s = retries.wait_s(classify(exn))
            if wait_s is None:
                raise
        await asyncio.sleep(wait_s)


async def ask_backend(
    backend: Backend, location: Location, call: Callable[[], Awaitable[T]], retries: Retries | None = None
) -> T:
    """Return the result of ``call``, a brief request of ``backend`` about ``location``, with retries; raise its last
    error as a StorageError."""
    policy = transfer_config().retry
    retries = retries or Retries(policy)
    try:
        return await ask(call, lambda exn: backend.classify(exn, location), policy, retries=retries)
    except WdsError:
        raise
    except Exception as exn:
        assert retries.fault is not None
        error = error_for(retries.fault, location.shown, 0, retries.failures)
        raise error from (None if location.spec.quotes_answers else exn)
