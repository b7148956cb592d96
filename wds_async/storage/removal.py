"""Removal of objects and folders from stores and of local files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from wds_async.errors import ShardNotFound, WdsError
from wds_async.storage.base import Location, error_for
from wds_async.storage.listing.expand import folder_entries
from wds_async.storage.local import explain_os_error
from wds_async.storage.options import StorageOptions
from wds_async.storage.registry import Backends, locate
from wds_async.storage.retry import ask_backend
from wds_async.storage.storeloop import StoreLoop

__all__ = ["remove"]

_AT_ONCE = 32


def remove(urls: Iterable[str], options: Mapping[str, Any] | StorageOptions | None = None) -> None:
    """Remove the objects and local files ``urls``, many at once; those that are not there are passed over.

    A URL that ends with "/" stands for all that lies below that folder, and on this machine for the folder itself.
    ``options`` are for the stores' clients. Raises the first error once all others are removed: UrlError for what
    cannot be removed (a command, a server without DELETE), and a StorageError.
    """
    options = StorageOptions(options)
    names: list[str] = []
    for url in urls:
        if not url.endswith("/"):
            names.append(url)
        elif (place := locate(url, options=options)).path is not None:
            _remove_folder(place)
        else:
            with contextlib.suppress(ShardNotFound):
                names += (entry.url for entry in folder_entries(url, recursive=True, options=options))
    if names:
        with StoreLoop() as loop:
            loop.run(_remove(loop.backends, names, options))


async def _remove(backends: Backends, urls: Iterable[str], options: StorageOptions) -> None:
    todo, errors = iter(urls), list[WdsError]()

    async def work() -> None:
        for url in todo:
            try:
                location = locate(url, options=options)
                backend = backends.of(location)
                await ask_backend(backend, location, functools.partial(backend.remove, location))
            except WdsError as exn:
                errors.append(exn)

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    if errors:
        raise errors[0]


def _remove_folder(location: Location) -> None:
    """Remove a local folder with all that is in it; of a link in it, the link alone."""
    assert location.path is not None
    while os.path.lexists(location.path):
        try:
            shutil.rmtree(location.path)
        except FileNotFoundError:  # another process removes the same
            continue
        except OSError as exn:
            raise error_for(explain_os_error(exn), location.shown, 0, 1) from exn
