"""The JSON index of a dataset."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from wds_async.errors import ConfigError, ShardNotFound, UnsafeContent
from wds_async.indexed.index import load_index, placed_shards
from wds_async.tar.index import shard_list


def write(path: Path, **document: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"wids_version": 1, **document}))
    return str(path)


def entry(url: str, nsamples: int = 1, **more: Any) -> dict[str, Any]:
    return {"url": url, "nsamples": nsamples, **more}


def urls(index: dict[str, Any]) -> list[str]:
    return [shard["url"] for shard in index["shardlist"]]


def test_urls_are_relative_to_argument_then_base_then_place(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.json", shardlist=[entry("x.tar")])
    based = write(tmp_path / "b.json", base="gs://b/d", shardlist=[entry("x.tar")])
    nested = write(tmp_path / "c.json", base="d", shardlist=[entry("x.tar")])
    assert urls(load_index(plain)) == [f"{tmp_path}/x.tar"]
    assert urls(load_index(based)) == ["gs://b/d/x.tar"]
    assert urls(load_index(nested)) == [f"{tmp_path}/d/x.tar"]
    assert urls(load_index(based, base="/other")) == ["/other/x.tar"]


def test_datasets_in_a_dataset(origin: Any, tmp_path: Path) -> None:
    other = {"wids_version": 1, "name": "far", "shardlist": [entry("y.tar", 2)]}
    source = origin.add("d/other.json", json.dumps(other).encode())
    path = write(
        tmp_path / "a.json",
        name="all",
        weight=3,
        shardlist=[entry("x.tar")],
        datasets=[{"source_url": source, "weight": 5}, {"name": "near", "shardlist": [entry("z.tar", weight=7)]}],
    )
    assert load_index(path)["shardlist"] == [
        entry(f"{tmp_path}/x.tar", name="all", weight=3),
        entry(f"{origin.base}/d/y.tar", 2, weight=5, source_url=source, dataset="far"),
        entry(f"{tmp_path}/z.tar", weight=7, dataset="near"),
    ]


def test_from_http_and_from_a_file_object(origin: Any) -> None:
    text = json.dumps({"wids_version": 1, "shardlist": [entry("x.tar", 4)]})
    url = origin.add("d/i.json", text.encode())
    assert urls(load_index(url)) == [f"{origin.base}/d/x.tar"]
    assert urls(load_index(io.StringIO(text))) == ["x.tar"]
    assert urls(load_index(io.BytesIO(text.encode()), base="s3://b")) == ["s3://b/x.tar"]


def test_options_go_over_the_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", name="one", shardlist=[entry("x.tar")])
    assert load_index(path, options={"name": "two"})["name"] == "two"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"wids_version": 1,\n"shardlist": [}', "line 2, column 15"),
        ("[]", "holds a list"),
        ("{}", "wids_version is None"),
        ('{\n"wids_version": 2}', "line 2, .*only 1"),
        ('{"wids_version": 1}', "names no shards"),
        ('{"wids_version": 1, "shardlist": {}}', "not a list"),
        ('{"wids_version": 1, "shardlist": [\n"x.tar"]}', r"line 2, .*shardlist\[0\]"),
        ('{"wids_version": 1, "shardlist": [\n\n{"url": "x.tar"}]}', "line 3, .*nsamples of x.tar is None"),
        ('{"wids_version": 1, "shardlist": [{"url": "x.tar", "nsamples": -1}]}', "is -1"),
        ('{"wids_version": 1, "datasets": [1]}', r"datasets\[0\].*1 is no object"),
        ('{"wids_version": 1, "datasets": 1}', "not a list"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_what_is_no_index_is_named(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=f"broken.json.*{why}"):
        load_index(path)


def test_a_file_object_that_is_no_index() -> None:
    with pytest.raises(ConfigError, match=r"the index: .*line 1"):
        load_index(io.StringIO("{"))


def test_an_index_of_an_index_of_an_index(tmp_path: Path) -> None:
    inner = write(tmp_path / "inner.json", source_url="more.json", shardlist=[])
    outer = write(tmp_path / "outer.json", datasets=[{"source_url": inner}])
    with pytest.raises(ConfigError, match="yet another index"):
        load_index(outer)
    with pytest.raises(ShardNotFound, match=r"missing\.json"):
        load_index(write(tmp_path / "o.json", datasets=[{"source_url": "missing.json"}]))


@pytest.mark.parametrize("url", ["pipe:touch /x", "-", "file:///etc/x.tar", "local:///x.tar"])
def test_only_files_of_the_user_name_commands_and_files(url: str, origin: Any, tmp_path: Path) -> None:
    for document in ({"shardlist": [entry(url)]}, {"datasets": [{"source_url": url}]}):
        fetched = origin.add("i.json", json.dumps({"wids_version": 1, **document}).encode())
        with pytest.raises(UnsafeContent, match=r"i\.json, line 1.*may not name"):
            load_index(fetched)
    assert urls(load_index(write(tmp_path / "own.json", shardlist=[entry(url)]))) == [url]
    nested = {"wids_version": 1, "base": "/etc", "shardlist": [entry("/etc/x.tar")]}
    fetched = origin.add("i.json", json.dumps(nested).encode())
    assert urls(load_index(fetched)) == [f"{origin.base}/etc/x.tar"]  # of the host that it came from


def test_what_is_made_can_be_loaded(tmp_path: Path) -> None:
    counted = [{"url": str(tmp_path / name), "nsamples": count} for name, count in (("a.tar", 3), ("b.tar", 2))]
    placed = placed_shards(counted, folder=str(tmp_path))
    assert [shard["url"] for shard in placed] == ["a.tar", "b.tar"]
    assert placed_shards(counted) == counted
    (tmp_path / "i.json").write_text(shard_list(placed, "n"))
    index = load_index(tmp_path / "i.json")
    assert index["name"] == "n"
    assert index["shardlist"] == [{**shard, "name": "n"} for shard in counted]
