"""Zstandard: Python's own module (3.14 and later), which free-threaded Python has too, else the package zstandard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["decompressor", "error_class", "packed", "unpacked", "writer"]


def _of_python() -> Any:
    """Return ``compression.zstd``; None before Python 3.14."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415 (3.14)
    except ImportError:
        return None
    return zstd


def _package() -> Any:
    import zstandard  # noqa: PLC0415 (10 ms, and few shards are zstd)

    return zstandard


def decompressor(window_bytes: int) -> Any:
    """Return an object whose ``decompress(data)`` unpacks one frame, with windows of at most ``window_bytes``."""
    if (zstd := _of_python()) is None:
        return _package().ZstdDecompressor(max_window_size=window_bytes).decompressobj()
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_bytes.bit_length() - 1})


def error_class() -> type[Exception]:
    """Return the class of errors of damaged data."""
    error: type[Exception] = (_of_python() or _package()).ZstdError
    return error


def writer(stream: Any) -> Any:
    """Return a file that packs what is written to it into ``stream``, which its ``close`` leaves open."""
    if (zstd := _of_python()) is None:
        return _package().ZstdCompressor().stream_writer(stream, closefd=False)
    return zstd.ZstdFile(stream, "w")


def packed(parts: Iterable[bytes]) -> bytes:
    """Return ``parts`` packed as one frame."""
    zstd = _of_python()
    packer = _package().ZstdCompressor().compressobj() if zstd is None else zstd.ZstdCompressor()
    return b"".join([*map(packer.compress, parts), packer.flush()])


def unpacked(data: bytes) -> bytes:
    """Return the content of one frame."""
    if (zstd := _of_python()) is None:
        return bytes(_package().ZstdDecompressor().decompressobj().decompress(data))
    return bytes(zstd.decompress(data))
