"""Locations of URLs, for tests that call a store's backend themselves."""

from wds_async.storage.base import Location
from wds_async.storage.registry import locate


def location_of(url: str) -> Location:
    """Return the location of ``url``, as our own clients read it."""
    return locate(url, final=True)
