"""The catalogue of stores: the spec of every store's folder, and those of the kinds that need no folder."""

from __future__ import annotations

import difflib
import functools
import pkgutil
import urllib.parse
from typing import TYPE_CHECKING, Any

from wds_async.storage.ais import SPEC as AIS
from wds_async.storage.azure import SPEC as AZURE
from wds_async.storage.gcs import SPEC as GCS
from wds_async.storage.http import SPEC as HTTP
from wds_async.storage.hub import SPEC as HUB
from wds_async.storage.s3 import SPEC as S3
from wds_async.storage.spec import StoreSpec

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "BY_SCHEME",
    "PLUGIN",
    "STORES",
    "STORES_GROUP",
    "installed_stores",
    "known_protocol",
    "load",
    "similar_scheme",
    "spec_of",
    "usual_scheme",
    "web_store",
]

STORES = (HTTP, S3, GCS, AZURE, HUB, AIS)
"""Stores with a folder of their own. A new one is added here."""

PLUGIN = "plugin:"
"""Prefix of the kind of a store from an installed package; the scheme follows."""

STORES_GROUP = "wds_async.stores"
"""The group of entry points by which installed packages bring stores: the name is the scheme."""

_KINDS = {
    spec.kind: spec
    for spec in (
        *STORES,
        StoreSpec(kind="local", backend="wds_async.storage.local:LocalBackend", has_server=False),
        StoreSpec(kind="pipe", backend="wds_async.storage.pipe:PipeBackend", has_server=False, in_order=True),
        StoreSpec(kind="stdin", backend="wds_async.storage.pipe:StdinBackend", has_server=False, in_order=True),
        StoreSpec(
            kind="opener", backend="wds_async.storage.user_openers:OpenedBackend", has_server=False, in_order=True
        ),
        StoreSpec(kind="generic", backend="wds_async.storage.generic:GenericBackend", routable=True),
    )
}

BY_SCHEME = {name: spec for spec in STORES for name in (*spec.schemes, *spec.aliases)}
"""The store of each scheme and alias."""

_OFTEN_MEANT = ("file", "pipe", *BY_SCHEME, "sftp", "ftp", "webdav", "hdfs")

_USUAL = {alias: spec.schemes[0] for spec in STORES for alias in spec.aliases}


@functools.cache
def spec_of(kind: str) -> StoreSpec:
    """Return the spec of the kind of a location."""
    return _KINDS.get(kind) or StoreSpec(kind=kind, schemes=(kind.removeprefix(PLUGIN),), deadlines=True)


def usual_scheme(scheme: str) -> str:
    """Return the scheme that ``scheme`` is another name of, or ``scheme`` itself."""
    return _USUAL.get(scheme, scheme)


def web_store(url: str) -> StoreSpec:
    """Return the store that an ``http(s)`` URL belongs to: HTTP, unless the host is another store's web service."""
    for spec in STORES:
        if spec.web_services and any(service in url.lower() for service in spec.web_services):
            parts = urllib.parse.urlsplit(url)
            account, _, service = (parts.hostname or "").partition(".")
            own = parts.scheme == "https" and account and service in spec.web_services
            if own and spec.web_signature not in urllib.parse.parse_qs(parts.query):
                return spec
    return HTTP


def load(name: str) -> Any:
    """Import the object that a spec names as ``"module:object"``."""
    return pkgutil.resolve_name(name)


def similar_scheme(name: str) -> str | None:
    """Return the known scheme that is most like the unknown scheme ``name``; None if none is similar."""
    near = difflib.get_close_matches(name, _OFTEN_MEANT, 1, 0.6 if len(name) > 2 else 0.5)
    return near[0] if near else None


def known_protocol(name: str) -> bool:
    """Return whether fsspec has a filesystem of this name (installed or not)."""
    from fsspec.registry import known_implementations, registry  # noqa: PLC0415 (slow, and often not needed)

    return name in known_implementations or name in registry


@functools.cache
def installed_stores() -> dict[str, EntryPoint]:
    """Return the stores of installed packages by scheme, in lower case, without importing them."""
    import importlib.metadata  # noqa: PLC0415 (slow, and often not needed)

    return {point.name.lower(): point for point in importlib.metadata.entry_points(group=STORES_GROUP)}
