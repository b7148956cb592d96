"""Indexes of shards: DALI's text file and Energon's binary file beside each, and WebDataset's JSON list of all.

DALI's (version 1.2, of its tool ``wds2idx``): a first line ``v1.2 N`` with the number of samples, then a line for each
sample with four words for each field: the extension, the offset of its data in bytes, its size in bytes, the member's
name. The words are separated by blanks, so no name may hold one; offsets are those of a plain tar. Version 1.1,
which is read too, has no names.

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

from wds_async.errors import ConfigError, CorruptShard, ShardFormatError
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
_WORDS = {_VERSION: 4, "v1.1": 3}
"""Words for each field, by the version of DALI's index."""
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


def read_dali(text: str, name: str = "the index", shard_bytes: int | None = None) -> list[list[MemberEntry]]:
    """Return the fields of each sample from the text of DALI's index, version 1.2 or 1.1 (whose fields have the name
    ""); ``name`` is for errors.

    Raises ConfigError, with the line, for what is no such index, and ShardFormatError where a sample begins before the
    end of the one before it, or ends behind ``shard_bytes``.
    """
    head, *lines = text.splitlines() or [""]
    version, _, count = head.partition(" ")
    if version not in _WORDS or not count.strip().isdecimal():
        why = f"{head!r:.80}; an index of DALI begins with '{_VERSION} N' or 'v1.1 N'"
        raise ConfigError(f"{redact(name)}, line 1: {why}")
    if int(count) != len(lines):
        raise ConfigError(f"{redact(name)}: its first line says {count.strip()} samples, and it has {len(lines)}")
    samples, end = [], 0
    for number, line in enumerate(lines, 2):
        fields = _dali_fields(line, _WORDS[version])
        if not fields:
            what = "extension, offset, size and name" if version == _VERSION else "extension, offset and size"
            raise ConfigError(f"{redact(name)}, line {number}: {line!r:.80} is no list of {what}")
        start, stop = min(field.offset for field in fields), max(field.offset + padded(field.size) for field in fields)
        if start < end + BLOCK or start % BLOCK:
            why = f"byte {start} is no place of data in a tar behind byte {end}, where the sample before it ends"
            raise ShardFormatError(f"{redact(name)}, line {number}: {why}")
        if shard_bytes is not None and stop > shard_bytes:
            raise _of_longer_shard(f"{redact(name)}, line {number}", stop, shard_bytes)
        samples.append(fields)
        end = stop
    return samples


def _of_longer_shard(where: str, stop: int, size: int) -> ShardFormatError:
    why = f"a sample ends at byte {stop:,} of a shard that has {size:,} bytes"
    return ShardFormatError(f"{where}: {why}: this is the index of another shard, make it again (`wds-async index`)")


def _dali_fields(line: str, count: int) -> list[MemberEntry]:
    """Return the fields in one line of DALI's index with ``count`` words for each; nothing if there are others."""
    words = line.split()
    if len(words) % count or not all(n.isdecimal() for n in (*words[1::count], *words[2::count])):
        return []
    names = words[3::4] if count == 4 else itertools.repeat("")
    fields = zip(names, words[1::count], words[2::count], strict=False)
    return [MemberEntry(member, int(offset), int(size)) for member, offset, size in fields]


def energon_name(url: str) -> str:
    """Return the name of Energon's index of a shard: ``a/train-000.tar.idx`` for ``a/train-000.tar``."""
    return f"{url}.idx"


def energon_index(starts: Iterable[int], stop: int) -> bytes:
    """Return the bytes of Energon's index: ``starts`` are the offsets of the samples, ``stop`` the end of the last."""
    offsets = [*starts, stop]
    return struct.pack(f"<{len(offsets)}Q", *offsets)


def read_energon(data: bytes, name: str = "the index", shard_bytes: int | None = None) -> list[int]:
    """Return the offsets in Energon's index: those of the samples, then the end of the last.

    Raises ConfigError for what is no such index, and ShardFormatError where that end is behind ``shard_bytes``.
    """
    count, rest = divmod(len(data), 8)
    offsets = list(struct.unpack(f"<{count}Q", data[: 8 * count]))
    ordered = all(a < b for a, b in itertools.pairwise(offsets))
    if rest or not count or not ordered or any(offset % BLOCK for offset in offsets):
        why = f"{len(data):,} bytes that are no ascending offsets of tar blocks, eight bytes each"
        raise ConfigError(f"{redact(name)}: no index of Energon: {why}")
    if shard_bytes is not None and offsets[-1] > shard_bytes:
        raise _of_longer_shard(f"{redact(name)}, byte {len(data) - 8}", offsets[-1], shard_bytes)
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
