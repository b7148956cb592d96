"""``wds-async ls``."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from wds_async.cli.ls import _folder_of, _show, _within
from wds_async.cli.shards import entries
from wds_async.errors import ConfigError
from wds_async.storage.base import Entry
from wds_async.storage.listing.expand import forget_listings


def test_samples_and_members_are_where_tarfile_finds_them(call: Any, rows: Any, shards: Any) -> None:
    paths = shards(2, 3)
    expected, first = [], {}
    for path in paths:
        with tarfile.open(path) as archive:
            for member in archive:
                place = {"bytes": member.size, "shard": str(path), "offset": member.offset}
                expected.append({"name": member.name, **place})
                first.setdefault((str(path), member.name.partition(".")[0]), member.offset)
    assert rows("ls", "--members", *paths) == expected
    assert expected[0]["name"] in call("ls", *paths, "--members").output
    found = rows("ls", *paths)
    assert {(row["shard"], row["key"]): row["offset"] for row in found} == first
    assert (set(found[0]["fields"]), found[0]["fields"]["cls"]) == ({"png", "cls", "json"}, 1)
    lines = call("ls", *paths).output.splitlines()
    assert len(lines) == 6
    assert "cls 1 B" in lines[0]
    assert lines[0].endswith(f"{paths[0]} @0")
    assert [len(rows("ls", *paths, "-n", count)) for count in (2, 0)] == [2, 0]


def test_braces_over_http_without_secrets(rows: Any, shards: Any, origin: Any) -> None:
    for path in shards(3, 2):
        origin.add(path.name, path.read_bytes())
    found = rows("ls", f"{origin.base}/shard-{{000000..000002}}.tar?X-Amz-Signature=topsecret")
    assert len(found) == 6
    assert "topsecret" not in str(found)


def test_specifications_and_functions(call: Any, rows: Any, shards: Any, tmp_path: Any, function: str) -> None:
    (first, _) = shards(2, 3)
    spec = tmp_path / "spec.yaml"
    spec.write_text("dataset:\n- shards: shards/shard-{000000..000001}.tar\n")
    assert len(rows("ls", spec, first)) == 9
    assert len(rows("ls", spec, "--members")) == 18
    mixed = rows("ls", first, function + "samples", first)
    assert [row["key"] for row in mixed[2:9]] == ["000002", *(f"k{i}" for i in range(5)), "000000"]
    assert mixed[4] == {
        "key": "k1",
        "fields": {"txt": 2, "cls": 1, "bin": 3},
        "shard": function + "samples",
        "offset": None,
    }
    assert call("ls", function + "samples", "-n", 2).output.splitlines()[1].endswith("bin 3 B  makes_pipelines:samples")
    with pytest.raises(ConfigError, match="type tuple"):
        list(entries([function + "batches"]))
    assert "makes samples" in call("ls", function + "samples", "--members").output
    spec.write_text("dataset:\n- shards: x.tar\n  weight: -1\n")
    wrong = call("ls", spec)
    assert wrong.exit_code == 2
    assert "line 3, column 3" in wrong.output


def test_what_came_before_a_fault_is_listed(program: Any, shards: Any, tmp_path: Any) -> None:
    (path,) = shards(1, 4)
    cut = tmp_path / "cut.tar"
    cut.write_bytes(path.read_bytes()[:5000])
    done = program("ls", cut, "--members")
    assert done.returncode == 1
    assert b".png" in done.stdout
    assert b"cut.tar" in done.stderr


def test_a_folder_of_files(call: Any, rows: Any, tmp_path: Any) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "y.tar").write_bytes(b"123")
    (tmp_path / "x.tar").write_bytes(b"1" * 1500)
    for given in (tmp_path, f"{tmp_path}/", f"file://{tmp_path}/"):
        lines = call("ls", given).output.splitlines()
        assert [line.split()[-1] for line in lines] == ["sub/", "x.tar"]
        assert lines[1].startswith("   1.5 kB  20")
        assert lines[0].index("sub/") == lines[1].index("x.tar")
    found = rows("ls", tmp_path, "-r")
    assert [(row["url"], row["bytes"]) for row in found] == [(f"{tmp_path}/x.tar", 1500), (f"{tmp_path}/sub/y.tar", 3)]
    assert set(found[0]) == {"url", "bytes", "modified"}
    assert call("ls", f"{tmp_path}/", "-n", 1).output.split()[-1] == "sub/"
    assert len(call("ls", tmp_path, tmp_path / "sub").output.splitlines()) == 3


def test_the_shards_that_match(call: Any, shards: Any, tmp_path: Any) -> None:
    paths = shards(3, 1)
    lines = call("ls", "--shards", paths[0].parent / "shard-*[12].tar").output.splitlines()
    assert [line.split()[-1] for line in lines] == [str(path) for path in paths[1:]]
    spec = tmp_path / "spec.yaml"
    spec.write_text("dataset:\n- shards: shards/*.tar\n")
    assert len(call("ls", "--shards", spec).output.splitlines()) == 3
    assert len(call("ls", paths[0].parent / "*.tar").output.splitlines()) == 3  # samples, one in each
    assert len(call("ls", "--members", paths[0].parent).output.splitlines()) == 9


def test_a_folder_of_a_store_is_listed_without_reading(call: Any, tmp_path: Any, nginx: Any) -> None:
    for name in ("x-0.tar", "x-1.tar"):
        (tmp_path / name).write_bytes(b"no tar at all")
    server = nginx(tmp_path, extra="autoindex on;", access_log=True)
    forget_listings()
    assert [line.split()[-1] for line in call("ls", server.url("")).output.splitlines()] == ["x-0.tar", "x-1.tar"]
    assert len(call("ls", "--shards", server.url("x-*.tar")).output.splitlines()) == 2
    assert call("ls", "--shards", server.url("y-*.tar")).exit_code == 2
    assert {entry["uri"] for entry in server.log()} == {"/"}


def test_names_of_a_folder_are_no_commands_for_the_terminal(call: Any, tmp_path: Any) -> None:
    (tmp_path / "a\x1b[31m.tar").touch()
    assert "\x1b" not in call("ls", tmp_path).output


ROOT = Path(__file__).parents[2]


def test_what_a_folder_is(tmp_path: Path) -> None:
    (tmp_path / "x.tar").touch()
    assert _folder_of(str(tmp_path)) == f"{tmp_path}/"
    assert _folder_of("s3://b/") == "s3://b/"
    for given in (f"{tmp_path}/x.tar", "s3://b/x.tar", "s3://b/{a,b}/", "s3://b/*/", "-", "pipe:ls /", "http://h/?a/"):
        assert _folder_of(given) is None, given


def test_a_small_folder_is_sorted(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    (tmp_path / "a").touch()
    assert [entry.url for entry in _within(f"{tmp_path}/", recursive=False)] == [f"{tmp_path}/z/", f"{tmp_path}/a"]


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [Entry("s3://b/d/", None), Entry("s3://b/x", 999_900_000, 0.0), Entry("s3://b/?X-Amz-Signature=hush", 1)]
    _show(entries, below="s3://b/", limit=None, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["d/"]
    assert lines[1] == " 999.9 MB  1970-01-01 00:00  x"
    assert "hush" not in lines[2]
    assert len({line.rindex(" ") for line in lines}) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals")
@pytest.mark.parametrize(
    ("arguments", "last"), [([], "1 folder, 2 objects, 1.5 kB"), (["-n", "2"], "1 folder, 1 object,")]
)
def test_a_total_on_a_terminal(tmp_path: Path, arguments: list[str], last: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"1" * 1000)
    (tmp_path / "b").write_bytes(b"1" * 500)
    ours, theirs = os.openpty()
    line = [sys.executable, "-m", "wds_async", "ls", str(tmp_path), *arguments]
    process: Any = subprocess.Popen(line, stdout=theirs, stdin=theirs, cwd=ROOT)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # how a terminal ends
        pass
    os.close(ours)
    assert process.wait(30) == 0
    assert last in shown.decode().splitlines()[-1]
