"""Spill objects: samples of some inputs in sorted runs, so that a range of keys is one range of bytes in each run.

A spill object holds runs, and behind them the index of each run. A run is the bytes of its samples as a tar has them
(`rawtar`), in the order of their keys. The index of a run has an entry for each sample, all of one size: little-endian
the bytes of the sample (8), a tag of its key (8), the bytes of its order key (2), its side (1), and its order key
(see `ordering`), filled up with zeros. Where runs and indexes stand is told by the record of the task, as `SpillRun`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from wds_async.config import transfer_config
from wds_async.distributed.attempts import add_traffic, skipped_entries
from wds_async.distributed.functions import function_named
from wds_async.distributed.ordering import Ordering
from wds_async.distributed.outputs import SummedSink
from wds_async.distributed.rawtar import key_tag, raw_sample
from wds_async.distributed.tasks import Input, Record, Task
from wds_async.errors import ConfigError, FieldTooLarge, WdsError
from wds_async.observe.cost_limit import enforce
from wds_async.observe.ledger import Ledger
from wds_async.reading.samples import ShardParsing, read_shards
from wds_async.redact import redact
from wds_async.storage.options import StorageOptions
from wds_async.tar.group import RawSample
from wds_async.transfer.reader import ShardReader, ShardStream, open_shards
from wds_async.transfer.stats import Board

__all__ = ["ScatterWork", "SpillEntry", "SpillRun", "entry_type", "spill_name"]

_ENTRY_BYTES = 300
"""Memory that a sample takes beside its bytes while its run is gathered."""
_WRITE_BYTES = 1 << 20


class SpillEntry(NamedTuple):
    """One sample of a run, in memory. Sorted by its ``key``, which is unique."""

    key: bytes
    side: int
    tag: int
    size: int
    raw: bytes | list[bytes]


@dataclass(frozen=True, slots=True)
class SpillRun:
    """Place of a run in its spill object: its bytes ``[start, start + bytes)``, its index of ``samples`` entries from
    ``index`` on, whose keys are filled up to ``width`` bytes."""

    start: int
    bytes: int
    samples: int
    index: int
    width: int

    @property
    def entry(self) -> np.dtype[Any]:
        """The type of an entry of its index."""
        return entry_type(self.width)


@functools.cache
def entry_type(width: int) -> np.dtype[Any]:
    """Return the type of an index entry whose key takes ``width`` bytes."""
    return np.dtype([("size", "<u8"), ("tag", "<u8"), ("length", "<u2"), ("side", "u1"), ("key", f"S{width}")])


def spill_name(number: int) -> str:
    """Return the name of the spill object of a task."""
    return f"{number:05d}.spill"


class _SpillWriter:
    """Writer of one spill object: gathers samples, and writes a sorted run whenever ``run_bytes`` are there."""

    def __init__(self, target: SummedSink, run_bytes: int) -> None:
        self._target, self._run_bytes = target, run_bytes
        self._entries: list[SpillEntry] = []
        self._held = 0
        self._runs: list[tuple[int, int, int, list[bytes]]] = []

    def add(self, entry: SpillEntry) -> None:
        """Add a sample."""
        self._held += entry.size + _ENTRY_BYTES
        if self._held > self._run_bytes and self._entries:
            self._write_run()
            self._held = entry.size + _ENTRY_BYTES
        self._entries.append(entry)

    def finish(self) -> list[SpillRun]:
        """Write what is left and the indexes; return where everything stands."""
        if self._entries:
            self._write_run()
        runs = []
        for start, size, width, entries in self._runs:
            runs.append(SpillRun(start, size, len(entries), self._target.bytes, width))
            self._write(entries)
        return runs

    def _write_run(self) -> None:
        entries, self._entries = self._entries, []
        entries.sort()
        width = max(len(entry.key) for entry in entries)
        pack, index = struct.Struct(f"<QQHB{width}s").pack, list[bytes]()
        start, parts, held = self._target.bytes, list[bytes](), 0
        entries.reverse()
        while entries:  # each is let go of once it is written
            key, side, tag, size, raw = entries.pop()
            index.append(pack(size, tag, len(key), side, key))
            parts += [raw] if isinstance(raw, bytes) else raw
            held += size
            if held >= _WRITE_BYTES:
                self._write(parts)
                held = 0
        self._write(parts)
        self._runs.append((start, self._target.bytes - start, width, index))

    def _write(self, parts: list[bytes]) -> None:
        """Write ``parts``, the large ones as they are, and clear the list."""
        small: list[bytes] = []
        for part in parts:
            if len(part) < _WRITE_BYTES >> 3:
                small.append(part)
                continue
            if small:
                self._target.write(b"".join(small))
                small = []
            self._target.write(part)
        if small:
            self._target.write(b"".join(small))
        parts.clear()


class _InputPosition:
    """The number of the input that is read, and of its latest sample."""

    def __init__(self, first: int) -> None:
        self.sample: RawSample | None = None
        self._first = first
        self.number = first
        self.index = -1
        self.samples = 0

    def begin(self, shard: object, number: int) -> None:
        """Note that the input at place ``number`` of the task begins."""
        self.number, self.index = self._first + number, -1

    def wanted(self, samples: Iterator[RawSample], stream: ShardStream) -> Iterator[RawSample]:
        """Return all of ``samples``."""
        return samples

    def over(self, shard: object) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class ScatterWork:
    """Reads the inputs of a task and writes their samples to one spill object in sorted runs of at most ``run_bytes``.

    ``folder`` is where spill objects go, ``out`` that of the outputs. Task parameters: ``first`` is the number of its
    first input among all, ``side`` that of the join. Raises ConfigError for a sample of more than ``sample_bytes``.
    """

    ordering: Ordering
    folder: str
    out: str
    run_bytes: int
    sample_bytes: int
    reader_bytes: int
    on_corrupt: str = "raise"
    options: StorageOptions = field(default_factory=StorageOptions)

    def describe(self) -> dict[str, Any]:
        """Return what the result depends on."""
        return {"kind": "scatter", "run_bytes": self.run_bytes, "on_corrupt": self.on_corrupt, **asdict(self.ordering)}

    def run(self, task: Task) -> Record:
        """Write the spill object of ``task``; the record's ``more`` has its ``runs``, and samples and bytes by split
        (of a join: of the first data set)."""
        side, position = int(task.parameters.get("side", 1)), _InputPosition(int(task.parameters["first"]))
        ledger, splits = Ledger(Board()), dict[str, list[int]]()
        target = SummedSink(self.folder + spill_name(task.number), self.options)
        try:
            writer = _SpillWriter(target, self.run_bytes)
            for split, entry in self._entries(task.inputs, ledger, position, side):
                writer.add(entry)
                total = splits.setdefault(split, [0, 0])
                total[0] += side
                total[1] += entry.size * side
            runs = writer.finish()
            output = target.commit(self.out, None)
        except BaseException:
            target.abort()
            raise
        finally:
            add_traffic(ledger.board.traffic())
        skipped, more = skipped_entries(ledger)
        return Record(
            task=task.number,
            id=task.identity(self.describe()),
            inputs=task.inputs,
            outputs=(output,),
            samples_in=position.samples,
            samples_out=sum(run.samples for run in runs),
            dropped=position.samples - sum(run.samples for run in runs),
            bytes_in=sum(one.size or 0 for one in task.inputs),
            bytes_out=output.bytes,
            skipped=skipped,
            more={"runs": [list(astuple(run)) for run in runs], "splits": splits, "side": side, **more},
        )

    def _entries(
        self, inputs: Sequence[Input], ledger: Ledger, position: _InputPosition, side: int
    ) -> Iterator[tuple[str, SpillEntry]]:
        """Yield the split and the entry of each sample that is kept."""
        key_of = self.ordering.key_function(function_named, side)
        for sample in self._samples(inputs, ledger, position):
            position.index += 1
            position.samples += 1
            try:
                key = key_of(sample, position.number, position.index)
                if key is None:
                    continue
                size, raw = raw_sample(sample)
                if size > self.sample_bytes:
                    raise ConfigError(
                        f"it has {size:,} bytes, and with this memory= a sample has at most {self.sample_bytes:,}"
                    )
            except Exception as exn:
                raise _located(exn, sample) from exn
            yield key[1], SpillEntry(key[0], side, key_tag(sample["__key__"]), size, raw)

    def _samples(self, inputs: Sequence[Input], ledger: Ledger, position: _InputPosition) -> Iterator[Any]:
        log = ledger.begin()
        shards = [{"url": one.url} | ({"version": one.version} if one.version else {}) for one in inputs]
        config = transfer_config(budget_bytes=self.reader_bytes)
        parsing = ShardParsing.of(log, lcase=False, on_corrupt=self.on_corrupt, max_field_bytes=self.sample_bytes)

        def opening() -> ShardReader:
            return open_shards(shards, config=config, stats=log.counters, options=self.options)

        try:
            yield from read_shards(opening, enforce, parsing, log, position)
        except FieldTooLarge as exn:
            raise ConfigError(f"{exn}; with this memory= a sample has at most {self.sample_bytes:,} bytes") from exn


def _located(exn: Exception, sample: RawSample) -> WdsError:
    """Return an error that names the sample. What a function of the program raised becomes a ConfigError."""
    shard = redact(sample.shard)
    kind, text = (type(exn), str(exn)) if isinstance(exn, WdsError) else (ConfigError, f"{type(exn).__name__}: {exn}")
    where = f"{shard} at byte {sample.offset}, sample {sample['__key__']!r}"
    return kind(f"{where}: {text}").at(shard, sample.offset)
