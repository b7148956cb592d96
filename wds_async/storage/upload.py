"""Writing to stores: HTTP PUT, and fsspec's filesystems.

Object stores that stream (S3, GCS, Azure) get a multipart upload while the shard is being written, which becomes an
object only when it is completed. For every other store the bytes are gathered in a temporary file on this machine
(``TMPDIR``, as large as the shard) and sent at the end: an HTTP PUT can then be tried again and carries a
``Content-Length``, without which presigned URLs refuse it, and no store is left with half an object.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import random
import ssl
import tempfile
import threading
import urllib.parse
import weakref
from collections.abc import Mapping
from typing import IO, Any, NoReturn

from wds_async.config import proxy_for, transfer_config
from wds_async.errors import MissingExtra, ShardNotFound, StorageError
from wds_async.redact import redact
from wds_async.storage.base import Answer, Fault, Request, Verdict, error_for
from wds_async.storage.generic import EXTRAS, GenericBackend
from wds_async.storage.http import HttpBackend
from wds_async.urls import scheme

__all__ = ["HttpSink", "MultipartSink", "StoreSink", "fsspec_sink"]

Data = bytes | bytearray | memoryview

_TRANSACTIONAL = frozenset({"s3", "s3a", "gs", "gcs"})
"""Files of these obey ``autocommit=False``: ``close`` sends the last part, ``commit`` completes, ``discard`` aborts."""
_COMPLETED_BY_CLOSE = frozenset({"az", "abfs", "abfss"})
"""Blocks of these become a blob at ``close``; those of an upload that is never closed are dropped by the service."""
_RENAMED = frozenset({"arrow_hdfs", "ftp", "hdfs", "memory", "sftp", "smb", "ssh", "webhdfs"})
"""Here a file is visible while it is being sent, and renaming is cheap: it gets its name last."""
_REDIRECTS = frozenset({301, 302, 307, 308})
_MAX_REDIRECTS = 5
_BLOCK_BYTES = 1 << 20


class _Gathered:
    """A temporary file, sent by ``_send`` at `commit`; it is removed in any case."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.offset = 0
        descriptor, path = tempfile.mkstemp(prefix="wds-async-", suffix=".tmp")
        self._file: IO[bytes] = open(descriptor, "wb")  # noqa: SIM115 - closed by commit or abort
        self._remove = weakref.finalize(self, os.remove, path)
        self._path = path

    def write(self, data: Data) -> int:
        try:
            self._file.write(data)
        except OSError as exn:
            self._fail(exn)
        self.offset += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is sent before `commit`."""

    def commit(self) -> None:
        if not self._remove.alive:
            return
        try:
            self._file.close()
        except OSError as exn:
            self.abort()
            self._fail(exn)
        try:
            self._send(self._path)
        finally:
            self._remove()

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not hide the error that led here
            self._file.close()
        self._remove()

    def _fail(self, exn: OSError) -> NoReturn:
        error = StorageError(
            f"{redact(self.url)} at byte {self.offset}: it is gathered in {self._path!r}: {exn.strerror or exn}."
            " Set TMPDIR to a disk with more room."
        )
        error.errno = exn.errno
        raise error from exn

    def _send(self, path: str) -> None:
        raise NotImplementedError


class HttpSink(_Gathered):
    """PUT to a URL, tried again like a read (``WDS_RETRIES``, ``WDS_TIMEOUT``). ``headers`` are sent too, but
    not to another origin that the server redirects to."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._backend = HttpBackend()
        self._request = self._backend.request(url)
        host = urllib.parse.urlsplit(self._request.url).hostname or ""
        # Azure wants to be told what kind of blob a PUT makes; a SAS URL is otherwise all that is needed.
        blob = {"x-ms-blob-type": "BlockBlob"} if host.endswith(".blob.core.windows.net") else {}
        self._headers = {**blob, **dict(headers or {})}
        super().__init__(url)

    def _send(self, path: str) -> None:
        config = transfer_config()
        rng, never = random.Random(), threading.Event()
        attempt = 0
        while True:
            attempt += 1
            with open(path, "rb") as file:
                fault = self._attempt(file, config.stall_timeout_s)
            if fault is None:
                return
            if not fault.verdict.again or attempt >= config.retry.max_attempts:
                raise error_for(fault, redact(self.url), self.offset, attempt)
            never.wait(config.retry.delay_s(attempt, rng, fault.retry_after_s))

    def _attempt(self, file: IO[bytes], timeout_s: float) -> Fault | None:
        request = self._request
        headers = {**dict(request.headers), "Content-Type": "application/octet-stream", **self._headers}
        del headers["Accept-Encoding"]
        for _ in range(_MAX_REDIRECTS + 1):
            file.seek(0)
            try:
                answer = _put(request.url, headers, file, self.offset, timeout_s)
            except (OSError, http.client.HTTPException) as exn:
                return self._backend.classify(exn if isinstance(exn, OSError) else ConnectionError(str(exn)))
            if answer.status not in _REDIRECTS or "location" not in answer.fields:
                return None if 200 <= answer.status < 300 else self._backend.classify(answer)
            target = urllib.parse.urljoin(request.url, answer.fields["location"])
            if _origin(target) != _origin(request.url):  # what was meant for one origin is no other's business
                own = {name.lower() for name in self._headers} | {"authorization"}
                headers = {name: value for name, value in headers.items() if name.lower() not in own}
            request = Request(target)
        return Fault(Verdict.FATAL, f"more than {_MAX_REDIRECTS} redirects")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _put(url: str, headers: Mapping[str, str], body: IO[bytes], size: int, timeout_s: float) -> Answer:
    """One PUT, through the environment's proxy where it names one."""
    connection, target, more = _connect(url, timeout_s)
    with contextlib.closing(connection):
        connection.connect()
        try:
            connection.request("PUT", target, body=body, headers={**headers, **more, "Content-Length": str(size)})
        except (BrokenPipeError, ConnectionResetError):  # refused before it was read; the answer says why
            with contextlib.suppress(OSError, http.client.HTTPException):
                return _answer(connection)
            raise
        return _answer(connection)


