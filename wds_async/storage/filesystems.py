"""The fsspec filesystems of one engine, and ranges and listings read through them.

They are made on the engine's loop, uncached (``skip_instance_cache``): an instance cached by fsspec belongs to another
loop, or to the parent of a fork. fsspec's own configuration (files and ``FSSPEC_*``) is applied by fsspec, whenever
one is made; ``storage_options`` go over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from wds_async.errors import UrlError
from wds_async.redact import redact
from wds_async.storage.base import Call, Contradiction, Entry, ObjectReplaced
from wds_async.storage.deadlines import question_s, transfer_s, with_deadline
from wds_async.storage.file_servers import (
    SERVER_EXTRAS,
    end_session,
    holds_connection,
    prepared_session,
    read_range,
    said_by_url,
    started,
)
from wds_async.storage.preload import client_imports, extra_needed
from wds_async.storage.stores import BY_SCHEME, STORES, load
from wds_async.urls import links

__all__ = [
    "Filesystems",
    "FsspecRanges",
    "filesystem_of",
    "is_async",
    "protocols",
]

_EXTRAS = {
    name: spec.extra for spec in STORES if spec.extra for name in (*spec.schemes, *spec.aliases, *spec.protocols)
}
_EXTRAS |= {name: extra for extra, names in SERVER_EXTRAS.items() for name in names}
"""The extra that brings the filesystem of a protocol."""


def protocols(url: str) -> list[str]:
    """Return the protocol of each link of an fsspec chain; "" for a path."""
    chain = links(url)
    return [link.partition("://")[0] if "://" in link or link is not chain[-1] else "" for link in chain]


def is_async(filesystem: Any) -> bool:
    """Return whether its coroutines are awaited on the loop; otherwise it blocks."""
    return bool(getattr(filesystem, "async_impl", False) and getattr(filesystem, "asynchronous", False))


def filesystem_of(url: str, options: Mapping[str, Any], *, asynchronous: bool = False) -> tuple[Any, str]:
    """Make a filesystem for ``url`` with ``options`` over those in the URL; return it and the path. Blocks (imports).

    MissingExtra where its package is not installed.
    """
    if len(links(url)) > 1:  # fsspec keeps the instances of chains, by all their arguments
        with _extra_needed(url):
            with client_imports():
                import fsspec  # noqa: PLC0415 (slow, and often not needed)

                for protocol in protocols(url):
                    if protocol:
                        fsspec.get_filesystem_class(protocol)
            with _own_classes(url):
                filesystem, path = fsspec.core.url_to_fs(url, **_prepared_chain(url, options))
            return filesystem, str(path)
    cls = _class_of(url)
    arguments: dict[str, Any] = {**said_by_url(cls._get_kwargs_from_urls(url)), **options, "skip_instance_cache": True}
    if asynchronous and getattr(cls, "async_impl", False):
        arguments["asynchronous"] = True
    with _extra_needed(url):
        return started(cls(**_prepared(protocols(url)[0], arguments))), str(cls._strip_protocol(url))


_registering = threading.Lock()


def _prepared(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a filesystem as its client needs them. Imports the client."""
    spec = BY_SCHEME.get(protocol)
    if spec is not None and spec.fsspec_options:
        prepared: dict[str, Any] = load(spec.fsspec_options)(options)
        return prepared
    return prepared_session(protocol, options)


