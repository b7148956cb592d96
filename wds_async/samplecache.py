"""Samples kept on disk, to be yielded from there in later epochs: `LMDBCached` and `SQLiteCache`.

Both hold pickles and read them by the rules of `autodecode.unpickle_loads`: a database of another user's runs no code
here. A sample that could not be read back by these rules is refused when it is written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import itertools
import logging
import os
import pickle
import random
import sqlite3
import struct
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wds_async import packages, world
from wds_async.arguments import check_size
from wds_async.autodecode import torch_loads, unpickle_loads
from wds_async.checkpoint.states import StageState
from wds_async.errors import ConfigError, StateError, UnsafeContent
from wds_async.stages import PipelineStage, Traits
from wds_async.tar.group import RawSample

__all__ = ["LMDBCached", "SQLiteCache"]

logger = logging.getLogger("wds_async")

_COMPLETE = b"_"  # WebDataset's mark of a database that holds the whole stream
_WRITER = b"\0filler"  # the stream and writer of an unfinished database, and how many samples of it are there
_NUMBER = struct.Struct("<Q")
_CHUNK_BYTES = 16 << 20  # a transaction's most, whatever the number of its samples
_MAX_KEY_BYTES = 480  # LMDB allows 511, and a number may be added
_BUSY_S = 60.0
_ZIP = b"PK\x03\x04"  # how a file of torch.save begins

_environments: weakref.WeakValueDictionary[tuple[int, str], Any] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _replace_lock() -> None:
    """Make a new lock: a thread of the parent may have held it when this process was forked."""
    global _opening
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock)


class _SamplePickler(pickle.Pickler):
    """Writes samples as they come from shards as dicts: a cache holds no class of ours."""

    def reducer_override(self, obj: Any) -> Any:
        return (dict, (), None, None, iter(obj.items())) if isinstance(obj, RawSample) else NotImplemented


def _dumps(sample: Any, loads: Callable[[bytes], Any]) -> bytes:
    """Return the pickle of ``sample``. UnsafeContent if ``loads`` would refuse it."""
    stream = io.BytesIO()
    _SamplePickler(stream, pickle.HIGHEST_PROTOCOL).dump(sample)
    data = stream.getvalue()
    try:
        loads(data)
    except UnsafeContent as exn:
        words = "this sample is not cached, because it could not be read back"
        raise UnsafeContent(f"{words}: {exn}; the cache takes allow_pickle=True, too") from exn
    return data


class LMDBState(StageState):
    """State of `LMDBCached`: the samples of databases that are still to be given, or the one that is being filled."""

    def __init__(self) -> None:
        self.loaded = False
        self.stored: list[tuple[str, range]] = []
        """Numbers of samples that are to be given, by the database's folder within the cache's."""
        self.source_follows = True
        self.stores = True
        """True while it fills the database from the source."""
        self.stream: bytes | None = None
        """Identity of the stream that is being written."""
        self.count = 0
        """Number of its samples that have passed."""
        self.writer: _StreamWriter | None = None

    @classmethod
    def at_start(cls, stage: Any, start: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        raise StateError(
            "LMDBCached gives other samples once it has stored them: steps before the state cannot be made again; give "
            "an earlier state"
        )

    def save(self) -> dict[str, Any]:
        if self.writer is not None:
            self.writer.flush()  # they would be lost with this process
            self.count = self.writer.number
        ranges = [[folder, at.start, at.stop, at.step] for folder, at in self.stored]
        return {
            "stored": {"ranges": ranges, "count": sum(len(at) for _, at in self.stored)},
            "without_source": not self.source_follows,
            "stores": self.stores,
            "stream": None if self.stream is None else self.stream.hex(),
            "passed": self.count,
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.loaded = True
        self.stored = [(folder, range(*numbers)) for folder, *numbers in saved["stored"]["ranges"]]
        self.source_follows, self.stores = not saved["without_source"], saved["stores"]
        self.stream = None if saved["stream"] is None else bytes.fromhex(saved["stream"])
        self.count = saved["passed"]

    @classmethod
    def shared(cls, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"without_source": False, "stores": False, "stream": None, "passed": 0}


class LMDBCached(PipelineStage):
    """Store what passes in an LMDB database, and yield it from there once the whole stream is in it.

    ``fname``: the database's folder; it is made when the first sample comes. With several ranks or workers each has a
        database of its own in it, because each sees its own share of the stream: a cache is used by runs of the same
        numbers of ranks and workers. One that a single process filled is used by all, each taking every n-th sample.
    ``map_size``: the most bytes that a database may hold (address space, not disk).
    ``pickler``: a module with ``dumps`` and ``loads``. With Python's `pickle`, reading follows the rules for pickled
        fields (plain classes, numpy, torch; ``allow_pickle`` or ``WDS_ALLOW_PICKLE=1`` for others, for data that you
        trust); another one is used as it is.
    ``chunksize``: samples of one transaction; fewer if they exceed 16 MiB.

    A stream that is not read to its end leaves a database that is not used, and filled anew by the next iteration,
    unless that goes on from a state: then the database is filled further. A state that is loaded by another number of
    ranks or workers gives what is left of the old databases, if they are there, and the next iteration fills new ones.
    Samples come back in the order of their ``__key__`` (the order of the stream if they have none). The file format is
    WebDataset's. Raises MissingExtra without the package lmdb, UnsafeContent for a sample that reading would refuse,
    and ConfigError if ``map_size`` is too small.
    """

    traits = Traits(same_items=True, state=LMDBState)

    def __init__(
        self,
        fname: str | os.PathLike[str],
        map_size: float = 1e12,
        pickler: Any = pickle,
        chunksize: int = 500,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self.fname = os.fspath(fname)
        self.map_size = check_size("LMDBCached", "map_size", map_size, at_least=1)
        self.pickler = pickler
        self.chunksize = check_size("LMDBCached", "chunksize", chunksize, at_least=1)
        self.allow_pickle = allow_pickle

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.pickler, types.ModuleType):  # which does not pickle
            state["pickler"] = f"module:{self.pickler.__name__}"
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.pickler, str):
            self.pickler = importlib.import_module(self.pickler.removeprefix("module:"))

    def is_complete(self) -> bool:
        """Return whether this process would read from its database rather than from the source."""
        return self._find() is not None

    def run(self, source: Iterable[Any], *, state: LMDBState | None = None) -> Iterator[Any]:
        """Yield the samples of the database if it is complete, else those of ``source``, storing them."""
        state = state or LMDBState()
        if not state.loaded and (database := self._find()) is not None:
            state.stored, state.source_follows = [database], False
        return self._items(source, state)

    def _items(self, source: Iterable[Any], state: LMDBState) -> Iterator[Any]:
        while state.stored:
            yield from self._replay(state)
            del state.stored[0]
        if state.source_follows:
            yield from self._fill(source, state) if state.stores else source

    def _folder(self) -> str:
        """Return the folder of this worker's own database, within the cache's."""
        here = world.place()
        if here.world_size * here.num_workers == 1:
            return ""
        return f"rank-{here.rank}-of-{here.world_size}-worker-{here.worker}-of-{here.num_workers}"

    def _find(self) -> tuple[str, range] | None:
        """Return the folder of the complete database to read from, and the numbers of its samples to read."""
        here = world.place()
        first, step = here.rank * here.num_workers + here.worker, here.world_size * here.num_workers
        for folder, at in ((self._folder(), (0, 1)), ("", (first, step))):
            if (size := self._size(folder)) is not None:
                return folder, range(at[0], size, at[1])
        return None

    def _size(self, folder: str) -> int | None:
        """Return how many samples the database has; None unless it is complete."""
        path = os.path.join(self.fname, folder)
        if not os.path.exists(os.path.join(path, "data.mdb")):
            return None
        with self._open(path).begin() as transaction:
            complete = transaction.get(_COMPLETE) is not None
            return int(transaction.stat()["entries"]) - 1 if complete else None

    def _open(self, folder: str) -> Any:
        """Return the environment, one for all iterators of this process: LMDB must not open a file twice in one. It is
        closed with the last iterator; a forked child opens its own."""
        lmdb = packages.optional("lmdb", "LMDBCached", "lmdb")
        key = os.getpid(), os.path.realpath(folder)
        with _opening:
            for other, inherited in list(_environments.items()):
                if other[0] != key[0]:  # lmdb counts it as open until it is closed here; the parent's stays open
                    del _environments[other]
                    inherited.close()
            environment = _environments.get(key)
            if environment is None:
                Path(folder).mkdir(parents=True, exist_ok=True)
                environment = _environments[key] = lmdb.open(folder, map_size=self.map_size)
        return environment

    def _loads(self, data: bytes) -> Any:
        return unpickle_loads(data, self.allow_pickle) if self.pickler is pickle else self.pickler.loads(data)

    def _replay(self, state: LMDBState) -> Iterator[Any]:
        """Yield the samples of the first database of ``state``, which has the rest of their numbers all the while."""
        folder, numbers = state.stored[0]
        if not numbers:
            return
        if (self._size(folder) or 0) <= numbers[-1]:
            path = os.path.join(self.fname, folder)
            raise StateError(f"{path}: the state goes on with sample {numbers[0]} of a database that is not there now")
        environment = self._open(os.path.join(self.fname, folder))  # held while the iterator lives
        with environment.begin() as transaction:
            cursor = transaction.cursor()
            passed = (key for key in cursor.iternext(values=False) if key != _COMPLETE)
            next(itertools.islice(passed, numbers.start, None), None)  # the cursor stands at that one now
            stored = (value for key, value in cursor.iternext() if key != _COMPLETE)
            for value in itertools.islice(stored, 0, numbers.stop - numbers.start, numbers.step):
                numbers = numbers[1:]
                state.stored[0] = folder, numbers
                yield self._loads(value)

    def _fill(self, source: Iterable[Any], state: LMDBState) -> Iterator[Any]:
        path = os.path.join(self.fname, self._folder())
        state.writer = writer = _StreamWriter(self._open(path), self.fname, state.stream, state.count)
        state.stream = writer.stream
        for i, sample in enumerate(source, state.count):
            key = (isinstance(sample, dict) and sample.get("__key__")) or str(i)
            # At once: a later stage may change the sample in place.
            data = _dumps(sample, self._loads) if self.pickler is pickle else self.pickler.dumps(sample)
            writer.add(str(key).encode(), data)
            if len(writer.chunk) >= self.chunksize or writer.size >= _CHUNK_BYTES:
                writer.flush()
            yield sample
        writer.finish()
        state.count, state.writer = writer.number, None


class _StreamWriter:
    """One attempt to write a whole stream. It begins with an empty database, or behind the first ``passed`` samples of
    ``stream``, which it was to write before; and it writes nothing more once another attempt has begun: the two
    together would be neither's stream."""

    def __init__(self, environment: Any, shown: str, stream: bytes | None = None, passed: int = 0) -> None:
        self.environment = environment
        self.shown = shown
        self.stream = stream or uuid.uuid4().bytes
        self.token = self.stream + uuid.uuid4().bytes
        self.number = passed
        self.chunk: list[tuple[bytes, bytes]] = []
        """Pickled samples that are still to be written, by their keys."""
        self.size = 0
        """Bytes of these."""
        with environment.begin(write=True) as transaction:
            before = transaction.get(_WRITER)
            if stream is None:
                transaction.drop(environment.open_db(None, transaction), delete=False)
            self._stored = 0 if stream is None or before is None else _NUMBER.unpack(before[-_NUMBER.size :])[0]
            if stream is None or (before is not None and before.startswith(stream)):
                transaction.put(_WRITER, self.token + _NUMBER.pack(self._stored))
            elif transaction.get(_COMPLETE) != stream:
                logger.warning("%s: the database that was being filled is gone: the next epoch fills it", shown)

    def add(self, key: bytes, data: bytes) -> None:
        """Take one more pickled sample."""
        self.chunk.append((key, data))
        self.size += len(data)

    def flush(self) -> None:
        """Write the samples that were added; a key that exists already, or that LMDB could not hold, gets a number.
        Those that are there from before are passed over."""
        if not self.chunk:
            return
        chunk, self.chunk, self.size = self.chunk, [], 0
        first, self.number = self.number + 1, self.number + len(chunk)
        with self._transaction() as transaction:
            for number, (key, value) in enumerate(chunk, first) if transaction else ():
                if number <= self._stored:
                    continue
                plain = key not in (b"", _COMPLETE, _WRITER) and len(key) <= _MAX_KEY_BYTES
                if not plain or not transaction.put(key, value, overwrite=False):
                    transaction.put(key[:_MAX_KEY_BYTES] + b"\0%012d" % number, value)
            if transaction:
                transaction.put(_WRITER, self.token + _NUMBER.pack(max(self.number, self._stored)))

    def finish(self) -> None:
        """Write the rest, and mark the database as complete."""
        self.flush()
        with self._transaction() as transaction:
            if transaction:
                transaction.delete(_WRITER)
                transaction.put(_COMPLETE, self.stream)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        lmdb = packages.optional("lmdb", "LMDBCached", "lmdb")
        try:
            with self.environment.begin(write=True) as transaction:
                yield transaction if (transaction.get(_WRITER) or b"").startswith(self.token) else None
        except lmdb.MapFullError as exn:
            size = self.environment.info()["map_size"]
            raise ConfigError(f"{self.shown}: more samples than map_size={size} bytes hold; give a larger one") from exn


