"""`ShardIndex`: where the samples of one shard are, with the version of the shard that this is true of; and its file.

The file (``train-000000.tar.index``) is a safetensors file, which other programs can read: eight bytes with the length
of the head (little-endian), the head in JSON, the arrays. The arrays are ``starts`` (I64) and ``lengths`` (U32, or I64
where a sample has 4 GiB or more), in bytes of the uncompressed tar, and, where keys are known, ``keys`` (U8: UTF-8, one
after another) with ``key_stops`` (U32 or I64: where each ends). The head's ``__metadata__`` holds, as text:

* ``wds_index``: version of this format, ``1``
* ``url``: the shard, without secrets; ``size``: its bytes as stored; ``version``: what pins it (an ETag, say)
* ``plain``: ``1``, or ``0`` where the shard is compressed, so that offsets are not those of its file
* ``samples``: how many there are, so that a reader of lengths needs the head only
* ``crc32``: of the whole file, in eight hexadecimal digits, with eight zeros in their place

safetensors: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wds_async.errors import ConfigError
from wds_async.redact import redact

__all__ = ["HEAD_BYTES", "PackedKeys", "ShardFacts", "ShardIndex", "facts_in"]

HEAD_BYTES = 4 << 10
"""A head is shorter, unless the URL is very long."""

_VERSION = "1"
_NO_CRC = "0" * 8
_DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "U32": np.dtype("<u4"), "U8": np.dtype("u1")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_HEAD_AT_MOST = 1 << 20
_INODE = re.compile(r"inode \d+, ")

Numbers = NDArray[np.int64] | NDArray[np.uint32]


def _numbers(values: Any) -> Numbers:
    """Return ``values``, none negative, as an array of four bytes each where all fit."""
    wide = np.asarray(values, np.int64)
    return wide if len(wide) and int(wide.max()) >= 1 << 32 else wide.astype(np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class PackedKeys:
    """Keys of samples as one array of bytes, and where each ends: a tenth of the memory of as many strings."""

    data: NDArray[np.uint8]
    stops: Numbers

    @staticmethod
    def of(keys: Iterable[str]) -> PackedKeys:
        """Return ``keys`` packed."""
        encoded = [key.encode("utf-8", "surrogateescape") for key in keys]
        stops = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), dtype=np.int64)
        return PackedKeys(np.frombuffer(b"".join(encoded), np.uint8), _numbers(stops))

    def __len__(self) -> int:
        return len(self.stops)

    def __getitem__(self, i: int) -> str:
        start = int(self.stops[i - 1]) if i else 0
        return self.data[start : int(self.stops[i])].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """The shard that an index is of: ``url`` without secrets, ``size`` in bytes as stored and ``version``, what pins
    it ("": unknown); ``samples``: how many it holds; ``plain``: False where it is compressed."""

    url: str
    size: int
    version: str
    samples: int
    plain: bool = True

    def fits(self, size: int | None, version: str) -> bool:
        """Return whether this is certain to be of a shard of that size and version. A file that was copied with its
        time of change is the same shard."""
        known, seen = (_INODE.sub("", text) for text in (self.version, version))
        return bool(seen) and known == seen and size == self.size


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """Offsets and lengths of the samples of one shard, in bytes of the uncompressed tar: from the first header block of
    a sample to the end of its last member, or to the start of the next sample."""

    facts: ShardFacts
    starts: NDArray[np.int64]
    lengths: Numbers
    keys: PackedKeys | None = None

    @staticmethod
    def of(
        url: str,
        size: int,
        version: str,
        starts: Any,
        stops: Any,
        *,
        keys: Iterable[str] | None = None,
        plain: bool = True,
    ) -> ShardIndex:
        """Return the index of a shard whose samples begin at ``starts`` and end before ``stops``."""
        begins = np.asarray(starts, np.int64)
        lengths = _numbers(np.asarray(stops, np.int64) - begins)
        facts = ShardFacts(redact(url), size, version, len(begins), plain)
        return ShardIndex(facts, begins, lengths, None if keys is None else PackedKeys.of(keys))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.starts)

    def stop(self, i: int) -> int:
        """Return the end of sample ``i``."""
        return int(self.starts[i]) + int(self.lengths[i])

    def to_bytes(self) -> bytes:
        """Return the file."""
        arrays: dict[str, NDArray[Any]] = {"starts": self.starts, "lengths": self.lengths}
        if self.keys is not None:
            arrays |= {"key_stops": self.keys.stops, "keys": self.keys.data}
        # The widest first, so that each is aligned.
        arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
        facts = self.facts
        head: dict[str, Any] = {
            "__metadata__": {
                "wds_index": _VERSION,
                "samples": str(facts.samples),
                "size": str(facts.size),
                "version": facts.version,
                "plain": str(int(facts.plain)),
                "crc32": _NO_CRC,
                "url": facts.url,
            }
        }
        at = 0
        for name, array in arrays.items():
            little = array.dtype.newbyteorder("<")
            place = [at, at + array.nbytes]
            head[name] = {"dtype": _NAMES[little], "shape": list(array.shape), "data_offsets": place}
            at += array.nbytes
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        data = b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in arrays.values())
        whole = _LENGTH.pack(len(text)) + text + data
        crc = f'"crc32": "{zlib.crc32(whole):08x}"'
        return whole.replace(f'"crc32": "{_NO_CRC}"'.encode(), crc.encode(), 1)

    @staticmethod
    def from_bytes(data: bytes, name: str = "the index") -> ShardIndex:
        """Return the index in a file's bytes. ConfigError, with ``name``, for what is no such file, or damaged."""
        facts, head, at = _read_head(data, name)
        crc = f'"crc32": "{head["crc32"]}"'.encode()
        whole = data[:at].replace(crc, f'"crc32": "{_NO_CRC}"'.encode(), 1)
        if crc != f'"crc32": "{zlib.crc32(data[at:], zlib.crc32(whole)):08x}"'.encode():
            raise _wrong(name, "it does not match its checksum: it is damaged or cut")
        try:
            arrays = {key: _array(data, at, head[key]) for key in ("starts", "lengths")}
            arrays |= {key: _array(data, at, head[key]) for key in ("key_stops", "keys") if key in head}
        except (KeyError, TypeError, ValueError) as exn:
            raise _wrong(name, f"its arrays are not described well: {exn!r}") from exn
        keys = PackedKeys(arrays["keys"], arrays["key_stops"]) if "keys" in arrays else None
        index = ShardIndex(facts, arrays["starts"], arrays["lengths"], keys)
        if {len(index), len(index.lengths), len(index if keys is None else keys)} != {facts.samples}:
            raise _wrong(name, "its arrays have other lengths than its head says")
        return index


