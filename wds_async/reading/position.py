"""Position of a reading stage between two samples, and the way back to samples that were read before."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from wds_async.checkpoint.history import ReadLog, Stretch
from wds_async.checkpoint.packing import Reference
from wds_async.checkpoint.states import SourceState
from wds_async.errors import StateError
from wds_async.reading.spans import entry_at
from wds_async.redact import redact
from wds_async.tar.group import RawSample
from wds_async.transfer.reader import ShardStream

__all__ = [
    "OpenShard",
    "OpenStretch",
    "ReadState",
    "check_shard",
    "entries_of",
    "entry_left",
    "facts_of",
    "picked",
]

_GAP_BYTES = 256 << 10
"""Samples that are nearer to each other are read by one request."""


class OpenShard(Protocol):
    """A shard while it is read."""

    stream: ShardStream

    @property
    def compressed(self) -> bool:
        """True if parts of it cannot be read by their positions."""


class OpenStretch:
    """Stretch of an open shard whose samples have been given."""

    def __init__(self) -> None:
        self._shard: OpenShard | None = None
        self._from: int | None = 0
        """Offset of its first sample; None until that of a span that is cut has come."""

    def begin(self, shard: OpenShard) -> None:
        """Begin with ``shard``."""
        self._shard, self._from = shard, _first_of(shard.stream.info)

    def wanted(self, samples: Iterator[RawSample], stream: ShardStream) -> Iterator[RawSample]:
        """Return those of ``samples`` that the entry of their shard asks for: those ``behind`` an offset."""
        behind = stream.info.get("behind", 0)
        if behind:
            return itertools.dropwhile(lambda sample: sample.offset < behind, samples)
        return samples if self._from is not None else itertools.chain.from_iterable(self._first_and_rest(samples))

    def _first_and_rest(self, samples: Iterator[RawSample]) -> Iterator[Iterable[RawSample]]:
        for first in samples:
            self._from = first.offset
            yield (first,)
            del first
            yield samples

    def until(self, sample: RawSample | None) -> Iterable[Stretch]:
        """Return the stretch up to ``sample``, the latest one, if there is any that `end` has not noted."""
        if self._shard is None or sample is None or self._from is None:
            return ()
        stop = sample.stop
        if stop is None and (info := self._shard.stream.info).get("stop") is not None:
            stop = getattr(self._shard, "cut_at", None) if info.get("cut") else info["stop"]
        return ((self._shard.stream.url, self._from, stop),)

    def end(self, sample: RawSample | None, log: ReadLog) -> None:
        """Note in ``log`` what was given of a shard that is over."""
        for stretch in self.until(sample):
            log.add(stretch)
        self._shard = None


class ReadState(SourceState):
    """Position of a reading stage: the shards that it has read, and the place in the one that is open."""

    def __init__(self) -> None:
        self.sample: RawSample | None = None
        """The latest sample of the open shard."""
        self._shards = 0
        """Number of the open shard, or of the next one."""
        self._at: Mapping[str, Any] | None = None
        """Place in the open shard that was loaded."""
        self._entries: list[Any] | None = None
        """Shards that were shared out, in place of those of the shard list."""
        self._endless = False
        self._first = 0
        self._before: str | None = None
        """URL of the last shard in front of those of this run."""
        self._read: dict[int, str] = {}
        """The open shard and the one before it, by their numbers."""
        self._open: OpenShard | None = None
        self._facts: dict[str, Any] = {}
        """By URL, facts of the shards that were read (see `entries_of`)."""
        self._log = ReadLog()
        self._given = OpenStretch()

    def shards(self, source: Iterable[Any]) -> Iterator[Any]:
        """Return the shards to read: those of ``source``, or those that were shared out, from the one that was open on,
        which begins where it was left."""
        if self._entries is not None:
            source = itertools.chain(self._entries, source if self._endless else ())
        return self._from_open(self._without_read_shards(iter(source)))

    def _without_read_shards(self, source: Iterator[Any]) -> Iterator[Any]:
        """Return what follows the shards that were read. StateError where the last one is not the one it was."""
        for entry in itertools.islice(source, max(0, self._shards - 1), self._shards):
            check_shard(entry, self._before, self._shards - 1)
        return source

    def listed(self) -> Iterator[Any]:
        """Return the shards to read that do not come from an endless source."""
        if self._entries is not None and self._shards < len(self._entries):
            return self._from_open(iter(self._entries[self._shards :]))
        return iter(() if self._at is None else [entry_left({"url": self._at["url"]}, self._at)])

    def _from_open(self, rest: Iterator[Any]) -> Iterator[Any]:
        if self._at is None:
            return rest
        entry = next(rest, None)
        check_shard(entry, self._at["url"], self._shards)
        return itertools.chain([entry_left(entry, self._at)], rest)

    def begin(self, shard: OpenShard, number: int) -> None:
        """Note that ``shard``, number ``number`` of this run, begins."""
        self._shards, self._open, self.sample = self._first + number, shard, None
        self._read = {number: url for number, url in self._read.items() if number == self._shards - 1}
        self._read[self._shards] = shard.stream.url
        self._given.begin(shard)

    def wanted(self, samples: Iterator[RawSample], stream: ShardStream) -> Iterator[RawSample]:
        """Return those of ``samples`` that the entry of their shard asks for."""
        return self._given.wanted(samples, stream)

    def save(self) -> dict[str, Any]:
        number, at = self._shards, None
        if self._open is not None:
            self._facts[self._open.stream.url] = facts_of(self._open)
        if self._open is None:
            at = self._at
        elif self.sample is not None and self.sample.stop is None:
            number += 1
        elif self.sample is not None:
            at = {"url": self.sample.shard, "start": self.sample.stop, **facts_of(self._open)}
        before = self._before if self._open is None or number == self._first else self._read[number - 1]
        saved: dict[str, Any] = {"shards": number, "at": at, "before": before}
        saved["log"] = self._log.packed(self._given.until(self.sample))
        if self._entries is not None:
            rest = self._entries[number:]
            shards = max(0, number - len(self._entries))
            saved |= {"shards": shards, "entries": rest, "endless": self._endless, "before": None}
        return saved

    def load(self, saved: dict[str, Any]) -> None:
        self._shards = self._first = saved["shards"]
        self._at, self._before = saved.get("at"), saved.get("before")
        self._entries, self._endless = saved.get("entries"), saved.get("endless", False)
        self._log.load(saved.get("log", ""))

    def record_shards(self, shards: dict[str, Any]) -> None:
        self._facts = shards

    def over(self, shard: OpenShard) -> None:
        """Note the facts of a shard that is over, and what was given of it."""
        self._given.end(self.sample, self._log)
        self._facts[shard.stream.url] = facts_of(shard)


def check_shard(entry: Any, url: str | None, number: int) -> None:
    """Raise StateError unless ``entry``, number ``number`` of the list, is that of the shard at ``url`` (None: any)."""
    now = entry if isinstance(entry, str) or entry is None else entry["url"]
    if url is not None and now != url:
        raise StateError(
            f"when the state was saved, shard {number} was {redact(url)}, and now it is {redact(str(now))}: the "
            "list of shards or its seed has changed, or a function in front of the reading draws random numbers"
        )


def facts_of(shard: OpenShard) -> dict[str, Any]:
    """Return what reading a part of ``shard`` once more takes: its version, and whether it is compressed."""
    version = shard.stream.version
    return {"version": version, "compressed": True} if shard.compressed else {"version": version}


def entry_left(entry: Any, at: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``entry`` of a shard from the place that was saved on. A compressed one is read from its start."""
    entry = {"url": entry} if isinstance(entry, str) else dict(entry or {})
    rest = {**entry, "behind": at["start"]} if at.get("compressed") else entry_at(entry, at["start"])
    return {**rest, "version": at["version"]}


