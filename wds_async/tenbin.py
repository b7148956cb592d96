"""tenbin: arrays of numbers as 64-byte-aligned chunks, in WebDataset's format with ``uint32`` besides.

A chunk is the magic ``~TenBin~``, the length of its data as an int64, and the data, padded with zeros to 64 bytes. An
array is two chunks: a header of int64s (dtype code and label as eight characters each, number of dimensions, the
dimensions) and its numbers in C order. All is little-endian.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["decode_buffer", "encode_buffer", "load", "read", "save", "write"]

Buffer = bytes | bytearray | memoryview
Infos = bool | Sequence[str]

MAGIC = b"~TenBin~"
_ALIGN = 64
_MAX_DIMENSIONS = 9
_CODES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")


def encode_buffer(l: list[Any], infos: Sequence[str] | None = None) -> bytearray:  # noqa: E741 - WebDataset's name
    """Return the arrays of the list ``l`` (of any shape with up to nine dimensions) as tenbin bytes.

    ``infos`` gives each array a label of at most eight ASCII characters. Raises ValueError for anything but a
    list, and for dtypes other than float16 to 64, int8 to 64 and uint8 to 64.
    """
    if not isinstance(l, list):
        raise ValueError(f"tenbin encodes a list of arrays, not {type(l).__name__}")
    return bytearray().join(_chunks(l, infos))


def decode_buffer(buf: Buffer, infos: Infos = False) -> Any:
    """Return the arrays in ``buf``, as a list of views into it (read-only where ``buf`` is).

    ``infos=True`` returns the pair of arrays and labels; a sequence of labels must be those of the buffer.
    Raises ValueError where the bytes are not tenbin.
    """
    view = memoryview(buf).cast("B")
    chunks, pos = [], 0
    while pos < len(view):
        size = _chunk_size(bytes(view[pos : pos + 16]))
        pos += 16
        if size > len(view) - pos:
            raise ValueError(f"tenbin: a chunk of {size} bytes at byte {pos}, where {len(view) - pos} are left")
        chunks.append(view[pos : pos + size])
        pos += size + -size % _ALIGN
    return _arrays(chunks, infos)


def write(stream: IO[bytes], l: Iterable[Any], infos: Sequence[str] | None = None) -> None:  # noqa: E741
    """Write arrays to an open file, as `encode_buffer` encodes them."""
    for chunk in _chunks(list(l), infos):
        stream.write(chunk)


def read(stream: IO[bytes], n: int = sys.maxsize, infos: Infos = False) -> Any:
    """Read at most ``n`` arrays (all, unless told otherwise) from an open file; see `decode_buffer`."""
    chunks: list[Buffer] = []
    while len(chunks) // 2 < n and (head := stream.read(16)):
        size = _chunk_size(head)
        data = stream.read(size)
        if len(data) < size:
            raise ValueError(f"tenbin: the file ends inside a chunk: {size} bytes wanted, {len(data)} got")
        stream.read(-size % _ALIGN)
        chunks.append(data)
    return _arrays(chunks, infos)


def save(fname: str | os.PathLike[str], *args: Any, infos: Sequence[str] | None = None, nocheck: bool = False) -> None:
    """Write the arrays ``args`` to the file ``fname``, which must end in ``.ten`` unless ``nocheck``."""
    _check_name(fname, nocheck)
    with open(fname, "wb") as stream:
        write(stream, args, infos=infos)


def load(fname: str | os.PathLike[str], infos: Infos = False, nocheck: bool = False) -> Any:
    """Read the arrays of the file ``fname``; see `save` and `decode_buffer`."""
    _check_name(fname, nocheck)
    with open(fname, "rb") as stream:
        return read(stream, infos=infos)


def _check_name(fname: str | os.PathLike[str], nocheck: bool) -> None:
    if not nocheck and not os.fspath(fname).endswith(".ten"):
        raise ValueError(f"{os.fspath(fname)!r}: a tenbin file is named *.ten (nocheck=True takes any name)")


def _chunks(arrays: list[Any], infos: Sequence[str] | None) -> Iterator[bytes]:
    labels = [""] * len(arrays) if infos is None else infos
    if len(labels) != len(arrays):
        raise ValueError(f"tenbin: {len(arrays)} arrays, but {len(labels)} infos")
    for item, label in zip(arrays, labels, strict=True):
        array = np.asarray(item, order="C")
        code = array.dtype.kind + str(array.dtype.itemsize)
        if code not in _CODES:
            raise ValueError(f"tenbin has no code for the dtype {array.dtype}; it holds {' '.join(_CODES)}")
        if array.ndim > _MAX_DIMENSIONS:
            raise ValueError(f"tenbin: {array.ndim} dimensions; it holds at most {_MAX_DIMENSIONS}")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        header = _word(code) + _word(label) + struct.pack(f"<{array.ndim + 1}q", array.ndim, *array.shape)
        for data in (header, array.tobytes()):
            yield MAGIC + struct.pack("<q", len(data))
            yield data
            yield b"\0" * (-len(data) % _ALIGN)


def _word(text: str) -> bytes:
    word = text.encode("ascii")
    if len(word) > 8:
        raise ValueError(f"tenbin: the label {text!r} has more than eight characters")
    return word.ljust(8, b"\0")


def _chunk_size(head: bytes) -> int:
    if len(head) < 16 or head[:8] != MAGIC:
        raise ValueError(f"tenbin: no chunk begins with {head!r}")
    size: int = struct.unpack("<q", head[8:])[0]
    if size < 0:
        raise ValueError(f"tenbin: a chunk of {size} bytes")
    return size


def _arrays(chunks: Sequence[Buffer], infos: Infos) -> Any:
    if len(chunks) % 2:
        raise ValueError("tenbin: the bytes end between an array's header and its numbers")
    arrays: list[NDArray[Any]] = []
    labels: list[str] = []
    for header, data in zip(chunks[::2], chunks[1::2], strict=True):
        code = bytes(header[:8]).rstrip(b"\0").decode("ascii", "replace")
        rank = int.from_bytes(header[16:24], "little", signed=True)
        if code not in _CODES or not 0 <= rank <= _MAX_DIMENSIONS or len(header) < 24 + 8 * rank:
            raise ValueError(f"tenbin: no array has the header {bytes(header[:32])!r}")
        shape = struct.unpack_from(f"<{rank}q", header, 24)
        arrays.append(np.frombuffer(data, dtype="<" + code).reshape(shape))
        labels.append(bytes(header[8:16]).rstrip(b"\0").decode("ascii", "replace"))
    if infos is True:
        return arrays, labels
    if infos and list(infos) != labels:
        raise ValueError(f"tenbin: the arrays are labelled {labels}, not {list(infos)}")
    return arrays
