"""Listings of stores: the shards that a pattern or a folder stands for, and the contents of a folder.

Called by plain code when a dataset is made, also from within a running event loop (notebooks). So each call has a
thread with an event loop of its own, which ends with the call; a program that forks later inherits only names.

Only the folders that a pattern needs are listed, page by page, and of their names only those that match are held. The
names of a folder in which something matched are kept for the run (`forget_listings` drops them), so that the datasets
of one folder list it once: 16 MB at most. A folder that is larger is listed anew each time.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import AsyncIterator, Generator, Iterable
from typing import TypeVar

from wds_async.config import transfer_config
from wds_async.storage.base import Entry
from wds_async.storage.listing.folders import forget
from wds_async.storage.listing.globs import Pattern, parse
from wds_async.storage.listing.searching import Folders
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import locate
from wds_async.storage.storeloop import StoreLoop
from wds_async.urls import expand_urls, local_path

__all__ = ["expand_listed", "folder_entries", "forget_listings", "matches"]

T = TypeVar("T")
Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_PAGE = 1000


def expand_listed(urls: Urls, options: StorageOptions = NOTHING_GIVEN) -> list[str]:
    """Return every shard that ``urls`` names, in order: `urls.expand_urls`, and then patterns in URLs of stores
    (``s3://b/x-*.tar``, ``gs://b/**/[ab].tar``) and folders (``https://host/dir/``: the shards in it) as well, each
    sorted. See `globs` for what a pattern is; a name that is there literally is taken literally.

    ``options``: for the stores' clients. Blocks while stores are listed. Raises `UrlError` for what cannot be listed
    and where nothing matches, and a StorageError where the store refuses or fails.
    """
    expanded = expand_urls(urls)
    patterns = _patterns(expanded, options)
    return [entry.url for entry in _found(expanded, patterns, options, fresh=False)] if patterns else expanded


def matches(urls: Urls, options: StorageOptions = NOTHING_GIVEN) -> list[Entry]:
    """Return the same, with sizes and times where a listing has them or the file is local; never from memory."""
    expanded = expand_urls(urls)
    return [_with_status(entry) for entry in _found(expanded, _patterns(expanded, options), options, fresh=True)]


def folder_entries(url: str, *, recursive: bool = False, options: StorageOptions = NOTHING_GIVEN) -> Generator[Entry]:
    """Yield what is in the folder ``url``, which ends with "/", in the store's order: objects and folders, or with
    ``recursive`` the objects in it and then those in its folders. Listed page by page as it is taken; close the
    iterator to stop before its end. Raises what `expand_listed` raises.
    """
    with StoreLoop("wds-async-listing") as loop:
        pages = _pages(_folders(loop, options, fresh=True), url, recursive)
        while page := loop.run(_next(pages)):
            yield from page


def forget_listings() -> None:
    """Forget all listings, so that the next dataset lists its folders again."""
    forget()


def _patterns(urls: list[str], options: StorageOptions) -> dict[str, Pattern]:
    """Return those of ``urls`` that are patterns, by URL."""
    patterns: dict[str, Pattern] = {}
    for url in urls:
        if (pattern := parse(url)) is not None and url not in patterns and not _opened_by_program(pattern, options):
            patterns[url] = pattern
    return patterns


def _found(expanded: list[str], patterns: dict[str, Pattern], options: StorageOptions, *, fresh: bool) -> list[Entry]:
    if not patterns:
        return [Entry(url, None) for url in expanded]
    with StoreLoop("wds-async-listing") as loop:
        searches = loop.run(_folders(loop, options, fresh=fresh).match(patterns.values()))
    results = {search.pattern.url: search for search in searches}
    return [entry for url in expanded for entry in (results[url].result() if url in results else [Entry(url, None)])]


def _opened_by_program(pattern: Pattern, options: StorageOptions) -> bool:
    """Return whether the program's own opener reads such URLs: ``*`` may mean something else to it."""
    place = locate(pattern.folder, options=options)
    return place.kind == "opener" and place.target == pattern.folder


def _with_status(entry: Entry) -> Entry:
    path = local_path(entry.url) if entry.size is None else None
    if path is not None:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode):
                return Entry(entry.url, status.st_size, status.st_mtime)
    return entry


def _folders(loop: StoreLoop, options: StorageOptions, *, fresh: bool) -> Folders:
    return Folders(loop.backends, options, transfer_config().retry, fresh=fresh)


async def _pages(folders: Folders, url: str, recursive: bool) -> AsyncIterator[list[Entry]]:
    todo = [url]
    while todo:
        page: list[Entry] = []
        inner: list[str] = []
        async with contextlib.aclosing(folders.entries(todo.pop())) as entries:
            async for entry in entries:
                if recursive and entry.url.endswith("/"):
                    inner.append(entry.url)
                    continue
                page.append(entry)
                if len(page) == _PAGE:
                    yield page
                    page = []
        if page:
            yield page
        todo += reversed(inner)


async def _next(pages: AsyncIterator[list[Entry]]) -> list[Entry] | None:
    return await anext(pages, None)
