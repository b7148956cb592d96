"""Protocol of a store's backend: it describes how a shard is read and explains what went wrong. Where a request can be
had, the engine moves the body.

A shard is read in one of four ways (`Access`):

* `Request`: a ranged HTTP GET that the engine sends itself, zero-copy;
* `LocalFile`: positioned reads of a file;
* `Ranges`: ``read(start, stop)`` of some other client, copied into the slab;
* `Stream`: bytes in order only: a pipe, standard input, a server that cannot answer ranges.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from wds_async.errors import (
    AccessDenied,
    FetchTimeout,
    ObjectChanged,
    PipeError,
    ShardNotFound,
    StorageError,
    TransferError,
    UrlError,
)
from wds_async.redact import redact
from wds_async.storage.options import NO_OPTIONS, Options
from wds_async.storage.spec import StoreSpec
from wds_async.storage.stores import spec_of
from wds_async.urls import links, local_path, scheme

__all__ = [
    "Access",
    "Answer",
    "Backend",
    "BackendWrapper",
    "CacheEntry",
    "Call",
    "Checksum",
    "Contradiction",
    "CopiedFile",
    "Description",
    "Entry",
    "Fault",
    "Growing",
    "Guard",
    "LocalFile",
    "Location",
    "ObjectReplaced",
    "Pages",
    "Ranges",
    "RedirectLoop",
    "RefusedAnswer",
    "Request",
    "Stream",
    "Tls",
    "Verdict",
    "error_for",
]

Call = Callable[..., Awaitable[Any]]
"""``await call(function, *args)`` runs a blocking function on a thread."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Verification of the two sides of a TLS connection. The default is the system's authorities (``SSL_CERT_FILE``),
    and no certificate of our own."""

    verify: bool = True
    ca_file: str = ""
    """PEM file of the authorities that the server's certificate is verified against; "" for the system's."""
    certificate: str = ""
    """PEM file of our own certificate, with its key unless ``key`` names another file."""
    key: str = ""


class Guard(Protocol):
    """Protocol: rules for where requests may go, in a program that reads URLs of clients (the service)."""

    def why_not(self, host: str, address: str) -> str:
        """Return why no connection may go to ``address``, to which ``host`` resolved; "" where it may."""
        ...

    def leads(self, start: str, target: str) -> None:
        """Raise AccessDenied where a redirect from ``start`` to ``target`` may not be followed."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """A GET that the engine may send with ``Range`` added. ``url`` and ``headers`` may hold credentials: never log
    them.

    ``keeps_redirect``: where the request is redirected, later parts go straight to the new place (until that
    refuses); False follows the redirect anew each time. ``follows``: False takes a redirect for an answer that
    `Backend.classify` explains, because what is signed is good for one place only. ``renew_after``: an instant of
    ``time.monotonic``, after which the backend is asked for another one before a part is asked for. ``guard`` is asked
    before a redirect is followed. ``hops``: the URLs of the redirects that led here, oldest first.
    """

    url: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    keeps_redirect: bool = True
    follows: bool = True
    renew_after: float = math.inf
    tls: Tls = Tls()
    socket: str = ""
    """Path of the Unix socket that it is sent to, "" for the host that ``url`` names."""
    guard: Guard | None = field(default=None, repr=False, compare=False)
    hops: tuple[str, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A regular file; ``size`` in bytes, ``version`` changes when the file is replaced."""

    path: str
    size: int
    version: str


@runtime_checkable
class Ranges(Protocol):
    """An object of known ``size`` bytes whose ranges another client reads."""

    size: int
    version: str

    async def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``[start, stop)``; the engine notices fewer as a fault of the client."""
        ...


@runtime_checkable
class Stream(Protocol):
    """Bytes in order. ``restartable`` says whether opening again gives the same bytes from the start.

    A stream whose end nothing confirms (an HTTP body without a length ends with its connection) has an attribute
    ``open_ended``, which is True once it is open."""

    restartable: bool

    async def open(self) -> str:
        """Start, and return the version of what is read ("" where there is none)."""
        ...

    async def readinto(self, into: memoryview) -> int:
        """Fill ``into`` and return the number of bytes, 0 at the end."""
        ...

    async def close(self) -> None:
        """Stop now, also in the middle; idempotent."""
        ...


Access = Request | LocalFile | Ranges | Stream


@dataclass(frozen=True, slots=True)
class CopiedFile(LocalFile):
    """A shard's whole copy in a disk cache."""


