"""The folder: one process's own, and tidy."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.service.cache.test_index import row
from wds_async.errors import ConfigError
from wds_async.service.cache.disk import INDEX, open_folder, open_index, take_out_trash
from wds_async.service.cache.index import IndexBatch


def test_one_process_at_a_time(tmp_path: Path) -> None:
    opened = open_folder(tmp_path / "new" / "cache")
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="another process works on this cache"):
        open_folder(tmp_path / "new" / "cache")
    opened.close()
    opened.close()
    open_folder(tmp_path / "new" / "cache").close()


def test_what_a_killed_process_left_is_tidied(tmp_path: Path) -> None:
    opened = open_folder(tmp_path)
    files = opened.files
    opened.index.write(IndexBatch({5: row(5), 6: row(6, held=0), 9: row(9)}), 10, {}, sweep_from=7)
    for number in (5, 6, 7, 9, 11):
        files.create(number).close()
    opened.close()
    opened = open_folder(tmp_path)
    assert {path.name for path in (tmp_path / "data").rglob("*") if path.is_file()} == {"5", "9"}
    assert opened.index.totals().entries == 2
    opened.close()


@pytest.mark.parametrize("damage", ["garbage", "deleted", "marked", "cut", "stranger", "pages"])
def test_an_index_that_is_none(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    opened = open_folder(tmp_path)
    opened.index.write(IndexBatch({number: row(number) for number in range(1, 500)}), 500, {})
    opened.files.create(1).close()
    if damage == "marked":
        opened.mark_broken()
    opened.close()
    index = tmp_path / INDEX
    if damage == "garbage":
        index.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    elif damage == "deleted":
        index.unlink()
    elif damage == "cut":
        index.write_bytes(index.read_bytes()[:5000])
    elif damage == "pages":  # its head is good, and says that all is well
        index.write_bytes(index.read_bytes()[:4096] + b"\xa5" * (index.stat().st_size - 4096))
    elif damage == "stranger":
        database = sqlite3.connect(index)
        database.execute("DROP TABLE entries")
        database.close()
    for _ in range(2):
        again = open_folder(tmp_path)
        assert again.totals.entries == 0
        again.close()
    assert not (tmp_path / "data").exists()
    assert (damage == "deleted") == ("was moved to" not in caplog.text)
    assert (tmp_path / f"{INDEX}.bad").exists() == (damage != "deleted")
    take_out_trash(tmp_path)
    assert not list(tmp_path.glob("trash-*"))


def test_looking_needs_a_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no cache"):
        open_index(tmp_path)
    assert list(tmp_path.iterdir()) == []
