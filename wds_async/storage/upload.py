"""Writing to stores: HTTP PUT, and fsspec's filesystems.

Object stores that stream (S3, GCS, Azure) get a multipart upload while the shard is being written, which becomes an
object only when it is completed. For every other store the bytes are gathered in a temporary file on this machine
(``TMPDIR``, as large as the shard) and sent at the end: an HTTP PUT can then be tried again and carries a
``Content-Length``, without which presigned URLs refuse it, and no store is left with half an object.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NoReturn, cast

from wds_async.config import transfer_config
from wds_async.errors import MissingExtra, ShardNotFound, StorageError, UrlError
from wds_async.storage.base import Answer, Fault, Location, RedirectLoop, error_for
from wds_async.storage.deadlines import call_with_deadline, transfer_s
from wds_async.storage.file_servers import end_session, user_of
from wds_async.storage.filesystems import filesystem_of
from wds_async.storage.generic import explain_foreign
from wds_async.storage.http.backend import HttpBackend
from wds_async.storage.http.puts import put
from wds_async.storage.retry import Retries
from wds_async.storage.secrets import Secrets, Writer
from wds_async.storage.stores import load

__all__ = [
    "HttpSink",
    "MultipartSink",
    "StoreSink",
    "close_writer",
    "fsspec_sink",
    "writer_of",
]

Data = bytes | bytearray | memoryview
_RENAMED = frozenset({"arrow_hdfs", "ftp", "hdfs", "memory", "sftp", "smb", "ssh", "webhdfs"})
"""Here a file is visible while it is being sent, and renaming is cheap: it gets its name last."""
_BLOCK_BYTES = 1 << 20
_ABORT_WITHIN_S = 10.0
"""Time for which the store is waited for where an upload has failed already, or is not wanted any more."""


class _Gathered:
    """A temporary file, sent by ``_send`` at `commit`; it is removed in any case."""

    def __init__(self, location: Location) -> None:
        self.location, self.offset = location, 0
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
        """Do nothing: nothing is sent before `commit`."""

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
            f"{self.location.shown} at byte {self.offset}: it is gathered in {self._path!r}: {exn.strerror or exn}."
            " Set TMPDIR to a disk with more room."
        )
        error.errno = exn.errno
        raise error from exn

    def _send(self, path: str) -> None:
        raise NotImplementedError


class HttpSink(_Gathered):
    """PUT to a URL, tried again like a read (``WDS_RETRIES``, ``WDS_TIMEOUT``). The ``headers`` of its options are sent
    too, but not to another origin that the server redirects to."""

    def __init__(self, location: Location) -> None:
        self._backend = HttpBackend(location.options)
        self._backend.prepare()
        self._request = self._backend.request(location.target)
        super().__init__(location)

    def _send(self, path: str) -> None:
        config = transfer_config()
        allowed_s = transfer_s(config.retry.timeout_s, self.offset)
        end_s = time.monotonic() + allowed_s
        retries = Retries(
            config.retry, exhausted=lambda n: n >= config.retry.brief_attempts or time.monotonic() >= end_s
        )
        while True:
            try:
                with open(path, "rb") as file:
                    answer = call_with_deadline(allowed_s, self._put, file, config.stall_timeout_s)
                if 200 <= answer.status < 300:
                    return
                fault = self._classify(answer)
            except (OSError, RedirectLoop) as exn:
                fault = self._classify(exn)
            wait_s = retries.wait_s(fault)
            if wait_s is None:
                raise error_for(fault, self.location.shown, self.offset, retries.failures)
            threading.Event().wait(wait_s)

    def _classify(self, outcome: Answer | BaseException) -> Fault:
        return self._backend.classify(outcome, self.location)

    def _put(self, file: IO[bytes], timeout_s: float) -> Answer:
        """Send the file to where redirects lead. Raise OSError or `RedirectLoop`."""
        return put(self._request, file, self.offset, timeout_s)


class MultipartSink:
    """A streamed upload of a store whose files become objects only when they are completed. Each call of the store's
    client has a deadline; small pieces are put together, so that there are few calls."""

    def __init__(self, location: Location, stream: Any, *, transactional: bool) -> None:
        self._location, self._stream, self._transactional = location, stream, transactional
        self._filesystem = getattr(stream, "fs", None)
        self._timeout_s = transfer_config().retry.timeout_s
        self._pending = bytearray()
        self._block_bytes = getattr(stream, "blocksize", None)
        self._offset = 0
        self._open = True

    def write(self, data: Data) -> int:
        gather_bytes = min(_BLOCK_BYTES, self._block_bytes or _BLOCK_BYTES)
        if len(data) >= gather_bytes:
            self._send_pending()
            self._call(self._stream.write, data)
        else:
            self._pending += data
            if len(self._pending) >= gather_bytes:
                self._send_pending()
        self._offset += len(data)
        return len(data)

    def _send_pending(self) -> None:
        pending, self._pending = self._pending, bytearray()
        if pending:
            self._call(self._stream.write, pending)

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        # It may send what the client has held back: one block, where it tells the size of its blocks.
        held_bytes = min(self._offset, self._block_bytes or self._offset)
        with _explained(self._location, self._offset, self._filesystem):
            call_with_deadline(transfer_s(self._timeout_s, held_bytes + sum(map(len, args))), function, *args)

    def flush(self) -> None:
        """Do nothing: a store takes parts of its own size."""

    def commit(self) -> None:
        if not self._open:
            return
        try:
            self._send_pending()
            self._call(self._stream.close)
            if self._transactional:
                self._call(self._stream.commit)
        except BaseException:
            self.abort()
            raise
        self._open = False
        close_writer(self._filesystem)

    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(Exception):  # must not hide the error that led here
            if self._transactional:
                call_with_deadline(_ABORT_WITHIN_S, self._stream.discard)
        self._stream.closed = True  # its own `close`, also by garbage collection, would send what it holds
        close_writer(self._filesystem)


class StoreSink(_Gathered):
    """A file put to any other filesystem of fsspec."""

    def __init__(self, location: Location, filesystem: Any, path: str) -> None:
        super().__init__(location)
        self._filesystem, self._target = filesystem, path
        self._renames = location.scheme in _RENAMED and len(location.links) == 1

    def commit(self) -> None:
        try:
            super().commit()
        finally:
            end_session(self._filesystem)

    def abort(self) -> None:
        super().abort()
        end_session(self._filesystem)

    def _send(self, path: str) -> None:
        folder, slash, name = self._target.rpartition("/")
        first = f"{folder}{slash}.{name}.{os.urandom(4).hex()}.tmp" if self._renames else self._target
        timeout_s = transfer_config().retry.timeout_s
        with _explained(self.location, self.offset):
            try:
                call_with_deadline(transfer_s(timeout_s, self.offset), self._filesystem.put_file, path, first)
                if self._renames:
                    call_with_deadline(timeout_s, self._rename, first)
            except BaseException:
                if self._renames:
                    with contextlib.suppress(Exception):
                        call_with_deadline(_ABORT_WITHIN_S, self._filesystem.rm_file, first)
                raise

    def _rename(self, first: str) -> None:
        try:
            self._filesystem.mv(first, self._target)
        except FileExistsError:  # not every store replaces
            self._filesystem.rm_file(self._target)
            self._filesystem.mv(first, self._target)


def fsspec_sink(location: Location) -> MultipartSink | StoreSink:
    """Begin to write to ``location`` through fsspec, a blob's https address too."""
    spec, timeout_s = location.spec, transfer_config().retry.timeout_s
    with _explained(location, 0):
        address, options = location.target, cast("Mapping[str, Any]", location.options)
        if spec.write_options:
            address, options = load(spec.write_options)(address, options)
        try:
            filesystem, path = call_with_deadline(timeout_s, filesystem_of, address, options)
        except ValueError as exn:
            if "Protocol not known" not in str(exn):
                raise
            raise UrlError(f"{location.shown}: nothing here writes to URLs of this scheme") from None
        if not spec.publish:
            return StoreSink(location, filesystem, path)
        transactional = spec.publish == "commit"
        stream = call_with_deadline(timeout_s, filesystem.open, path, "wb", autocommit=not transactional)
        return MultipartSink(location, stream, transactional=transactional)