class Growing(Protocol):
    """A file that another process is writing. Every method may block."""

    awaited: bool
    """True if the consumer has come to this shard: before that no consumer waits for it."""
    patience_s: float
    """Time limit of waiting for one more byte."""
    patience_lost: bool
    """Set where that was too long."""

    def open(self) -> None:
        """Open the file. FileNotFoundError if it is no longer there."""
        ...

    def read(self, into: memoryview, offset: int) -> int:
        """Return the bytes at ``offset`` that are there, 0 where there is none yet."""
        ...

    def ended(self, offset: int) -> bool | None:
        """Return True if the file is whole and ends at ``offset``, False if its writer is gone, None otherwise."""
        ...

    def close(self) -> None:
        """Close the file; may be called again."""
        ...


class CacheEntry(Protocol):
    """One shard of one reader, as its cache sees it and the engine needs it."""

    @property
    def check(self) -> bool:
        """True if a copy is compared with its object before it is used."""
        ...

    def replaced(self) -> None:
        """Note that the object has changed since its copy was made: `begin`, which is called again, must not give that
        copy. Blocks.
        """
        ...

    def begin(self) -> CopiedFile | Growing | None:
        """Return what to read: the copy on disk, the file that grows into one, or (None) the object in its store.
        Blocks. Never returns a growing file when called again because one stopped growing.
        """
        ...

    def lose(self) -> None:
        """Note that the copy that `begin` gave cannot be read; the object in the store is read from now on."""
        ...


@dataclass(frozen=True)
class Location:
    """The place of a shard: ``url`` as the user wrote it (expanded), ``target`` after rewriting, and ``kind``, that of
    a spec in `stores`, or ``plugin:`` and the scheme for a store of an installed package. Each part of ``target`` is
    parsed once."""

    url: str
    target: str
    kind: str
    options: Options = field(default=NO_OPTIONS, compare=False)
    """Options for its store (``storage_options``)."""
    fallback: Location | None = field(default=None, compare=False)
    """The location to read from when its store cannot be reached (``WDS_AIS_FALLBACK``)."""
    entry: CacheEntry | None = field(default=None, compare=False)
    """The shard's entry in a disk cache, where there is one: it decides at the time of reading how to read it."""

    @functools.cached_property
    def scheme(self) -> str:
        """The scheme of ``target``, see `urls.scheme`."""
        return scheme(self.target)

    @functools.cached_property
    def path(self) -> str | None:
        """The path of a local file, None for anything else."""
        return local_path(self.target) if self.kind == "local" else None

    @functools.cached_property
    def links(self) -> list[str]:
        """The links of an fsspec chain; ``[target]`` for anything else."""
        return links(self.target)

    @functools.cached_property
    def server(self) -> str:
        """Scheme and host (of a chain, those that it ends at), by which attempts and failures are counted."""
        return "/".join(self.target.rpartition("::")[2].split("/", 3)[:3])

    @functools.cached_property
    def shown(self) -> str:
        """``url`` without secrets, for messages."""
        return redact(self.url)

    @property
    def spec(self) -> StoreSpec:
        """The facts of its store."""
        return spec_of(self.kind)

    @property
    def in_order(self) -> bool:
        """True if its store can only be read from the start."""
        return self.entry is None and self.spec.in_order


