"""Destinations for shards: local files, standard output, commands, HTTP servers, and every store that fsspec knows.

A shard appears under its name whole, at `Sink.commit`, or not at all. All calls are blocking: a writer has nothing else
to do meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

from wds_async.config import transfer_config
from wds_async.errors import (
    AccessDenied,
    ConfigError,
    MissingExtra,
    PipeError,
    ShardNotFound,
    StorageError,
    UrlError,
)
from wds_async.redact import redact
from wds_async.storage import pipe, registry
from wds_async.storage.base import Backend, Location
from wds_async.storage.checksums import digest_of
from wds_async.storage.filewriting import WRITE_BYTES, write_all
from wds_async.storage.options import StorageOptions
from wds_async.storage.retry import Retries, ask_backend
from wds_async.storage.storeloop import StoreLoop
from wds_async.storage.stores import load
from wds_async.storage.user_openers import GOPEN_BUFSIZE, named_opener

__all__ = ["FileSink", "LocalSink", "PipeSink", "Sink", "open_sink", "publish", "publish_new", "publish_text"]

T = TypeVar("T")
Data = bytes | bytearray | memoryview
_WITHOUT_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK})


class Sink(Protocol):
    """One object that is being written. After `commit` or `abort` nothing more is written."""

    def write(self, data: Data) -> int:
        """Take all of ``data``; returns its bytes."""
        ...

    def flush(self) -> None:
        """Hand on what is buffered, where that means something."""
        ...

    def commit(self) -> None:
        """Publish: the object appears, whole. Once committed or aborted this does nothing."""
        ...

    def abort(self) -> None:
        """Give up: nothing appears, and what was there before stays. Once committed or aborted this does nothing."""
        ...


class LocalSink:
    """A file that is written under another name in its folder and gets its own when it is complete.

    Devices and FIFOs, which cannot be replaced, are written directly. ``temporary`` is the path meanwhile.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)  # a link stays, what it points to is replaced
        self.temporary: str | None = None
        if os.path.isdir(self.path):
            raise IsADirectoryError(errno.EISDIR, "this is a directory; name a file in it", path)
        if not os.path.exists(self.path) or os.path.isfile(self.path):
            folder, name = os.path.split(self.path)
            self.temporary = os.path.join(folder, f".{name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
        self._offset = 0
        self._open = True
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._stream = open(self.temporary or self.path, "wb")  # noqa: SIM115 - closed by commit or abort
        except OSError as exn:
            self._fail(exn)

    def write(self, data: Data) -> int:
        try:
            if len(data) <= WRITE_BYTES:
                self._stream.write(data)
            else:
                self._stream.flush()
                write_all(self._stream.fileno(), memoryview(data).cast("B"))
        except OSError as exn:
            self._fail(exn)
        self._offset += len(data)
        return len(data)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as exn:
            self._fail(exn)

    def commit(self) -> None:
        if not self._open:
            return
        try:
            self._stream.close()
            if self.temporary is not None:
                os.replace(self.temporary, self.path)
        except OSError as exn:
            self.abort()
            self._fail(exn)
        self._open = False

    def commit_new(self) -> bool:
        """Publish only where there is no file of this name, and return whether it did; what is there stays as it is.
        The file is on the disk then."""
        if self.temporary is None:
            self.abort()
            return False
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            os.link(self.temporary, self.path)
        except FileExistsError:  # where the answer of a network file system was lost, it may be our own link
            return os.stat(self.temporary).st_nlink > 1
        except OSError as exn:
            if exn.errno in _WITHOUT_LINKS:
                raise UrlError(
                    f"{self.path}: this file system has no links, by which a file is created only where there is none; "
                    "write to the store itself (s3://, gs://, az://), or to another file system"
                ) from exn
            self._fail(exn)
        finally:
            self.abort()
        return True

    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):  # a full disk must not hide the error that led here
            self._stream.close()
        if self.temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.temporary)

    def _fail(self, exn: OSError) -> NoReturn:
        folder = os.path.dirname(self.path)
        kind, text = StorageError, f"at byte {self._offset}: {exn.strerror or exn}. Check the disk."
        if isinstance(exn, FileNotFoundError):
            kind, text = ShardNotFound, f"the folder {folder!r} is not there (any more), or cannot be made"
        elif isinstance(exn, FileExistsError | NotADirectoryError):
            text = f"{folder!r} cannot be a folder: a file is in its place"
        elif isinstance(exn, PermissionError):
            kind, text = AccessDenied, f"{exn.strerror}. Check the permissions of the folder {folder!r}."
        error = kind(f"{self.path}: {text}")
        error.errno = exn.errno
        raise error from exn


