"""Samples as the bytes that they take in a tar, headers and padding included: made once, and moved as they are.

The headers are those of `TarWriter` with ``mtime=0``, so the same samples give the same bytes, whatever the headers of
the shard that they come from.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from crc32c import crc32c

from wds_async.distributed.outputs import SummedSink
from wds_async.distributed.tasks import Output
from wds_async.errors import DuplicateField
from wds_async.storage.options import StorageOptions
from wds_async.tar.blocks import BLOCK
from wds_async.tar.group import base_plus_ext
from wds_async.tar.parse import members_of
from wds_async.tar.source import ByteSource
from wds_async.tar.write import compressed, compression, member_header

__all__ = ["RawTarWriter", "joined", "key_of_raw", "key_tag", "raw_sample", "renamed"]

_PADDING = bytes(BLOCK)
_PLACE = frozenset(("__key__", "__url__", "__local_path__"))
_SMALL_BYTES = 64 << 10
"""Below this, joining the parts of a sample costs less than handing them on one by one."""


def raw_sample(sample: Mapping[str, Any]) -> tuple[int, bytes | list[bytes]]:
    """Return the bytes that a sample takes in a tar, and what they are: one piece, or of a large sample several. The
    fields stay in their order; what says where the sample is from is not written."""
    key, total, parts = sample["__key__"], 0, list[bytes]()
    for field, data in sample.items():
        if field not in _PLACE:
            size = len(data)
            header, padding = member_header(f"{key}.{field}", size), _PADDING[: -size % BLOCK]
            parts += (header, data, padding)
            total += len(header) + size + len(padding)
    return total, b"".join(parts) if total <= _SMALL_BYTES else parts


def _members(raw: bytes | memoryview) -> Iterator[tuple[str, bytes]]:
    pieces = iter((memoryview(raw),))
    source = ByteSource(lambda: next(pieces, None), "a sample")
    try:
        yield from ((name, data) for name, data, _ in members_of(source))
    finally:
        source.drop()


def key_of_raw(raw: bytes | memoryview) -> str:
    """Return the key of a sample from its bytes in a tar."""
    name, _ = next(_members(raw))
    return base_plus_ext(name)[0] or ""


def key_tag(key: str) -> int:
    """Return 64 bits that stand for the key of a sample."""
    data = key.encode("utf-8", "surrogateescape")
    return zlib.crc32(data) << 32 | crc32c(data)


def renamed(raw: bytes | memoryview, key: str) -> bytes:
    """Return a sample with another key."""
    fields = {str(base_plus_ext(name)[1]): data for name, data in _members(raw)}
    _, parts = raw_sample({"__key__": key, **fields})
    return parts if isinstance(parts, bytes) else b"".join(parts)


def joined(left: bytes | memoryview, right: bytes | memoryview) -> bytes:
    """Return two samples of one key as one, the fields of ``left`` first. DuplicateField for a field of both."""
    names = {name.lower() for name, _ in _members(left)}
    if both := sorted(name for name, _ in _members(right) if name.lower() in names):
        key, field = base_plus_ext(both[0])
        error = DuplicateField(f"sample {key!r}: both data sets have the field {field!r}; rename it in one of them")
        error.__dict__.update(key=key, field=field)
        raise error
    return b"".join((left, right))


class RawTarWriter:
    """A tar that is written from the bytes of samples, compressed by the suffix of its name."""

    def __init__(self, url: str, options: StorageOptions) -> None:
        self.samples = 0
        self._written = 0
        self._sink = SummedSink(url, options)
        self._stream: Any = compressed(self._sink, compression(url.partition("?")[0], None), 0)
        self._small: list[bytes | memoryview] = []
        self._small_bytes = 0

    def write(self, raw: bytes | memoryview) -> None:
        """Write a sample. The memory must stay as it is until `flush` or `close`."""
        self.samples += 1
        self._written += len(raw)
        if len(raw) <= _SMALL_BYTES:
            self._small.append(raw)
            self._small_bytes += len(raw)
            if self._small_bytes < 1 << 20:
                return
            raw = b""
        self.flush()
        if raw:
            self._stream.write(raw)

    def flush(self) -> None:
        """Hand on what was gathered of small samples."""
        if self._small:
            self._stream.write(b"".join(self._small))
            self._small.clear()
            self._small_bytes = 0

    def close(self, out: str) -> Output:
        """End the tar and let it appear. ``out``: the folder that its name in the record is relative to."""
        try:
            self.flush()
            self._stream.write(bytes(2 * BLOCK + -(self._written + 2 * BLOCK) % tarfile.RECORDSIZE))
            if self._stream is not self._sink:
                self._stream.close()
            return self._sink.commit(out, self.samples)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Give up: nothing appears."""
        self._small.clear()
        self._sink.abort()
