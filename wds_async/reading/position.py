"""Position of a reading stage between two samples, and the way back to samples that were read before."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from wds_async.checkpoint.packing import Reference
from wds_async.checkpoint.states import StageState
from wds_async.errors import StateError
from wds_async.reading.recover import ShardRecovery
from wds_async.reading.spans import entry_at
from wds_async.redact import redact
from wds_async.tar.group import RawSample
from wds_async.transfer.reader import ShardStream

__all__ = ["ReadState", "at_offsets", "entries_of", "picked"]

_GAP_BYTES = 256 << 10
"""Samples that are nearer to each other are read by one request."""


class ReadState(StageState):
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
        self._open: ShardRecovery | None = None
        self._versions: dict[str, str] = {}

    def shards(self, source: Iterable[Any]) -> Iterator[Any]:
        """Return the shards to read: those of ``source``, or those that were shared out, from the one that was open on,
        which begins where it was left."""
        if self._entries is not None:
            source = itertools.chain(self._entries, source if self._endless else ())
        return self._from_open(itertools.islice(source, self._shards, None))

    def listed(self) -> Iterator[Any]:
        """Return the shards to read that do not come from an endless source."""
        if self._entries is not None and self._shards < len(self._entries):
            return self._from_open(iter(self._entries[self._shards :]))
        return iter(() if self._at is None else [_at({"url": self._at["url"]}, self._at)])

    def _from_open(self, rest: Iterator[Any]) -> Iterator[Any]:
        if self._at is None:
            return rest
        entry = next(rest, None)
        info = {"url": entry} if isinstance(entry, str) else dict(entry or {})
        if info.get("url") != self._at["url"]:
            raise StateError(
                f"the state was saved in shard {self._shards}, {redact(self._at['url'])}, and now that is "
                f"{redact(str(info.get('url')))}: the list of shards or its seed has changed"
            )
        return itertools.chain([_at(info, self._at)], rest)

    def begin(self, shard: ShardRecovery, number: int) -> None:
        """Note that ``shard``, number ``number`` of this run, begins."""
        self._shards, self._open, self.sample = self._first + number, shard, None

    def save(self) -> dict[str, Any]:
        number, at = self._shards, None
        if self._open is None:
            at = self._at
        elif self.sample is not None and self.sample.stop is None:
            number += 1
        elif self.sample is not None:
            at = {"url": self.sample.shard, "start": self.sample.stop, "version": self._open.stream.version}
        saved: dict[str, Any] = {"shards": number, "at": at}
        if self._entries is not None:
            rest = self._entries[number:]
            saved |= {"shards": max(0, number - len(self._entries)), "entries": rest, "endless": self._endless}
        return saved

    def load(self, saved: dict[str, Any]) -> None:
        self._shards = self._first = saved["shards"]
        self._at = saved.get("at")
        self._entries, self._endless = saved.get("entries"), saved.get("endless", False)

    def versions(self, urls: Iterable[str]) -> list[str]:
        """Return the versions of shards that were read; "" is unknown."""
        return [self._versions.get(url, "") for url in urls]

    def over(self, shard: ShardRecovery) -> None:
        """Note the version of a shard that is over."""
        self._versions[shard.stream.url] = shard.stream.version


def _at(entry: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``entry`` of a shard from the place that was saved on."""
    return {**entry_at(entry, at["start"]), "version": at["version"]}


def entries_of(
    references: Sequence[Reference], versions: Mapping[str, str], *, alone: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the spans of shards that hold ``references``, each to be read by one request or a few. ``alone``: for a
    reading stage that is to give these samples and none of those between them."""
    for url, group in itertools.groupby(
        sorted(references if alone else set(references), key=_place), key=lambda reference: reference[0]
    ):
        stop, offsets = None, []
        span: dict[str, Any] = {}
        for _, offset, behind in group:
            again = alone and offset in offsets  # drawn twice: once more by another span
            if span and stop is not None and offset - stop <= _GAP_BYTES and not again:
                stop = span["stop"] = behind
                offsets.append(offset)
                continue
            if span:
                yield span
            stop, offsets = behind, [offset]
            span = {"url": url, "start": offset, "stop": stop, "version": versions.get(url, "")}
            if alone:
                span["only"] = offsets
        yield span


def at_offsets(samples: Iterable[RawSample], stream: ShardStream) -> Iterator[RawSample]:
    """Yield those of ``samples`` that the entry of their shard names in ``only``. StateError where one is missing."""
    left = {offset for offset in stream.info["only"] if offset >= stream.start}
    for sample in samples if left else ():
        if sample.offset in left:
            left.remove(sample.offset)
            yield sample
        if not left:
            return
    if left:
        raise _missing(stream.url, min(left))


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
    wanted = {(url, offset) for url, offset, _ in references}
    found = {(s.shard, s.offset): s for s in samples if (s.shard, s.offset) in wanted}
    for url, offset, _ in references:
        if (url, offset) not in found:
            raise _missing(url, offset)
    given: set[tuple[str, int]] = set()
    return [_one_more(found[url, offset], given) for url, offset, _ in references]


def _one_more(sample: RawSample, given: set[tuple[str, int]]) -> RawSample:
    """Return ``sample``, or a copy where it was given before: a shard may be drawn twice."""
    place = sample.shard, sample.offset
    if place in given:
        return sample.copy()
    given.add(place)
    return sample
