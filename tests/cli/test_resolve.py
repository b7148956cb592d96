"""``wds-async resolve``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.servers import BEFORE_HEAD, Origin
from wds_async.cli.shards import human


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("WDS_REWRITE", "GOPEN_REWRITE", "WDS_SECURE", "WDS_DIRECT", "WDS_CACHE", "WDS_AIS_FALLBACK")
    for name in (*names, "AIS_ENDPOINT", "USE_AIS_FOR", "AIS_AUTHN_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WDS_RETRIES", "1")


@pytest.fixture
def resolve(call: Any) -> Any:
    """Status, one dict a shard, summary."""

    def run(*arguments: Any) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
        result = call("resolve", *arguments, "--json")
        *rows, summary = [json.loads(line) for line in result.stdout.splitlines()]
        return result.exit_code, rows, summary

    return run


def test_nothing_is_read_unless_asked(resolve: Any, origin: Origin) -> None:
    status, rows, summary = resolve(f"{origin.base}/{{0..2}}.tar")
    assert status == 0
    assert not origin.requests
    assert [row["url"] for row in rows] == [origin.url(f"{i}.tar") for i in range(3)]
    assert summary == {"shards": 3, "shown": 3, "checked": False, "failed": 0}
    assert {(row["kind"], row["store"], row["endpoint"], row["direct"]) for row in rows} == {
        ("http", "HTTP", origin.base, True)
    }
    assert rows[0]["check"] is None


def test_ten_are_shown_unless_all_are(resolve: Any, shards: Any) -> None:
    pattern = str(shards(12, 1)[0]).replace("000000", "{000000..000011}")
    _, rows, summary = resolve(pattern)
    assert (len(rows), summary["shards"], summary["shown"]) == (10, 12, 10)
    _, rows, summary = resolve(pattern, "--all")
    assert (len(rows), summary["shown"]) == (12, 12)


def test_a_check_reads_the_beginning_of_each(resolve: Any, shards: Any, origin: Origin) -> None:
    for path in shards(3, 50):
        origin.add(path.name, path.read_bytes())
    status, rows, summary = resolve(f"{origin.base}/shard-{{000000..000002}}.tar", "--check")
    assert status == 0
    assert [request.range for request in origin.requests] == ["bytes=0-511"] * 3
    for row in rows:
        look = row["check"]
        assert (look["ok"], look["looks_like"], look["error"]) == (True, "tar", "")
        assert look["bytes"] == len(origin.files["/shard-000000.tar"])
        assert 0 < look["seconds"] < 10
    assert summary["checked"]


def test_what_cannot_be_read_is_said_and_ends_with_1(resolve: Any, origin: Origin) -> None:
    page = origin.add("page.tar", b"<html>Log in</html>" * 50)
    origin.behave(path="/denied.tar", status=403)
    slow = origin.add("slow.tar", b"slow")
    origin.behave(path="/slow.tar", stall_after=BEFORE_HEAD)
    urls = [origin.url("missing.tar"), origin.url("denied.tar"), page, slow, "nonsense://x"]
    status, rows, summary = resolve(*urls, "--check", "--timeout", "0.5")
    assert status == 1
    assert summary["failed"] == 5
    for row, words in zip(
        rows, ("answered 404", "answered 403", "an HTML page", "no answer within 0.5 s"), strict=False
    ):
        assert row["check"]["ok"] is False
        assert words in row["check"]["error"]
    assert "unknown scheme 'nonsense'" in rows[4]["error"]
    assert rows[4]["check"] is None
    assert resolve("nonsense://x")[0] == 1


def test_rewriting_is_shown_with_its_rule(resolve: Any, shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = shards(1, 1)
    monkeypatch.setenv("WDS_REWRITE", f"s3://=/never/;gs://b/={path.parent}/")
    status, (row,), _ = resolve(f"gcs://b/{path.name}", "--check")
    assert status == 0
    assert (row["url"], row["target"]) == (f"gcs://b/{path.name}", str(path))
    assert row["rule"] == f"gs://b/={path.parent}/"
    assert row["check"]["ok"]
    monkeypatch.setenv("WDS_SECURE", "1")
    status, (row,), _ = resolve("gs://b/x.tar")
    assert status == 1
    assert "WDS_SECURE" in row["error"]


def test_commands_are_not_run(resolve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REWRITE", f"gs://=pipe:touch {tmp_path}/")
    status, (row,), _ = resolve("gs://ran", "--check")
    assert status == 0
    assert row["target"] == f"pipe:touch {tmp_path}/ran"
    assert row["check"]["ok"] is None
    assert "command" in row["check"]["why"]
    assert not (tmp_path / "ran").exists()


def test_routing_to_aistore_and_why_not(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    for name, value in {"AWS_ACCESS_KEY_ID": "AKIAX", "AWS_SECRET_ACCESS_KEY": "topsecret", "AWS_REGION": "r"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("USE_AIS_FOR", "gs")
    _, (row,), _ = resolve("gs://b/x.tar", "--timeout", 5)
    assert row["route"] == "not to AIStore: USE_AIS_FOR names gs, but AIS_ENDPOINT is not set"
    monkeypatch.setenv("AIS_ENDPOINT", "http://127.0.0.1:2")
    monkeypatch.setenv("WDS_AIS_FALLBACK", "1")
    _, rows, _ = resolve("gcs://b/x.tar", "ais://b/x.tar", "s3://b/x.tar", "--timeout", 5)
    assert [row["kind"] for row in rows] == ["ais", "ais", "s3"]
    assert [row["fallback"] for row in rows] == ["gcs", "", ""]
    assert [row["route"] for row in rows] == [
        "to AIStore: USE_AIS_FOR names gs",
        "to AIStore (AIS_ENDPOINT)",
        "not to AIStore: USE_AIS_FOR does not name s3",
    ]
    assert "topsecret" not in json.dumps(rows)


def test_shards_in_the_cache(resolve: Any, shards: Any, origin: Origin, tmp_path: Path, monkeypatch: Any) -> None:
    from wds_async.shardcache.cache import DiskCache

    folder = tmp_path / "cache"
    monkeypatch.setenv("WDS_CACHE", str(folder))
    url = origin.add("x.tar", shards(1, 1)[0].read_bytes())
    assert resolve(url)[1][0]["cached"] is False
    assert not folder.exists()  # a look makes nothing
    folder.mkdir()
    DiskCache(folder).fetch(url)
    assert resolve(url)[1][0]["cached"] is True


def test_for_people_what_is_the_same_is_said_once(call: Any, shards: Any, origin: Origin) -> None:
    for path in shards(3, 5):
        origin.add(path.name, path.read_bytes())
    url = f"{origin.base}/shard-{{000000..000003}}.tar".replace("http://", "http://me:topsecret@")
    result = call("resolve", url, "--check")
    assert result.exit_code == 1
    assert "topsecret" not in result.output
    assert result.stdout.count(f"endpoint  {origin.base}") == 1
    assert result.stdout.count("by direct requests") == 1
    size = human(len(origin.files["/shard-000000.tar"]))
    assert result.stdout.count(f"  ok  {size}  tar  first bytes after ") == 3
    (line,) = [line for line in result.stdout.splitlines() if "000003" in line]
    assert line.count("000003") == 1
    assert "the server answered 404" in line
    assert result.stderr == "4 shards: 1 cannot\n"
    assert "all that are shown can be resolved" in call("resolve", url).stderr


def test_a_specification(resolve: Any, shards: Any, tmp_path: Path) -> None:
    shards(2, 1)
    spec = tmp_path / "spec.yaml"
    spec.write_text("dataset:\n- shards: shards/shard-{000000..000001}.tar\n")
    status, rows, _ = resolve(spec, "--check")
    assert status == 0
    assert [Path(row["url"]).name for row in rows] == ["shard-000000.tar", "shard-000001.tar"]


def test_rules_that_match_nothing_are_named(call: Any, resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_REWRITE", "made://=/data/;gs://old/=gs://new/")
    assert resolve("made://x.tar")[2]["unmatched_rules"] == ["gs://old/=gs://new/"]
    assert "match none of the 1 shards: gs://old/=gs://new/" in call("resolve", "made://x.tar").stderr
    assert "unmatched_rules" not in resolve("{made://x.tar,gs://old/x.tar}")[2]


def test_equal_errors_are_grouped(call: Any, resolve: Any, shards: Any, origin: Origin) -> None:
    origin.add("good.tar", shards(1, 4)[0].read_bytes())
    origin.behave(when=lambda request: "good" not in request.path, status=403)
    urls = [f"{origin.base}/denied-{{00..19}}.tar", origin.url("good.tar"), origin.url("other.tar")]
    result = call("resolve", *urls, "--check", "--all")
    named = [line for line in result.stdout.splitlines() if ".tar" in line]
    assert [line.count("denied-") for line in named] == [1, 0, 4]
    assert "20 with the same error as" in named[2]
    assert "21 cannot" in result.stderr
    assert call("resolve", *urls, "--check", "--all", "--verbose").stdout.count("answered 403") == 21
    assert len(resolve(*urls, "--check", "--all")[1]) == 22


def test_an_empty_archive_is_named(resolve: Any, call: Any, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(bytes(10240))
    (tmp_path / "y.tar").write_bytes(b"")
    status, rows, _ = resolve(tmp_path / "x.tar", tmp_path / "y.tar", "--check")
    assert [row["check"]["looks_like"] for row in rows] == ["tar, empty: no members", ""]
    assert "the shard is empty (0 bytes)" in rows[1]["check"]["error"]
    assert status == 1
    assert "tar, empty: no members" in call("resolve", tmp_path / "x.tar", "--check").stdout
