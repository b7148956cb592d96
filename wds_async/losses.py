"""What was passed over, as values: single entries, and their sums."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wds_async.redact import redact

__all__ = ["SHOWN", "BarrenShards", "Counts", "Entry", "appended", "counts_of", "read_back", "reason_of"]


SHOWN = 300
"""Characters of a reason, or of a key."""
_BEGINS = '{"stage": '  # each line; within a text it would stand with its quotes escaped


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that was passed over. None: nobody knows."""

    stage: str
    """``read`` (the transfer), ``checksum``, ``tar``, ``records``, or the name of the stage: ``decode``, ``map``, …"""
    reason: str
    """The exception's class and message, on one line, without secrets."""
    shard: str | None = None
    """Its URL, expanded, before rewriting, without secrets."""
    offset: int | None = None
    """In bytes, in the uncompressed tar."""
    bytes: int | None = None
    """Bytes that were passed over."""
    samples: int | None = None
    """Samples that were passed over, or lost a member. Those in ``bytes`` are not counted."""
    key: str | None = None
    field: str | None = None
    rest: bool = False
    """Whether the rest of the shard was passed over."""
    epoch: int | None = None
    rank: int = 0
    worker: int = 0
    time: float = 0.0
    """Seconds since 1970, UTC."""

    @property
    def kind(self) -> str:
        """The exception's class."""
        return self.reason.partition(":")[0]

    def __str__(self) -> str:
        if self.shard is not None and self.shard in self.reason:
            return self.reason
        where = [self.shard or "a sample of an unknown shard"]
        where += [f"byte {self.offset}"] if self.offset is not None else []
        where += [f"key {self.key!r}"] if self.key is not None else []
        return f"{', '.join(where)}: {self.reason}"


@dataclass(slots=True)
class Counts:
    """Sums over entries. ``unread`` of the samples never left the reader; ``unsized`` shards have a rest of unknown
    size, behind ``unsized_at`` bytes in all."""

    entries: int = 0
    samples: int = 0
    shards: int = 0
    bytes: int = 0
    unread: int = 0
    unsized: int = 0
    unsized_at: int = 0
    held: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, entry: Entry) -> None:
        """Count one more."""
        self.entries += 1
        self.samples += entry.samples or 0
        self.shards += entry.rest
        self.bytes += entry.bytes or 0
        if entry.stage in ("read", "tar", "records"):
            self.unread += entry.samples or 0
        if entry.stage == "checksum" and not entry.samples:  # read, and handed on to nobody
            self.held += entry.bytes or 0
        if entry.rest and entry.bytes is None:
            self.unsized += 1
            self.unsized_at += entry.offset or 0
        self.reasons[entry.kind] += 1

    def plus(self, other: Counts, sign: int = 1) -> Counts:
        """The sum, or with -1 what came since ``other``."""
        numbers = {name: getattr(self, name) + sign * getattr(other, name) for name in _NUMBERS}
        reasons = {kind: self.reasons[kind] + sign * other.reasons[kind] for kind in self.reasons | other.reasons}
        return Counts(**numbers, reasons=+Counter(reasons))

    def state(self) -> dict[str, Any]:
        """The sums as plain data, for JSON and `counts_of`."""
        return {**{name: getattr(self, name) for name in _NUMBERS}, "reasons": dict(self.reasons)}

    def share(self, samples: float, size: float, shards: float) -> float:
        """The part that was lost of a reading that gave ``samples``, ``size`` bytes and ``shards`` that ended well:
        by samples where they are known, else by bytes. A rest of unknown size counts as if its shard had the mean size
        of those that ended well."""
        size = max(0.0, size - self.held)
        if self.unsized and not size:
            return 1.0
        by_samples = self.samples / max(samples + self.unread, self.samples, 1)
        mean = size / shards if shards else 0.0
        gone = self.bytes + max(0.0, self.unsized * mean - self.unsized_at)
        return min(1.0, by_samples + (gone / (size + gone) if gone else 0.0))

    def text(self, share: float) -> str:
        """``passed over 3 samples and 1 shard (12.3 MB, 0.40%): 2 DecodingError, 1 CorruptShard``"""
        parts = [f"{n:,} {word}{'' if n == 1 else 's'}" for n, word in _worded(self.samples, self.shards) if n]
        size = f"{_size(self.bytes)}, " if self.bytes else ""
        reasons = ", ".join(f"{n:,} {kind}" for kind, n in self.reasons.most_common())
        return f"passed over {' and '.join(parts) or 'bytes'} ({size}{share:.2%}): {reasons}"


