"""Second half of a job that reshards: where each output begins, and the outputs from ranges of the spill objects.

The samples of all runs, sorted by their keys, are one sequence that depends on inputs and seed alone. Splitters cut it
into buckets that fit the memory of a task; how many there are does not change the sequence. The plan holds, for each
splitter and run, the number of the first sample and its byte, so that a bucket is one range of each run.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import numpy as np

from wds_async.config import transfer_config
from wds_async.distributed.attempts import add_traffic
from wds_async.distributed.folder import JobFolder
from wds_async.distributed.ordering import TAIL_BYTES
from wds_async.distributed.outputs import ANY_NUMBER, ANY_TEXT, write_object
from wds_async.distributed.rawtar import RawTarWriter, joined, key_of_raw, key_tag, renamed
from wds_async.distributed.spill import SpillRun
from wds_async.distributed.tasks import Output, Record, Task
from wds_async.errors import ConfigError, CorruptShard
from wds_async.observe.cost_limit import limit_of_job
from wds_async.redact import redact
from wds_async.storage.options import StorageOptions
from wds_async.transfer.range_reader import RangeReader, WantedRange
from wds_async.transfer.stats import Counters
from wds_async.transfer.traffic import Traffic

__all__ = [
    "PLAN_NAME", "SAMPLE_SHARE", "GatherWork", "OutputRule", "PlanWork", "ShardNames", "buckets_of", "check_ranges",
]  # fmt: skip

_HEAD = struct.Struct("<8sQ")
_MAGIC = b"WDSPLAN1"
PLAN_NAME = "plan"
"""Name of the plan, beside the spill objects."""
_TARGET = 0.75
"""Share of the most that a bucket may hold which it is planned to hold: its splitters are estimates."""
SAMPLE_SHARE = 0.9
"""Share of a bucket that one sample may take."""
_POINTS = 1 << 20
_POINTS_A_BUCKET = 64
_INDEX_BYTES = 32 << 20
"""Bytes of the indexes that are held at a time."""


_RANGE = re.compile(r"\{(\d+)\.\.(\d*)\}")
_FIELDS = re.compile(r"\{(split|shard(?::0?\d*d)?)\}")


@dataclass(frozen=True)
class ShardNames:
    """Names of outputs. ``template`` has ``{split}``, where there are splits, and one of ``{000000..004095}``,
    ``{000000..}`` (as many as there will be) and ``{shard:06d}``, or no number: one shard. ConfigError for others."""

    template: str

    def __post_init__(self) -> None:
        ranges, rest = _RANGE.findall(self.template), _RANGE.sub("", self.template)
        fields = [name.partition(":")[0] for name in _FIELDS.findall(rest)]
        odd = set("{}") & set(_FIELDS.sub("", rest))
        if odd or len(ranges) + fields.count("shard") > 1 or (self.count is not None and self.count < 1):
            raise ConfigError(
                f"output={redact(self.template)!r}: it has one number, {{000000..000099}}, {{000000..}} or"
                " {shard:06d}, or none for one shard, and besides only {split}"
            )

    @property
    def count(self) -> int | None:
        """Number of names of the template; None for as many as there will be."""
        match = _RANGE.search(self.template)
        if match is None:
            return None if "{shard" in self.template else 1
        return int(match[2]) - int(match[1]) + 1 if match[2] else None

    @property
    def has_split(self) -> bool:
        """True if the name of the split is in the template."""
        return "{split}" in self.template

    def name(self, split: str, number: int) -> str:
        """Return the name of shard ``number`` (from 0) of ``split``."""
        return _RANGE.sub(lambda match: f"{int(match[1]) + number:0{len(match[1])}d}", self.template).format(
            split=split, shard=number
        )

    def all_names(self) -> Iterator[str]:
        """Yield all names, with `outputs.ANY_NUMBER` and `outputs.ANY_TEXT` for what is not known yet."""
        if self.count is not None:
            yield from (self.name(ANY_TEXT, number) for number in range(self.count))
        else:
            yield _RANGE.sub(ANY_NUMBER, self.template).format(split=ANY_TEXT, shard=ANY_NUMBER)


@dataclass(frozen=True)
class OutputRule:
    """Size of shards: ``shards`` of as many samples each, give or take one, or ``maxcount`` samples each, or about
    ``maxsize`` bytes each. One of the three."""

    shards: int | None = None
    maxcount: int | None = None
    maxsize: int | None = None

    @property
    def by_bytes(self) -> bool:
        """True if a place in the sequence is counted in bytes rather than in samples."""
        return self.maxsize is not None

    def cuts(self, split: str, samples: int, size: int) -> list[int]:
        """Return where the shards of a split with ``samples`` of ``size`` bytes begin, and its end: in samples or in
        bytes. ConfigError for more shards than samples."""
        if not samples:
            return [0]
        if self.maxcount is not None:
            return [*range(0, samples, self.maxcount), samples]
        count = self.shards if self.maxsize is None else -(-size // self.maxsize)
        assert count is not None
        total = size if self.by_bytes else samples
        if self.shards is not None and samples < self.shards:
            of = f" of the split {split!r}" if split else ""
            raise ConfigError(
                f"{samples:,} samples{of} cannot fill {self.shards:,} shards: name fewer in output, or give maxcount="
            )
        return [total * number // count for number in range(count + 1)]


@dataclass(frozen=True)
class _Segment:
    """A split in the sequence: its ``name``, the numbers of its shards among all, from ``first`` on, and the places
    where they begin, and its end."""

    name: str
    first: int
    cuts: list[int]


@dataclass(frozen=True)
class _GatherPlan:
    """Places of all samples. ``places[b]`` is where bucket ``b`` begins in the sequence, the last one the end."""

    spills: list[str]
    runs: list[tuple[int, SpillRun]]
    """Number of the spill object, and the run."""
    places: list[int]
    segments: list[_Segment]
    by_bytes: bool
    join: str
    rows_at: int = 0

    @property
    def shards(self) -> int:
        """The number of outputs."""
        return sum(len(one.cuts) - 1 for one in self.segments)

    def encoded(self, rows: np.ndarray[Any, Any]) -> bytes:
        """Return it as an object, with ``rows``: for each splitter and run the number of a sample and its byte."""
        head = {
            "spills": self.spills,
            "runs": [[number, *astuple(run)] for number, run in self.runs],
            "places": self.places,
            "segments": [asdict(one) for one in self.segments],
            "by_bytes": self.by_bytes,
            "join": self.join,
        }
        text = json.dumps(head, separators=(",", ":")).encode()
        return b"".join((_HEAD.pack(_MAGIC, len(text)), text, rows.astype("<i8").tobytes()))

    @classmethod
    def read(cls, reader: _Objects, url: str) -> _GatherPlan:
        """Read the head of the plan at ``url``."""
        magic, size = _HEAD.unpack(reader.range(url, 0, _HEAD.size))
        if magic != _MAGIC:
            raise CorruptShard(f"{redact(url)}: no plan of a job that reshards").at(redact(url), 0)
        head = json.loads(reader.range(url, _HEAD.size, _HEAD.size + size))
        runs = [(number, SpillRun(*run)) for number, *run in head.pop("runs")]
        segments = [_Segment(**one) for one in head.pop("segments")]
        return cls(runs=runs, segments=segments, rows_at=_HEAD.size + size, **head)

    def rows(self, reader: _Objects, url: str, first: int, last: int) -> np.ndarray[Any, Any]:
        """Read the rows of the splitters ``first`` to ``last``, both included."""
        row = 16 * len(self.runs)
        data = reader.range(url, self.rows_at + first * row, self.rows_at + (last + 1) * row)
        return np.frombuffer(data, "<i8").reshape(last + 1 - first, len(self.runs), 2)


class _Objects:
    """Reader of ranges of spill objects, within ``memory_bytes`` of its own."""

    def __init__(self, memory_bytes: int, options: StorageOptions) -> None:
        self._traffic = Traffic()
        limit, counters = limit_of_job(), Counters(traffic=self._traffic)
        if limit is not None:
            limit.watch(counters)
        self._reader = RangeReader(
            transfer_config(budget_bytes=memory_bytes),
            options,
            traffic=self._traffic,
            before_request=(lambda: None) if limit is None else limit.check,
        )

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytearray]:
        """Return the bytes of each range, all requested at once."""
        return self._reader.read([WantedRange(*one) for one in wanted])

    def range(self, url: str, start: int, stop: int) -> bytearray:
        """Return the bytes of one range."""
        return self.ranges([(url, start, stop)])[0]

    def close(self) -> None:
        """Close its connections, and count what was read."""
        self._reader.close()
        add_traffic(self._traffic)


@dataclass(frozen=True)
class PlanWork:
    """Looks at the indexes of all spill objects, chooses the splitters, and writes the plan: a job of one task.

    ``scattered`` is the folder of the job that wrote the spill objects to ``folder``. ``bucket_bytes`` is the most that
    a bucket may hold. ``join`` is "", "inner", "left" or "outer". Task parameters: ``tasks`` of that job.
    """

    scattered: JobFolder
    folder: str
    rule: OutputRule
    bucket_bytes: int
    task_bytes: int
    reader_bytes: int
    join: str = ""
    options: StorageOptions = field(default_factory=StorageOptions)

    def describe(self) -> dict[str, Any]:
        """Return what the result depends on."""
        sizes = {"bucket_bytes": self.bucket_bytes, "task_bytes": self.task_bytes}
        return {"kind": "plan", "join": self.join, **asdict(self.rule), **sizes}

    def run(self, task: Task) -> Record:
        """Write the plan; the record's ``more`` has the number of ``shards`` and how many a task of the gathering
        writes (``shards_per_task``)."""
        spills, runs, segments = self._layout(range(int(task.parameters["tasks"])))
        objects = _Objects(self.reader_bytes, self.options)
        try:
            splitters = self._splitters(objects, spills, runs)
            check_ranges(len(runs), len(splitters) + 1, self.bucket_bytes)
            rows, places = self._rows(objects, spills, runs, splitters)
        finally:
            objects.close()
        self._check_buckets(rows)
        plan = _GatherPlan(spills, runs, places, segments, self.rule.by_bytes, self.join)
        output = write_object(f"{self.folder}{PLAN_NAME}", plan.encoded(rows), self.scattered.out, self.options)
        size = int(rows[-1, :, 1].sum())
        per_task = max(1, self.task_bytes * plan.shards // max(1, size))
        return Record(
            task=task.number,
            id=task.identity(self.describe()),
            inputs=task.inputs,
            outputs=(output,),
            bytes_out=output.bytes,
            more={"shards": plan.shards, "shards_per_task": per_task, "bytes": size, "buckets": len(places) - 1},
        )

    def _layout(self, tasks: Iterable[int]) -> tuple[list[str], list[tuple[int, SpillRun]], list[_Segment]]:
        """Return the names of the spill objects, all runs and the splits."""
        spills, runs, totals = list[str](), list[tuple[int, SpillRun]](), dict[str, list[int]]()
        for record in self.scattered.records(tasks):
            runs += [(len(spills), SpillRun(*run)) for run in record.more["runs"]]
            spills.append(record.outputs[0].url.rpartition("/")[2])
            for name, (samples, size) in record.more["splits"].items():
                total = totals.setdefault(name, [0, 0])
                total[0] += samples
                total[1] += size
        if self.join == "outer":  # the records count the first data set alone
            totals = {"": [sum(run.samples for _, run in runs), sum(run.bytes for _, run in runs)]}
        segments, first, place = list[_Segment](), 0, 0
        for name in sorted(totals, key=lambda name: name.encode("utf-8", "surrogateescape")):
            cuts = self.rule.cuts(name, *totals[name])
            segments.append(_Segment(name, first, [place + cut for cut in cuts]))
            first, place = first + len(cuts) - 1, place + cuts[-1]
        return spills, runs, segments

    def _indexes(
        self, reader: _Objects, spills: list[str], runs: list[tuple[int, SpillRun]]
    ) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the index of each run."""
        for group in _groups(runs, lambda one: one[1].samples * one[1].entry.itemsize, _INDEX_BYTES):
            wanted = [
                (self.folder + spills[number], run.index, run.index + run.samples * run.entry.itemsize)
                for number, run in group
            ]
            for (_, run), data in zip(group, reader.ranges(wanted), strict=True):
                yield np.frombuffer(data, run.entry)

    def _splitters(self, reader: _Objects, spills: list[str], runs: list[tuple[int, SpillRun]]) -> list[bytes]:
        """Return the keys at which buckets begin, behind the first one: estimated from keys at equal distances."""
        total = sum(run.bytes for _, run in runs)
        target, buckets = max(1, int(self.bucket_bytes * _TARGET)), buckets_of(total, self.bucket_bytes)
        if buckets <= 1:
            return []
        points = min(_POINTS, buckets * _POINTS_A_BUCKET * len(runs))
        step = max(1, total // points)
        found: list[tuple[bytes, int]] = []  # a key, and the bytes that it stands for
        for index in self._indexes(reader, spills, runs):
            ends = np.cumsum(index["size"])
            places = np.searchsorted(ends, np.arange(step // 2, int(ends[-1]), step), side="right")
            chosen, counts = np.unique(places, return_counts=True)
            found += zip(_keys(index[chosen]), (counts * step).tolist(), strict=True)
        found.sort()
        splitters, held = list[bytes](), 0
        for key, weight in found:
            if held and held + weight > target:
                splitters.append(key[:-TAIL_BYTES] if self.join else key)  # the samples of one key stay together
                held = 0
            held += weight
        return sorted(set(splitters))

    def _rows(
        self, reader: _Objects, spills: list[str], runs: list[tuple[int, SpillRun]], splitters: list[bytes]
    ) -> tuple[np.ndarray[Any, Any], list[int]]:
        """Return where each bucket begins in each run (sample and byte) and in the whole sequence."""
        rows = np.zeros((len(splitters) + 2, len(runs), 2), np.int64)
        places = np.zeros(len(splitters) + 2, np.int64)
        width = max(map(len, splitters), default=1)
        wanted = np.array(splitters, f"S{width}")
        for number, index in enumerate(self._indexes(reader, spills, runs)):
            at = np.concatenate((np.searchsorted(index["key"], wanted), [len(index)])).astype(np.int64)
            sizes = np.concatenate(([0], np.cumsum(index["size"]))).astype(np.int64)
            counted = (index["side"] | (self.join == "outer")) * (index["size"] if self.rule.by_bytes else 1)
            rows[1:, number, 0], rows[1:, number, 1] = at, sizes[at]
            places[1:] += np.concatenate(([0], np.cumsum(counted))).astype(np.int64)[at]
        return rows, places.tolist()

    def _check_buckets(self, rows: np.ndarray[Any, Any]) -> None:
        largest = int(np.diff(rows[:, :, 1].sum(axis=1)).max(initial=0))
        if largest > self.bucket_bytes:
            raise ConfigError(
                f"a part of the sequence takes {largest:,} bytes, and a task holds {self.bucket_bytes:,} at a time:"
                " give more memory=, and overwrite=True to begin again"
            )


def buckets_of(total: int, bucket_bytes: int) -> int:
    """Return how many buckets ``total`` bytes are planned to make."""
    return -(-total // max(1, int(bucket_bytes * _TARGET)))


def check_ranges(runs: int, buckets: int, bucket_bytes: int) -> None:
    """Raise ConfigError where the table of the ranges of all buckets in all runs would not fit the memory."""
    if runs * buckets * 16 > bucket_bytes:
        times = math.ceil((runs * buckets * 16 / bucket_bytes) ** (1 / 3) * 10) / 10
        raise ConfigError(
            f"{runs:,} sorted runs and {buckets:,} buckets make {runs * buckets:,} small ranges, more than this memory"
            f" is for: give {times} times as much memory= or more"
        )


def _keys(index: np.ndarray[Any, Any]) -> list[bytes]:
    """Return the keys of index entries, which numpy gives without the zeros at their ends."""
    return [key.ljust(size, b"\0") for key, size in zip(index["key"].tolist(), index["length"].tolist(), strict=True)]


def _groups(items: Sequence[Any], size: Callable[[Any], int], most: int) -> Iterator[list[Any]]:
    """Yield ``items`` in groups of at most ``most`` bytes, or of one."""
    group, held = list[Any](), 0
    for item in items:
        if group and held + size(item) > most:
            yield group
            group, held = [], 0
        group.append(item)
        held += size(item)
    if group:
        yield group


@dataclass(frozen=True)
class GatherWork:
    """Writes some of the outputs: of each bucket of theirs it reads one range of each run, and sorts.

    ``folder`` has the plan and the spill objects. ``names`` are those of the outputs, ``out`` is their folder. Task
    parameters: its outputs ``[first, last)``, of those of all splits.
    """

    folder: str
    names: ShardNames
    out: str
    reader_bytes: int
    source: Mapping[str, Any] = field(default_factory=dict)
    """JSON: what the sequence of samples depends on."""
    options: StorageOptions = field(default_factory=StorageOptions)

    def describe(self) -> dict[str, Any]:
        """Return what the result depends on."""
        return {"kind": "reshard", "names": self.names.template.removeprefix(self.out), **self.source}

    def run(self, task: Task) -> Record:
        """Write the outputs of ``task``."""
        first, last = int(task.parameters["first"]), int(task.parameters["last"])
        objects = _Objects(self.reader_bytes, self.options)
        try:
            gathering = _Gathering(self, objects, first, last)
            gathering.run()
        finally:
            objects.close()
        outputs = tuple(gathering.outputs)
        return Record(
            task=task.number,
            id=task.identity(self.describe()),
            inputs=task.inputs,
            outputs=outputs,
            samples_in=gathering.taken,
            samples_out=sum(one.samples or 0 for one in outputs),
            dropped=gathering.unmatched,
            bytes_in=gathering.bytes_in,
            bytes_out=sum(one.bytes for one in outputs),
            more={"renamed": gathering.renamed, "unmatched": gathering.unmatched},
        )


_Entry = tuple[bytes, int, int, int, int]
"""Order key, number of the run, bytes, tag of the sample's key, side."""
_Placed = tuple[memoryview | bytes, int, int]
"""Bytes, tag and place of a sample."""


@dataclass(slots=True)
class _Bucket:
    """The samples of a bucket that are wanted, in order, how far each moves the place in the sequence, the place of the
    first, and the bytes of each run."""

    entries: list[_Entry]
    weights: list[int]
    place: int
    data: dict[int, memoryview]


class _Gathering:
    """One task's work: buckets are loaded, the next one while one is written."""

    def __init__(self, work: GatherWork, objects: _Objects, first: int, last: int) -> None:
        self._work, self._objects = work, objects
        self._plan = plan = _GatherPlan.read(objects, work.folder + PLAN_NAME)
        self._folder = work.folder
        self._shards: list[tuple[str, int, int, int]] = [
            (one.name, number, one.cuts[number], one.cuts[number + 1])
            for one in plan.segments
            for number in range(max(0, first - one.first), min(last - one.first, len(one.cuts) - 1))
        ]
        self._writer: _ShardsInOrder = _ShardsInOrder(self._shards, work, keep_empty=not plan.by_bytes)
        self.outputs = self._writer.outputs
        self.taken = self.unmatched = self.bytes_in = 0

    @property
    def renamed(self) -> int:
        """Number of samples that got another key."""
        return self._writer.renamed

    def run(self) -> None:
        """Write the outputs."""
        begin, end = self._shards[0][2], self._shards[-1][3]
        places = self._plan.places
        first = max(0, bisect.bisect_right(places, begin) - 1)
        last = bisect.bisect_left(places, end)
        try:
            with ThreadPoolExecutor(1) as pool:
                loading = pool.submit(self._load, first, begin, end)
                for number in range(first, last):
                    bucket = loading.result()
                    if number + 1 < last:
                        loading = pool.submit(self._load, number + 1, begin, end)
                    self._write(bucket)
                    del bucket
            self._writer.close()
        except BaseException:
            self._writer.discard()
            raise

    def _load(self, number: int, begin: int, end: int) -> _Bucket:
        """Read the samples of a bucket whose places are in ``[begin, end)``."""
        plan, place = self._plan, self._plan.places[number]
        before, behind = plan.rows(self._objects, self._folder + PLAN_NAME, number, number + 1)
        entries = self._entries(before[:, 0], behind[:, 0])
        weights, skipped = self._weights(entries), 0
        if place < begin or plan.places[number + 1] > end:
            starts = list(itertools.accumulate(weights, initial=place))
            skipped = bisect.bisect_left(starts, begin, hi=len(entries))
            stop = bisect.bisect_left(starts, end, hi=len(entries))
            place = starts[skipped]
        else:
            stop = len(entries)
        at = before[:, 1].tolist()
        for _, run, size, _, _ in entries[:skipped]:
            at[run] += size
        del entries[stop:], entries[:skipped], weights[stop:], weights[:skipped]
        sizes = dict[int, int]()
        for _, run, size, _, _ in entries:
            sizes[run] = sizes.get(run, 0) + size
        wanted = []
        for run, size in sizes.items():
            spill, run_at = plan.runs[run]
            start = run_at.start + at[run]
            wanted.append((self._folder + plan.spills[spill], start, start + size))
        data = [memoryview(one) for one in self._objects.ranges(wanted)]
        return _Bucket(entries, weights, place, dict(zip(sizes, data, strict=True)))

    def _weights(self, entries: Sequence[_Entry]) -> list[int]:
        """Return how far each sample moves the place in the sequence. In a join only the last sample of a key moves it,
        by what all of that key count, so that they have one place and no cut separates them."""
        plan, outer = self._plan, self._plan.join == "outer"
        weights = [(one[4] | outer) * (one[2] if plan.by_bytes else 1) for one in entries]
        if plan.join:
            for number, (one, other) in enumerate(itertools.pairwise(entries)):
                if one[3] == other[3]:
                    weights[number + 1] += weights[number]
                    weights[number] = 0
        return weights

    def _entries(self, before: np.ndarray[Any, Any], behind: np.ndarray[Any, Any]) -> list[_Entry]:
        """Return the index entries from ``before`` to ``behind``, numbers of samples in each run, in their order."""
        plan, wanted = self._plan, list[tuple[str, int, int]]()
        runs = np.flatnonzero(behind > before).tolist()
        for number in runs:
            spill, run = plan.runs[number]
            size = run.entry.itemsize
            start, stop = run.index + int(before[number]) * size, run.index + int(behind[number]) * size
            wanted.append((self._folder + plan.spills[spill], start, stop))
        entries: list[_Entry] = []
        for number, data in zip(runs, self._objects.ranges(wanted), strict=True):
            index = np.frombuffer(data, plan.runs[number][1].entry)
            columns = (index[name].tolist() for name in ("key", "size", "tag", "side"))
            entries += [(key, number, size, tag, side) for key, size, tag, side in zip(*columns, strict=True)]
        entries.sort()
        return entries

    def _write(self, bucket: _Bucket) -> None:
        """Write the samples of a bucket."""
        write = self._writer.write
        samples = self._matched(bucket) if self._plan.join else self._in_order(bucket)
        for raw, tag, place in samples:
            write(raw, tag, place)
        self._writer.flush()

    def _in_order(self, bucket: _Bucket) -> Iterator[_Placed]:
        """Yield the bytes, tag and place of each sample."""
        data, place = bucket.data, bucket.place
        at = dict.fromkeys(data, 0)
        self.taken += len(bucket.entries)
        for (_, run, size, tag, _), weight in zip(bucket.entries, bucket.weights, strict=True):
            start = at[run]
            at[run] = stop = start + size
            self.bytes_in += size
            yield data[run][start:stop], tag, place
            place += weight

    def _matched(self, bucket: _Bucket) -> Iterator[_Placed]:
        """Yield the samples of the first side, joined with those of the other, which stand before them; of an outer
        join also those of the other side without a partner."""
        join = self._plan.join
        other: _Placed | None = None
        last: _Placed | None = None
        for entry, one in zip(bucket.entries, self._in_order(bucket), strict=True):
            side = entry[4]
            previous = last if side else other
            if previous is not None and _same_key(previous, one):
                of, key = "inputs" if side else "join", key_of_raw(one[0])
                raise CorruptShard(f"{of}: the key {key!r} is there twice; a join needs keys of their own")
            partner = other if side and other is not None and _same_key(other, one) else None
            if join == "outer" and other is not None and partner is None:
                yield other
            other, last = (None, one) if side else (one, last)
            if partner is not None:
                yield joined(one[0], partner[0]), *one[1:]
            elif side and join != "inner":
                yield one
            else:
                self.unmatched += side
        if join == "outer" and other is not None:
            yield other


def _same_key(one: _Placed, other: _Placed) -> bool:
    """Return True if two samples have the same key."""
    return one[1] == other[1] and key_of_raw(one[0]) == key_of_raw(other[0])


class _ShardsInOrder:
    """Writer of consecutive shards: ``(split, number, begin, end)``, in places of the sequence. The samples of a
    shard get keys that differ. A shard without samples is written if ``keep_empty``."""

    def __init__(self, shards: Sequence[tuple[str, int, int, int]], work: GatherWork, *, keep_empty: bool) -> None:
        self._waiting = iter(shards)
        self._work, self._keep_empty = work, keep_empty
        self._open: RawTarWriter | None = None
        self._current: tuple[str, int, int, int] = ("", 0, 0, -1)
        self._names = _DistinctKeys()
        self.outputs: list[Output] = []

    @property
    def renamed(self) -> int:
        """Number of samples that got another key."""
        return self._names.renamed

    def write(self, raw: bytes | memoryview, tag: int, place: int) -> None:
        """Write a sample to the shard of its place."""
        while place >= self._current[3]:
            self._next()
        if self._open is None:
            self._begin()
        assert self._open is not None
        self._open.write(self._names.distinct(raw, tag))

    def flush(self) -> None:
        """Let go of the memory of samples."""
        if self._open is not None:
            self._open.flush()

    def close(self) -> None:
        """End the last shard, and write those that are empty behind it."""
        with contextlib.suppress(StopIteration):
            while True:
                self._next()

    def discard(self) -> None:
        """Give up the shard that is being written."""
        if self._open is not None:
            self._open.discard()
            self._open = None

    def _begin(self) -> None:
        split, number, _, _ = self._current
        self._open = RawTarWriter(self._work.names.name(split, number), self._work.options)
        self._names.begin()

    def _next(self) -> None:
        if self._open is None and self._keep_empty and self._current[3] >= 0:
            self._begin()
        writer, self._open = self._open, None
        if writer is not None:
            self.outputs.append(writer.close(self._work.out))
        self._current = next(self._waiting)


class _DistinctKeys:
    """Gives a sample another key where its own is in the shard already: adjacent ones would be read as one sample, and
    an index by key would find one of them only."""

    def __init__(self) -> None:
        self.renamed = 0
        self.begin()

    def begin(self) -> None:
        """Begin a shard."""
        self._seen = set[int]()
        self._counts = dict[int, int]()

    def distinct(self, raw: bytes | memoryview, tag: int) -> bytes | memoryview:
        """Return the sample, whose key has the ``tag``, perhaps with another key."""
        if tag not in self._seen:
            self._seen.add(tag)
            return raw
        key, count, other = key_of_raw(raw), self._counts.get(tag, 0), tag
        while other in self._seen:
            count += 1
            other = key_tag(f"{key}-{count}")
        self._seen.add(other)
        self._counts[tag] = count
        self.renamed += 1
        return renamed(raw, f"{key}-{count}")