def entries_of(references: Sequence[Reference], facts: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the spans of shards that hold ``references``, each to be read by one request or a few; compressed shards
    whole."""
    places = sorted(set(references), key=_place)
    for url, group in itertools.groupby(places, key=lambda reference: reference[0]):
        of_shard = facts.get(url, {})
        whole = {"url": url, "version": of_shard.get("version", "")}
        if of_shard.get("compressed"):
            yield whole
            continue
        span: dict[str, Any] = {}
        for _, offset, stop in group:
            if span and span["stop"] is not None and offset - span["stop"] <= _GAP_BYTES:
                span["stop"] = stop
                continue
            if span:
                yield span
            span = {**whole, "start": offset, "stop": stop}
        yield span


def _first_of(entry: Mapping[str, Any]) -> int | None:
    """Return where the samples of ``entry`` begin; None for a span of a shard that is cut, whose reader finds it."""
    if entry.get("cut"):
        at: int | None = entry.get("at")
        return at if at is not None or entry["cut"][0] else 0
    return int(entry.get("behind") or entry.get("start") or 0)


def _missing(url: str, offset: int) -> StateError:
    return StateError(
        f"{redact(url)}: no sample begins at byte {offset}, where one stood when the state was saved: the shard has "
        "been replaced; begin the epoch again"
    )


def _place(reference: Reference) -> tuple[str, int, float]:
    url, offset, stop = reference
    return url, offset, float("inf") if stop is None else stop


def picked(samples: Iterable[RawSample], references: Sequence[Reference]) -> list[RawSample]:
    """Return the samples at ``references``, in their order, out of ``samples``. StateError where one is missing."""
    places = {(url, offset) for url, offset, _ in references}
    found = {(s.shard, s.offset): s for s in samples if type(s) is RawSample and (s.shard, s.offset) in places}
    for url, offset, _ in references:
        if (url, offset) not in found:
            raise _missing(url, offset)
    given: set[tuple[str, int]] = set()
    return [_one_more(found[url, offset], given, stop) for url, offset, stop in references]


def _one_more(sample: RawSample, given: set[tuple[str, int]], stop: int | None) -> RawSample:
    """Return ``sample``, or a copy where it was given before: a shard may be drawn twice. It ends at ``stop``, which
    the last one of a range that was read does not show."""
    place = sample.shard, sample.offset
    sample.stop = stop
    if place in given:
        return sample.copy()
    given.add(place)
    return sample
