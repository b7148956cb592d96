"""Looking after a cache's folder without a service: what is in it, removing, pinning, comparing. It all blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from wds_async.chunkcache.chunks import CHUNK_BYTES, PAGE, Chunks
from wds_async.chunkcache.entries import cost
from wds_async.chunkcache.files import DataFile, DataFolder
from wds_async.chunkcache.folder import open_folder, open_index, take_out_trash
from wds_async.chunkcache.index import Batch, Index, Row
from wds_async.chunkcache.scrub import Verified

__all__ = ["Verified", "listed", "pin", "pins", "remove", "verify"]

_AT_ONCE = 1000


def listed(folder: Path, prefix: str = "") -> Iterator[Row]:
    """The objects whose key begins so, also while a service works on the folder: as the index has them, which may be
    half a second behind. ConfigError where there is no cache."""
    with contextlib.closing(open_index(folder)) as index:
        yield from index.rows(prefix)


def pins(folder: Path) -> list[str]:
    """What is pinned, also while a service works on the folder. ConfigError where there is no cache."""
    with contextlib.closing(open_index(folder)) as index:
        return index.pins()


def pin(folder: Path, names: Iterable[str], *, pinned: bool) -> list[str]:
    """Pin objects by their keys, or prefixes that end with "/", or (``pinned`` False) no longer; all that is pinned
    then. ConfigError where a service works on the folder."""
    with contextlib.closing(open_folder(folder)) as opened:
        return opened.index.pin(names, pinned=pinned)


def remove(folder: Path, chosen: Callable[[str], bool]) -> list[Row]:
    """Remove the objects whose key is ``chosen``; they. ConfigError where a service works on the folder."""
    with contextlib.closing(open_folder(folder)) as opened:
        take_out_trash(folder)
        gone = [row for row in opened.index.rows() if chosen(row.key)]
        for start in range(0, len(gone), _AT_ONCE):
            some = gone[start : start + _AT_ONCE]
            for row in some:
                opened.files.remove(row.id)
            opened.index.write(Batch(gone={row.id for row in some}), opened.totals.next_id, opened.totals.state)
    return gone


def verify(folder: Path, prefix: str = "", *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Verified]:
    """Compare every chunk of every object with its checksum, and drop what is bad, so that it is fetched again.
    ConfigError where a service works on the folder: that compares each chunk before it is first served anyway."""
    with contextlib.closing(open_folder(folder)) as opened:
        for row in list(opened.index.rows(prefix)):
            batch, found = _compared(row, opened.index, opened.files, chunk_bytes)
            if found.bad:
                opened.index.write(batch, opened.totals.next_id, opened.totals.state)
            yield found


def _compared(row: Row, index: Index, files: DataFolder, chunk_bytes: int) -> tuple[Batch, Verified]:
    loaded = index.load(row.key)
    pages = loaded[1] if loaded is not None else None
    chunks = Chunks(row.size, chunk_bytes)
    chunks.load(pages or ())
    numbers = chunks.numbers()
    bad = _bad(row, chunks, files)
    for number in bad:
        chunks.drop(number)
    batch = Batch()
    left = chunks.numbers()
    if pages is None or not left:
        files.remove(row.id)
        batch.gone.add(row.id)
        bad = bad or [-1]  # a damaged row, or one of nothing
    else:
        held = sum(cost(chunks.length(number)) for number in left)
        batch.rows[row.id] = replace(row, held=held)
        batch.pages = {(row.id, number // PAGE): chunks.page(number // PAGE) for number in bad}
    return batch, Verified(row.key, len(numbers) - len(bad) if pages is not None else 0, len(bad))


def _bad(row: Row, chunks: Chunks, files: DataFolder) -> list[int]:
    try:
        file = files.open(row.id)
    except OSError:
        return chunks.numbers()
    with contextlib.closing(file):
        return [number for number in chunks.numbers() if not _good(file, chunks, number)]


def _good(file: DataFile, chunks: Chunks, number: int) -> bool:
    start, stop = chunks.bounds(number)
    try:
        return file.crc(start, stop - start) == chunks.crc(number)
    except OSError:
        return False
