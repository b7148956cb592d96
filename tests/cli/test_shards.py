"""What ``ls`` and ``cat`` stand on: every member and sample, with the offset where ``tarfile`` finds it."""

from __future__ import annotations

import tarfile
from typing import Any

import pytest

from tests.servers.shards import make_shard
from wds_async.cli import shards as cli_shards
from wds_async.errors import ConfigError, UrlError


def test_members_equal_tarfile(shards: Any) -> None:
    paths = shards(2, 5, payload=100)
    expected = []
    for path in paths:
        with tarfile.open(path) as archive:
            expected += [(str(path), m.name, m.size, m.offset) for m in archive]
    found = cli_shards.members([str(path) for path in paths])
    assert [(url, name, len(data), offset) for url, (name, data, offset) in found] == expected


def test_samples_know_their_first_header(shards: Any) -> None:
    (path,) = shards(1, 4)
    with tarfile.open(path) as archive:
        first: dict[str, int] = {}
        for member in archive:
            first.setdefault(member.name.split(".")[0], member.offset)
    entries = list(cli_shards.samples([str(path)]))
    assert {entry.key: entry.offset for entry in entries} == first
    assert {entry.url for entry in entries} == {str(path)}
    assert all(set(entry.fields) == {"png", "cls", "json"} for entry in entries)


def test_samples_of_two_shards_with_the_same_key_stay_apart(tmp_path: Any) -> None:
    paths = [tmp_path / name for name in ("a.tar", "b.tar")]
    for path in paths:
        path.write_bytes(make_shard({"same": {"cls": b"1"}}))
    assert [entry.url for entry in cli_shards.samples(map(str, paths))] == [str(path) for path in paths]


def test_raw_is_the_shards_bytes(shards: Any) -> None:
    paths = shards(3, 3)
    assert b"".join(bytes(view) for view in cli_shards.raw(map(str, paths))) == b"".join(
        path.read_bytes() for path in paths
    )


def test_expand() -> None:
    assert cli_shards.expand(["http://h/x-{0..1}.tar", "http://h/y.tar"]) == [
        "http://h/x-0.tar",
        "http://h/x-1.tar",
        "http://h/y.tar",
    ]
    with pytest.raises(UrlError):
        cli_shards.expand([])


def test_expand_specifications(tmp_path: Any) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("dataset: [{shards: 'http://h/x-{0..1}.tar'}, {shards: y.tar}]")
    assert cli_shards.expand([str(path), "z.tar"]) == [
        "http://h/x-0.tar",
        "http://h/x-1.tar",
        str(tmp_path / "y.tar"),
        "z.tar",
    ]
    with pytest.raises(UrlError, match="makes samples"):
        cli_shards.expand(["x.tar", "package.module:function"])


def test_entries_of_everything(shards: Any, function: str) -> None:
    (path,) = shards(1, 2)
    found = list(cli_shards.entries([str(path), function + "samples", str(path)]))
    assert [entry.key for entry in found] == ["000000", "000001", *(f"k{i}" for i in range(5)), "000000", "000001"]
    assert found[0].offset == 0
    made = found[3]
    assert (made.url, made.offset) == (function + "samples", None)
    assert made.fields == {"txt": b"t1", "cls": b"1", "bin": b"abc"}
    with pytest.raises(ConfigError, match="type tuple"):
        list(cli_shards.entries([function + "batches"]))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e6, "2.5 MB"), (3e9, "3.0 GB"), (4e12, "4.0 TB")],
)
def test_human(count: float, text: str) -> None:
    assert cli_shards.human(count) == text
