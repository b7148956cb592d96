"""Listings of stores: the shards that a pattern or a folder stands for, and the contents of a folder.

Called by plain code when a dataset is made, also from within a running event loop (notebooks). So each call has a
thread with an event loop of its own, which ends with the call; a program that forks later inherits only names.

Only the folders that a pattern needs are listed, page by page, and of their names only those that match are held. The
names of a folder in which something matched are kept for the run (`forget_listings` drops them), so that the datasets
of one folder list it once: 16 MB at most. A folder that is larger is listed anew each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Generator, Iterable, Mapping
from typing import TypeVar

from wds_async.config import transfer_config
from wds_async.errors import AccessDenied, ShardNotFound, UrlError
from wds_async.storage.base import Entry
from wds_async.storage.listing.folders import forget
from wds_async.storage.listing.globs import Pattern, parse
from wds_async.storage.listing.searching import Folders
from wds_async.storage.local import version_without_inode
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import locate
from wds_async.storage.storeloop import StoreLoop
from wds_async.urls import expand_urls, local_path

__all__ = ["expand_listed", "folder_entries", "forget_listings", "listed_by_folder", "matches"]

T = TypeVar("T")
Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_PAGE = 1000
_FOLDERS_AT_ONCE = 8
_LISTED_FROM = 16
"""So many objects of one folder are looked up in its listing; fewer are as soon asked for one by one."""
_LISTED_BESIDE = 5000
_LISTED_FOR_EACH = 10
"""The listing of a folder ends after so many names, and so many for each object that is looked up. A page of a thousand
names takes one request; each object that is asked for by itself takes one, too."""


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


def listed_by_folder(urls: Iterable[str], options: StorageOptions = NOTHING_GIVEN) -> dict[str, Entry]:
    """Return those of ``urls`` (expanded) that a listing of their folder tells with their version, by URL.

    A folder is listed once for all of them, where there are enough, and no further than is worth it: a much larger
    folder, one that may not be listed, and what it lacks is left out. Raises a StorageError where a store fails.
    """
    wanted: dict[str, set[str]] = {}
    for url in urls:
        wanted.setdefault(url.rpartition("/")[0] + "/", set()).add(url)
    wanted = {folder: names for folder, names in wanted.items() if len(names) >= _LISTED_FROM}
    if not wanted:
        return {}
    with StoreLoop("wds-async-listing") as loop:
        return loop.run(_listed(_folders(loop, options, fresh=True), wanted, options))


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
                version = version_without_inode(status.st_size, status.st_mtime_ns)
                return Entry(entry.url, status.st_size, status.st_mtime, version)
    return entry


def _folders(loop: StoreLoop, options: StorageOptions, *, fresh: bool) -> Folders:
    return Folders(loop.backends, options, transfer_config().retry, fresh=fresh)


async def _listed(folders: Folders, wanted: Mapping[str, set[str]], options: StorageOptions) -> dict[str, Entry]:
    """Return the entries of the URLs that are ``wanted`` of each folder, several folders at once."""
    listed: dict[str, Entry] = {}
    todo = iter(wanted.items())

    async def work() -> None:
        for folder, urls in todo:
            left, seen, most = set(urls), 0, _LISTED_BESIDE + _LISTED_FOR_EACH * len(urls)
            with contextlib.suppress(UrlError, AccessDenied, ShardNotFound):  # what it lacks is asked for by itself
                if not locate(folder, options=options).spec.lists_versions:
                    continue
                async with contextlib.aclosing(folders.entries(folder)) as entries:
                    async for entry in entries:
                        seen += 1
                        if entry.url in left and entry.version:
                            left.discard(entry.url)
                            listed[entry.url] = entry
                        if not left or seen >= most:
                            break

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(_FOLDERS_AT_ONCE, len(wanted))):
                group.create_task(work())
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return listed


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