class FileSink:
    """An open binary file (standard output, or what a user's ``gopen_schemes`` entry returned). ``closes``: whether
    it is ours to close."""

    def __init__(self, stream: Any, *, closes: bool) -> None:
        self._stream, self._closes, self._open = stream, closes, True

    def write(self, data: Data) -> int:
        self._stream.write(data)
        return len(data)

    def flush(self) -> None:
        if hasattr(self._stream, "flush"):
            self._stream.flush()

    def commit(self) -> None:
        if self._open:
            self._open = False
            self._stream.close() if self._closes else self.flush()

    def abort(self) -> None:
        """Stop. What was written cannot be taken back: a tar breaks off. A file of ours is closed."""
        if self._open:
            self._open = False
            with contextlib.suppress(Exception):  # must not hide the error that led here
                self._stream.close() if self._closes else self.flush()


class PipeSink:
    """The standard input of a command. `commit` waits for it; a status other than 0 is `PipeError`. `abort` kills
    the command and whatever it started; what it has done by then is its own affair."""

    def __init__(self, url: str) -> None:
        command = url.removeprefix("pipe:").strip()
        if not command:
            raise UrlError("pipe: has no command; write pipe:COMMAND, for instance pipe:cat > x.tar")
        self._url, self._offset = url, 0
        self._process: Any = pipe.start(command, writes=True, shell=True)

    def write(self, data: Data) -> int:
        if self._process is None:
            raise ValueError(f"{redact(self._url)}: written to after commit or abort")
        try:
            self._process.stdin.write(data)
        except OSError as exn:
            self._fail(self._finish(), exn)
        self._offset += len(data)
        return len(data)

    def flush(self) -> None:
        if self._process is None:
            return
        try:
            self._process.stdin.flush()
        except OSError as exn:
            self._fail(self._finish(), exn)

    def commit(self) -> None:
        if self._process is None:
            return
        self.flush()
        if status := self._finish():
            self._fail(status, None)

    def _finish(self) -> int:
        process, self._process = self._process, None
        try:
            return pipe.finish_writing(process)
        except BaseException:  # Ctrl-C while the command is waited for
            pipe.stop(process)
            raise

    def abort(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            pipe.stop(process)

    def _fail(self, status: int, exn: OSError | None) -> NoReturn:
        what = pipe.describe_status(status) if status else "the command ended before it had read everything"
        raise PipeError(
            f"{redact(self._url)} at byte {self._offset}: {what}. Run it in a shell to see what it says."
        ) from exn


def open_sink(url: str, *, options: Mapping[str, Any] | StorageOptions | None = None, final: bool = False) -> Sink:
    """Begin to write ``url``: a path or ``file:`` URL, ``-``, ``pipe:command``, ``http(s)://`` (PUT), or a URL of
    fsspec. It is rewritten (``WDS_REWRITE``) and checked against ``WDS_SECURE`` as for reading; the program's opener
    for its scheme (``gopen_schemes``) is called as ``opener(url, "wb", bufsize)``; a ``final`` URL is what such an
    opener was given, neither rewritten nor given to it again.

    ``options`` (by scheme, or without) go to the store's client, see `StorageOptions`. HTTP bodies, and what goes to
    stores without multipart upload, are gathered in a temporary file (``TMPDIR``) and sent at `Sink.commit`.

    Raises UrlError for a scheme that nothing knows, UnsafeContent for what secure mode forbids, MissingExtra where the
    filesystem's package is not installed, ConfigError for options that nothing takes, and errors of StorageError
    (with FileNotFoundError or PermissionError mixed in) where the target cannot be made.
    """
    place = registry.locate(url, final=final, options=StorageOptions(options))
    target = place.target
    if place.options and place.kind in ("local", "stdin", "pipe", "opener"):
        raise ConfigError(f"{redact(url)}: nothing here takes the options {sorted(place.options)}")
    if place.path is not None:
        return LocalSink(place.path)
    if place.kind == "stdin":
        return FileSink(sys.stdout.buffer, closes=False)
    if place.kind == "pipe":
        return PipeSink(target)
    if place.kind == "opener":
        return FileSink(named_opener(place)(target, "wb", GOPEN_BUFSIZE), closes=True)
    sink: Sink = load(place.spec.sink)(place)
    return sink


def publish(url: str, data: Data, options: Mapping[str, Any] | StorageOptions | None = None) -> None:
    """Write a small file to ``url``; it appears whole or not at all. Raises what `open_sink` does."""
    sink = open_sink(url, options=options)
    try:
        sink.write(data)
        sink.commit()
    except BaseException:
        sink.abort()
        raise


def publish_new(url: str, data: Data, options: Mapping[str, Any] | StorageOptions | None = None) -> bool:
    """Write a small file to ``url`` where there is none; it appears whole. Return False where there is one, which stays
    as it is. Of many writers at once, on whatever machines, exactly one has True.

    It is decided by the store: a file system by a link, S3, Azure and web servers by ``If-None-Match: *``, Google Cloud
    Storage by ``ifGenerationMatch=0``, SFTP by renaming. Where an answer is lost and the attempt repeated, True may
    also mean that another writer had created the same bytes. Raises what `open_sink` does, and UrlError where the store
    cannot decide it, or is seen to replace objects nevertheless.
    """
    place = registry.locate(url, options=StorageOptions(options))
    if place.path is not None:
        sink = LocalSink(place.path)
        try:
            sink.write(data)
            return sink.commit_new()
        except BaseException:
            sink.abort()
            raise
    if place.in_order:
        raise UrlError(f"{redact(url)}: a command or an opener of the program cannot create only where there is none")
    with StoreLoop() as loop:
        return loop.run(_Creation(loop.backends.of(place), place, bytes(data)).run())


def publish_text(url: str, text: str, options: Mapping[str, Any] | StorageOptions | None = None) -> None:
    """Write a small text file, in UTF-8, to ``url``, as `publish` does."""
    publish(url, text.encode("utf-8"), options)


_honoured: set[Any] = set()
"""Servers that refused a second creation, in this process."""


class _Creation:
    """The creation of one object where there is none, with retries.

    A server that is not known to decide that by itself is tried first, once a process: it has to refuse a second
    creation."""

    def __init__(self, backend: Backend, location: Location, data: bytes) -> None:
        self._backend, self._location, self._data = backend, location, data

    async def run(self) -> bool:
        location = self._location
        server = location.kind, location.server, location.options
        if server in _honoured or await self._ask(lambda: self._backend.certainly_creates(location)):
            return await self._once()
        if await self._is_there():
            return False
        created = await self._once()
        if await self._create():  # and not `_once`, for which our own object is a success
            raise UrlError(
                f"{location.shown}: its server replaces an object although it was asked to create one only where there "
                "is none (If-None-Match: *), so that writers would overwrite each other; write to a store that honours "
                "that: a local or shared folder, S3, Google Cloud Storage, Azure"
            )
        _honoured.add(server)
        return created

    async def _once(self) -> bool:
        """Return whether the object was created. Where an attempt failed, the object that the next one finds may be
        its work."""
        retries = Retries(transfer_config().retry)
        return await self._create(retries) or (retries.fault is not None and await self._is_ours())

    async def _create(self, retries: Retries | None = None) -> bool:
        return await self._ask(lambda: self._backend.create(self._location, self._data), retries)

    async def _is_there(self) -> bool:
        try:
            await self._ask(lambda: self._backend.remote_checksum(self._location))
        except (AccessDenied, ShardNotFound):  # a store may deny what is not there
            return False
        return True

    async def _is_ours(self) -> bool:
        """Return whether the object's checksum is that of our data; False where its store keeps none."""
        checksum = await self._ask(lambda: self._backend.remote_checksum(self._location))
        if checksum is None:
            return False
        with contextlib.suppress(MissingExtra, ValueError):
            digest = digest_of(checksum.algorithm)
            digest.update(memoryview(self._data))
            return digest.digest() == checksum.digest
        return False

    async def _ask(self, call: Callable[[], Awaitable[T]], retries: Retries | None = None) -> T:
        return await ask_backend(self._backend, self._location, call, retries)
