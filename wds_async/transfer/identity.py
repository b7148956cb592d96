"""Size and version of shards before they are read: by listings where these tell, else by one small request each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from wds_async.storage.base import Entry
from wds_async.storage.listing.expand import listed_by_folder, matches
from wds_async.storage.options import StorageOptions
from wds_async.transfer.probe import probe

__all__ = ["identified"]


def identified(
    urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    options: Mapping[str, Any] | StorageOptions | None = None,
) -> list[Entry]:
    """Return every shard that ``urls`` names (braces, patterns, folders: see `storage.listing.expand`), in order, with
    its size and its version in the form in which a reader compares it (``version`` of a shard's dict).

    Patterns are listed anyway. Shards that are named one by one are looked up by one listing of each folder, where
    the store's listings tell versions and the folder is not much larger than what is asked for; all others are asked
    for one by one, many at once. Size and version are unknown (None, "") for what can only be read in order: commands
    and the program's openers. Raises UrlError where nothing matches, and the error of the first shard that is
    missing or cannot be read.
    """
    options = StorageOptions(options)
    named = matches(urls, options)
    entries = {entry.url: entry for entry in named}
    entries |= listed_by_folder([entry.url for entry in named if not entry.version], options)
    left = [url for url, entry in entries.items() if not entry.version]
    for probed in probe(left, options):
        if probed.error is not None:
            raise probed.error
        if probed.checked:
            known = entries[probed.url]
            entries[probed.url] = Entry(probed.url, probed.size, known.modified, probed.version)
    return [entries[entry.url] for entry in named]
