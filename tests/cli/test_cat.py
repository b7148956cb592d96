"""``wds-async cat``."""

from __future__ import annotations

import json
from typing import Any

from tests.servers.shards import make_shard, sample_fields
from wds_async.cli.shards import samples


def keys(path: Any) -> list[str]:
    return [entry.key for entry in samples([str(path)])]


def test_short_fields_in_full_others_by_size(call: Any, rows: Any, shards: Any) -> None:
    (path,) = shards(1, 3)
    lines = call("cat", path).output.splitlines()
    assert len(lines) == 3
    assert "cls=1" in lines[1]
    assert 'json={"number": 1}' in lines[1]
    assert "png=<" in lines[1]
    found = rows("cat", path, "-n", 2)
    assert [row["key"] for row in found] == keys(path)[:2]
    assert found[1]["fields"]["cls"] == {"bytes": 1, "text": "1"}
    assert set(found[1]["fields"]["png"]) == {"bytes"}


def test_a_field_and_whole_shards_are_written_as_they_are(program: Any, shards: Any) -> None:
    (path,) = shards(1, 3)
    done = program("cat", path, "--key", keys(path)[2], "--field", "PNG")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == sample_fields(2)["png"]
    raw = program("cat", "--raw", path, path)
    assert (raw.returncode, raw.stdout, raw.stderr) == (0, 2 * path.read_bytes(), b"")


def test_a_key_or_field_that_is_not_there(call: Any, shards: Any) -> None:
    (path,) = shards(1, 2)
    result = call("cat", path, "--key", "nobody")
    assert result.exit_code == 1
    assert "no sample with key 'nobody'" in result.output
    result = call("cat", path, "--key", keys(path)[0], "--field", "jpg")
    assert result.exit_code == 1
    assert "it has png, cls, json" in result.output


def test_control_characters_do_not_reach_the_terminal(call: Any, tmp_path: Any) -> None:
    path = tmp_path / "evil.tar"
    path.write_bytes(make_shard({"k": {"txt": b"\x1b]0;owned\x07", "cls": b"1\n2"}}))
    output = call("cat", path).output
    assert "\x1b" not in output
    assert "txt=<10 B>" in output
    assert "cls=1 2" in output


def test_a_specification_and_a_function(call: Any, shards: Any, tmp_path: Any, function: str) -> None:
    (path,) = shards(1, 2)
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"wids_version": 1, "shardlist": [{"url": str(path), "nsamples": 2}]}))
    assert call("cat", index).output == call("cat", path).output
    assert call("cat", "--raw", index).stdout_bytes == path.read_bytes()
    assert call("cat", function + "samples", "--key", "k3", "--field", "txt").output == "t3"
    missing = call("cat", function + "samples", "--key", "none")
    assert missing.exit_code == 1
    assert "makes_pipelines:samples" in missing.output
