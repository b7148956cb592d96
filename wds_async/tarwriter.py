"""Writing samples into one tar."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import tarfile
import time
import warnings
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

from wds_async.encoders import make_encoder
from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.storage.options import StorageOptions
from wds_async.storage.sink import Sink, open_sink, publish_text
from wds_async.tar.compress import compressed, compression
from wds_async.tar.index import DaliIndex, Entry, dali_name, shard_list, shard_list_name
from wds_async.tar.names import NameRules

__all__ = ["TarWriter"]

Sample = Mapping[str, Any]
Path = str | os.PathLike[str]

logger = logging.getLogger("wds_async")

_SMALL_BYTES = 64 << 10  # below this, joining a sample's parts costs less than handing them on one by one
_FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)

_unfinished: weakref.WeakSet[TarWriter] = weakref.WeakSet()


class TarWriter:
    """Writes samples to one tar.

    ``fileobj`` is a path (``.gz .tgz .bz2 .xz .zst`` compress), any URL that `open_sink` writes (``pipe:command``,
    ``http://…``, ``s3://…``, ``gs://…``), ``"-"`` for standard output, or an open binary file, which stays open. A file
    or object appears under its name, complete, when the writer is closed, and not at all when the ``with`` block ends
    in an exception or the interpreter exits before `close`.

    ``user``, ``group``, ``mode`` and ``mtime`` (seconds since 1970; the time of writing unless given) stand in
    each header; with ``mtime`` the same samples give the same bytes. ``compress`` is True (gz), ``"gz"``,
    ``"bz2"``, ``"xz"``, ``"zst"``, False, or None: by suffix. ``encoder``: see `make_encoder`; ``quality`` (1 to 100;
    100 unless given) is that of the JPEG and WebP fields it encodes. With ``keep_meta`` the fields that begin with
    ``_`` are written too; they must be str. ``format`` is a format of ``tarfile`` or its name; None is
    ``USTAR_FORMAT``, with a PAX header before what that cannot hold (names of more than 100 bytes, or 255 with folders;
    fields of 8 GiB).

    ``index``: ``"dali"`` or True writes DALI's index beside the tar (``x.tar``: ``x.idx``), ``"json"`` a list of
    this one shard (``x.json``). ``storage_options`` go to `open_sink`. ``payload`` is the bytes of fields written
    so far, ``container`` those of the tar (compressed where it is), ``count`` the samples.

    Raises ConfigError for bad arguments, and what `open_sink` raises.
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
        *,
        index: bool | str | None = None,
        quality: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._sink: Sink | None = None
        self.tarstream: Any = None
        self._pid = os.getpid()
        self.user, self.group, self.mode, self.mtime = user, group, mode, mtime
        self.keep_meta = keep_meta
        self.encoder = make_encoder(encoder, quality)
        self.format: Any = getattr(tarfile, format, -1) if isinstance(format, str) else format
        if self.format is not None and self.format not in _FORMATS:
            raise ConfigError(f"format={format!r}: it is USTAR_FORMAT, GNU_FORMAT or PAX_FORMAT of tarfile")
        self.name = os.fspath(fileobj) if isinstance(fileobj, str | os.PathLike) else ""
        self.compress = compression(self.name, compress)
        self._options = StorageOptions(storage_options)
        self.index = _index_kind(index, self.name, self.compress)
        self.entries = DaliIndex() if self.index == "dali" else None
        if self.name:
            self._sink = open_sink(self.name, options=self._options)
        self._out = _Counted(self._sink if self._sink is not None else fileobj)
        self.stream: Any = self._sink if self._sink is not None else fileobj
        self.tarstream = compressed(self._out, self.compress, mtime)
        self.rules = NameRules()
        self.count = self.payload = 0
        self._written = 0  # bytes of tar so far
        if self._sink is not None:
            _unfinished.add(self)

    @property
    def container(self) -> int:
        """Bytes handed to the file so far, headers and padding included, compressed where the tar is."""
        return self._out.count

    def write(self, obj: Sample, mtime: float | None = None) -> int:
        """Write a sample, fields in sorted order; returns the bytes of its fields.

        ``mtime`` is this sample's own. Raises ValueError, with nothing of the sample written, where ``__key__`` is
        missing, a value does not encode to bytes, or no reader would give the sample back (see `NameRules`). After
        any other error, such as a full disk, the writer is closed and nothing appears.
        """
        if self.tarstream is None:
            raise ValueError("this TarWriter is closed")
        sample = self.encoder(obj)
        key: Any = sample.get("__key__")
        fields = [f for f in sample if f != "__key__" and (self.keep_meta or not str(f).startswith("_"))]
        names = self.rules.check(key, fields)
        if mtime is None:
            mtime = self.mtime if self.mtime is not None else time.time()
        total, parts, entries, at = 0, list[Any](), list[Entry](), self._written
        for field in sorted(fields):
            data = self._bytes(key, field, sample[field])
            header, size = self._header(key, field, len(data), mtime), len(data)
            parts += (header, data, bytes(-size % tarfile.BLOCKSIZE))
            if self.entries is not None:
                entries.append(Entry(f"{key}.{field}", at + len(header), size))
            at += len(header) + size + -size % tarfile.BLOCKSIZE
            total += size
        for entry in entries:
            self.entries.add(entry)  # type: ignore[union-attr]
        try:
            for part in [b"".join(parts)] if total <= _SMALL_BYTES else parts:
                self.tarstream.write(part)
        except BaseException:  # part of it may be written: what followed would be no tar
            self.discard()
            raise
        self._written = at
        self.rules.wrote(key, names)
        self.payload += total
        self.count += 1
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
            try:
                return info.tobuf(self.format or tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
            except ValueError:
                if self.format is not None:
                    raise
                return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        except ValueError as exn:
            raise ConfigError(
                f"sample {key!r}: the header of field {field!r} cannot be written ({exn}); USTAR holds names of 100"
                " bytes, or 255 with folders, and sizes below 8 GiB: shorten the key, or leave format= away"
            ) from None

    def close(self) -> None:
        """End the tar, let it appear, and write its index. Closing twice does nothing."""
        if self.tarstream is None:
            return
        try:
            self.tarstream.write(bytes(1024 + -(self._written + 1024) % tarfile.RECORDSIZE))
            if self.tarstream is not self._out:
                self.tarstream.close()
            if self._sink is not None:
                self._sink.commit()
            elif hasattr(self.stream, "flush"):
                self.stream.flush()
        except BaseException:
            self.discard()
            raise
        self.tarstream = None
        _unfinished.discard(self)
        if self.index == "dali" and self.entries is not None:
            publish_text(dali_name(self.name), self.entries.text(), self._options)
        elif self.index == "json":
            place, name = shard_list_name(self.name.replace("%", "%%"))
            shard = {"url": self.name.rpartition("/")[2], "nsamples": self.count, "filesize": self.container}
            publish_text(place, shard_list([shard], name), self._options)

    def discard(self) -> None:
        """Give up: nothing appears. In an open file that was passed in, the tar just breaks off."""
        if self.tarstream is not None and self.tarstream is not self._out:
            self._out.shut = True
            with contextlib.suppress(Exception):  # what is left in the compressor is of no use
                self.tarstream.close()
        self.tarstream = None
        _unfinished.discard(self)
        if self._sink is not None:
            self._sink.abort()

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


class _Counted:
    """What bytes go through on their way to a file; ``shut`` lets none through any more."""

    def __init__(self, stream: Any) -> None:
        self._write = stream.write
        self.count = 0
        self.shut = False

    def write(self, data: Any) -> int:
        if not self.shut:
            self._write(data)
            self.count += len(data)
        return len(data)

    def flush(self) -> None:
        """For compressors, which call it; the file is flushed at the end."""


def _index_kind(index: bool | str | None, name: str, compress: str) -> str | None:
    kind = "dali" if index is True else index or None
    if kind not in (None, "dali", "json"):
        raise ConfigError(f'index={index!r}: it is "dali" (or True), "json" or None')
    if kind == "dali" and compress:
        raise ConfigError(f"index={index!r}: DALI seeks in plain tars only, and this one is compressed ({compress})")
    if kind is not None and (not name or name == "-" or name.startswith("pipe:")):
        raise ConfigError(f"index={index!r}: an index is written beside a tar, so the tar needs a name")
    return str(kind) if kind else None


def _abandon() -> None:
    """At exit nobody knows whether the tars that are open were meant to be complete."""
    for writer in list(_unfinished):
        if writer._pid == os.getpid():
            logger.error("%s was never closed, so it was not written; use `with` or close()", redact(writer.name))
            writer.discard()


atexit.register(_abandon)
