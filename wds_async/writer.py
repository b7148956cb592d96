"""Writing samples into tars, one (`TarWriter`) or as many as it takes (`ShardWriter`)."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import logging
import lzma
import os
import sys
import tarfile
import time
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any

from wds_async.encoders import (
    add_handlers,
    default_handlers,
    imageencoder,
    make_encoder,
    numpy_dumps,
    numpy_npz_dumps,
    tenbin_dumps,
    torch_dumps,
)
from wds_async.errors import ConfigError, UrlError
from wds_async.redact import redact
from wds_async.urls import local_path

__all__ = [
    "ShardWriter",
    "TarWriter",
    "add_handlers",
    "default_handlers",
    "imageencoder",
    "make_encoder",
    "numpy_dumps",
    "numpy_npz_dumps",
    "tenbin_dumps",
    "torch_dumps",
]

Sample = Mapping[str, Any]
Path = str | os.PathLike[str]

_log = logging.getLogger(__name__)


_COMPRESSIONS = {"gz": "gz", "tgz": "gz", "bz2": "bz2", "tbz2": "bz2", "xz": "xz", "txz": "xz", "zst": "zst"}


def _compression(name: str, compress: bool | str | None) -> str:
    if compress is None:
        return _COMPRESSIONS.get(name.rpartition(".")[2].lower(), "")
    if isinstance(compress, bool):
        return "gz" if compress else ""
    if compress in _COMPRESSIONS:
        return _COMPRESSIONS[compress]
    raise ConfigError(f"compress={compress!r}: it is True, False, None (by suffix), gz, bz2, xz or zst")


def _compressed(stream: Any, compression: str, mtime: float | None) -> Any:
    """``stream`` behind a compressor, whose ``close`` leaves ``stream`` open."""
    if compression == "gz":  # no file name and, with ``mtime``, no clock in its header: the same bytes every time
        stamp = None if mtime is None else int(mtime)
        return gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=stamp)
    if compression == "bz2":
        return bz2.BZ2File(stream, "wb")
    if compression == "xz":
        return lzma.LZMAFile(stream, "wb")
    if compression == "zst":
        import zstandard  # noqa: PLC0415 - few shards are zstd

        return zstandard.ZstdCompressor().stream_writer(stream, closefd=False)
    return stream


class _LocalFile:
    """A file that is written under another name in its folder and gets its own when it is complete."""

    def __init__(self, url: Path) -> None:
        path = local_path(os.fspath(url))
        if path is None:
            raise UrlError(
                f"{redact(os.fspath(url))}: shards are written to local files and open file objects; write there,"
                " then upload, or give an opener that returns a file object"
            )
        self.path = os.path.realpath(path)  # a link stays, what it points to is replaced
        self.temporary: str | None = None
        if not os.path.exists(self.path) or os.path.isfile(self.path):  # a device or FIFO cannot be replaced
            folder, name = os.path.split(self.path)
            self.temporary = os.path.join(folder, f".{name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
        try:
            self.stream = open(self.temporary or self.path, "wb")  # noqa: SIM115 - closed by publish or discard
        except FileNotFoundError as exn:
            raise FileNotFoundError(exn.errno, "there is no such folder to write to", os.fspath(path)) from None

    def publish(self) -> None:
        self.stream.close()
        if self.temporary is not None:
            os.replace(self.temporary, self.path)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not hide the error that led here
            self.stream.close()
        if self.temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.temporary)


class TarWriter:
    """Writes samples to one tar.

    ``fileobj`` is a path (``.gz .tgz .bz2 .xz .zst`` compress), ``"-"`` for standard output, or an open binary
    file, which stays open. A file appears under its name, complete, when the writer is closed, and not at all when
    the ``with`` block ends in an exception.

    ``user``, ``group``, ``mode`` and ``mtime`` (seconds since 1970; the time of writing unless given) stand in
    each header; with ``mtime`` the same samples give the same bytes. ``compress`` is True (gz), ``"gz"``,
    ``"bz2"``, ``"xz"``, ``"zst"``, False, or None: by suffix. ``encoder``: see `make_encoder`. With ``keep_meta``
    the fields that begin with ``_`` are written too; they must be str. ``format`` is a format of ``tarfile`` or its
    name; None is ``USTAR_FORMAT``, which every tool reads and which holds keys of up to 250 bytes.

    Raises UrlError for a URL that is not local, ConfigError for bad arguments, OSError where the file cannot be made.
    """

    def __init__(
        self,
        fileobj: Path | IO[bytes],
        user: str = "bigdata",
        group: str = "bigdata",
        mode: int = 0o0444,
        compress: bool | str | None = None,
        encoder: Any = True,
        keep_meta: bool = False,
        mtime: float | None = None,
        format: int | str | None = None,
    ) -> None:
        self._file: _LocalFile | None = None
        self.tarstream: Any = None
        self._pid = os.getpid()
        self.user, self.group, self.mode, self.mtime = user, group, mode, mtime
        self.keep_meta = keep_meta
        self.encoder = make_encoder(encoder)
        self.format: Any = getattr(tarfile, format, -1) if isinstance(format, str) else (format or 0)
        if self.format not in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            raise ConfigError(f"format={format!r}: it is USTAR_FORMAT, GNU_FORMAT or PAX_FORMAT of tarfile")
        name = os.fspath(fileobj) if isinstance(fileobj, str | os.PathLike) else ""
        self.compress = _compression(name, compress)
        if name == "-":
            self.stream: Any = sys.stdout.buffer
        elif name:
            self._file = _LocalFile(name)
            self.stream = self._file.stream
        else:
            self.stream = fileobj
        self.tarstream = _compressed(self.stream, self.compress, mtime)
        self._written = 0  # bytes of tar so far

    def write(self, obj: Sample, mtime: float | None = None) -> int:
        """Write a sample, fields in sorted order; returns the bytes of its fields.

        ``mtime`` is this sample's own. Raises ValueError, with nothing of the sample written, where ``__key__`` is
        missing, a value does not encode to bytes, or a name is too long for the format.
        """
        if self.tarstream is None:
            raise ValueError("this TarWriter is closed")
        sample = self.encoder(obj)
        key = sample.get("__key__")
        if not isinstance(key, str):
            raise ValueError(f"a sample needs a __key__ of type str, this one has {key!r} (fields {sorted(sample)})")
        if mtime is None:
            mtime = self.mtime if self.mtime is not None else time.time()
        total = 0
        parts: list[Any] = []
        for field in sorted(sample):
            if field == "__key__" or (field.startswith("_") and not self.keep_meta):
                continue
            data = self._bytes(key, field, sample[field])
            parts += (self._header(key, field, len(data), mtime), data, b"\0" * (-len(data) % tarfile.BLOCKSIZE))
            total += len(data)
        for part in parts:
            self.tarstream.write(part)
            self._written += len(part)
        return total

    def _bytes(self, key: str, field: str, value: Any) -> Any:
        if field.startswith("_"):
            if not isinstance(value, str):
                raise ValueError(f"sample {key!r}: metadata is str, but {field!r} is {type(value).__name__}")
            return value.encode("utf-8")
        if isinstance(value, memoryview):
            return value.cast("B") if value.c_contiguous else value.tobytes()
        if not isinstance(value, bytes | bytearray):
            raise ValueError(f"sample {key!r}: {field!r} is {type(value).__name__} after encoding, not bytes")
        return value

    def _header(self, key: str, field: str, size: int, mtime: float) -> bytes:
        info = tarfile.TarInfo(f"{key}.{field}")
        info.size, info.mode, info.uname, info.gname = size, self.mode, self.user, self.group
        info.mtime = mtime if self.format == tarfile.PAX_FORMAT else int(mtime)
        try:
            return info.tobuf(self.format, "utf-8", "surrogateescape")
        except ValueError as error:
            raise ConfigError(
                f"sample {key!r}: the header of field {field!r} cannot be written ({error}); USTAR holds names of 100"
                " bytes, or 255 with folders, and sizes below 8 GiB: shorten the key, or pass"
                " format=tarfile.PAX_FORMAT"
            ) from None

    def close(self) -> None:
        """End the tar and let the file appear. Closing twice does nothing."""
        if self.tarstream is None:
            return
        try:
            self.tarstream.write(b"\0" * (1024 + -(self._written + 1024) % tarfile.RECORDSIZE))
            if self.tarstream is not self.stream:
                self.tarstream.close()
            if self._file is not None:
                self._file.publish()
            else:
                self.stream.flush()
        except BaseException:
            self.discard()
            raise
        self.tarstream = None

    def discard(self) -> None:
        """Give up: the file does not appear. In an open file that was passed in, the tar just breaks off."""
        if self.tarstream is not None and self.tarstream is not self.stream:
            with contextlib.suppress(Exception):  # what is left in the compressor is of no use
                self.tarstream.close()
        self.tarstream = None
        if self._file is not None:
            self._file.discard()

    def __enter__(self) -> TarWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, exn: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if getattr(self, "tarstream", None) is not None and self._pid == os.getpid():
            self.close()
            warnings.warn("a TarWriter was never closed; it is now, use `with`", ResourceWarning, stacklevel=1)


class ShardWriter:
    """Writes samples to numbered tars.

    ``pattern`` holds one ``%d`` (``"train-%06d.tar"``), counted from ``start_shard``. Before a sample is written
    to a shard that holds ``maxcount`` samples or ``maxsize`` bytes of fields, the next shard is begun. A shard
    appears under its name when it is complete; then ``post(fname)`` is called. Nothing is made for no samples.

    ``opener(fname)`` returns the open file to write to, which is closed at the shard's end. ``verbose=0`` silences
    the log record of each shard. ``kw`` are `TarWriter`'s arguments. An exception in the ``with`` block discards
    the shard that was being written; those before it stay. ``fname``, ``shard`` (the next number), ``count``,
    ``size`` (of this shard) and ``total`` (samples of all) tell the state. Raises ConfigError for a bad pattern.
    """

    def __init__(
        self,
        pattern: Path,
        maxcount: int = 100000,
        maxsize: float = 3e9,
        post: Callable[[str], Any] | None = None,
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], Any] | None = None,
        **kw: Any,
    ) -> None:
        self.pattern = os.fspath(pattern)
        try:
            distinct = self.pattern % 0 != self.pattern % 1
        except (TypeError, ValueError):
            distinct = False
        if not distinct:
            raise ConfigError(f"pattern={self.pattern!r}: it needs one place for the number, as in 'train-%06d.tar'")
        self.maxcount, self.maxsize, self.post = maxcount, maxsize, post
        self.verbose, self.opener, self.kw = verbose, opener, kw
        self.shard = start_shard
        self.tarstream: TarWriter | None = None
        self.fname: str | None = None
        self.total = self.count = self.size = 0
        self._opened: Any = None
        self._closed = False

    def next_stream(self) -> None:
        """End the current shard and begin the next."""
        self.finish()
        self.fname = self.pattern % self.shard
        if self.verbose:
            _log.info("writing %s after %d samples", redact(self.fname), self.total)
        self.count = self.size = 0
        self._opened = self.opener(self.fname) if self.opener is not None else None
        self.tarstream = TarWriter(self.fname if self._opened is None else self._opened, **self.kw)
        self.shard += 1

    def write(self, obj: Sample, mtime: float | None = None) -> None:
        """Write a sample, beginning a new shard where the current one is full; see `TarWriter.write`."""
        if self._closed:
            raise ValueError("this ShardWriter is closed")
        if self.tarstream is None or self.count >= self.maxcount or self.size >= self.maxsize:
            self.next_stream()
        assert self.tarstream is not None
        size = self.tarstream.write(obj, mtime)
        self.count += 1
        self.total += 1
        self.size += size

    def finish(self) -> None:
        """End the current shard, if there is one: publish it and call ``post``. An empty one is discarded."""
        stream, self.tarstream = self.tarstream, None
        if stream is None or self.fname is None:
            return
        try:
            if self.count or self._opened is not None:
                stream.close()
            else:
                stream.discard()
        finally:
            self._close_opened()
        if self.count and self.post is not None:
            self.post(self.fname)

    def close(self) -> None:
        """End the last shard. Closing twice does nothing."""
        self._closed = True
        self.finish()

    def _close_opened(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, exn: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        self._closed = True
        stream, self.tarstream = self.tarstream, None
        if stream is not None:
            stream.discard()
        self._close_opened()