class _UnsavedOrder(StageState):
    """State of a cache that yields its samples in an order drawn by the operating system."""

    def save(self) -> dict[str, Any]:
        raise StateError(
            "DBCache(shuffle=True) draws its order from the operating system, which no state has: leave shuffle out, "
            "and shuffle behind it"
        )


class SQLiteCache(world.TorchDataset):
    """The first ``size`` samples of a source, kept in an SQLite file and yielded from there once it holds them.

    ``dbname``: the file; None passes the source through. With several ranks each has its own, named
        ``dbname.<rank>-of-<ranks>``; the workers of a rank share one, and share out its samples.
    ``size``: samples to keep. The iteration that fills the cache ends with the last of them, as later ones do. A source
        that has fewer (counting each ``__key__`` once) is read again every time.
    ``source``: anything iterable; also set by `source_`, or by a pipeline whose stage this is.
    ``shuffle``: yield the stored samples in another random order each time.
    ``verbose``: log (level info) what is done.

    Samples are stored under their ``__key__``, or under a digest. They are read by the rules for pickled fields;
    ``allow_pickle`` is for data that you trust. A file written by WebDataset is read by those for ``.pth``. Raises
    UnsafeContent for a sample that reading would refuse, and ConfigError for a file that is no such cache.
    """

    def __init__(
        self,
        dbname: str | os.PathLike[str] | None,
        size: int,
        source: Iterable[Any] | None = None,
        shuffle: bool = False,
        verbose: bool = True,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self.dbname = None if dbname is None else os.fspath(dbname)
        self.size = check_size("DBCache", "size", size)
        self.source = source
        self.shuffled = shuffle  # not ``shuffle``: subclasses have fluent methods
        self.verbose = verbose
        self.allow_pickle = allow_pickle

    def source_(self, source: Iterable[Any]) -> SQLiteCache:
        """Set the source; returns this object."""
        self.source = source
        return self

    def __iter__(self) -> Iterator[Any]:
        return self.run(self.source)

    @property
    def traits(self) -> Traits:
        """Declaration of the stage: without a state, so that it is run again, or with one that cannot be saved."""
        return Traits(state=_UnsavedOrder if self.shuffled else False)

    def run(self, source: Iterable[Any] | None, *, state: StageState | None = None) -> Iterator[Any]:
        """Iterate with ``source`` in place of one's own; so this is a stage, too."""
        if self.dbname is not None and self.total >= self.size:
            return self.dbiter()
        if source is None:
            raise ConfigError("this DBCache has no source: pass source=, call source_, or make it a stage")
        return iter(source) if self.dbname is None else self._fill(source)

    @property
    def total(self) -> int:
        """The number of stored samples."""
        with self._connection() as db:
            return _count(db)

    def cachesize(self) -> int:
        """Return how many samples are kept at most."""
        return self.size

    def key_exists(self, key: str) -> bool:
        """Return whether there is a sample stored under ``key``."""
        with self._connection() as db:
            return _has(db, key)

    def getmeta(self, key: str) -> str | None:
        """Return the text that `setmeta` stored; None without one."""
        with self._connection() as db:
            row = db.execute("SELECT value FROM meta WHERE key = ?", (str(key),)).fetchone()
            return None if row is None else str(row[0])

    def setmeta(self, key: str, value: Any) -> None:
        """Store ``str(value)`` beside the samples."""
        with self._connection() as db, db:
            db.execute("DELETE FROM meta WHERE key = ?", (str(key),))
            db.execute("INSERT INTO meta (key, value) VALUES (?, ?)", (str(key), str(value)))

    def dbiter(self) -> Iterator[Any]:
        """Yield the stored samples; with several workers this worker's share of them."""
        here = world.place()
        with self._connection() as db:
            rows = [row for (row,) in db.execute("SELECT rowid FROM cache ORDER BY rowid")]
            rows = rows[here.worker :: here.num_workers]
            if self.shuffled:
                random.Random().shuffle(rows)
            self._log("yields %d samples of the cache", len(rows))
            for row in rows:
                (data,) = db.execute("SELECT data FROM cache WHERE rowid = ?", (row,)).fetchone()
                loads = torch_loads if data.startswith(_ZIP) else unpickle_loads
                yield loads(bytes(data), self.allow_pickle)

    def _fill(self, source: Iterable[Any]) -> Iterator[Any]:
        loads = functools.partial(unpickle_loads, allow_pickle=self.allow_pickle)
        with self._connection() as db:
            self._log("fills the cache: %d samples of %d are there", _count(db), self.size)
            stored_left = self.size  # for an endless source, whose samples come again and again
            for sample in source:
                data = _dumps(sample, loads)
                key = sample.get("__key__") if isinstance(sample, dict) else None
                with db:  # a transaction: no worker stores more than the size, or a key twice
                    db.execute("BEGIN IMMEDIATE")
                    total = _count(db)
                    key = hashlib.sha256(data).hexdigest() if key is None else str(key)
                    stored = _has(db, key)
                    if total >= self.size:  # another filled it: the samples of this source that it has still come
                        stored_left -= 1
                        if not stored or stored_left < 0:
                            return
                    elif not stored:
                        db.execute("INSERT INTO cache (key, data) VALUES (?, ?)", (key, data))
                yield sample
                if not stored and total + 1 >= self.size:
                    return

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Open a connection of its own for each use: SQLite's must not cross a fork."""
        if self.dbname is None:
            raise ConfigError("this DBCache is off: it has no dbname")
        here = world.place()
        name = self.dbname if here.world_size == 1 else f"{self.dbname}.{here.rank}-of-{here.world_size}"
        try:
            # Iterators may be taken to another thread; they are used by one at a time. Transactions are begun by hand.
            db = sqlite3.connect(name, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        except sqlite3.OperationalError as exn:
            raise ConfigError(f"{name}: {exn}; does its folder exist?") from exn
        with contextlib.closing(db):
            try:
                # A cache can be made again, so it need not survive a power cut; a killed process harms nothing.
                db.execute("PRAGMA synchronous = OFF")
                db.execute("CREATE TABLE IF NOT EXISTS cache (key TEXT PRIMARY KEY, data BLOB)")
                db.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT, value TEXT)")
            except sqlite3.DatabaseError as exn:
                raise ConfigError(f"{name}: {exn}; if this is not a sample cache, name another file") from exn
            yield db

    def _log(self, words: str, *args: Any) -> None:
        if self.verbose:
            logger.info("DBCache %s " + words, self.dbname, *args)


def _count(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM cache").fetchone()[0])


def _has(db: sqlite3.Connection, key: str) -> bool:
    return db.execute("SELECT 1 FROM cache WHERE key = ?", (key,)).fetchone() is not None