def _connect(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """Whom to ask, for what, and the headers that a proxy wants besides."""
    parts = urllib.parse.urlsplit(url)
    options: dict[str, Any] = {"timeout": timeout_s, "blocksize": _BLOCK_BYTES}
    kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
    if parts.scheme == "https":
        kind = http.client.HTTPSConnection
        options["context"] = ssl.create_default_context()
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    proxy = proxy_for(url)
    if proxy is None:
        return kind(parts.hostname or "", parts.port, **options), target, {}
    through = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    more = {}
    if through.username is not None:
        pair = f"{urllib.parse.unquote(through.username)}:{urllib.parse.unquote(through.password or '')}"
        more = {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode("ascii")}
    connection = kind(through.hostname or "", through.port, **options)
    if parts.scheme == "https":
        connection.set_tunnel(parts.hostname or "", parts.port, headers=more)
        return connection, target, {}
    return connection, urllib.parse.urlunsplit((*parts[:2], parts.path or "/", parts.query, "")), more


def _answer(connection: http.client.HTTPConnection) -> Answer:
    response = connection.getresponse()
    fields = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, fields, response.read(500) if response.status >= 400 else b"")


class MultipartSink:
    """A streamed upload of a store whose files become objects only when they are completed."""

    def __init__(self, url: str, stream: Any, *, transactional: bool) -> None:
        self._url, self._stream, self._transactional = url, stream, transactional
        self._offset = 0
        self._open = True

    def write(self, data: Data) -> int:
        with _explained(self._url, self._offset):
            self._stream.write(data)
        self._offset += len(data)
        return len(data)

    def flush(self) -> None:
        """A store takes parts of its own size; there is nothing to hurry."""

    def commit(self) -> None:
        if not self._open:
            return
        try:
            with _explained(self._url, self._offset):
                self._stream.close()
                if self._transactional:
                    self._stream.commit()
        except BaseException:
            self.abort()
            raise
        self._open = False

    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(Exception):  # must not hide the error that led here
            if self._transactional:
                self._stream.discard()
        self._stream.closed = True  # its own `close`, also by garbage collection, would send what it holds


class StoreSink(_Gathered):
    """A file put to any other filesystem of fsspec."""

    def __init__(self, url: str, filesystem: Any, target: str, *, renames: bool) -> None:
        super().__init__(url)
        self._filesystem, self._target, self._renames = filesystem, target, renames

    def _send(self, path: str) -> None:
        folder, slash, name = self._target.rpartition("/")
        first = f"{folder}{slash}.{name}.{os.urandom(4).hex()}.tmp" if self._renames else self._target
        with _explained(self.url, self.offset):
            try:
                self._filesystem.put_file(path, first)
                if self._renames:
                    self._rename(first)
            except BaseException:
                if self._renames:
                    with contextlib.suppress(Exception):
                        self._filesystem.rm_file(first)
                raise

    def _rename(self, first: str) -> None:
        try:
            self._filesystem.mv(first, self._target)
        except FileExistsError:  # not every store replaces
            self._filesystem.rm_file(self._target)
            self._filesystem.mv(first, self._target)


def fsspec_sink(url: str, options: Mapping[str, Any]) -> MultipartSink | StoreSink:
    """Begin to write ``url`` through fsspec; ``options`` are its filesystem's."""
    import fsspec  # noqa: PLC0415 (slow, and often not needed)

    name = scheme(url)
    with _explained(url, 0):
        try:
            filesystem, path = fsspec.core.url_to_fs(url, **options)
        except ImportError as exn:
            need = f'pip install "wds-async[{EXTRAS[name]}]"' if name in EXTRAS else str(exn)
            raise MissingExtra(f"{redact(url)} needs a package that is not installed: {need}") from exn
        transactional = name in _TRANSACTIONAL
        if "::" in url or not (transactional or name in _COMPLETED_BY_CLOSE):
            return StoreSink(url, filesystem, str(path), renames="::" not in url and name in _RENAMED)
        stream = filesystem.open(path, "wb", autocommit=not transactional)
        return MultipartSink(url, stream, transactional=transactional)


class _explained:
    """Exceptions of a filesystem as errors of the tree."""

    def __init__(self, url: str, offset: int) -> None:
        self._url, self._offset = url, offset

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, exn: BaseException | None, trace: Any) -> None:
        if isinstance(exn, Exception) and not isinstance(exn, MissingExtra | ValueError):
            self._raise(exn)

    def _raise(self, exn: Exception) -> NoReturn:
        if isinstance(exn, FileNotFoundError):
            shown = redact(self._url)
            raise ShardNotFound(f"{shown}: there is no such bucket or folder to write to; make it first.") from exn
        fault = GenericBackend(_never).classify(exn)
        raise error_for(fault, redact(self._url), self._offset, 1) from exn


async def _never(*args: Any) -> Any:
    raise AssertionError("nothing is read here")
