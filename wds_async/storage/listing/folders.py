"""Listing of one folder of a store, with retries, after rewriting and routing; and the cache of listings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from wds_async.config import RetryPolicy
from wds_async.environment import VARIABLES, variable
from wds_async.errors import UrlError, WdsError
from wds_async.redact import redact
from wds_async.storage.base import Backend, Entry, Fault, RefusedAnswer, Verdict, error_for
from wds_async.storage.options import StorageOptions
from wds_async.storage.registry import Backends, locate
from wds_async.storage.retry import Retries
from wds_async.storage.stores import STORES

__all__ = ["KEPT_BYTES", "Folder", "forget", "keep", "kept", "size_of"]

logger = logging.getLogger("wds_async")

KEPT_BYTES = 16_000_000
"""The names of one folder, and of all that are kept, take no more memory than this."""
_NAME_BYTES = 57  # of a str and its place in a list

_RENEWALS_AT_MOST = 3
_LIST_ADVICE = (
    " Where these credentials may read objects but not list them (s3:ListBucket, storage.objects.list, …), name the "
    "shards with braces: x-{000..999}.tar."
)
_ATTEMPTS_BESIDE_A_FALLBACK = 2
_NO_GRANT = re.compile(
    r"\b401\b|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|Expired|TimeTooSkewed|AuthenticationFailed"
    r"|InvalidAuthenticationInfo|no credentials(?!.*anonymous listing)|clock|profile|no token|S3's client"
    r"|cannot be read|is not JSON",
    re.IGNORECASE,
)
"""Refusals that are not about permissions: wrong or old keys, clocks, credentials that are not there."""

# What decides which store a URL means, or what of it is seen: a listing is not for those of another account.
_DECIDING = tuple(name for spec in STORES for name in spec.variables)
_PREFIXES = tuple(name for name in _DECIDING if name.endswith("_"))
_IDENTITIES = tuple(dict.fromkeys((*(v.name for v in VARIABLES if v.name.startswith(_PREFIXES)), *_DECIDING)))

_kept: dict[Any, list[str]] = {}


def size_of(names: Iterable[str]) -> int:
    """Return the bytes that ``names`` take in memory, about."""
    return sum(len(name) + _NAME_BYTES for name in names)


def keep(key: Any, names: list[str]) -> None:
    """Remember the names in a folder, and forget the oldest folders beyond `KEPT_BYTES`."""
    _kept[key] = names
    while sum(map(size_of, list(_kept.values()))) > KEPT_BYTES:
        _kept.pop(next(iter(list(_kept))), None)


def kept(key: Any) -> list[str] | None:
    """Return the remembered names of a folder, those of folders with "/" at their end; None without."""
    return _kept.get(key)


def forget() -> None:
    """Forget every folder that was listed."""
    _kept.clear()


class Folder:
    """The folder ``url`` while it is listed: its location and its failures so far."""

    def __init__(self, url: str, backends: Backends, options: StorageOptions, retry: RetryPolicy) -> None:
        self.url = url
        self.location = locate(url, options=options)
        if self.location.in_order:
            raise UrlError(
                f"{redact(url)}: {redact(self.location.target)!r} is not a folder that can be listed (a command, or an "
                "opener of the program); name the shards, with braces {000..999}"
            )
        self._backends = backends
        self._policy = retry
        self._restart()

    @property
    def key(self) -> Any:
        """The key of its remembered listing."""
        seen = hash(tuple(variable(name) for name in _IDENTITIES))
        return self.location.kind, self.location.target, self.location.options, seen

    async def names(self) -> AsyncGenerator[tuple[str, Entry]]:
        """Yield each name (of a folder with "/" at its end) and its entry. Raises what the client raises."""
        target, objects = self.location.target, self.location.spec.object_store
        entries: Any = self._backend.entries(self.location)
        async with contextlib.aclosing(entries):
            async for entry in entries:
                self._since, self._answered = self._clock(), True
                name = entry.url[len(target) :] if entry.url.startswith(target) else ""
                if name and "/" not in name[:-1] and (objects or name not in ("/", "./", "../")):
                    yield name, entry

    async def again(self, exn: Exception) -> None:
        """Wait until it may be listed again, or raise the error for ``exn``."""
        fault = self._backend.classify(exn, self.location)
        self._answered = self._answered or isinstance(exn, RefusedAnswer)
        wait_s = self._retries.wait_s(fault)
        if wait_s is not None:
            if wait_s > 0:
                attempt = self._retries.failures + 1
                logger.info("%s: %s; it is listed again, attempt %d", redact(self.url), fault.reason, attempt)
            await asyncio.sleep(wait_s)
            return
        if not self._retries.retryable or self.location.fallback is None:
            raise self._error(fault) from exn
        logger.warning("%s: %s; listing its own store instead", redact(self.url), fault.reason)
        self.location = self.location.fallback
        self._restart()

    def _exhausted(self, failures: int) -> bool:
        known = self._answered or not self.location.spec.has_server
        leaves = self.location.fallback is not None and failures >= _ATTEMPTS_BESIDE_A_FALLBACK
        return leaves or self._policy.gives_up(failures, self._clock() - self._since, origin_known=known)

    @property
    def _backend(self) -> Backend:
        return self._backends.of(self.location)

    def _restart(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._since, self._answered = self._clock(), False
        self._retries = Retries(self._policy, renewals=_RENEWALS_AT_MOST, exhausted=self._exhausted)

    def _error(self, fault: Fault) -> WdsError:
        kind = type(error_for(fault, "", 0, 1))
        tried = f" after {self._retries.failures} attempts" if self._retries.failures > 1 else ""
        advice = f" {fault.advice}" if fault.advice else ""
        permission = fault.verdict is Verdict.DENIED and self.location.spec.object_store
        advice += _LIST_ADVICE if permission and not _NO_GRANT.search(fault.reason) else ""
        where = "" if self.location.target == self.url else f" (at {redact(self.location.target)})"
        return kind(f"{redact(self.url)}{where} cannot be listed: {fault.reason}{tried}.{advice}")
