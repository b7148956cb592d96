"""`compare`: two sets of shards, sample by sample, by key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wds_async.dataset import WebDataset
from wds_async.redact import redact
from wds_async.storage.listing.expand import Urls

__all__ = ["DiffCounts", "Difference", "compare"]

_SHORT = 40
_DIGEST_BYTES = 12


@dataclass(frozen=True)
class Difference:
    """One difference: ``kind`` is ``only in A``, ``only in B``, ``field`` (other bytes), ``only in A`` or ``only in B``
    with a ``field``, ``order``, or ``repeated`` (the key comes again in one of them)."""

    kind: str
    key: str
    field: str = ""
    a: str = ""
    b: str = ""


@dataclass
class DiffCounts:
    """Counts of a comparison: samples and bytes of both sides."""

    samples_a: int = 0
    samples_b: int = 0
    bytes_a: int = 0
    bytes_b: int = 0


@dataclass(slots=True)
class _Entry:
    """A sample of A: its place, and for each field its bytes, if they are few, or its digest."""

    number: int
    shard: str
    offset: int
    fields: dict[str, bytes]


def _samples(urls: Urls, fields: frozenset[str], ignored: frozenset[str]) -> Iterator[tuple[Any, dict[str, bytes]]]:
    for sample in WebDataset(urls, shardshuffle=False, empty_check=False, nodesplitter=None, workersplitter=None):
        names = (name for name in sample if not name.startswith("_"))
        yield sample, {name: sample[name] for name in names if (not fields or name in fields) and name not in ignored}


def _kept(data: bytes) -> bytes:
    """Return a byte that tells which, and ``data`` or its digest and length."""
    if len(data) <= _SHORT:
        return b"=" + data
    return b"#" + hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() + len(data).to_bytes(8, "big")


def _shown(kept: bytes) -> str:
    if kept[:1] == b"#":
        return f"{int.from_bytes(kept[-8:], 'big'):,} bytes"
    text = kept[1:].decode("utf-8", "backslashreplace")
    return text if text.isprintable() else f"{len(kept) - 1} bytes"


def compare(
    a: Urls,
    b: Urls,
    counts: DiffCounts,
    *,
    ordered: bool = False,
    fields: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> Iterator[Difference]:
    """Yield what differs between the samples of the shards ``a`` and ``b``, by key; count them in ``counts``.

    With ``ordered`` the order counts too. Only ``fields`` are compared, if any are given, and never those of
    ``ignore``. All keys of ``a`` are held in memory, with some 20 bytes a field: about 300 bytes a sample.
    """
    chosen, ignored = frozenset(fields), frozenset(ignore)
    entries: dict[str, _Entry] = {}
    shards: dict[str, str] = {}
    for sample, values in _samples(a, chosen, ignored):
        counts.samples_a += 1
        counts.bytes_a += sum(map(len, values.values()))
        key, shard = sample["__key__"], shards.setdefault(sample.shard, sample.shard)
        if key in entries:
            yield Difference("repeated", key, a=_place(shard, sample.offset))
            continue
        kept = {name: _kept(data) for name, data in values.items()}
        entries[key] = _Entry(counts.samples_a - 1, shard, sample.offset, kept)
    seen: set[str] = set()
    for sample, values in _samples(b, chosen, ignored):
        counts.samples_b += 1
        counts.bytes_b += sum(map(len, values.values()))
        key, place = sample["__key__"], _place(sample.shard, sample.offset)
        entry = entries.pop(key, None)
        if entry is None:
            yield Difference("repeated" if key in seen else "only in B", key, b=place)
            continue
        seen.add(key)
        if ordered and entry.number != counts.samples_b - 1:
            yield Difference("order", key, a=f"sample {entry.number}", b=f"sample {counts.samples_b - 1}")
        yield from _fields(key, entry.fields, values)
    for key, entry in entries.items():
        yield Difference("only in A", key, a=_place(entry.shard, entry.offset))


def _fields(key: str, kept: Mapping[str, bytes], values: Mapping[str, bytes]) -> Iterator[Difference]:
    for name in sorted({*kept, *values}):
        if name not in values:
            yield Difference("only in A", key, name, a=_shown(kept[name]))
        elif name not in kept:
            yield Difference("only in B", key, name, b=_shown(_kept(values[name])))
        elif kept[name] != (other := _kept(values[name])):
            yield Difference("field", key, name, _shown(kept[name]), _shown(other))


def _place(shard: str, offset: int) -> str:
    return f"{redact(shard)} @{offset}"