class Verdict(enum.Enum):
    """The meaning of an answer or exception for the next attempt."""

    TRANSIENT = "transient"
    EXPIRED = "expired"
    """The request lapsed, or another one is to be tried, which `Backend.access` gives."""
    DENIED = "denied"
    MISSING = "missing"
    CHANGED = "changed"
    STALLED = "stalled"
    COMMAND = "command"
    FATAL = "fatal"

    @property
    def retryable(self) -> bool:
        """True if another attempt can help."""
        return self in (Verdict.TRANSIENT, Verdict.EXPIRED, Verdict.STALLED)


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer that is not the bytes asked for. ``excerpt``: the beginning of its body."""

    status: int
    fields: Mapping[str, str]
    excerpt: bytes = b""


class RefusedAnswer(Exception):
    """Carrier of an `Answer` from where it was read to where it is classified."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"HTTP {answer.status}")
        self.answer = answer


class Contradiction(ConnectionError):
    """The answer contradicts the request: other bytes than those asked for, or not as many as it says."""


class RedirectLoop(Exception):
    """Redirects that lead back to where they began, or on without end. Its text has the hops, redacted."""


class ObjectReplaced(Exception):
    """The object is not the one that was read before."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a listing: an object, or a folder, whose ``url`` ends with "/". ``size`` (bytes) is None for a
    folder, and for an object whose store does not tell it (a web server's index page). ``modified`` is seconds since
    1970."""

    url: str
    size: int | None
    modified: float | None = None
    version: str = ""
    """Version that the object's reader is given (`ShardStream.version`); "" where the listing does not tell."""


@dataclass(frozen=True, slots=True)
class Description:
    """Description for people of how a shard is read: its ``store``, its ``endpoint`` (a URL), the ``identity`` that is
    used (never a secret), and whether the engine sends the requests itself (``direct``) or ``why`` not.
    """

    store: str
    endpoint: str
    identity: str
    direct: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer or exception, explained: what it means, in words, and what the user can do."""

    verdict: Verdict
    reason: str
    advice: str = ""
    retry_after_s: float | None = None
    throttled: bool = False
    """The store throttles: the engine uses fewer connections for a while."""
    contradicts: bool = False
    """The answer is not one to the request: a broken server, which is tried less often."""
    connection_refused: bool = False
    """The port is closed: where a shard can be read elsewhere, it soon is."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """The checksum of an object, from its store or a file beside it. ``algorithm``: ``crc32c``,
    ``md5``, ``sha256``, …; ``digest``: its bytes, big-endian; ``source``: where it is said, for messages."""

    algorithm: str
    digest: bytes
    source: str = ""


class Backend:
    """Base of the stores' backends. `access`, `describe` and `classify` are each store's own; by default a store gives
    no requests and no listing, keeps no checksums, and has nothing to renew or release. Methods that may block are
    ``async`` and run on the engine's loop."""

    async def access(self, location: Location) -> Access:
        """Return how to read a shard (rewritten and routed). Called again once a `Request` is past its
        ``renew_after``, and after `Verdict.EXPIRED`: never the same one then."""
        raise NotImplementedError

    async def describe(self, location: Location) -> Description:
        """Describe how a shard is read. May ask for credentials, but reads nothing."""
        raise NotImplementedError

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        """Explain an answer or exception of this store. The only place where foreign errors are read.

        `Verdict.EXPIRED` says that `access` will now give another request (fresh credentials, another region): the
        engine asks for it at once, and does not count that as a fault."""
        raise NotImplementedError

    def entries(self, location: Location) -> AsyncIterator[Entry]:
        """Yield what is in a folder, whose ``target`` ends with "/": objects, and folders one level down, page by page.

        A folder that is empty and one that does not exist may look the same. UrlError where the store lists nothing.
        """
        raise UrlError(
            f"{location.shown}: this kind of URL cannot be listed; name the shards, with braces {{000..999}}"
        )

    def streamed(self, request: Request) -> Stream:
        """Return the same object as a stream, for a server that does not answer ranges."""
        raise TypeError(f"{type(self).__name__} gives no requests")

    def renew(self, location: Location) -> None:
        """Forget the credentials of ``location``, so that `access` reads them anew (files, environment, tokens).
        Called after an unexpected refusal, once for each part; must cost nothing, and be harmless where they were
        renewed a moment ago."""

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        """Return the checksum of the whole object (as stored) from the head of an answer, None without one;
        ``fields`` in lower case. The strongest of several that costs little: CRC-32C before others."""
        return None

    def expect(self, location: Location) -> None:
        """Note that the shard will be read soon, after those before. Must cost nothing, and never raise."""

    async def batch(self, wanted: Sequence[tuple[Location, int, int]]) -> Sequence[memoryview | None] | None:
        """Return ranges of objects (location, start, stop), read by one request, whatever the objects' versions are.
        None in place of a range: it has to be read by a request of its own, which raises what is wrong. None in place
        of all: no request was made."""
        return None

    async def remote_checksum(self, location: Location) -> Checksum | None:
        """Request the checksum of the whole object (``verify="always"``); None where the store keeps none."""
        return None

    async def create(self, location: Location, data: bytes) -> bool:
        """Create an object with ``data`` where there is none; it appears whole. Return False where there is one, which
        stays as it is. UrlError where the store cannot decide that by itself."""
        raise UrlError(
            f"{location.shown}: this kind of store cannot create an object only where there is none; write to a local "
            "or shared folder, S3, Google Cloud Storage, Azure, SFTP, or a web server that honours If-None-Match"
        )

    async def remove(self, location: Location) -> None:
        """Remove the object; none that is not there is an error. UrlError where the store removes nothing."""
        raise UrlError(f"{location.shown}: objects of this kind of store cannot be removed; remove it by its own tools")

    async def certainly_creates(self, location: Location) -> bool:
        """Return whether the store is known to keep the promise of `create`. A server that ignores the condition
        replaces the object and reports success."""
        return False

    async def close(self) -> None:
        """Release clients and sessions."""