def facts_in(data: bytes, name: str = "the index") -> ShardFacts:
    """Return the facts in the first `HEAD_BYTES` or more of a file, which are not compared with its checksum.

    ConfigError for what is no index, and where the head is longer than ``data``.
    """
    return _read_head(data, name)[0]


def _read_head(data: bytes, name: str) -> tuple[ShardFacts, dict[str, Any], int]:
    """Return the facts, the head, and where the arrays begin."""
    size = _LENGTH.unpack(data[:8])[0] if len(data) >= 8 else _HEAD_AT_MOST + 1
    if size > _HEAD_AT_MOST or data[8:9] != b"{":
        raise _wrong(name, f"it begins with {data[:16]!r}")
    if len(data) < 8 + size:
        raise _wrong(name, f"its head has {size} bytes and {len(data) - 8} are there")
    try:
        head = json.loads(data[8 : 8 + size])
        known: Mapping[str, str] = head["__metadata__"]
        if known["wds_index"] != _VERSION:
            raise _wrong(name, f"it has version {known['wds_index']!r} of the format, and only {_VERSION} is known")
        numbers = (int(known["size"]), known["version"], int(known["samples"]), known["plain"] == "1")
        return ShardFacts(known["url"], *numbers), {**head, "crc32": str(known["crc32"])}, 8 + size
    except (KeyError, TypeError, ValueError) as exn:
        if isinstance(exn, ConfigError):
            raise
        raise _wrong(name, f"its head is not that of an index of a shard: {exn!r}") from exn


def _array(data: bytes, at: int, described: Mapping[str, Any]) -> NDArray[Any]:
    start, stop = described["data_offsets"]
    if not 0 <= start <= stop <= len(data) - at:
        raise ValueError(f"bytes {start} to {stop} of {len(data) - at}")
    dtype = _DTYPES[described["dtype"]]
    array: NDArray[Any] = np.frombuffer(data, dtype, (stop - start) // dtype.itemsize, at + start)
    return array.astype(dtype.newbyteorder("="))


def _wrong(name: str, why: str) -> ConfigError:
    return ConfigError(f"{redact(name)}: no index of a shard: {why} (`wds-async index SHARDS… --kind wds` makes one)")
