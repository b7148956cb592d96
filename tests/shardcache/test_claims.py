"""Names that several URLs could have."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wds_async.shardcache.names import claim


def test_the_first_has_it(tmp_path: Path) -> None:
    assert claim(tmp_path, "x.tar", "s3@a/x.tar")
    assert not claim(tmp_path, "x.tar", "s3@b/x.tar")
    assert claim(tmp_path, "x.tar", "s3@a/x.tar")
    assert claim(tmp_path, "y.tar", "s3@b/y.tar")


def test_one_of_many_has_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: claim(tmp_path, "x.tar", f"s3@{i % 8}/x.tar"), range(64)))
    owners = {i % 8 for i, yes in enumerate(won) if yes}
    assert len(owners) == 1


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert claim(tmp_path / "file", "x.tar", "s3@a/x.tar")
