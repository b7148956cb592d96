"""Indexes of shards: DALI's text file and Energon's binary file beside each, and WebDataset's JSON list of all.

DALI's (version 1.2, of its tool ``wds2idx``): a first line ``v1.2 N`` with the number of samples, then a line for each
sample with four words for each field: the extension, the offset of its data in bytes, its size in bytes, the member's
name. The words are separated by blanks, so no name may hold one; offsets are those of a plain tar. Older versions have
no names.

Energon's (``train-000.tar.idx``, of ``energon prepare``): unsigned numbers of eight bytes, little-endian, without a
head: the offset of each sample's first header block in a plain tar, extension headers included, then the end of the
last member. N samples take 8 * (N + 1) bytes. It holds no keys.

WebDataset's JSON (``wids`` version 1)::

    {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": "train",
     "shardlist": [{"url": "train-000000.tar", "nsamples": 1000, "filesize": 104857600}, …]}
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from wds_async.errors import ConfigError, CorruptShard
from wds_async.redact import redact
from wds_async.tar.blocks import BLOCK, LOW_SUMS, padded
from wds_async.tar.group import SKIP_META, base_plus_ext
from wds_async.tar.headers import Headers, pass_over
from wds_async.tar.parse import HEADER, SIZES, TIMES
from wds_async.tar.source import NOTHING, ByteSource, Read

__all__ = [
    "DaliIndex", "Header", "MemberEntry", "dali_name", "energon_index", "energon_name", "headers_of", "read_dali",
    "read_energon", "scan", "shard_list", "shard_list_name",
]  # fmt: skip

Header = tuple[str, int, int, int, bool]
"""Header of a regular file in a tar: its name, the offset of its first block (extension headers included), the offset
of its data, the size of its data as stored, all in bytes, and whether it is stored sparse. A plain tuple, for speed."""

_VERSION = "v1.2"
_KIND = "wids-shard-index-v1"
_BLANK = re.compile(r"\s")
_META = re.compile(SKIP_META)
_NUMBER = re.compile(r"%[^%a-zA-Z]*[diuoxX]")


class MemberEntry(NamedTuple):
    """One field in a plain tar: the member's ``name``, the ``offset`` of its data and its ``size``, in bytes."""

    name: str
    offset: int
    size: int


class DaliIndex:
    """Gathers the entries of one shard, in their order."""

    def __init__(self, entries: Iterable[MemberEntry] = ()) -> None:
        self._lines: list[str] = []
        self._key: str | None = None
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._lines)

    def add(self, entry: MemberEntry) -> None:
        """Add the next member; names without a key or field are passed over, as by a reader.

        Raises ValueError for a name with a blank, which the format cannot hold.
        """
        key, field = base_plus_ext(entry.name)
        if key is None or _META.match(entry.name):
            return
        if not field or _BLANK.search(entry.name):
            raise ValueError(
                f"{entry.name!r}: DALI's index is separated by blanks, so no name may be empty or hold one"
            )
        words = f"{field} {entry.offset} {entry.size} {entry.name}"
        if key == self._key:
            self._lines[-1] += f" {words}"
        else:
            self._key = key
            self._lines.append(words)

    def text(self) -> str:
        """Return the file's text."""
        return "\n".join([f"{_VERSION} {len(self._lines)}", *self._lines, ""])


def dali_name(url: str) -> str:
    """Return the name that ``wds2idx`` gives the index of a shard: ``a/train-000.idx`` for ``a/train-000.tar``."""
    folder, slash, name = url.rpartition("/")
    return f"{folder}{slash}{name[:1]}{name[1:].partition('.')[0]}.idx"


def read_dali(text: str, name: str = "the index") -> list[list[MemberEntry]]:
    """Return the fields of each sample from the text of DALI's index; ``name`` is for errors.

    Raises ConfigError, with the line, for what is no such index, and for versions without names (before 1.2).
    """
    head, *lines = text.splitlines() or [""]
    version, _, count = head.partition(" ")
    if version != _VERSION or not count.strip().isdecimal():
        raise ConfigError(f"{redact(name)}, line 1: {head!r:.80}; an index of DALI 1.2 begins with '{_VERSION} N'")
    if int(count) != len(lines):
        raise ConfigError(f"{redact(name)}: its first line says {count.strip()} samples, and it has {len(lines)}")
    return [_dali_fields(line, number, name) for number, line in enumerate(lines, 2)]


def _dali_fields(line: str, number: int, name: str) -> list[MemberEntry]:
    """Return the fields in one line of DALI's index."""
    words = line.split()
    fields = list(zip(words[1::4], words[2::4], words[3::4], strict=False))
    good = words and len(words) == 4 * len(fields) and all(at.isdecimal() and n.isdecimal() for at, n, _ in fields)
    if not good:
        raise ConfigError(f"{redact(name)}, line {number}: {line!r:.80} is no list of extension, offset, size and name")
    return [MemberEntry(member, int(offset), int(size)) for offset, size, member in fields]


