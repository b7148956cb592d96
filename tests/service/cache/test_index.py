"""The index: rows, checksums of chunks, keys, and the journal that writes it."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.cache.doubles import CHUNK, Clock, full_disk, threaded
from wds_async.service.cache.disk import DataFile
from wds_async.service.cache.entries import ObjectEntry, facts_of_row
from wds_async.service.cache.index import PAGE, Chunks, Index, IndexBatch, IndexRow, key_of
from wds_async.service.cache.policy import Policy
from wds_async.service.cache.writeback import Journal
from wds_async.storage.base import Checksum
from wds_async.transfer.ranges import Facts

_MANY = 200_000


def row(number: int, key: str = "", **how: object) -> IndexRow:
    given: dict[str, object] = {
        "id": number, "key": key or f"s3://bucket/{number:08}.tar", "tenant": "t", "identity": f"v{number}",
        "size": 5000, "ranged": True, "facts": "{}", "checked": 1.0, "used": 2.0, "last": number * 10, "held": 8192,
    }  # fmt: skip
    return IndexRow(**{**given, **how})  # type: ignore[arg-type]


def test_write_and_load(tmp_path: Path) -> None:
    index = Index(tmp_path / "index")
    index.write(IndexBatch({1: row(1), 2: row(2, size=None)}, {(1, 0): b"abc", (1, 3): b"d"}), 3, {"now": 7})
    index.close()
    again = Index(tmp_path / "index")
    assert again.load(row(1).key) == (row(1), [(0, b"abc"), (3, b"d")])
    assert again.load(row(2).key) == (row(2, size=None), [])
    assert again.load("s3://bucket/other") is None
    totals = again.totals()
    assert (totals.entries, totals.by_tenant, totals.next_id, totals.state) == (2, {"t": 16384}, 3, {"now": 7})
    again.write(IndexBatch({1: row(1, held=4096, last=99)}, gone={2}), 3, {})
    assert again.totals().by_tenant == {"t": 4096}
    assert [one.id for one in again.oldest((-1, -1), 10)] == [1]
    again.write(IndexBatch(gone={1}), 3, {})
    assert again.totals().entries == 0
    again.close()


def test_a_key_has_one_entry(tmp_path: Path) -> None:
    index = Index(tmp_path / "index")
    index.write(IndexBatch({1: row(1, "k")}, {(1, 0): b"old"}), 2, {})
    index.write(IndexBatch({2: row(2, "k")}, {(2, 0): b"new"}), 3, {})
    assert index.load("k") == (row(2, "k"), [(0, b"new")])
    assert index.totals().entries == 1
    index.close()


def test_all_or_nothing(tmp_path: Path) -> None:
    index = Index(tmp_path / "index")
    index.write(IndexBatch({1: row(1)}), 2, {})
    with pytest.raises(sqlite3.Error):
        index.write(IndexBatch({2: row(2), 3: row(3, identity=None)}), 9, {})
    assert index.totals().entries == 1
    assert index.totals().next_id == 2
    index.close()


def test_prefixes(tmp_path: Path) -> None:
    index = Index(tmp_path / "index")
    keys = ["gs://a/1", "s3://a/1", "s3://a/2", "s3://ab/1", "s3://b/1"]
    index.write(IndexBatch({number: row(number, key) for number, key in enumerate(keys, 1)}), 9, {})
    assert [one.key for one in index.rows("s3://a/")] == keys[1:3]
    assert [one.key for one in index.rows()] == keys
    assert [one.key for one in index.rows("s3://b/1")] == ["s3://b/1"]
    reader = Index(tmp_path / "index", read_only=True)
    assert len(list(reader.rows())) == 5
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.write(IndexBatch(gone={1}), 9, {})
    reader.close()
    index.close()


def test_no_index_of_ours(tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(b"garbage" * 1000)
    with pytest.raises(sqlite3.DatabaseError):
        Index(tmp_path / "index")
    database = sqlite3.connect(tmp_path / "other")
    database.execute("PRAGMA user_version = 77")
    database.close()
    with pytest.raises(sqlite3.DatabaseError, match="version 77"):
        Index(tmp_path / "other")


def test_many_entries_cost_nothing_at_the_start(tmp_path: Path) -> None:
    index = Index(tmp_path / "index")
    for first in range(0, _MANY, 50_000):
        rows = {number: row(number) for number in range(first + 1, first + 50_001)}
        index.write(IndexBatch(rows), first + 50_001, {})
    index.close()
    again = Index(tmp_path / "index")
    steps = [0]
    again._db.set_progress_handler(lambda: steps.__setitem__(0, steps[0] + 1), 1000)  # thousands of SQLite's steps
    totals = again.totals()
    oldest = again.oldest((5000, 500), 1000)
    found = again.load(row(77_777).key)
    assert (totals.entries, totals.next_id) == (_MANY, _MANY + 1)
    assert [one.id for one in oldest] == list(range(501, 1501))
    assert found is not None
    assert steps[0] < _MANY / 1000  # less than one step an entry: no table was walked through
    again.close()


@given(st.sets(st.integers(0, 3 * PAGE)), st.integers(0, 3 * PAGE))
def test_pages_bring_back_what_stays(numbers: set[int], passing: int) -> None:
    chunks = Chunks((3 * PAGE + 1) * 10, 10)
    for number in numbers:
        chunks.add(number, number * 31, on_probation=number == passing)
    again = Chunks(chunks.size, 10)
    again.load((page, chunks.page(page)) for page in range(4))
    assert again.numbers() == sorted(numbers - {passing})
    assert all(again.crcs[number] == number * 31 and number not in again.trusted for number in again.numbers())


@given(st.sets(st.integers(0, 20)), st.integers(0, 210), st.integers(0, 250))
def test_ready_is_what_is_there_in_a_row(numbers: set[int], start: int, count: int) -> None:
    chunks = Chunks(205, 10)
    for number in numbers:
        chunks.add(number, 0)
    there = {at for number in numbers for at in range(*chunks.bounds(number))}
    end = start
    while end < min(start + count, 205) and end in there:
        end += 1
    assert chunks.ready(start, start + count) == end


def test_nonsense_in_a_page_is_passed_over() -> None:
    chunks = Chunks(2500, 1000)
    chunks.load([(0, b"\x00\x00abcd\x63\x00abcd\x01"), (9, b"")])
    assert chunks.numbers() == [0]


SIGNED = (
    "https://host/a.tar?X-Amz-Credential=SECRET&X-Amz-Signature=SECRET",
    "https://account.blob.core.windows.net/c/a.tar?se=2030&sig=SECRET",
    "https://user:SECRET@host/a.tar",
    "https://SECRET@host/a.tar",
)


@pytest.mark.parametrize("url", ["s3://bucket/a.tar", "https://host/a.tar?part=3", "gs://bucket/a%20b.tar"])
def test_a_url_without_a_secret_is_its_own_key(url: str) -> None:
    assert key_of(url) == url


@pytest.mark.parametrize("url", SIGNED)
def test_a_secret_is_not_in_the_key(url: str) -> None:
    key = key_of(url)
    assert "SECRET" not in key
    assert "/a.tar" in key  # people find it, and prefixes do
    assert key_of(key) == key
    assert key == key_of(url) != key_of(url.replace("SECRET", "OTHER"))


def journal_of(folder: Path, **how: Any) -> Journal:
    index = Index(folder / "index")
    clock = Clock()
    policy = Policy(1 << 20, CHUNK)
    return Journal(index, threaded, policy, clock=clock, wall=lambda: clock() + 1e9, next_id=5, **how)


async def test_files_that_are_being_made_are_swept_after_a_crash(tmp_path: Path) -> None:
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


async def test_an_index_on_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


async def test_a_damaged_index_is_reported(tmp_path: Path) -> None:
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


FACTS = Facts(3 * CHUNK + 5, '"etag"', {"etag": '"etag"'}, Checksum("crc32c", b"abcd", "x-goog-hash"), True)


def entry_of(facts: Facts = FACTS) -> ObjectEntry:
    return ObjectEntry(7, "key", "s3://bucket/a?signature", facts, "tenant", Chunks(facts.size, CHUNK))


def test_facts_come_back_from_their_row() -> None:
    row = entry_of().row(1.0, 2.0, 3)
    assert facts_of_row(row) == FACTS
    assert (row.key, row.held, row.last) == ("key", 0, 3)
    assert "signature" not in repr(row)  # the URL may hold one, and is not kept
    assert facts_of_row(entry_of(Facts(None, "", {}, None, False)).row(0, 0, 0)) == Facts(None, "", {}, None, False)
