"""Compression of whole shards on the way out; `decompress` is the way in."""

from __future__ import annotations

import bz2
import gzip
import lzma
from typing import Any

from wds_async.errors import ConfigError

__all__ = ["compressed", "compression"]

_KINDS = {"gz": "gz", "tgz": "gz", "bz2": "bz2", "tbz2": "bz2", "xz": "xz", "txz": "xz", "zst": "zst"}


def compression(name: str, compress: bool | str | None) -> str:
    """``gz``, ``bz2``, ``xz``, ``zst`` or "" for none: what ``compress`` says (True: gz; False: none whatever the
    name), for None the suffix of ``name``. Where both speak of gz, bz2 or xz and differ, it is the first of these
    three, as in WebDataset. Raises ConfigError for any other ``compress``."""
    named = _KINDS.get(name.rpartition(".")[2].lower(), "")
    if compress is None:
        return named
    if compress is False:
        return ""
    asked = "gz" if compress is True else _KINDS.get(compress)
    if asked is None:
        raise ConfigError(f"compress={compress!r}: it is True, False, None (by suffix), gz, bz2, xz or zst")
    if "zst" in (asked, named):
        return asked
    return next(kind for kind in ("gz", "bz2", "xz") if kind in (asked, named))


def compressed(stream: Any, kind: str, mtime: float | None) -> Any:
    """``stream`` behind a compressor, whose ``close`` leaves ``stream`` open."""
    if kind == "gz":  # no file name and, with ``mtime``, no clock in its header: the same bytes every time
        stamp = None if mtime is None else int(mtime)
        return gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=stamp)
    if kind == "bz2":
        return bz2.BZ2File(stream, "wb")
    if kind == "xz":
        return lzma.LZMAFile(stream, "wb")
    if kind == "zst":
        import zstandard  # noqa: PLC0415 (few shards are zstd)

        return zstandard.ZstdCompressor().stream_writer(stream, closefd=False)
    return stream
