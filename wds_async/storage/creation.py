"""Creation of objects only where there are none: what decides a race between writers without a lock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from wds_async.config import transfer_config
from wds_async.errors import AccessDenied, MissingExtra, ShardNotFound, UrlError, WdsError
from wds_async.storage.base import Backend, Location, error_for
from wds_async.storage.checksums import digest_of
from wds_async.storage.registry import Backends
from wds_async.storage.retry import Retries

__all__ = ["create"]

T = TypeVar("T")

_honoured: set[Any] = set()
"""Servers that refused a second creation, in this process."""


async def create(backends: Backends, location: Location, data: bytes) -> bool:
    """Create the object at ``location`` where there is none, with retries. Return False where there is one.

    A server that is not known to decide that by itself is tried first, once a process: it has to refuse a second
    creation. Raises StorageError, and UrlError where the store cannot do it.
    """
    return await _Creation(backends.of(location), location, data).run()


class _Creation:
    """The creation of one object."""

    def __init__(self, backend: Backend, location: Location, data: bytes) -> None:
        self._backend, self._location, self._data = backend, location, data

    async def run(self) -> bool:
        location = self._location
        server = location.kind, location.server, location.options
        if server in _honoured or await self._ask(lambda: self._backend.certainly_creates(location)):
            return await self._once()
        if await self._is_there():
            return False
        created = await self._once()
        if await self._once():
            raise UrlError(
                f"{location.shown}: its server replaces an object although it was asked to create one only where there "
                "is none (If-None-Match: *), so that writers would overwrite each other; write to a store that honours "
                "that: a local or shared folder, S3, Google Cloud Storage, Azure"
            )
        _honoured.add(server)
        return created

    async def _once(self) -> bool:
        """Return whether the object was created. Where an attempt failed, the object that the next one finds may be
        its work."""
        retries = Retries(transfer_config().retry)
        created = await self._ask(lambda: self._backend.create(self._location, self._data), retries)
        return created or (retries.fault is not None and await self._is_ours())

    async def _is_there(self) -> bool:
        try:
            await self._ask(lambda: self._backend.remote_checksum(self._location))
        except (AccessDenied, ShardNotFound):  # a store may deny what is not there
            return False
        return True

    async def _is_ours(self) -> bool:
        """Return whether the object's checksum is that of our data; False where its store keeps none."""
        checksum = await self._ask(lambda: self._backend.remote_checksum(self._location))
        if checksum is None:
            return False
        with contextlib.suppress(MissingExtra, ValueError):
            digest = digest_of(checksum.algorithm)
            digest.update(memoryview(self._data))
            return digest.digest() == checksum.digest
        return False

    async def _ask(self, call: Callable[[], Awaitable[T]], retries: Retries | None = None) -> T:
        """Return the result of ``call``, with retries, or raise its error as one of StorageError."""
        retries = retries or Retries(transfer_config().retry)
        while True:
            try:
                return await call()
            except WdsError:
                raise
            except Exception as exn:
                fault = self._backend.classify(exn, self._location)
                wait_s = retries.wait_s(fault)
                if wait_s is None:
                    error = error_for(fault, self._location.shown, 0, retries.failures)
                    raise error from (None if self._location.spec.quotes_answers else exn)
            await asyncio.sleep(wait_s)
