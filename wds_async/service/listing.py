"""Listings of buckets, by name and page by page, made of the folders that their stores list, each in order."""

from __future__ import annotations

import time
import urllib.parse
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from wds_async.errors import ShardNotFound
from wds_async.service.names import url_of
from wds_async.service.refusals import Refusal
from wds_async.storage.base import Entry
from wds_async.urls import scheme

__all__ = ["ListEntry", "ListPage", "Listings"]

_MOST_NAMES, _KEPT_S, _DEEPEST = 250_000, 30.0, 64


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One line of a listing: ``name`` within the bucket; a folder's ends with "/". ``size`` in bytes, ``modified`` in
    seconds since 1970; None if unknown."""

    name: str
    size: int | None = None
    modified: float | None = None

    @property
    def folder(self) -> bool:
        return self.name.endswith("/")


@dataclass(frozen=True, slots=True)
class ListPage:
    """Lines in order, and whether ``more`` follow."""

    lines: tuple[ListEntry, ...]
    more: bool


class Listings:
    """Pages of buckets; ``entries`` lists one folder. A listed folder is kept for ``kept_s``, so that successive pages
    cost its store one listing; together at most ``most`` names (some 300 bytes each). ``check`` raises Refusal for
    folders that may not be listed; within a page they are left out (links that lead out of an allowed folder)."""

    def __init__(
        self,
        entries: Callable[[str], Any],
        *,
        kept_s: float = _KEPT_S,
        most: int = _MOST_NAMES,
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._entries, self._check = entries, check
        self._kept_s, self._most, self._clock, self._held = kept_s, most, clock, 0
        self._folders: OrderedDict[str, tuple[float, list[ListEntry]]] = OrderedDict()

    async def page(self, bucket: str, prefix: str, after: str, most: int, *, one_level: bool) -> ListPage:
        """Return at most ``most`` lines of ``bucket`` (its URL, which ends with "/"): names that begin with ``prefix``
        and come behind ``after``. ``one_level``: folders are lines, and are not entered.

        Raises the tree's errors; ShardNotFound without such a bucket. An unused prefix gives an empty page.
        """
        lines: list[ListEntry] = []
        start = prefix[: prefix.rfind("/") + 1]
        async with aclosing(self._walk(bucket, start, prefix, after, one_level, 0)) as walk:
            async for line in walk:
                lines.append(line)
                if len(lines) > most:
                    break
        return ListPage(tuple(lines[:most]), len(lines) > most)

    async def _walk(
        self, bucket: str, folder: str, prefix: str, after: str, one_level: bool, depth: int
    ) -> AsyncGenerator[ListEntry]:
        if depth > _DEEPEST:
            raise Refusal(400, f"folders more than {_DEEPEST} deep below {prefix!r}; give a longer prefix", "listing")
        for line in await self._folder(bucket, folder):
            if line.folder and not one_level:
                within = line.name.startswith(prefix) or prefix.startswith(line.name)
                passed = line.name < after and not after.startswith(line.name)
                if within and not passed and await self._may_list(url_of(bucket, line.name)):
                    async with aclosing(self._walk(bucket, line.name, prefix, after, False, depth + 1)) as walk:
                        async for deeper in walk:
                            yield deeper
            elif line.name > after and line.name.startswith(prefix):
                yield line

    async def _may_list(self, url: str) -> bool:
        try:
            await self._check(url) if self._check is not None else None
        except Refusal:
            return False
        return True

    async def _folder(self, bucket: str, folder: str) -> list[ListEntry]:
        """Return the content of one folder, by name."""
        url = url_of(bucket, folder)
        kept = self._folders.get(url)
        if kept is not None and self._clock() - kept[0] < self._kept_s:
            self._folders.move_to_end(url)
            return kept[1]
        lines_by_name: dict[str, ListEntry] = {}
        try:
            async with aclosing(self._entries(url)) as entries:
                async for entry in entries:
                    line = _line(url, folder, entry)
                    if line is not None:
                        lines_by_name[line.name] = line
                    if len(lines_by_name) > self._most:
                        words = f"{folder or 'the bucket'} holds more than {self._most} names, too many to list here"
                        raise Refusal(507, words, "listing")
        except ShardNotFound:
            if not folder:
                raise
        lines = sorted(lines_by_name.values(), key=lambda line: line.name)
        _, replaced = self._folders.pop(url, (0.0, None))
        self._folders[url] = self._clock(), lines
        self._held += len(lines) + 1 - (0 if replaced is None else len(replaced) + 1)
        while self._held > self._most and len(self._folders) > 1:
            self._held -= len(self._folders.popitem(last=False)[1][1]) + 1
        return lines


def _line(url: str, folder: str, entry: Entry) -> ListEntry | None:
    """Return ``entry`` of the folder at ``url`` by its name in the bucket; None if it is not below that."""
    base, at = url.partition("?")[0], entry.url.partition("?")[0] if scheme(url) in ("http", "https") else entry.url
    if not at.startswith(base) or at == base:
        return None
    name = at[len(base) :]
    if scheme(url) in ("http", "https", "file"):
        name = urllib.parse.unquote(name)
    return ListEntry(folder + name, entry.size, entry.modified)
