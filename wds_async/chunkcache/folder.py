"""A cache's folder: the lock that makes it one process's own, the index, the files. All blocks.

::

    folder/lock             held while a service (or the command) works on it
    folder/index.sqlite     what is there
    folder/data/0a/10a      the object with number 0x10a
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from wds_async.chunkcache.files import DataFolder
from wds_async.chunkcache.index import Batch, Index, Totals
from wds_async.errors import ConfigError

__all__ = ["INDEX", "OpenFolder", "open_folder", "open_index", "take_out_trash"]

logger = logging.getLogger("wds_async")

INDEX = "index.sqlite"
_DATA = "data"
_TRASH = "trash-"
_BROKEN = "index.broken"


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """A folder that is this process's own until `close`."""

    path: Path
    files: DataFolder
    index: Index
    totals: Totals
    lock: FileLock

    def mark_broken(self) -> None:
        """What the index says cannot be read everywhere: the next one who opens the folder begins anew."""
        with contextlib.suppress(OSError):
            self.files.touch(_BROKEN)

    def close(self) -> None:
        """Idempotent."""
        self.index.close()
        self.files.close()
        self.lock.release()


def open_folder(path: Path) -> OpenFolder:
    """Lock the folder, and make it where it is not there. ConfigError where another process has it; OSError where it
    cannot be written. An index that is none is moved away, and the cache begins empty: that is warned of."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as undo:
        lock = FileLock(path / "lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(
                f"{path}: another process works on this cache (a service, or `wds-async cache`). One service a folder: "
                "give this one another folder, or end the other first"
            ) from None
        undo.callback(lock.release)
        files = DataFolder(path)
        undo.callback(files.close)
        try:
            index, totals = _open_or_replace(files)
        except sqlite3.Error as exn:
            raise OSError(f"{path / INDEX}: {exn}") from exn
        undo.pop_all()
    return OpenFolder(path, files, index, totals, lock)


def open_index(path: Path) -> Index:
    """The index of a folder, to look at, also while a service works on it. ConfigError where there is none."""
    try:
        return Index(path / INDEX, read_only=True)
    except sqlite3.Error as exn:
        raise ConfigError(f"{path}: no cache of the service, or its index cannot be read: {exn}") from exn


def take_out_trash(path: Path) -> None:
    """Remove what `open_folder` put aside. It may take a while."""
    for trash in path.glob(f"{_TRASH}*"):
        shutil.rmtree(trash, ignore_errors=True)


def _open_or_replace(files: DataFolder) -> tuple[Index, Totals]:
    path = files.root
    index, broken = path / INDEX, path / _BROKEN
    if broken.exists():
        _begin_anew(path, "it could not be read everywhere")
    elif not index.exists():
        _put_aside(path)  # files that no index tells of
    try:
        return _opened(files)
    except sqlite3.OperationalError as exn:
        if "no such" not in str(exn):
            raise
        _begin_anew(path, str(exn))
    except sqlite3.DatabaseError as exn:
        _begin_anew(path, str(exn))
    return _opened(files)


def _opened(files: DataFolder) -> tuple[Index, Totals]:
    """The index, where all that is read of it at a start can be read."""
    index = Index(files.root / INDEX)
    try:
        totals = index.totals()
        _tidy(files, index, totals)
    except BaseException:
        index.close()
        raise
    return index, totals


def _begin_anew(path: Path, why: str) -> None:
    index = path / INDEX
    bad = path / f"{INDEX}.bad"
    logger.warning("cache: %s is no good index: %s; it was moved to %s, and the cache begins empty", index, why, bad)
    if index.exists():
        os.replace(index, bad)
    for name in (f"{INDEX}-wal", f"{INDEX}-shm", _BROKEN):
        (path / name).unlink(missing_ok=True)
    _put_aside(path)


def _put_aside(path: Path) -> None:
    data = path / _DATA
    if data.exists():
        number = 0
        while (trash := path / f"{_TRASH}{number}").exists():
            number += 1
        data.rename(trash)


def _tidy(files: DataFolder, index: Index, totals: Totals) -> None:
    """Files of a process that was killed: in transit, or so new that the index does not know them."""
    empty = index.empty()
    for number in empty:
        files.remove(number)
    if empty:
        index.write(Batch(gone=set(empty)), totals.next_id, totals.state)
    files.sweep(totals.sweep_from, index.numbers(totals.sweep_from))
