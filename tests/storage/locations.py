"""Locations of URLs, for tests that call a store's backend themselves."""

from collections.abc import Mapping
from typing import Any

from wds_async.storage.base import Location
from wds_async.storage.options import StorageOptions
from wds_async.storage.registry import locate


def location_of(url: str, options: Mapping[str, Any] | None = None) -> Location:
    """Return the location of ``url``, as our own clients read it."""
    return locate(url, final=True, options=StorageOptions(options))
