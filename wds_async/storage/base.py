"""What a backend is: it describes how a shard is read and explains what went wrong. It moves no bodies itself
where a request can be had.

A shard is read in one of four ways (`Access`):

* `Request`: a ranged HTTP GET that the engine sends itself, zero-copy;
* `LocalFile`: positioned reads of a file;
* `Ranges`: ``read(start, stop)`` of some other client, copied into the slab;
* `Stream`: bytes in order only: a pipe, standard input, a server that cannot answer ranges.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from wds_async.errors import (
    AccessDenied,
    FetchTimeout,
    ObjectChanged,
    PipeError,
    ShardNotFound,
    StorageError,
    TransferError,
)

__all__ = [
    "Access",
    "Answer",
    "Backend",
    "Fault",
    "LocalFile",
    "Ranges",
    "RefusedAnswer",
    "Request",
    "Stream",
    "Verdict",
    "error_for",
]


@dataclass(frozen=True, slots=True)
class Request:
    """A GET that the engine may send with ``Range`` added. ``headers`` may hold credentials: never log them.

    ``keeps_redirect``: where the request is redirected, later parts go straight to the new place (until that
    refuses); False follows the redirect anew each time.
    """

    url: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    keeps_redirect: bool = True


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A regular file; ``size`` in bytes, ``identity`` changes when the file is replaced."""

    path: str
    size: int
    identity: str


class Ranges(Protocol):
    """An object of known ``size`` bytes whose ranges another client reads."""

    size: int
    identity: str

    async def read(self, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)``; fewer are a fault of the client that the engine notices."""
        ...


class Stream(Protocol):
    """Bytes in order. ``restartable`` says whether opening again gives the same bytes from the start."""

    restartable: bool

    async def open(self) -> str:
        """Start, and return the identity of what is read ("" where there is none)."""
        ...

    async def readinto(self, into: memoryview) -> int:
        """The number of bytes written to ``into``, 0 at the end."""
        ...

    async def close(self) -> None:
        """Stop now, also in the middle; idempotent."""
        ...


Access = Request | LocalFile | Ranges | Stream


class Verdict(enum.Enum):
    """What an answer or exception means for the next attempt."""

    TRANSIENT = "transient"
    EXPIRED = "expired"
    DENIED = "denied"
    MISSING = "missing"
    CHANGED = "changed"
    STALLED = "stalled"
    COMMAND = "command"
    FATAL = "fatal"

    @property
    def again(self) -> bool:
        """Whether another attempt can help."""
        return self in (Verdict.TRANSIENT, Verdict.EXPIRED, Verdict.STALLED)


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer that is not the bytes asked for. ``excerpt``: the beginning of its body."""

    status: int
    fields: Mapping[str, str]
    excerpt: bytes = b""


class RefusedAnswer(Exception):
    """Carries an `Answer` from where it was read to where it is classified."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"HTTP {answer.status}")
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer or exception, explained: what it means, in words, and what the user can do."""

    verdict: Verdict
    reason: str
    advice: str = ""
    retry_after_s: float | None = None


class Backend(Protocol):
    """One kind of store. Methods that may block are ``async`` and run on the engine's loop."""

    async def access(self, url: str) -> Access:
        """How the shard at ``url`` (rewritten and routed) is read."""
        ...

    def streamed(self, request: Request) -> Stream:
        """The same object in order only, for a server that does not answer ranges as asked."""
        ...

    def classify(self, outcome: Answer | BaseException) -> Fault:
        """What an answer or exception of this store means. The only place where foreign errors are read."""
        ...

    async def close(self) -> None:
        """Release clients and sessions."""
        ...


_ERRORS: dict[Verdict, type[StorageError]] = {
    Verdict.TRANSIENT: TransferError,
    Verdict.EXPIRED: AccessDenied,
    Verdict.DENIED: AccessDenied,
    Verdict.MISSING: ShardNotFound,
    Verdict.CHANGED: ObjectChanged,
    Verdict.STALLED: FetchTimeout,
    Verdict.COMMAND: PipeError,
    Verdict.FATAL: TransferError,
}


def error_for(fault: Fault, url: str, offset: int, attempts: int) -> StorageError:
    """The exception of the tree for a fault that ends a read; ``url`` is already redacted."""
    tried = f" after {attempts} attempts" if attempts > 1 else ""
    advice = f" {fault.advice}" if fault.advice else ""
    return _ERRORS[fault.verdict](f"{url} at byte {offset}: {fault.reason}{tried}.{advice}")
