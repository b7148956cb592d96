"""What is known of objects while they are read: one version of each, pinned by what its first answer said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from wds_async.storage.base import Checksum
from wds_async.storage.registry import Location
from wds_async.transfer.retry import ShardNotes
from wds_async.transfer.window import Shard

__all__ = ["Facts", "Version", "Versions", "facts_of"]

_KEPT_S = 10.0
_KEPT = 256
_TOLD = frozenset({"etag", "last-modified", "content-type", "ais-version", "x-goog-hash", "repr-digest", "digest",
                   "x-ms-blob-content-md5", "x-linked-etag"})  # fmt: skip
_TOLD_OF_ALL = ("content-md5", "ais-checksum-", "x-amz-checksum-")
"""Sums that an answer to a range may give of that range."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the first answer told of an object."""

    size: int | None
    """Bytes; None: nobody knows before its end (a pipe, a server without ranges and length)."""
    identity: str
    """What pins it; "" where its origin gives nothing."""
    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of that answer's head, in lower case: ``etag``, ``last-modified``, ``content-type``, ``ais-version`` and the
    checksums of the whole object, as far as they were there."""
    checksum: Checksum | None = None
    """Of the whole object, where the answer brought one."""
    ranged: bool = True
    """False: it can be read in order only."""


@dataclass(slots=True, eq=False)
class Version(Shard):
    """One object as its first answer had it, and who reads it."""

    users: int = 0
    in_order: bool = False
    """Whether it may be read in order where it has to be."""
    pinned: tuple[str, int | None] | None = None
    """Identity and size of the facts that it has to have; None: those of its first answer."""
    facts: Facts | None = None
    """Once something of it has come."""
    origin: Any = None
    """Belongs to whoever fetches: what is known of where it is."""
    idle_since: float = 0.0


def facts_of(version: Version) -> Facts:
    """What is known of an object of which something has come."""
    notes: ShardNotes = version.notes
    fields, size, identity = notes.fields, version.size, version.identity
    if version.streamed:
        said = fields.get("content-length", "")
        plain = "transfer-encoding" not in fields and fields.get("content-encoding", "identity") in ("", "identity")
        size = int(said) if plain and said.isascii() and said.isdigit() else None
        identity = notes.stream.identity if notes.stream is not None else ""
    told = {name: text for name, text in fields.items() if name in _TOLD or (
        name.startswith(_TOLD_OF_ALL) and "content-range" not in fields)}  # fmt: skip
    return Facts(size, identity, MappingProxyType(told), version.checksum, not version.streamed or size == 0)


class Versions:
    """The objects that are read now, or were a moment ago: at most a few hundred that nobody reads. ``locate`` is asked
    for the place of each once."""

    def __init__(self, locate: Callable[[str], Location]) -> None:
        self._locate = locate
        self._current: dict[str, Version] = {}
        self._idle: dict[Version, None] = {}  # the longest first

    def __len__(self) -> int:
        return len(self._current)

    def take(self, url: str, facts: Facts | None = None) -> Version:
        """The version of ``url`` that ``facts`` are of, for one more reader; without them the one that is read now. One
        that nobody reads is no answer to what an object is like now. `leave` it."""
        version = self._current.get(url)
        wanted = None if facts is None else (facts.identity, facts.size)
        if version is None or not (version.users if wanted is None else version.pinned == wanted):
            version = self.fresh(url, facts)
            version.users = 1
            self.install(version)
            return version
        version.users += 1
        self._idle.pop(version, None)
        return version

    def fresh(self, url: str, facts: Facts | None = None) -> Version:
        """A version that nothing has come of, and that nobody else is given."""
        version = Version(0, url, notes=ShardNotes(self._locate(url)))
        if facts is not None:
            version.size, version.identity, version.facts = facts.size, facts.identity, facts
            version.pinned, version.notes.etag = (facts.identity, facts.size), facts.fields.get("etag", "")
        return version

    def install(self, version: Version) -> None:
        """Give this version to those who come."""
        former = self._current.get(version.url)
        self._current[version.url] = version
        if former is not None and not former.users:
            self._retire(former)
        if not version.users:
            self._rest(version)

    def leave(self, version: Version, *, failed: bool = False) -> None:
        """One reader less. After a failure nobody is given it any more."""
        version.users -= 1
        if failed and self._current.get(version.url) is version:
            del self._current[version.url]
        if version.users:
            return
        if self._current.get(version.url) is version:
            self._rest(version)
        else:
            self._retire(version)

    def look(self, now: float) -> None:
        """Forget what nobody has read for some seconds."""
        while self._idle and (version := next(iter(self._idle))).idle_since < now - _KEPT_S:
            self._forget(version)

    def close(self) -> None:
        """Forget everything that nobody reads."""
        while self._idle:
            self._forget(next(iter(self._idle)))

    def _rest(self, version: Version) -> None:
        version.idle_since = asyncio.get_running_loop().time()
        self._idle[version] = None
        if len(self._idle) > _KEPT:
            self._forget(next(iter(self._idle)))

    def _forget(self, version: Version) -> None:
        if self._current.get(version.url) is version:
            del self._current[version.url]
        self._retire(version)

    def _retire(self, version: Version) -> None:
        self._idle.pop(version, None)
        notes: ShardNotes = version.notes
        if notes.access is not None:
            notes.access.cancel()
        for file in notes.files.values():
            file.close()
        notes.files.clear()