def _prepared_chain(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a chain, in which each protocol has its own."""
    own = {name: _prepared(name, options.get(name, {})) for name in protocols(url) if name}
    return {**options, **{name: prepared for name, prepared in own.items() if prepared or name in options}}


def _own_class(protocol: str) -> Any:
    """Return the class that takes the place of fsspec's own for a protocol, None for most. Imports it."""
    spec = BY_SCHEME.get(protocol)
    return load(spec.fsspec_class) if spec is not None and spec.fsspec_class else None


@contextlib.contextmanager
def _own_classes(url: str) -> Iterator[None]:
    """While a chain is made, register our classes (`_own_class`) for its links; then those that were there before."""
    with client_imports():
        own = {name: cls for name in protocols(url) if (cls := _own_class(name)) is not None}
    if not own:
        yield
        return
    import fsspec  # noqa: PLC0415 (slow, and often not needed)

    with _registering:
        before = {name: fsspec.get_filesystem_class(name) for name in own}
        for name, cls in own.items():
            fsspec.register_implementation(name, cls, clobber=True)
        try:
            yield
        finally:
            for name, cls in before.items():
                fsspec.register_implementation(name, cls, clobber=True)


def _class_of(url: str) -> Any:
    protocol = protocols(url)[0]
    with _extra_needed(url), client_imports():
        import fsspec  # noqa: PLC0415 (slow, and often not needed)

        return _own_class(protocol) or fsspec.get_filesystem_class(protocol)


def _extra_needed(url: str) -> contextlib.AbstractContextManager[None]:
    extra = next((_EXTRAS[name] for name in protocols(url) if name in _EXTRAS), None)
    return extra_needed(redact(url), extra)


class Filesystems:
    """Filesystems of one store's backend, by protocol and what the URL names (host, user, account).

    Each of their calls has a deadline (`deadlines`): for a range `range_s`, for anything else `question_s`."""

    def __init__(
        self,
        call: Call,
        options: Mapping[str, Any],
        *,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 30.0,
    ) -> None:
        self._call, self._options, self._stall_s = call, options, stall_timeout_s
        self.question_s = question_s(connect_timeout_s, stall_timeout_s)
        self._made: dict[str, Any] = {}
        self._turns: dict[int, _Turn] = {}
        self._lost: list[Any] = []

    async def find(self, url: str) -> tuple[Any, str]:
        """Return the filesystem of ``url``, ready for use on this loop, and the path in it."""
        filesystem, path = await with_deadline(self._call(self._find, url), self.question_s)
        if is_async(filesystem) and hasattr(filesystem, "set_session"):
            await with_deadline(filesystem.set_session(), self.question_s)
        return filesystem, path

    async def ranges(self, url: str) -> FsspecRanges:
        """Return ``url`` as ranges that the filesystem's own client reads, which every store has."""
        filesystem, path = await self.find(url)
        info = await self.ask(filesystem, "info", path)
        if info.get("type") == "directory":
            raise IsADirectoryError(path)
        size = info.get("size")
        if size is None:
            raise UrlError(f"{redact(url)}: its filesystem does not tell its size; copy it to a store that does")
        return FsspecRanges(self, url, (filesystem, path), int(size), _version(info))

    async def ask(self, filesystem: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return what a method of the filesystem gives, by its coroutine where it has one."""
        if is_async(filesystem):
            return await with_deadline(getattr(filesystem, f"_{method}")(*args, **kwargs), self.question_s)
        return await self.take(filesystem, self.question_s, getattr(filesystem, method), *args, **kwargs)

    def range_s(self, size_bytes: int) -> float:
        """Return the deadline of a range, in seconds."""
        return transfer_s(self._stall_s, size_bytes)

    async def entries(self, url: str) -> AsyncIterator[Entry]:
        """Yield the entries of the folder ``url`` (which ends with "/"); those that are folders end with "/"."""
        filesystem, path = await self.find(url)
        for info in await self.ask(filesystem, "ls", path, detail=True):
            if str(info["name"]).strip("/") == path.strip("/"):  # fsspec lists a file as itself
                continue
            name = str(info["name"]).rstrip("/").rpartition("/")[2]
            if info.get("type") == "directory":
                yield Entry(f"{url}{name}/", None)
            elif name:
                yield Entry(url + name, info.get("size"), _modified(info))

    async def take(
        self, filesystem: Any, allowed_s: float, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a blocking filesystem, within ``allowed_s`` seconds of its turn. Where all calls go over one connection
        that breaks, or the call hangs, the next one is made by a new filesystem."""
        turn = self._turn(filesystem)
        try:
            return await turn.take(allowed_s, function, *args, **kwargs)
        except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError):
            raise
        except Exception as exn:
            if self.lost(filesystem) and not turn.hung:  # it was closed while this call waited for its turn
                raise ConnectionResetError("the connection broke") from exn
            turn.hung = turn.hung or isinstance(exn, TimeoutError)
            if turn.hung or holds_connection(filesystem):
                await self._leave(filesystem)
            raise

    async def _leave(self, filesystem: Any) -> None:
        """Use another filesystem from now on, unless it is of a chain: fsspec keeps those."""
        if any(made is filesystem for made in self._made.values()):
            self._lost.append(filesystem)
            self._made = {key: made for key, made in self._made.items() if made is not filesystem}
            with contextlib.suppress(TimeoutError):
                await with_deadline(self._call(end_session, filesystem), self.question_s)

    def lost(self, filesystem: Any) -> bool:
        """Return whether its connection broke."""
        return any(filesystem is one for one in self._lost)

    async def close(self) -> None:
        """Close all sessions."""
        for filesystem in self._made.values():
            await self._call(end_session, filesystem)
            session = getattr(filesystem, "_session", None)
            if is_async(filesystem) and session is not None and hasattr(session, "close"):
                await session.close()
            creator = getattr(filesystem, "_s3creator", None)  # what s3fs closes its clients by
            if is_async(filesystem) and creator is not None:
                await creator.__aexit__(None, None, None)
        self._made.clear()

    def _turn(self, filesystem: Any) -> _Turn:
        turn = self._turns.get(id(filesystem))
        if turn is None or turn.hung:
            turn = self._turns[id(filesystem)] = _Turn(self._call, turn.running if turn else threading.Lock())
        return turn

    def _find(self, url: str) -> tuple[Any, str]:
        if len(links(url)) > 1:
            return filesystem_of(url, self._options)
        cls = _class_of(url)
        key = f"{protocols(url)[0]} {sorted(cls._get_kwargs_from_urls(url).items())}"
        if key not in self._made:
            made, _ = filesystem_of(url, self._options, asynchronous=True)
            if self._made.setdefault(key, made) is not made:  # another thread was quicker
                end_session(made)
        return self._made[key], str(cls._strip_protocol(url))


_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified", "modified", "created")
_MODIFIED = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


def _version(info: dict[str, Any]) -> str:
    size = f"{info.get('size')} bytes"
    return next((f"{name} {info[name]}, {size}" for name in _VERSIONS if info.get(name)), size)


def _modified(info: dict[str, Any]) -> float | None:
    modified = next((info[name] for name in _MODIFIED if info.get(name)), None)
    if isinstance(modified, str):
        try:
            modified = datetime.datetime.fromisoformat(modified)
        except ValueError:
            return None
    if isinstance(modified, datetime.datetime):
        return modified.timestamp()
    return float(modified) if isinstance(modified, int | float) else None


class _Turn:
    """A lock for one call at a time: blocking filesystems promise nothing for threads. ``ftp`` has one connection, and
    ``simplecache`` shows a file to all while it is still being written."""

    def __init__(self, call: Call, running: threading.Lock) -> None:
        self._call = call
        self._queue = asyncio.Lock()
        self.running = running
        """Held by the thread of a call, also of one that was cancelled."""
        self.hung = False
        """A call has hung, so the waiting ones fail."""

    async def take(self, allowed_s: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            if not self.running.acquire(timeout=allowed_s):
                raise TimeoutError("an earlier call hangs")
            try:
                return function(*args, **kwargs)
            finally:
                self.running.release()

        async with self._queue:
            if self.hung:
                raise TimeoutError("an earlier call hangs")
            return await with_deadline(self._call(run), allowed_s)


class FsspecRanges:
    """An object whose ranges a filesystem reads, always with an explicit end (without one gcsfs asks three times).

    Such a client gives bytes, and not the answer that they came in. So their number is checked; and what the filesystem
    says of the object (size and its tag or time) is looked at again where a range comes short, and once when as many
    bytes as the object has were read. Not seen are: other bytes of the right number, an object that was replaced by
    one of the same size by a server that tells no tag and no time, and one that was replaced where the filesystem
    remembers its listings (FTP does)."""

    def __init__(self, owner: Filesystems, url: str, place: tuple[Any, str], size: int, version: str) -> None:
        self._owner, self._url = owner, url
        self._filesystem, self._path = place
        self.size, self.version, self._left = size, version, size

    async def read(self, start: int, stop: int) -> bytes:
        if self._owner.lost(self._filesystem):
            self._filesystem, self._path = await self._owner.find(self._url)
        filesystem, path, allowed_s = self._filesystem, self._path, self._owner.range_s(stop - start)
        if is_async(filesystem):
            data = await with_deadline(filesystem._cat_file(path, start=start, end=stop), allowed_s)
        else:
            data = await self._owner.take(filesystem, allowed_s, read_range, filesystem, path, start, stop)
        if len(data) != stop - start:
            await self._look_again()
        if not 0 < len(data) <= stop - start:  # a client may give less than it was asked for, but something
            raise Contradiction(f"asked for {stop - start} bytes, the filesystem gave {len(data)}")
        before, self._left = self._left, self._left - len(data)
        if before > 0 >= self._left:
            await self._look_again()
        return bytes(data) if not isinstance(data, bytes) else data

    async def _look_again(self) -> None:
        """Raise `ObjectReplaced` where the filesystem now describes another object."""
        version = self.version
        with contextlib.suppress(Exception):  # it cannot be had: nothing was seen
            version = _version(await self._owner.ask(self._filesystem, "info", self._path))
        if version != self.version:
            raise ObjectReplaced(f"it was {self.version} and is now {version}")
