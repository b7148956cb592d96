"""Ledger: a record of everything that was skipped, and the limit on it.

Each reading stage has a `Ledger` (``dataset.ledger``). The process that made the dataset records in memory, every other
(a DataLoader worker) in a file of lines in the folder of the stage's board, so a killed worker leaves its records. An
iteration records through an `EpochLog`, which logs one line when it ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import operator
import os
import sys
import time
import uuid
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wds_async import config, world
from wds_async.errors import ConfigError, TooMuchLost
from wds_async.redact import redact
from wds_async.transfer.stats import Board, Counters, Stats

__all__ = [
    "SHOWN",
    "BarrenShards",
    "EpochLog",
    "Ledger",
    "Ledgers",
    "SkipCounts",
    "Skipped",
    "append_skipped",
    "ledger_of",
    "ledgers_of",
    "read_skipped",
    "reason_of",
]

logger = logging.getLogger("wds_async")

KEPT = 10_000
"""Entries that a process keeps; later ones are only counted."""
JUDGED_SAMPLES, JUDGED_BYTES = 10_000, 1 << 30
"""Amount that a process reads before its share of losses is judged."""
WARNED_SHARE = 0.01
SHOWN = 300
"""Characters of a reason, or of a key."""
_FIRST = 3
_BEGINS = '{"stage": '  # each line; within a text it would stand with its quotes escaped


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Something that was skipped. None is unknown."""

    stage: str
    """``read`` (the transfer), ``checksum``, ``tar``, ``records``, or the name of the stage: ``decode``, ``map``, …"""
    reason: str
    """The exception's class and message, on one line, without secrets."""
    shard: str | None = None
    """Its URL, expanded, before rewriting, without secrets."""
    offset: int | None = None
    """In bytes, in the uncompressed tar."""
    bytes: int | None = None
    """Bytes that were skipped."""
    samples: int | None = None
    """Samples that were skipped, or lost a member. Those in ``bytes`` are not counted."""
    key: str | None = None
    field: str | None = None
    rest: bool = False
    """True if the rest of the shard was skipped."""
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


@dataclass
class SkipCounts:
    """Sums over entries. ``unread`` of the samples never left the reader, ``held`` bytes were read and never handed on;
    ``unsized`` shards have a rest of unknown size, behind ``unsized_at`` bytes in all."""

    entries: int = 0
    samples: int = 0
    shards: int = 0
    bytes: int = 0
    unread: int = 0
    unsized: int = 0
    unsized_at: int = 0
    held: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SkipCounts:
        """Return the counts of a `state`; an empty one is zero."""
        return cls(**{**state, "reasons": Counter(state.get("reasons", {}))})

    def state(self) -> dict[str, Any]:
        """Return the sums as plain data, for JSON."""
        return {**vars(self), "reasons": dict(self.reasons)}

    def add(self, entry: Skipped) -> None:
        """Count one more."""
        self.entries += 1
        self.samples += entry.samples or 0
        self.shards += entry.rest
        self.bytes += entry.bytes or 0
        if entry.stage in ("read", "tar", "records"):
            self.unread += entry.samples or 0
        if entry.stage == "checksum" and not entry.samples:
            self.held += entry.bytes or 0
        if entry.rest and entry.bytes is None:
            self.unsized += 1
            self.unsized_at += entry.offset or 0
        self.reasons[entry.kind] += 1

    def __add__(self, other: SkipCounts) -> SkipCounts:
        return SkipCounts(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: SkipCounts) -> SkipCounts:
        return SkipCounts(*map(operator.sub, vars(self).values(), vars(other).values()))

    def share(self, samples: float, size: float, shards: float) -> float:
        """Return the share that was lost of a reading that gave ``samples``, ``size`` bytes and ``shards`` that ended
        well: by samples where they are known, else by bytes. A rest of unknown size counts as if its shard had the mean
        size of those that ended well."""
        size = max(0.0, size - self.held)
        if self.unsized and not size:
            return 1.0
        by_samples = self.samples / max(samples + self.unread, self.samples, 1)
        mean = size / shards if shards else 0.0
        gone = self.bytes + max(0.0, self.unsized * mean - self.unsized_at)
        return min(1.0, by_samples + (gone / (size + gone) if gone else 0.0))

    def text(self, share: float) -> str:
        """Return the record as text: ``passed over 3 samples and 1 shard (12.3 MB, 0.40%): 2 DecodingError, 1
        CorruptShard``
        """
        amounts = {"sample": self.samples, "shard": self.shards}
        parts = [f"{count:,} {word}{'' if count == 1 else 's'}" for word, count in amounts.items() if count]
        size = f"{self.bytes / 1e6:,.1f} MB" if self.bytes >= 100_000 else f"{self.bytes:,} bytes"
        reasons = ", ".join(f"{count:,} {kind}" for kind, count in self.reasons.most_common())
        return (
            f"passed over {' and '.join(parts) or 'bytes'} ({size + ', ' if self.bytes else ''}{share:.2%}): {reasons}"
        )


