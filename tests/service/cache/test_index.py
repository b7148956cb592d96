"""The index."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from wds_async.service.cache.index import Index, IndexBatch, IndexRow

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


def test_a_damaged_row_is_told(tmp_path: Path) -> None:
    index = Index(tmp_path / "index")
    index.write(IndexBatch({1: row(1, "k")}, {(1, 0): b"x"}), 2, {})
    index.close()
    database = sqlite3.connect(tmp_path / "index")
    database.execute("UPDATE entries SET identity = 'another'")
    database.commit()
    database.close()
    again = Index(tmp_path / "index")
    found = again.load("k")
    assert found is not None
    assert found[1] is None
    again.close()


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
