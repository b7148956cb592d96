"""When and how to try again: pure values, no clock and no sleep of their own.

Back-off is exponential with full jitter ("Exponential Backoff And Jitter", AWS Architecture Blog, 2015):
attempt ``n`` waits a uniform random time in ``[0, min(cap, base * 2**(n-1))]``, or what the server's
``Retry-After`` says if that is longer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["RetryPolicy"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long a part is tried.

    Attempts are counted *without progress*: an attempt that brought at least one new byte starts the
    count again, so a long download over a bad line ends only when nothing moves any more.
    """

    max_attempts: int | None = None
    """Attempts without progress before the error is raised; 1 means never try again. None: as many as ``timeout_s``
    allows, so that an outage is waited for whatever the number of attempts in it."""
    max_contradictions: int = 8
    """The same, for answers that contradict the request: those of a broken server, which time does not heal."""
    timeout_s: float = 300.0
    """Seconds without progress, over all attempts, before the error is raised."""
    first_contact_s: float = 10.0
    """The same, for an origin that has never answered: a typo must not look like a hang."""
    refusal_timeout_s: float = 30.0
    """Seconds for which a 403 or 404 is asked again, where the store has answered the same identity for the same bucket
    before in this process: permissions, new credentials and listings take a while to reach every server of a store.
    0: a refusal ends the read at once."""
    base_s: float = 0.02
    """Upper bound of the first wait: most faults are over at once, and all that is read behind this part waits."""
    cap_s: float = 20.0
    """Upper bound of every wait, and of what ``Retry-After`` can ask for."""

    @property
    def brief_attempts(self) -> int:
        """For one request that nobody should wait minutes for: a page of a listing, a file to be written."""
        return self.max_contradictions if self.max_attempts is None else self.max_attempts

    def delay_s(self, attempt: int, rng: random.Random, retry_after_s: float | None = None) -> float:
        """Seconds to wait after failed attempt number ``attempt`` (the first is 1)."""
        bound = min(self.cap_s, self.base_s * 2.0 ** min(attempt - 1, 30))
        jittered = rng.uniform(0.0, bound)
        if retry_after_s is None:
            return jittered
        return max(jittered, min(retry_after_s, self.cap_s))

    def gives_up(self, attempt: int, idle_s: float, *, origin_known: bool, contradicted: bool = False) -> bool:
        """Whether to stop after ``attempt`` failures in a row and ``idle_s`` seconds without a byte."""
        allowed_s = self.timeout_s if origin_known else min(self.first_contact_s, self.timeout_s)
        most = self.max_attempts
        if contradicted:
            most = self.max_contradictions if most is None else min(most, self.max_contradictions)
        return idle_s >= allowed_s or (most is not None and attempt >= most)
