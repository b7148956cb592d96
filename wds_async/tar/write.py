"""Rules for keys and field names that are read back as they were written, headers, and compression by name.

A member is named ``key.field``, and a reader cuts that name again: at the first dot of its last component, fields in
lower case, adjacent members of one key as one sample (see `group`). Most bad names would be lost without a word.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import logging
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterable
from typing import Any

from wds_async import zstd
from wds_async.errors import ConfigError
from wds_async.logs import Once
from wds_async.tar.group import SKIP_META, base_plus_ext

__all__ = ["NameRules", "compressed", "compression", "member_header"]

logger = logging.getLogger("wds_async")

_PLAIN = re.compile(r"(?:(?!__)[^./\0][^./\0]*/)*(?!__)[^./\0][^./\0]*")
_META = re.compile(SKIP_META)
_NAME_BYTES = 100
_SIZE_LIMIT = 8**11


class NameRules:
    """The rules for one run of a writer: they consider the sample before, and log each warning once."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}  # names seen to be good, and what they are read back as
        self._warned = Once()
        self._last: str | None = None
        self._had: set[str] = set()

    def new_shard(self) -> None:
        """Forget the last sample: the next one is the first of a shard."""
        self._last = None

    def check(self, key: object, fields: Iterable[object]) -> set[str]:
        """Return the names that ``fields`` are read back under, for `wrote`.

        Raises ValueError, before anything is written, for a sample that no reader would give back: a key that is no
        str, empty, with a NUL, or whose last component is empty or begins with a dot; a field that is empty or has a
        ``/`` or NUL; fields or adjacent samples that would overwrite each other. What is read back, but changed, is
        logged once.
        """
        if not isinstance(key, str):
            raise ValueError(
                f"a sample needs a __key__ of type str, this one has {key!r} (fields {sorted(map(str, fields))})"
            )
        if _PLAIN.fullmatch(key) is None:
            self._odd_key(key)
        names: set[str] = set()
        for field in fields:
            name = self._fields.get(field) if isinstance(field, str) else None
            name = self._field(key, field) if name is None else name
            if name in names:
                raise ValueError(f"sample {key!r}: two fields are called {name!r} (they are read back in lower case)")
            names.add(name)
        if key == self._last:
            self._same_key(key, names)
        return names

    def wrote(self, key: str, names: set[str]) -> None:
        """Remember a sample that `check` passed as the last one."""
        self._last, self._had = key, names | self._had if key == self._last else names

    def _odd_key(self, key: str) -> None:
        last = key.rpartition("/")[2]
        if not last or last.startswith(".") or "\0" in key or _META.match(f"{key}.x"):
            raise ValueError(
                f"the key {key!r} would not be read back: a key is not empty, has no NUL, does not begin with a"
                " folder like '__x__', and its last component is not empty and does not begin with a dot"
            )
        if base_plus_ext(f"{key}.x") != (key, "x"):
            head = f"{key[: len(key) - len(last)]}{last.partition('.')[0]}"
            self._warn(
                "dot",
                f"the key {key!r} has a dot in its last component: it is read back as {head!r}, the rest goes to the"
                " names of the fields; write key.replace('.', '_')",
            )
        if key.startswith("/") or ".." in key.split("/"):
            self._warn("path", f"the key {key!r} is a path that tar does not unpack as it stands ('/' in front, '..')")

    def _field(self, key: str, field: object) -> str:
        if not isinstance(field, str) or not field or "/" in field or "\0" in field:
            raise ValueError(f"sample {key!r}: a field's name is a str, not empty, without '/' or NUL, not {field!r}")
        name = field.lower()
        if name != field:
            self._warn("case", f"the field {field!r} is read back as {name!r}; write it in lower case")
        if len(self._fields) < 4096:  # names that never repeat must not fill the memory
            self._fields[field] = name
        return name

    def _same_key(self, key: str, names: set[str]) -> None:
        if both := sorted(names & self._had):
            raise ValueError(
                f"two samples in a row have the key {key!r} and the fields {both}: a reader takes adjacent members of"
                " one key for one sample, and refuses this one; give each sample a key of its own"
            )
        self._warn("same", f"two samples in a row have the key {key!r}: they are read back as one sample")

    def _warn(self, kind: str, text: str) -> None:
        if self._warned.first(kind):
            logger.warning("writing shards: %s (logged once a writer)", text)