class BarrenShards:
    """The shards that gave no sample, since the last one that did: whether an endless list of shards has only such."""

    AT_MOST = 1000
    """Shards that may fail in a row, whichever they are, and shards that are remembered."""
    REPEATS = 64
    """Shards that must come again, so that chance does not decide where few shards are drawn at random."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._reset()

    def _reset(self) -> None:
        self._barren: set[str] = set()
        self._count = self._repeats = 0
        self._examples: dict[str, dict[str, Entry]] = {}
        self._kinds: Counter[str] = Counter()

    def add(self, shard: str, samples: int, failure: Entry | None) -> bool:
        """Count a shard that gave ``samples``, and ``failure`` if it could not be read to its end. Return True once
        going on is hopeless: 1,000 failed in a row, or all shards have come again, still without a sample."""
        if len(self._known) < self.AT_MOST:
            self._known.add(shard)
        if samples:
            self._reset()
            return False
        self._count += 1
        self._repeats += shard in self._barren
        if len(self._barren) < self.AT_MOST:
            self._barren.add(shard)
        kind = "no sample in it" if failure is None else failure.kind
        self._kinds[kind] += 1
        examples = self._examples.setdefault(kind, {})
        if failure is not None and len(examples) < _EXAMPLES:
            examples[shard] = failure
        return (failure is not None and self._count >= self.AT_MOST) or self._all_came_again()

    def _all_came_again(self) -> bool:
        if self._repeats < max(self.REPEATS, len(self._barren)):
            return False
        # A shard may be good that gave a sample before and has not come since. If u of n were, that many random draws
        # would have missed them all with a probability of exp(-u * count / n).
        untried, known = len(self._known - self._barren), len(self._known)
        return untried == 0 or untried * self._count >= 40 * known

    def __str__(self) -> str:
        """How many, and why: for each kind of failure their number and at most five shards, a line each."""
        lines = [f"{self._count:,} shards in a row ({len(self._barren):,} different ones) gave no sample"]
        for kind, count in self._kinds.most_common():
            examples = self._examples[kind].values()
            lines.append(f"{count:,} × {kind}" + "".join(f"\n    {entry}" for entry in examples))
        return "\n  ".join(lines)


_EXAMPLES = 5
_NUMBERS = ("entries", "samples", "shards", "bytes", "unread", "unsized", "unsized_at", "held")


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count:,} bytes"


def _worded(samples: int, shards: int) -> list[tuple[int, str]]:
    return [(samples, "sample"), (shards, "shard")]


def counts_of(state: Mapping[str, Any]) -> Counts:
    """The counts of which this is the `Counts.state`; an empty one is nothing."""
    return Counts(**{**state, "reasons": Counter(state.get("reasons", {}))})


def appended(path: Path, entry: Entry) -> None:
    """Append ``entry`` to a file as one JSON line, by one write: many processes may share the file. Raises OSError."""
    said = {name: value for name, value in asdict(entry).items() if value is not None}
    line = json.dumps(said).encode() + b"\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(handle, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def read_back(path: Path) -> list[Entry]:
    """The entries in a file of `appended`; none of a line that was cut short, with the process that wrote it or where
    the disk was full: what came next stands behind it, on the same line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Entry(**json.loads(line[max(0, line.rfind(_BEGINS)) :])) for line in lines if line.endswith("\n")]


def reason_of(exn: BaseException) -> str:
    """The class and message of an exception, on one line of at most 300 characters, without secrets."""
    said = str(exn).strip().splitlines()
    text = f"{type(exn).__name__}: {redact(said[0])}" if said else type(exn).__name__
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
