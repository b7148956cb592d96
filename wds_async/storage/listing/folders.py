"""One folder of a store, listed with retries after rewriting and routing; and the memory of listings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Iterator
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

__all__ = ["KEPT_CHARS", "Folder", "Names", "forget", "keep", "kept"]

logger = logging.getLogger("wds_async")

KEPT_CHARS = 16_000_000
"""The names of one folder, and of all that are kept, are no more characters than this."""

_RENEWALS_AT_MOST = 3
_PIECE = 1000
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

# -- the names of folders that were listed, for the run ---------------------------------------------------------


class Names:
    """The names in one folder, in compact form; those of folders end with "/".

    A folder with an empty name (of keys with "//") is kept apart.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._last: list[str] = []
        self._count = self.chars = 0
        self._has_empty = False

    def add(self, name: str) -> None:
        """Add a name; that of a folder ends with "/"."""
        self._count += 1
        self.chars += len(name) + 1
        if name == "/":
            self._has_empty = True
            return
        self._last.append(name if name.endswith("/") else name + "//")  # '//' ends an object's
        if len(self._last) == _PIECE:
            self._pieces.append("".join(self._last))
            self._last.clear()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        if self._has_empty:
            yield "/"
        for piece in (*self._pieces, "".join(self._last)):
            for match in re.finditer("([^/]+/)(/?)", piece):
                yield match[1][:-1] if match[2] else match[1]


_kept: dict[Any, Names] = {}


def keep(key: Any, listed: Names) -> None:
    """Remember a folder, and forget the oldest ones beyond `KEPT_CHARS`."""
    _kept[key] = listed
    while sum(names.chars for names in list(_kept.values())) > KEPT_CHARS:
        _kept.pop(next(iter(list(_kept))), None)


def kept(key: Any) -> Names | None:
    """Return the remembered names of a folder, None without."""
    return _kept.get(key)


def forget() -> None:
    """Forget every folder that was listed."""
    _kept.clear()


# -- one folder -------------------------------------------------------------------------------------------------


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