class _SkipReport:
    """Questions to one or several ledgers."""

    @abstractmethod
    def entries(self) -> list[Skipped]:
        """Return the entries of this process and its DataLoader workers, by time: at most 10,000 of each."""

    @abstractmethod
    def counts(self) -> SkipCounts:
        """Return the sums over all entries, also those that are not kept."""

    @abstractmethod
    def why_barren(self) -> str:
        """Return why shards of this process gave no sample: the empty ones, and the first entry; "" if none."""

    @abstractmethod
    def _statistics(self) -> Stats: ...

    def summary(self) -> str:
        """Return a few lines: how much was skipped, why, and the first entry."""
        counts, stats = self.counts(), self._statistics()
        if not counts.entries:
            return "nothing was passed over"
        kept = self.entries()
        lines = [counts.text(counts.share(stats.samples, stats.bytes, stats.shards))]
        lines += [f"first: {kept[0]}"] if kept else []
        if counts.entries > len(kept):
            lines.append(f"{counts.entries - len(kept):,} of {counts.entries:,} are counted but not kept (WDS_LEDGER)")
        return "\n".join(lines)

    def __len__(self) -> int:
        return self.counts().entries

    def __iter__(self) -> Iterator[Skipped]:
        return iter(self.entries())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"


class _ProcessLog:
    """Records of one process. ``file`` holds them for others, without its suffix; None: in memory only."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.kept: list[Skipped] = []
        self.counts, self.beyond = SkipCounts(), SkipCounts()
        self.warned: set[str] = set()
        self.empty: list[str] = []

    def add(self, entry: Skipped) -> None:
        self.counts.add(entry)
        beyond = self.counts.entries > KEPT
        if beyond:
            self.beyond.add(entry)
        elif self.file is None or len(self.kept) < _FIRST:
            self.kept.append(entry)
        if self.file is None:
            return
        with contextlib.suppress(OSError):  # the folder went with the process that made it, or its disk is full
            if beyond:
                aside = self.file.with_suffix(".new")
                aside.write_text(json.dumps(self.beyond.state()))
                os.replace(aside, self.file.with_suffix(".beyond"))
            else:
                append_skipped(self.file.with_suffix(".lines"), entry)

    def examples(self) -> str:
        return "".join(f"For example: {entry}. " for entry in self.kept[:_FIRST])

    def once(self, what: str) -> bool:
        """Return True the first time."""
        new = what not in self.warned
        self.warned.add(what)
        return new


class Ledger(_SkipReport):
    """Everything that a reading stage and the stages behind it skipped, in this process and its DataLoader workers.

    ``max_bad_fraction`` (default ``WDS_MAX_BAD_FRACTION``, else None): the share of what a process reads that may be
    lost (see `SkipCounts.share`), judged once it has read 10,000 samples or 1 GiB; beyond it `TooMuchLost` is raised.
    Above 1 % a warning is logged. ``WDS_LEDGER`` names a file that every entry is appended to, a JSON object a line;
    ``{rank}`` in it is replaced. Raise ConfigError where it cannot be written, and for a fraction out of range.

    A pickled ledger carries its counts, and goes on from them; one that is pickled for a DataLoader worker shares them.
    """

    def __init__(self, board: Board, max_bad_fraction: float | None = None) -> None:
        settings = config.settings()
        limit = settings.max_bad_fraction if max_bad_fraction is None else max_bad_fraction
        if limit is not None and not (isinstance(limit, int | float) and 0 <= limit <= 1):
            raise ConfigError(f"max_bad_fraction={limit!r}: a share of samples or bytes, from 0 to 1")
        self.max_bad_fraction = limit
        self.path = settings.ledger
        if self.path:
            # Raised now, and not at the first fault. Nothing is created: the rank may change later.
            path = Path(self._path_of_rank(world.place().rank))
            writable = os.access(path if path.exists() else path.parent, os.W_OK)
            if path.is_dir() or not writable or not path.parent.is_dir():
                raise ConfigError(f"WDS_LEDGER={path}: no file that can be written; its folder must be there")
        self.board = board
        self.epoch = world.SharedEpoch((settings.epoch or 0) - 1)
        self._begin_anew(SkipCounts())

    def detached(self, board: Board) -> Ledger:
        """Return an empty one with the same limit, which writes to no file."""
        other = Ledger(board, self.max_bad_fraction)
        other.path = ""
        return other

    def _begin_anew(self, before: SkipCounts) -> None:
        self._before = before
        self._pid, self._tag = os.getpid(), uuid.uuid4().hex[:12]
        self._logs: dict[int, _ProcessLog] = {}
        self._latest: weakref.ref[EpochLog] | None = None

    def begin(self, counters: Counters | None = None) -> EpochLog:
        """Return the log of a reader's next iteration, which counts in ``counters``. Stages behind it share it."""
        latest = self.current()
        if latest.reading:
            latest = self._new_log()
        latest.reading = True
        latest.epoch = self.epoch.next()
        latest.counters = counters or latest.counters
        return latest

    def current(self) -> EpochLog:
        """Return the log of the current iteration; without one, a new log whose reader has yet to begin."""
        latest = self._latest() if self._latest is not None else None
        return latest if latest is not None and latest.own else self._new_log()

    def _new_log(self) -> EpochLog:
        latest = EpochLog(self)
        self._latest = weakref.ref(latest)
        return latest

    def process_log(self) -> _ProcessLog:
        """Return the records of this process."""
        pid = os.getpid()
        if pid not in self._logs:  # a forked child must not count what its parent recorded
            name = f"ledger-{self._tag}-{pid}-{uuid.uuid4().hex[:8]}"
            self._logs = {pid: _ProcessLog(None if pid == self._pid else self.board.folder / name)}
        return self._logs[pid]

    def why_barren(self) -> str:
        log = self.process_log()
        reasons = []
        if log.empty:
            more = f" and {len(log.empty) - _FIRST} more" if len(log.empty) > _FIRST else ""
            reasons.append(f"these shards are empty archives, without a member: {', '.join(log.empty[:_FIRST])}{more}")
        if log.kept:
            reasons.append(f"passed over by the handler: {log.kept[0]}")
        return "; ".join(reasons)

    def entries(self) -> list[Skipped]:
        log = self.process_log()
        own = log.kept if log.file is None else []
        others = (entry for path in self._files("lines") for entry in read_skipped(path))
        return sorted([*own, *others], key=lambda entry: entry.time)

    def counts(self) -> SkipCounts:
        log = self.process_log()
        total = self._before + (log.beyond if log.file is None else SkipCounts())
        for path in self._files("beyond"):
            total += SkipCounts.of(json.loads(path.read_text()))
        for entry in self.entries():
            total.add(entry)
        return total

    def write(self, entry: Skipped) -> None:
        """Append ``entry`` to the file of ``WDS_LEDGER``, if set."""
        if not self.path:
            return
        path = Path(self._path_of_rank(entry.rank))
        try:
            append_skipped(path, entry)
        except OSError as exn:
            if self.process_log().once("file"):
                logger.warning("WDS_LEDGER=%s cannot be written any more, entries are missing there: %s", path, exn)

    def _path_of_rank(self, rank: int) -> str:
        return self.path.replace("{rank}", str(rank))

    def _statistics(self) -> Stats:
        return self.board.total()

    def _files(self, suffix: str) -> list[Path]:
        return sorted(self.board.folder.glob(f"ledger-{self._tag}-*.{suffix}"))

    def __getstate__(self) -> dict[str, Any]:
        state = {"board": self.board, "epoch": self.epoch, "max_bad_fraction": self.max_bad_fraction, "path": self.path}
        # A worker records for its parent, which has counted the rest.
        return state | ({"as": (self._pid, self._tag)} if world.spawning() else {"before": self.counts()})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.board, self.epoch = state["board"], state["epoch"]
        self.max_bad_fraction, self.path = state["max_bad_fraction"], state["path"]
        self._begin_anew(state.get("before", SkipCounts()))
        self._pid, self._tag = state.get("as", (self._pid, self._tag))


