"""Locations and backends, for tests that call a store's backend themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from wds_async.storage.base import Entry, Location
from wds_async.storage.options import Options, StorageOptions
from wds_async.storage.registry import locate

__all__ = ["location_of", "on_backend", "page_through"]


def location_of(url: str, options: Mapping[str, Any] | None = None) -> Location:
    """Return the location of ``url``, as our own clients read it."""
    return locate(url, final=True, options=StorageOptions(options))


def on_backend(
    make: Callable[..., Any], use: Callable[[Any], Any], options: dict[str, Any] | None = None, *, direct: bool = True
) -> Any:
    """Return the result of ``use`` with a backend, which is closed then."""

    async def run() -> Any:
        backend = make(asyncio.to_thread, Options(options or {}), direct=direct)
        try:
            return await use(backend)
        finally:
            await backend.close()

    return asyncio.run(run())


def page_through(make: Callable[..., Any], url: str, options: dict[str, Any] | None = None) -> list[Entry]:
    """Return all entries of the folder ``url``."""

    async def use(backend: Any) -> list[Entry]:
        return [entry async for entry in backend.entries(location_of(url))]

    entries: list[Entry] = on_backend(make, use, options)
    return entries
