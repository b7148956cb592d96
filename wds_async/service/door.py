"""Who may have what at once: the questions of the fast lane, answered by the functions that the slow way asks too.

A request is **warm** where it can be answered without waiting: its name is understood and allowed, its sender is let
in, and every byte that it wants lies on disk. All else is None here, and the slow way says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Protocol

from wds_async.service.heads import Head, span_of

__all__ = ["Door", "Object", "Pass", "Rules", "Warm"]

_KEPT = 4096  # targets, and heads of objects, that are remembered
_LONG_BYTES = 1024  # of a target that is not


class Object(Protocol):
    """A reference to what the cache has of one object (see `chunkcache`)."""

    url: str
    fd: int

    @property
    def size(self) -> int | None: ...

    @property
    def facts(self) -> object: ...

    @property
    def whole(self) -> bool: ...

    def ready(self, start: int, stop: int) -> int: ...

    def served(self, count: int) -> None: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Pass:
    """What a target means: the ``url`` that is read for it, and by which ``api`` it was asked for (a label)."""

    url: str
    api: str


class Rules(Protocol):
    """What the fast lane asks of the service. Nothing here waits; what is not known at once is None or False."""

    def name(self, target: str) -> Pass | None:
        """What ``target`` (a raw path with its query) stands for; None where it is no object that is known to be
        allowed. The answer is remembered."""
        ...

    def who(self, fields: Mapping[bytes, bytes], peer: str, *, local: bool) -> tuple[str, str] | None:
        """The client's name, and its tenant; None where it is not let in."""
        ...

    def peek(self, url: str, tenant: str) -> Object | None:
        """What the cache has of ``url``, where its identity is fresh."""
        ...

    def fields(self, found: Object, api: str) -> Mapping[str, str]:
        """The fields of every answer about the object, ``Server`` and ``ETag`` among them."""
        ...

    def enter(self, client: str) -> bool:
        """Count a request of ``client``; False where it has too many under way."""
        ...

    def leave(self, client: str) -> None:
        """It is over."""
        ...

    def heard(self, client: str, url: str) -> None:
        """``client`` reads ``url`` now: its plan moves on."""
        ...


@dataclass(slots=True)
class Warm:
    """An answer that is ready: a ``head``, then bytes ``at`` to ``stop`` of the object's file."""

    head: bytes
    status: int
    found: Object
    at: int
    stop: int
    client: str
    api: str
    keep_alive: bool
    began: float = 0.0
    first_s: float = 0.0
    """Until its first byte was sent."""
    sent: int = 0
    """Bytes of the body that were."""


class Door:
    """Answers by `Rules`, and remembers what does not change."""

    def __init__(self, rules: Rules, *, clock: Callable[[], float] = time.time) -> None:
        self.rules = rules
        self._clock = clock
        self._names: dict[bytes, Pass] = {}
        self._heads: dict[tuple[str, str, bool], tuple[object, bytes, bytes]] = {}
        self._second = -1
        self._date = b""

    def warm(self, head: Head, peer: str, *, local: bool = False) -> Warm | None:
        """The answer to ``head``, None where the slow way has it. Who takes it calls `over` at its end."""
        opened = self.opened(head, peer, local=local)
        if opened is None:
            return None
        found, passed, client = opened
        answer = None
        try:
            answer = self._answer(head, found, passed, client)
            if answer is not None and not self.rules.enter(client):
                answer = None
        finally:
            if answer is None:
                found.release()
        if answer is not None and head.method == "GET":
            self.rules.heard(client, passed.url)
        return answer

    def opened(self, head: Head, peer: str, *, local: bool) -> tuple[Object, Pass, str] | None:
        """The object that ``head`` asks for, with a reference to it, and who asks; None where it is not known, or not
        to be had by who asks."""
        passed = None if head.conditional else self._names.get(head.target) or self._named(head.target)
        if passed is None:
            return None
        who = self.rules.who(head.fields, peer, local=local)
        if who is None:
            return None
        found = self.rules.peek(passed.url, who[1])
        return None if found is None else (found, passed, who[0])

    def over(self, answer: Warm) -> None:
        """The answer was sent, or as much of it as its client took."""
        answer.found.served(answer.sent)
        answer.found.release()
        self.rules.leave(answer.client)

    def fields(self, found: Object, api: str) -> tuple[bytes, bytes]:
        """The lines of every answer about an object, and its ETag."""
        key, facts = (found.url, api, found.whole), found.facts
        known = self._heads.get(key)
        if known is None or known[0] is not facts:
            if len(self._heads) >= _KEPT:
                self._heads.clear()
            fields = self.rules.fields(found, api)
            lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode("latin-1")
            etag = next((value for name, value in fields.items() if name.lower() == "etag"), "")
            known = self._heads[key] = facts, lines, etag.encode("latin-1")
        return known[1], known[2]

    def date(self) -> bytes:
        """The field ``Date``, now."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._date = second, b"Date: %s\r\n" % formatdate(second, usegmt=True).encode("ascii")
        return self._date

    def _named(self, target: bytes) -> Pass | None:
        passed = self.rules.name(target.decode("ascii"))
        if passed is not None and len(target) <= _LONG_BYTES:
            if len(self._names) >= _KEPT:
                self._names.clear()
            self._names[target] = passed
        return passed

    def _answer(self, head: Head, found: Object, passed: Pass, client: str) -> Warm | None:
        size = found.size
        if size is None or found.fd < 0:
            return None
        lines, etag = self.fields(found, passed.api)
        wanted = head.fields.get(b"if-match")
        if wanted is not None and (wanted != etag or wanted[:1] != b'"'):
            return None
        get, asked = head.method == "GET", head.fields.get(b"range")
        start, stop, line, span = 0, size, b"HTTP/1.1 200 OK\r\n", b""
        if asked is not None:
            cut = span_of(asked, size) if get else None
            if cut is None:
                return None
            start, stop = cut
            line, span = (
                b"HTTP/1.1 206 Partial Content\r\n",
                b"Content-Range: bytes %d-%d/%d\r\n" % (start, stop - 1, size),
            )
        if get and start < stop and found.ready(start, stop) < stop:
            return None
        close = b"" if head.keep_alive else b"Connection: close\r\n"
        raw = b"%s%s%sContent-Length: %d\r\n%s%s\r\n" % (line, lines, span, stop - start, self.date(), close)
        status = 206 if span else 200
        return Warm(raw, status, found, start, stop if get else start, client, passed.api, head.keep_alive)
