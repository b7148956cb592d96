"""Telling the index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.service.cache.doubles import CHUNK, Clock, run, threaded
from tests.service.cache.test_entries import entry_of
from tests.service.cache.test_machine import full_disk
from wds_async.service.cache.disk import DataFile
from wds_async.service.cache.index import Index
from wds_async.service.cache.policy import Policy
from wds_async.service.cache.writeback import Journal


def journal_of(folder: Path, **how: Any) -> Journal:
    index = Index(folder / "index")
    clock = Clock()
    policy = Policy(1 << 20, CHUNK)
    return Journal(index, threaded, policy, clock=clock, wall=lambda: clock() + 1e9, next_id=5, **how)


def test_what_is_noted_is_written(tmp_path: Path) -> None:
    async def main() -> None:
        journal = journal_of(tmp_path)
        assert [journal.new_id(), journal.new_id()] == [5, 6]
        entry = entry_of()
        journal.used(entry)
        assert not journal.behind  # nothing is kept of what has no file
        entry.file = DataFile(tmp_path / "file", create=True)
        entry.checked = 400.0
        entry.chunks.add(2, 77)
        journal.changed(entry, 2)
        assert journal.behind
        assert journal.pending("key")
        assert await journal.flush()
        assert not journal.behind
        assert not journal.pending("key")
        found = journal.index and journal.index.load("key")
        assert found is not None
        row, pages = found
        assert (row.checked, row.used, row.held) == (400.0 + 1e9, 1000.0 + 1e9, CHUNK)
        assert pages == [(0, entry.chunks.page(0))]
        entry.gone = True
        journal.removing(entry.id)
        assert journal.is_removed(entry.id)
        journal.removed(entry.id)
        await journal.flush()
        assert journal.index is not None
        assert journal.index.load("key") is None
        assert journal.index.totals().next_id == 7
        entry.file.close()
        journal.index.close()

    run(main())


def test_files_that_are_being_made_are_swept_after_a_crash(tmp_path: Path) -> None:
    async def main() -> None:
        journal = journal_of(tmp_path)
        entry = entry_of()
        entry.file = DataFile(tmp_path / "file", create=True)
        assert [journal.new_id() for _ in range(5)] == [5, 6, 7, 8, 9]
        journal.without_file(5)
        journal.used(entry)  # number 7
        await journal.flush()
        assert journal.index is not None
        assert journal.index.totals().sweep_from == 6
        for number in (6, 8):
            journal.removed(number)
        await journal.flush()
        assert journal.index.totals().sweep_from == 9
        journal.without_file(9)
        journal.used(entry)
        await journal.flush()
        assert journal.index.totals().sweep_from == 10  # the next number: nothing is uncertain
        entry.file.close()
        journal.index.close()

    run(main())


def test_a_disk_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        journal = journal_of(tmp_path)
        entry = entry_of()
        entry.file = DataFile(tmp_path / "file", create=True)
        entry.chunks.add(0, 1)
        journal.changed(entry, 0)
        with full_disk():
            assert not await journal.flush()
            assert not await journal.flush()
        assert journal.behind
        assert journal.pending("key")
        assert caplog.text.count("cannot be written") == 1
        assert await journal.flush()
        assert journal.index is not None
        assert journal.index.load("key") is not None
        entry.file.close()
        journal.index.close()

    run(main())


def test_an_index_that_is_damaged_is_said_to_be(tmp_path: Path) -> None:
    async def main() -> None:
        said: list[str] = []
        Index(tmp_path / "index").close()  # all of it is in the file, nothing beside it
        journal = journal_of(tmp_path, broken=lambda: said.append("broken"))
        entry = entry_of()
        entry.file = DataFile(tmp_path / "file", create=True)
        entry.chunks.add(0, 1)
        journal.changed(entry, 0)
        assert journal.index is not None
        path = journal.index.path
        with open(path, "r+b") as file:  # noqa: ASYNC230 (a test)
            file.seek(4096)
            file.write(b"\xa5" * (path.stat().st_size - 4096))
        assert not await journal.flush()
        assert said == ["broken"]
        entry.file.close()
        journal.index.close()

    run(main())