class EpochLog:
    """Log of one iteration over a dataset in one process. When the last stage releases it, it writes a summary of what
    was skipped."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.counters = ledger.board.counters()
        self.reading = False
        self.epoch: int | None = None
        self._pid = os.getpid()
        self._log = ledger.process_log()
        self._counts_before = self._log.counts + SkipCounts()
        self._read_before = self._has_read()
        self._first: Skipped | None = None
        self._failure: Skipped | None = None  # of the shard that is being read
        self._barren = BarrenShards()

    @property
    def own(self) -> bool:
        """True if it belongs to this process; False if it was inherited by ``fork``."""
        return self._pid == os.getpid()

    def note(
        self,
        exn: BaseException,
        stage: str,
        *,
        shard: str | None = None,
        offset: int | None = None,
        size: int | None = None,
        samples: int | None = 1,
        key: Any = None,
        rest: bool = False,
    ) -> None:
        """Record what ``exn`` cost (see `Skipped`; ``size`` in bytes). Raise TooMuchLost beyond the limit."""
        here = world.place()
        shard = shard or getattr(exn, "shard", None) or getattr(exn, "url", None)
        key = getattr(exn, "key", None) if key is None else key
        name = getattr(exn, "field", None)
        entry = Skipped(
            stage=stage,
            reason=reason_of(exn),
            shard=None if shard is None else redact(str(shard)),
            offset=getattr(exn, "offset", None) if offset is None else offset,
            bytes=size,
            samples=samples,
            key=None if key is None else str(key)[:SHOWN],
            field=name[:SHOWN] if isinstance(name, str) else None,
            rest=rest,
            epoch=self.epoch,
            rank=here.rank,
            worker=here.worker,
            time=time.time(),
        )
        self._first = self._first or entry
        self._failure = entry if rest else self._failure
        self._log.add(entry)
        self.ledger.write(entry)
        for counter, count in (("bad_samples", samples or 0), ("passed_shards", rest), ("bad_bytes", size or 0)):
            if count:
                self.counters.add(counter, count)
        self.judge()

    def note_sample(self, stage: str, samples: int, exn: Exception, sample: Any) -> None:
        """Record a sample (or a batch of ``samples``) that a stage behind the reader skipped."""
        fields = sample if isinstance(sample, dict) else {}
        shard = getattr(sample, "shard", None) or fields.get("__url__")
        offset = getattr(sample, "offset", None)
        self.note(exn, stage, shard=shard, offset=offset, samples=samples, key=fields.get("__key__"))

    def judge(self) -> None:
        """Raise TooMuchLost beyond ``max_bad_fraction`` and warn at 1 %, once enough was read."""
        lost = self._log.counts
        if not lost.entries:
            return
        samples, size, shards = self._has_read()
        if samples + lost.unread < JUDGED_SAMPLES and size < JUDGED_BYTES:
            return
        share, limit = lost.share(samples, size, shards), self.ledger.max_bad_fraction
        if limit is not None and share > limit:
            raise TooMuchLost(
                f"max_bad_fraction={limit:g}: this process {lost.text(share)}, of {samples:,.0f} samples. "
                f"{self._log.examples()}Mend the shards, or what reads them, or raise max_bad_fraction "
                "(WDS_MAX_BAD_FRACTION); dataset.ledger and the file of WDS_LEDGER have every entry"
            )
        if share > WARNED_SHARE and self.once("share"):
            logger.warning(
                "more than %.0f %% is lost: %s. %sdataset.ledger has more; max_bad_fraction=%g would stop here",
                100 * WARNED_SHARE, lost.text(share), self._log.examples(), WARNED_SHARE,
            )  # fmt: skip

    def empty_shard(self, shard: str) -> None:
        """Count an archive without members, and log the first one of this process."""
        shard, empty = redact(shard), self._log.empty
        if len(empty) < KEPT and shard not in empty:
            empty.append(shard)
        if self.once("empty"):
            logger.warning("%s: the archive is empty: it ends without a member (logged once)", shard)

    def shard_over(self, shard: str, samples: int) -> None:
        """Count a shard that was read and gave ``samples``. Raise TooMuchLost where no shard gives any more: an endless
        list of shards would go on for ever."""
        failure, self._failure = self._failure, None
        if self._barren.add(shard, samples, failure):
            raise TooMuchLost(
                f"{self._barren}\ngoing on would only look like a hang, whatever the handler does. Look at the shards,"
                " their names and the credentials, and at select_files; dataset.ledger has every entry"
            )

    def once(self, what: str) -> bool:
        """Return True the first time in this process."""
        return self._log.once(what)

    def _has_read(self) -> tuple[float, float, float]:
        return self.counters.get("samples"), self.counters.get("bytes"), self.counters.get("shards")

    def __del__(self) -> None:
        if getattr(self, "_first", None) is None or not self.own or sys.is_finalizing():
            return
        lost = self._log.counts - self._counts_before
        share = lost.share(*map(operator.sub, self._has_read(), self._read_before))
        here = world.place()
        who = f", rank {here.rank}" if here.world_size > 1 else ""
        who += f", worker {here.worker}" if here.num_workers > 1 else ""
        epoch = "an iteration" if self.epoch is None else f"epoch {self.epoch}"
        logger.warning("%s%s: %s; first: %s; dataset.ledger has all", epoch, who, lost.text(share), self._first)


class Ledgers(_SkipReport):
    """Ledgers of several readers as one."""

    def __init__(self, ledgers: Iterable[Ledger]) -> None:
        self.ledgers = list(ledgers)

    def why_barren(self) -> str:
        return "; ".join(filter(None, (ledger.why_barren() for ledger in self.ledgers)))

    def entries(self) -> list[Skipped]:
        return sorted((entry for ledger in self.ledgers for entry in ledger.entries()), key=lambda entry: entry.time)

    def counts(self) -> SkipCounts:
        return sum((ledger.counts() for ledger in self.ledgers), SkipCounts())

    def _statistics(self) -> Stats:
        return sum((ledger.board.total() for ledger in self.ledgers), Stats())


def ledgers_of(stages: Iterable[Any], depth: int = 8) -> list[Ledger]:
    """Return the ledgers of the readers in a pipeline, in the pipelines that it mixes, and in the dataset of a
    DataLoader, each once. ``depth`` limits the search."""
    ledgers: list[Ledger] = []
    for stage in stages:
        own = getattr(stage, "ledger", None)
        if isinstance(own, Ledger | Ledgers):
            ledgers += [own] if isinstance(own, Ledger) else own.ledgers
        elif depth:
            datasets = getattr(stage, "datasets", None)
            below = datasets if isinstance(datasets, list | tuple) else [getattr(stage, "dataset", None)]
            ledgers += ledgers_of(below, depth - 1)
    return list({id(ledger): ledger for ledger in ledgers}.values())


def ledger_of(stages: Iterable[Any]) -> Ledger | Ledgers:
    """Return one ledger of all readers among ``stages``; an empty one where nothing reads shards."""
    ledgers = ledgers_of(stages)
    return ledgers[0] if len(ledgers) == 1 else Ledgers(ledgers)


class BarrenShards:
    """Shards without a sample since the last one with samples, to end an endless list that has only such."""

    AT_MOST = 1000
    """Shards that may fail in a row, whichever they are, and shards that are remembered."""
    REPEATS = 64
    """Shards that must come again, so that chance does not decide where few shards are drawn at random."""
    EXAMPLES = 5

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._barren: dict[str, Skipped | None] = {}
        self._count = self._repeats = 0

    def add(self, shard: str, samples: int, failure: Skipped | None) -> bool:
        """Count a shard that gave ``samples``, and ``failure`` if it could not be read to its end. Return True once
        going on is hopeless: 1,000 failed in a row, or all shards have come again, still without a sample."""
        if len(self._seen) < self.AT_MOST:
            self._seen.add(shard)
        if samples:
            self._barren.clear()
            self._count = self._repeats = 0
            return False
        self._count += 1
        self._repeats += shard in self._barren
        if len(self._barren) < self.AT_MOST:
            self._barren.setdefault(shard, failure)
        if failure is not None and self._count >= self.AT_MOST:
            return True
        if self._repeats < max(self.REPEATS, len(self._barren)):
            return False
        # A shard may be good that gave a sample before and has not come since. If u of n were, that many random draws
        # would have missed them all with a probability of exp(-u * count / n).
        untried = len(self._seen - self._barren.keys())
        return untried == 0 or untried * self._count >= 40 * len(self._seen)

    def __str__(self) -> str:
        """Return number and reasons: for each kind of failure the number of shards and at most five, a line each."""
        lines = [f"{self._count:,} shards in a row ({len(self._barren):,} different ones) gave no sample"]
        failures = list(self._barren.values())
        for kind, count in Counter("no sample in it" if each is None else each.kind for each in failures).most_common():
            examples = [each for each in failures if each is not None and each.kind == kind][: self.EXAMPLES]
            lines += [f"{count:,} × {kind}", *(f"  {each}" for each in examples)]
        return "\n  ".join(lines)


def append_skipped(path: Path, entry: Skipped) -> None:
    """Append ``entry`` to a file as one JSON line, by one write: many processes may share the file. Raise OSError."""
    values = {name: value for name, value in asdict(entry).items() if value is not None}
    line = json.dumps(values).encode() + b"\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(handle, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def read_skipped(path: Path) -> list[Skipped]:
    """Return the entries in a file of `append_skipped`, without lines that were cut short: by the end of their process,
    or by a full disk, where the next entry stands behind the piece on the same line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Skipped(**json.loads(line[max(0, line.rfind(_BEGINS)) :])) for line in lines if line.endswith("\n")]


def reason_of(exn: BaseException) -> str:
    """Return class and message of an exception, on one line of at most 300 characters, without secrets."""
    lines = str(exn).strip().splitlines()
    text = f"{type(exn).__name__}: {redact(lines[0])}" if lines else type(exn).__name__
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
