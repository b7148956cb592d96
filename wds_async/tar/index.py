"""Indexes of shards: DALI's text file beside each, and WebDataset's JSON list of all.

DALI's (version 1.2, of its tool ``wds2idx``): a first line ``v1.2 N`` with the number of samples, then a line for each
sample with four words for each field: the extension, the offset of its data in bytes, its size in bytes, the member's
name. The words are separated by blanks, so no name may hold one; offsets are those of a plain tar.

WebDataset's JSON (``wids`` version 1)::

    {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": "train",
     "shardlist": [{"url": "train-000000.tar", "nsamples": 1000, "filesize": 104857600}, …]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from wds_async.errors import CorruptShard
from wds_async.tar.blocks import padded
from wds_async.tar.group import SKIP_META, base_plus_ext
from wds_async.tar.headers import Headers, pass_over
from wds_async.tar.source import ByteSource, Read

__all__ = ["DaliIndex", "MemberEntry", "dali_name", "scan", "shard_list", "shard_list_name"]

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
        """The number of samples."""
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
        """The file's text."""
        return "\n".join([f"{_VERSION} {len(self._lines)}", *self._lines, ""])


def dali_name(url: str) -> str:
    """Return the name that ``wds2idx`` gives the index of a shard: ``a/train-000.idx`` for ``a/train-000.tar``."""
    folder, slash, name = url.rpartition("/")
    return f"{folder}{slash}{name[:1]}{name[1:].partition('.')[0]}.idx"


def scan(read: Read, url: str) -> Iterator[MemberEntry]:
    """Yield the entries of an existing plain tar; ``read`` gives its bytes piece by piece, as for `parse.members`.

    Raises NotATar, CorruptShard and TruncatedShard with ``url``. A compressed shard must not be unpacked for this: the
    offsets would be those of no file.
    """
    source = ByteSource(read, url)
    headers = Headers(source)
    try:
        while (member := headers.next(-1)) is not None:
            name, size, offset = member
            if headers.sparse_at == offset:
                what = f"member {name!r:.200} at byte {offset} is stored sparse, so its bytes stand at no one place"
                advice = "pack the shard again without tar's --sparse to index it"
                raise source.error(CorruptShard, f"{what}; {advice}", offset)
            yield MemberEntry(name, source.offset, size)
            pass_over(source, padded(size), offset)
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