def energon_name(url: str) -> str:
    """Return the name of Energon's index of a shard: ``a/train-000.tar.idx`` for ``a/train-000.tar``."""
    return f"{url}.idx"


def energon_index(starts: Iterable[int], stop: int) -> bytes:
    """Return the bytes of Energon's index: ``starts`` are the offsets of the samples, ``stop`` the end of the last."""
    offsets = [*starts, stop]
    return struct.pack(f"<{len(offsets)}Q", *offsets)


def read_energon(data: bytes, name: str = "the index") -> list[int]:
    """Return the offsets in Energon's index: those of the samples, then the end of the last.

    Raises ConfigError for what is no such index.
    """
    count, rest = divmod(len(data), 8)
    offsets = list(struct.unpack(f"<{count}Q", data[: 8 * count]))
    ordered = all(a < b for a, b in itertools.pairwise(offsets))
    if rest or not count or not ordered or any(offset % BLOCK for offset in offsets):
        why = f"{len(data):,} bytes that are no ascending offsets of tar blocks, eight bytes each"
        raise ConfigError(f"{redact(name)}: no index of Energon: {why}")
    return offsets


def headers_of(source: ByteSource) -> Iterator[Header]:
    """Yield the headers of the regular files in what is left of ``source``, a whole tar, and pass over their data
    uncopied.

    Raises what `parse.members` raises for the same bytes, but for FieldTooLarge. Call ``source.drop()`` at the end.
    """
    headers, first = Headers(source), -1
    # The loop of `parse`, without the data. Both are spelled out: sharing it would take a call for each header.
    sums, sizes, unpack, adler32 = LOW_SUMS, SIZES, HEADER.unpack_from, zlib.adler32
    view, pos, end = source.view, source.pos, source.end
    try:
        while True:
            name, size = None, -1
            if pos + BLOCK <= end and not headers.shared:
                raw, field, checksum, kind, prefix = unpack(view, pos)
                if prefix == b"\0" and adler32(view[pos : pos + BLOCK]) & 0xFFFF == sums[checksum]:
                    size, behind = sizes[field], pos + 2 * BLOCK
                    if kind == b"0":
                        try:
                            name = raw.partition(b"\0")[0].decode()
                        except ValueError:
                            name = None
                    elif (
                        kind == b"x"
                        and first < 0 < size <= BLOCK
                        and behind <= end
                        and TIMES.match(view, pos + BLOCK, behind)
                    ):
                        first, pos = source.base + pos, behind
                        continue
            if name is None or size < 0:
                source.pos, view = pos, NOTHING
                if (member := headers.next(first)) is None:
                    return
                name, size, start = member
                view, pos, end = source.view, source.pos, source.end
            else:
                start, pos = first if first >= 0 else source.base + pos, pos + BLOCK
            first = -1
            yield name, start, source.base + pos, size, headers.sparse_at == start
            pos += padded(size)
            if pos > end:
                rest, source.pos, view = pos - end, end, NOTHING
                pass_over(source, rest, start)
                view, pos, end = source.view, source.pos, source.end
    finally:
        if view is not NOTHING:
            source.pos, view = min(pos, end), NOTHING


def scan(read: Read, url: str) -> Iterator[MemberEntry]:
    """Yield the entries of an existing plain tar; ``read`` gives its bytes piece by piece, as for `parse.members`.

    Raises NotATar, CorruptShard and TruncatedShard with ``url``. A compressed shard must not be unpacked for this: the
    offsets would be those of no file.
    """
    source = ByteSource(read, url)
    try:
        for name, start, offset, size, sparse in headers_of(source):
            if sparse:
                what = f"member {name!r:.200} at byte {start} is stored sparse, so its bytes stand at no one place"
                advice = "pack the shard again without tar's --sparse to index it"
                raise source.error(CorruptShard, f"{what}; {advice}", start)
            yield MemberEntry(name, offset, size)
    finally:
        source.drop()


def shard_list(shards: Sequence[Mapping[str, Any]], name: str = "") -> str:
    """Return the JSON text for ``shards``: dicts with ``url`` (relative to the index, or whole), ``nsamples`` and,
    where known, ``filesize`` in bytes."""
    head: dict[str, Any] = {"__kind__": _KIND, "wids_version": 1, **({"name": name} if name else {})}
    return json.dumps({**head, "shardlist": [dict(shard) for shard in shards]}, indent=1) + "\n"


def shard_list_name(pattern: str) -> tuple[str, str]:
    """Return the place of the list of a pattern's shards, and its name: ``a/train.json`` and ``train`` for
    ``a/train-%06d.tar``; without letters before the number it is ``index.json``."""
    folder, slash, last = pattern.rpartition("/")
    number = _NUMBER.search(last)
    stem = last[: number.start()] if number else last.partition(".")[0]
    stem = stem.replace("%%", "%").rstrip("-_.")
    folder = folder.replace("%%", "%") if number else folder
    return f"{folder}{slash}{stem or 'index'}.json", stem
