"""Objects while they are read: one version of each, pinned by its first answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from wds_async.storage.base import Checksum, Location
from wds_async.transfer.shard_state import ShardState
from wds_async.transfer.window import Shard

__all__ = ["Facts", "OpenObject", "OpenObjects", "facts_of"]

_KEPT_S = 10.0
_KEPT = 256
_TOLD = frozenset({"etag", "last-modified", "content-type", "ais-version", "x-goog-hash", "repr-digest", "digest",
                   "x-ms-blob-content-md5", "x-linked-etag"})  # fmt: skip
_TOLD_OF_ALL = ("content-md5", "ais-checksum-", "x-amz-checksum-")
"""Sums that an answer to a range may give of that range."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of an object, from its first answer."""

    size: int | None
    """Bytes; None: unknown before its end (a pipe, a server without ranges and length)."""
    version: str
    """What pins it; "" where its origin gives nothing."""
    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of that answer's head, in lower case: ``etag``, ``last-modified``, ``content-type``, ``ais-version`` and the
    checksums of the whole object, as far as they were there."""
    checksum: Checksum | None = None
    """Of the whole object, where the answer brought one."""
    ranged: bool = True
    """False: it can be read in order only."""


@dataclass(slots=True, eq=False)
class OpenObject(Shard):
    """One object as its first answer had it, with the number of its readers."""

    users: int = 0
    in_order: bool = False
    """Whether it may be read in order where it has to be."""
    pinned: tuple[str, int | None] | None = None
    """Identity and size of the facts that it has to have; None: those of its first answer."""
    facts: Facts | None = None
    """Once something of it has come."""
    origin: Any = None
    """Set by the fetcher: the origin that it is read from."""
    idle_since: float = 0.0


def facts_of(obj: OpenObject) -> Facts:
    """Return the facts of an object of which some bytes have come."""
    state: ShardState = obj.state
    fields, size, version = state.fields, obj.size, state.version
    if obj.streamed:
        said = fields.get("content-length", "")
        plain = "transfer-encoding" not in fields and fields.get("content-encoding", "identity") in ("", "identity")
        size = int(said) if plain and said.isascii() and said.isdigit() else None
        version = state.stream.version if state.stream is not None else ""
    told = {name: text for name, text in fields.items() if name in _TOLD or (
        name.startswith(_TOLD_OF_ALL) and "content-range" not in fields)}  # fmt: skip
    return Facts(size, version, MappingProxyType(told), state.checksum, not obj.streamed or size == 0)


class OpenObjects:
    """Objects that are read now, or were a moment ago: at most a few hundred without readers. ``locate`` is called once
    for each."""

    def __init__(self, locate: Callable[[str], Location]) -> None:
        self._locate = locate
        self._current: dict[str, OpenObject] = {}
        self._idle: dict[OpenObject, None] = {}  # the longest first

    def __len__(self) -> int:
        return len(self._current)

    def take(self, url: str, facts: Facts | None = None) -> OpenObject:
        """The object at ``url`` that ``facts`` are of, for one more reader; without them the one that is read now. One
        that nobody reads is no answer to what an object is like now. `leave` it."""
        obj = self._current.get(url)
        wanted = None if facts is None else (facts.version, facts.size)
        if obj is None or not (obj.users if wanted is None else obj.pinned == wanted):
            obj = self.fresh(url, facts)
            obj.users = 1
            self.install(obj)
            return obj
        obj.users += 1
        self._idle.pop(obj, None)
        return obj

    def fresh(self, url: str, facts: Facts | None = None) -> OpenObject:
        """A fresh object: nothing of it has come, and no other reader gets it."""
        if facts is None:
            return OpenObject(0, url, state=ShardState(self._locate(url)))
        state = ShardState(self._locate(url), version=facts.version, etag=facts.fields.get("etag", ""))
        return OpenObject(0, url, size=facts.size, state=state, facts=facts, pinned=(facts.version, facts.size))

    def install(self, obj: OpenObject) -> None:
        """Give this object to later readers."""
        former = self._current.get(obj.url)
        self._current[obj.url] = obj
        if former is not None and not former.users:
            self._retire(former)
        if not obj.users:
            self._rest(obj)

    def leave(self, obj: OpenObject, *, failed: bool = False) -> None:
        """Count one reader less. After a failure no later reader gets it."""
        obj.users -= 1
        if failed and self._current.get(obj.url) is obj:
            del self._current[obj.url]
        if obj.users:
            return
        if self._current.get(obj.url) is obj:
            self._rest(obj)
        else:
            self._retire(obj)

    def look(self, now: float) -> None:
        """Forget objects without a reader for some seconds."""
        while self._idle and (obj := next(iter(self._idle))).idle_since < now - _KEPT_S:
            self._forget(obj)

    def close(self) -> None:
        """Forget all objects without readers."""
        while self._idle:
            self._forget(next(iter(self._idle)))

    def _rest(self, obj: OpenObject) -> None:
        obj.idle_since = asyncio.get_running_loop().time()
        self._idle[obj] = None
        if len(self._idle) > _KEPT:
            self._forget(next(iter(self._idle)))

    def _forget(self, obj: OpenObject) -> None:
        if self._current.get(obj.url) is obj:
            del self._current[obj.url]
        self._retire(obj)

    def _retire(self, obj: OpenObject) -> None:
        self._idle.pop(obj, None)
        state: ShardState = obj.state
        state.release()
