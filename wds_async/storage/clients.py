"""The packages that stores are read by, imported before workers are forked: once for all of them, not once in each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable

from wds_async.errors import WdsError
from wds_async.storage.imports import import_client
from wds_async.storage.registry import locate
from wds_async.urls import scheme

__all__ = ["import_clients"]

_PACKAGES = {
    "s3": ("wds_async.storage.s3.backend", "s3fs"),
    "gcs": ("wds_async.storage.gcs.backend", "google.auth.transport.requests", "google.oauth2.service_account"),
    "azure": ("wds_async.storage.azure.backend", "azure.storage.blob.aio", "azure.identity.aio"),
    "hf": ("wds_async.storage.hub.backend",),
    "ais": ("wds_async.storage.ais.backend",),
}
"""What the first read of a kind of location imports: for the clouds 0.2 to 0.4 s of CPU."""

_LOOKED_AT = 1000


def import_clients(urls: Iterable[str]) -> None:
    """Import what reading ``urls`` will need. Starts nothing; what is not installed is found out by who reads."""
    examples = {scheme(url): url for url in itertools.islice(urls, _LOOKED_AT)}
    for url in examples.values():
        with contextlib.suppress(WdsError):
            for package in _PACKAGES.get(locate(url).kind, ()):
                with contextlib.suppress(ImportError):
                    import_client(package)
