"""The search through folders for the matches of patterns.

The names in a folder are put behind the folder as the user wrote it, so that a found URL means the same everywhere.
Where a rule would lead the found URL elsewhere, that is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from wds_async.config import RetryPolicy
from wds_async.errors import ShardNotFound, UrlError, WdsError
from wds_async.redact import redact
from wds_async.storage.base import Entry
from wds_async.storage.listing.folders import KEPT_BYTES, Folder, keep, kept, size_of
from wds_async.storage.listing.globs import ANY_DEPTH, SHARDS, Pattern, is_pattern, matcher
from wds_async.storage.options import StorageOptions
from wds_async.storage.registry import Backends
from wds_async.urls import SHARD_SUFFIXES, rewrite, rules_from_env

__all__ = ["Folders", "Search"]

_AT_ONCE = 8
_DEPTH_AT_MOST = 64
_FOLDERS_AT_MOST = 100_000
_FOUND_AT_MOST = 10_000_000
_NEAR_AT_MOST = 10_000


@dataclass(slots=True, eq=False)
class Search:
    """The matches of one pattern, by URL, and counts of what was searched."""

    pattern: Pattern
    found: dict[str, Entry] = field(default_factory=dict)
    names: int = 0
    folders: int = 0
    deepest: int = -1
    near: list[str] = field(default_factory=list)

    def missed(self, step: int, name: str) -> None:
        """Keep some names that did not match, those of the deepest folders, for a hint."""
        if step > self.deepest:
            self.deepest = step
            self.near.clear()
        if step == self.deepest and len(self.near) < _NEAR_AT_MOST and not self.found:
            self.near.append(name)

    def result(self) -> list[Entry]:
        """Return the matches by URL. Raise UrlError where there is none."""
        if not self.found:
            raise UrlError(self._why_empty())
        return [self.found[url] for url in sorted(self.found)]

    def _why_empty(self) -> str:
        pattern, shown = self.pattern, redact(self.pattern.url)
        below = self.folders - 1
        where = redact(pattern.folder) + (f" and {below} folder{'' if below == 1 else 's'} below" if below > 0 else "")
        count = f"{self.names} name{'' if self.names == 1 else 's'} in {where}"
        if pattern.steps == (SHARDS,):
            text = f"{shown!r}: this folder holds no shard ({' '.join('*' + suffix for suffix in SHARD_SUFFIXES)})"
        else:
            text = f"{shown!r}: nothing matches this pattern"
        inner = [name for name in self.near if name.endswith("/")]
        step = pattern.steps[self.deepest] if self.deepest >= 0 else ""
        if step and (near := difflib.get_close_matches(step, self.near, 1, 0.5)):
            return f"{text} among {count}; the nearest is {redact(near[0])!r}"
        if inner and ANY_DEPTH not in pattern.steps:
            return f"{text} among {count}; **/ looks into its folders too, such as {redact(inner[0])!r}"
        return f"{text} among {count}"


@dataclass(slots=True)
class _Aim:
    """One step of a search in one folder."""

    search: Search
    at: int
    hits: list[tuple[str, Entry]] = field(default_factory=list)
    literal: tuple[str, Entry] | None = None
    match: Callable[[str], bool] = bool
    missed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.step != ANY_DEPTH:
            self.match = matcher(self.step, self.search.pattern.encoded)

    @property
    def step(self) -> str:
        return self.search.pattern.steps[self.at]

    @property
    def last(self) -> bool:
        return self.at == len(self.search.pattern.steps) - 1

    def take(self, name: str, entry: Entry) -> None:
        """Match one name of the folder."""
        folder, bare = name.endswith("/"), name.rstrip("/")
        if self.step == ANY_DEPTH:
            if (not bare.startswith(".") or name in ("./", "../")) and (folder or self.last):
                self.hits.append((name, entry))
        elif folder is not self.last and (bare == self.step or self._decoded(bare) == self.step):
            self.literal = name, entry
        elif bare and folder is not self.last and self.match(bare):
            self.hits.append((name, entry))
        elif len(self.missed) < _NEAR_AT_MOST:
            self.missed.append(name)

    def _decoded(self, name: str) -> str:
        return urllib.parse.unquote(name) if self.search.pattern.encoded and "%" in name else name

    def chosen(self) -> list[tuple[str, Entry]]:
        """Return the matches, only the name that is the step itself where there is one."""
        return self.hits if self.literal is None else [self.literal]


_Steps = dict[str, set[tuple[Search, int]]]


class Folders:
    """Lister on the running loop, for one call. ``fresh``: not from memory, and so with sizes and dates."""

    def __init__(self, backends: Backends, options: StorageOptions, retry: RetryPolicy, *, fresh: bool = False) -> None:
        self._backends, self._options, self._retry, self._fresh = backends, options, retry, fresh
        self._rules = rules_from_env()
        self._listed = 0

    async def entries(self, url: str) -> AsyncGenerator[Entry]:
        """Yield what is in the folder ``url``, in the store's order and the user's spelling; never from memory."""
        folder = self._folder(url)
        yielded = 0
        while True:
            seen = 0
            try:
                async with contextlib.aclosing(folder.names()) as names:
                    async for name, entry in names:
                        seen += 1
                        if seen > yielded:  # those before were yielded before a fault
                            yielded += 1
                            yield replace(entry, url=self._spelt(url, name))
            except WdsError:
                raise
            except Exception as exn:
                await folder.again(exn)
            else:
                return

    async def match(self, patterns: Iterable[Pattern]) -> list[Search]:
        """Search for all patterns at once, so that a folder is listed once for all of them."""
        searches = [Search(pattern) for pattern in patterns]
        level: _Steps = {}
        for search in searches:
            level.setdefault(search.pattern.folder, set()).add((search, 0))
        for depth in range(_DEPTH_AT_MOST):
            if not level:
                return searches
            deeper: _Steps = {}
            todo = iter(level.items())
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(_AT_ONCE, len(level))):
                        group.create_task(self._work(todo, deeper, missing_ok=depth > 0))
            except BaseExceptionGroup as several:
                raise several.exceptions[0] from None
            level = deeper
        raise UrlError(f"{redact(next(iter(level)))}: folders more than {_DEPTH_AT_MOST} deep are not listed")

    async def _work(
        self, todo: Iterator[tuple[str, set[tuple[Search, int]]]], deeper: _Steps, missing_ok: bool
    ) -> None:
        for url, steps in todo:
            try:
                aims = await self._look(url, steps)
            except ShardNotFound:
                if not missing_ok:
                    raise
                continue
            for aim in aims:
                for child, at in self._taken(url, aim):
                    deeper.setdefault(child, set()).add((aim.search, at))

    async def _look(self, url: str, steps: set[tuple[Search, int]]) -> list[_Aim]:
        """List one folder for all searches in it."""
        folder = self._folder(url)
        remembered = None if self._fresh else kept(folder.key)
        if remembered is not None:
            aims, count = _aims(steps), len(remembered)
            for name in remembered:
                for aim in aims:
                    aim.take(name, Entry(name, None))
        while remembered is None:
            aims, names, names_bytes, count = _aims(steps), list[str](), 0, 0
            try:
                async for name, entry in folder.names():
                    count += 1
                    for aim in aims:
                        aim.take(name, entry)
                    if not self._fresh and names_bytes <= KEPT_BYTES:
                        names.append(name)
                        names_bytes += size_of((name,))
            except WdsError:
                raise
            except Exception as exn:
                await folder.again(exn)
                continue
            if not self._fresh and any(aim.chosen() for aim in aims):  # what is to come may be what is looked for
                keep(folder.key, names)
            break
        for search in {aim.search for aim in aims}:
            search.names += count
            search.folders += 1
        return aims

    def _taken(self, url: str, aim: _Aim) -> Iterator[tuple[str, int]]:
        """Add the objects that an aim matched in the folder ``url``; return the folders to search, and for
        which step."""
        search, steps = aim.search, aim.search.pattern.steps
        for name, entry in aim.chosen():
            spelt = self._spelt(url, name)
            if not name.endswith("/"):
                spelt += search.pattern.query
                search.found[spelt] = replace(entry, url=spelt)
                continue
            at = aim.at if aim.step == ANY_DEPTH else aim.at + 1
            while at < len(steps) - 1 and not is_pattern(steps[at]):  # there is nothing to choose from
                spelt, at = f"{spelt}{steps[at]}/", at + 1
            yield spelt, at
        for name in aim.missed:
            search.missed(aim.at, name)
        if len(search.found) > _FOUND_AT_MOST:
            raise UrlError(f"{redact(search.pattern.url)}: more than {_FOUND_AT_MOST} shards are not taken")

    def _folder(self, url: str) -> Folder:
        self._listed += 1
        if self._listed > _FOLDERS_AT_MOST:
            raise UrlError(f"{redact(url)}: more than {_FOLDERS_AT_MOST} folders are not listed at once")
        return Folder(url, self._backends, self._options, self._retry)

    def _spelt(self, url: str, name: str) -> str:
        """Return ``name`` behind the user's folder, if that is where it will be read from."""
        if self._rules and rewrite(url + name, self._rules) != rewrite(url, self._rules) + name:
            raise UrlError(
                f"{redact(url + name)}: WDS_REWRITE leads this name elsewhere than its folder, so the folder cannot be "
                "listed through it; write a rule for the folder, or name the shards with braces"
            )
        return url + name


def _aims(steps: set[tuple[Search, int]]) -> list[_Aim]:
    """Return the aims of one folder; `ANY_DEPTH` may also be no folder at all."""
    todo, reached = list(steps), set(steps)
    for search, at in todo:
        deeper = search, at + 1
        at_any_depth = search.pattern.steps[at] == ANY_DEPTH and at + 1 < len(search.pattern.steps)
        if at_any_depth and deeper not in reached:
            reached.add(deeper)
            todo.append(deeper)
    return [_Aim(search, at) for search, at in todo]
