"""``wds-async check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin, make_shard, make_tar


def found(call: Any, *arguments: Any) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    result = call("check", *arguments, "--json")
    *findings, summary = [json.loads(line) for line in result.stdout.splitlines()]
    return result.exit_code, findings, summary


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def make(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return make


def test_good_shards(call: Any, shards: Any) -> None:
    paths = shards(3, 4)
    status, findings, summary = found(call, *paths)
    assert status == 0
    assert [finding["kind"] for finding in findings] in ([], ["overhead"])  # these samples are small
    assert (summary["shards"], summary["samples"], summary["errors"]) == (3, 12, 0)
    assert summary["bytes"] == sum(path.stat().st_size for path in paths)
    assert "0 errors" in call("check", *paths).stderr


def test_a_truncated_shard_does_not_hide_the_next(call: Any, write: Any) -> None:
    whole = make_shard({str(i): {"bin": bytes(5000)} for i in range(10)})
    broken = write("a.tar", whole[: len(whole) // 2])
    good = write("b.tar", make_shard({str(i): {"bin": bytes(5000)} for i in range(10, 20)}))
    missing = good.with_name("c.tar")
    status, findings, summary = found(call, broken, missing, good)
    assert status == 1
    assert [(finding["kind"], Path(finding["shard"]).name) for finding in findings] == [
        ("broken", "a.tar"),
        ("broken", "c.tar"),
    ]
    assert "5 good samples before" in findings[0]["text"]
    assert summary["samples"] == 15
    assert summary["errors"] == 2


def test_keys_that_come_again(call: Any, write: Any) -> None:
    apart = write("a.tar", make_tar([("1.jpg", b"x"), ("2.jpg", b"x"), ("1.cls", b"0"), ("2.cls", b"0")]))
    twice = write("b.tar", make_tar([("2.jpg", b"x"), ("3.jpg", b"x"), ("3.JPG", b"y")]))
    status, findings, _ = found(call, apart, twice)
    assert status == 1
    keys = [finding["text"] for finding in findings if finding["kind"] == "key"]
    assert "'1', '2' came before" in keys[0]
    assert "the field 'jpg' again" in keys[1]
    assert "'2' came before" in keys[2]


def test_members_that_nobody_reads_and_samples_unlike_the_others(call: Any, write: Any) -> None:
    members = [(f"{i}.txt", b"x" * 2000) for i in range(5)] + [("README", b"x" * 2000), ("9.cls", b"1" * 2000)]
    status, findings, _ = found(call, write("a.tar", make_tar(members)))
    assert status == 1
    kinds = {finding["kind"]: finding["text"] for finding in findings}
    assert "'README'" in kinds["name"]
    assert kinds["fields"] == "most samples have txt; 1 have cls"


def test_lines_for_people(call: Any, write: Any) -> None:
    result = call("check", write("a.tar", b"no tar" * 1000))
    assert result.exit_code == 1
    assert result.stdout.startswith("broken  ")
    assert "1 shard, 0 samples, 6.0 kB: 1 error\n" in result.stderr


def test_an_empty_archive_is_named(call: Any, write: Any) -> None:
    good = write("a.tar", make_shard({"0": {"bin": bytes(500_000)}}))
    empty, nothing = write("b.tar", bytes(10240)), write("c.tar", b"")
    status, findings, summary = found(call, good, empty, nothing)
    assert [(finding["kind"], finding["shard"]) for finding in findings] == [
        ("empty", str(empty)),
        ("broken", str(nothing)),
    ]
    assert "is empty: it ends without a member" in findings[0]["text"]
    assert "the shard is empty (0 bytes)" in findings[1]["text"]
    assert (status, summary["errors"]) == (1, 1)
    assert found(call, good, empty)[0] == 0


def test_equal_errors_are_grouped(call: Any, origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REFUSAL_TIMEOUT", "0")
    origin.behave(when=lambda request: "denied" in request.path, status=403)
    urls = f"{origin.base}/denied-{{00..19}}.tar"
    missing = f"{origin.base}/missing.tar"
    result = call("check", urls, missing)
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert "denied-00.tar at byte 0: the server answered 403" in lines[0]
    assert "404" in lines[1]
    assert lines[2].startswith(f"19 with the same error as {origin.base}/denied-00.tar: {origin.base}/denied-01.tar, ")
    assert "and 16 more" in lines[2]
    assert "21 errors" in result.stderr
    assert len(call("check", "--verbose", urls, missing).stdout.splitlines()) == 21
    assert len(found(call, urls, missing)[1]) == 21