def member_header(
    name: str,
    size: int,
    mtime: float = 0,
    *,
    mode: int = 0o444,
    user: str = "bigdata",
    group: str = "bigdata",
    format: Any = None,
) -> bytes:
    """Return the header blocks of a regular file, those that ``tarfile`` makes of ``format``; None: ustar, and for what
    that cannot hold a PAX header before it. ValueError for what ``format`` cannot hold."""
    if format != tarfile.PAX_FORMAT:
        mtime = int(mtime)
    info = functools.partial(_member, name, size, mtime, mode, user, group)
    try:
        if format not in (None, tarfile.USTAR_FORMAT):
            return info().tobuf(format, "utf-8", "surrogateescape")
        encoded = name.encode("utf-8", "surrogateescape")
        if len(encoded) > _NAME_BYTES or size >= _SIZE_LIMIT:
            return info().tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
        # A tenth of the time: all but name, size and checksum is the same from member to member.
        form, rest = _plain_header(mtime, mode, user, group)
    except ValueError:
        if format is not None:
            raise
        return info().tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    digits = b"%011o" % size
    # The low half of an Adler-32 is one plus the sum of the bytes, which is below its modulus here.
    checksum = rest + (zlib.adler32(encoded + digits) & 0xFFFF) - 1
    return form % (encoded.ljust(_NAME_BYTES, b"\0"), digits, checksum)


def _member(name: str, size: int, mtime: float, mode: int, user: str, group: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode, info.uname, info.gname = size, mtime, mode, user, group
    return info


@functools.lru_cache(64)
def _plain_header(mtime: float, mode: int, user: str, group: str) -> tuple[bytes, int]:
    """Return a ustar header with places for name, size and checksum, and the sum of its other bytes, where the
    checksum's field counts as eight spaces."""
    plain = _member("", 0, mtime, mode, user, group).tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
    parts = [part.replace(b"%", b"%%") for part in (plain[100:124], plain[136:148], plain[156:])]
    rest = sum(plain[:124]) + sum(plain[135:148]) + sum(plain[156:]) + 8 * 32
    return b"%b" + parts[0] + b"%b\0" + parts[1] + b"%06o\0 " + parts[2], rest


_KINDS = {"gz": "gz", "tgz": "gz", "bz2": "bz2", "tbz2": "bz2", "xz": "xz", "txz": "xz", "zst": "zst"}


def compression(name: str, compress: bool | str | None) -> str:
    """Return ``gz``, ``bz2``, ``xz``, ``zst`` or "" for none, by ``compress`` (True: gz; False: none whatever the
    name), for None by the suffix of ``name``. Where both name gz, bz2 or xz and differ, it is the first of these
    three, as in WebDataset. Raises ConfigError for any other ``compress``."""
    named = _KINDS.get(name.rpartition(".")[2].lower(), "")
    if compress is None:
        return named
    if compress is False:
        return ""
    kind = "gz" if compress is True else _KINDS.get(compress)
    if kind is None:
        raise ConfigError(f"compress={compress!r}: it is True, False, None (by suffix), gz, bz2, xz or zst")
    if "zst" in (kind, named):
        return kind
    return next(first for first in ("gz", "bz2", "xz") if first in (kind, named))


def compressed(stream: Any, kind: str, mtime: float | None) -> Any:
    """Return ``stream`` behind a compressor, whose ``close`` leaves ``stream`` open."""
    if kind == "gz":  # no file name and, with ``mtime``, no clock in its header: the same bytes every time
        stamp = None if mtime is None else int(mtime)
        return gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=stamp)
    if kind == "bz2":
        return bz2.BZ2File(stream, "wb")
    if kind == "xz":
        return lzma.LZMAFile(stream, "wb")
    if kind == "zst":
        return zstd.writer(stream)
    return stream