class BackendWrapper(Backend):
    """A backend that hands on to ``store`` what it does not override."""

    def __init__(self, store: Backend) -> None:
        self.store = store

    async def access(self, location: Location) -> Access:
        return await self.store.access(location)

    async def describe(self, location: Location) -> Description:
        return await self.store.describe(location)

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        return self.store.classify(outcome, location)

    def entries(self, location: Location) -> AsyncIterator[Entry]:
        return self.store.entries(location)

    def streamed(self, request: Request) -> Stream:
        return self.store.streamed(request)

    def renew(self, location: Location) -> None:
        self.store.renew(location)

    def checksum(self, fields: Mapping[str, str]) -> Checksum | None:
        return self.store.checksum(fields)

    def expect(self, location: Location) -> None:
        self.store.expect(location)

    async def batch(self, wanted: Sequence[tuple[Location, int, int]]) -> Sequence[memoryview | None] | None:
        return await self.store.batch(wanted)

    async def remote_checksum(self, location: Location) -> Checksum | None:
        return await self.store.remote_checksum(location)

    async def create(self, location: Location, data: bytes) -> bool:
        return await self.store.create(location, data)

    async def remove(self, location: Location) -> None:
        await self.store.remove(location)

    async def certainly_creates(self, location: Location) -> bool:
        return await self.store.certainly_creates(location)

    async def close(self) -> None:
        await self.store.close()


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
    """Return the error for a fault that ends a read; ``url`` is already redacted."""
    tried = f" after {attempts} attempts" if attempts > 1 else ""
    advice = f" {fault.advice}" if fault.advice else ""
    return _ERRORS[fault.verdict](f"{url} at byte {offset}: {fault.reason}{tried}.{advice}").at(url, offset)


class Pages:
    """Marks (continuation tokens or links) of the pages of one listing; each may come once."""

    def __init__(self, store: str, url: str) -> None:
        self._store, self._url = store, url
        self._marks: set[int] = set()

    def turn(self, mark: str) -> None:
        """Go on by ``mark``. Raise TransferError where it came before: the listing would never end."""
        if hash(mark) in self._marks:
            raise TransferError(
                f"{redact(self._url)} cannot be listed: {self._store} repeats its continuation token or link, so that "
                "its listing never ends. The store, or something between, is broken; name the shards with braces."
            )
        self._marks.add(hash(mark))