@contextlib.contextmanager
def _explained(location: Location, offset: int, filesystem: Any = None) -> Iterator[None]:
    """Raise exceptions of a filesystem as errors of the tree."""
    try:
        yield
    except (MissingExtra, ValueError):
        raise
    except FileNotFoundError as exn:
        raise ShardNotFound(f"{location.shown}: there is no such bucket or folder to write to; make it first.") from exn
    except Exception as exn:
        spec, writer, fault = location.spec, writer_of(location, filesystem), None
        if spec.explain_write:
            fault = load(spec.explain_write)(exn, identity=writer.identity, **writer.details)
        fault = fault or explain_foreign(exn, user_of(location.target, location.options))
        repeats = any(writer.secrets.hidden(text) != text for text in (fault.reason, str(exn)))
        error = error_for(writer.secrets.of_fault(fault), location.shown, offset, 1)
        raise error from (None if spec.quotes_answers or repeats else exn)  # a cause's text is shown whole


_NO_SECRETS = frozenset({"host", "port", "user", "username"})


def writer_of(location: Location, filesystem: Any) -> Writer:
    """Return the identity and secrets that ``filesystem`` (None where it could not be made) writes with. Called once
    writing has failed: raises nothing, but may block."""
    with contextlib.suppress(Exception):  # must not hide the error that led here
        if location.spec.writer:
            writer: Writer = load(location.spec.writer)(location.target, location.options, filesystem)
            return writer
    return Writer(secrets=Secrets(*(value for name, value in location.options.items() if name not in _NO_SECRETS)))


def close_writer(filesystem: Any) -> None:
    """Close the client of an s3fs that only this writer has; harmless for others. It lives on fsspec's own loop, and
    closed by garbage collection it would end in the middle of it."""
    maker, loop = getattr(filesystem, "_s3creator", None), getattr(filesystem, "loop", None)
    if maker is None or loop is None or getattr(filesystem, "_s3", None) is None:
        return
    from fsspec.asyn import sync  # noqa: PLC0415 (loaded by now)

    filesystem._s3creator = filesystem._s3 = None
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = finalizer.peek()
        if found is not None and found[0] is filesystem:
            finalizer.detach()
    with contextlib.suppress(Exception):  # must not hide the error that led here
        sync(loop, maker.__aexit__, None, None, None, timeout=5.0)
