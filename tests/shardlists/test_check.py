"""A look at shards before a training."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.servers import BEFORE_HEAD, Origin, make_shard, make_tar
from tests.transfer.reading import data, quick
from wds_async.errors import AccessDenied, ConfigError, FetchTimeout, NotATar, ShardNotFound, StorageError
from wds_async.shardcache.cache import DiskCache
from wds_async.shardlists import DirectoryShardList, MultiShardSample, ResampledShards, SimpleShardList
from wds_async.shardlists.check import check_shards, lists_of, looks_like, shards_to_check
from wds_async.storage.options import NOTHING_GIVEN
from wds_async.transfer.probe import HEAD_BYTES, Probed

SHARD = make_shard({str(i): {"bin": data(3000, i)} for i in range(5)})


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WDS_REWRITE", "GOPEN_REWRITE", "WDS_SECURE", "WDS_DIRECT", "AIS_ENDPOINT", "USE_AIS_FOR"):
        monkeypatch.delenv(name, raising=False)


def check(*urls: str, which: str = "all", **more: Any) -> None:
    check_shards([urls], which, NOTHING_GIVEN, config=more.pop("config", quick()), **more)


def begins(content: bytes) -> Probed:
    return Probed("x.tar", len(content), "", content[:HEAD_BYTES])


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (SHARD, "tar"),
        (gzip.compress(SHARD), "gzip"),
        (bz2.compress(SHARD), "bzip2"),
        (lzma.compress(SHARD), "xz"),
        (zstandard.compress(SHARD), "zstd"),
        (make_tar([("a" * 150 + ".txt", b"x")], format=tarfile.GNU_FORMAT), "tar"),
        (make_tar([("ä" * 90 + ".txt", b"x")], format=tarfile.PAX_FORMAT), "tar"),
        (bytes(10240), "tar, empty: no members"),
        (make_tar([("BZh.txt", b"x")]), "tar"),
    ],
)
def test_shards_are_known_by_their_beginning(content: bytes, kind: str) -> None:
    assert looks_like(begins(content)) == (kind, None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<html><body>Log in</body></html>" * 100, "an HTML page"),
        (b'<?xml version="1.0"?><Error/>', "an XML document"),
        (b"", "0 bytes"),
        (SHARD[:400], "no tar header"),
        (gzip.compress(b"no tar at all" * 1000), "no tar header"),
        (data(5000), "no tar header"),
    ],
)
def test_what_is_no_shard_is_named(content: bytes, words: str) -> None:
    kind, error = looks_like(begins(content))
    assert kind == ""
    assert isinstance(error, NotATar)
    assert words in str(error)


def test_nothing_is_said_of_what_was_not_read() -> None:
    assert looks_like(Probed("-", checked=False, why="once")) == ("", None)
    assert looks_like(Probed("x", error=ShardNotFound("x"))) == ("", None)


def test_ends_and_all() -> None:
    lists = [["a", "b", "c"], ["d"], ["e", "a"], []]
    assert shards_to_check(lists, "ends") == ["a", "c", "d", "e"]
    assert shards_to_check(lists, "all") == ["a", "b", "c", "d", "e"]
    with pytest.raises(ConfigError, match="check='some': known are 'ends'"):
        shards_to_check(lists, "some")


def test_the_lists_of_what_a_dataset_begins_with(tmp_path: Path) -> None:
    urls = ["http://h/0.tar", "http://h/1.tar"]
    assert lists_of(SimpleShardList(urls)) == [urls]
    assert lists_of(ResampledShards(urls)) == [urls]
    spec = {
        "datasets": [{"buckets": ["http://h"], "shards": ["0.tar"]}, {"buckets": ["http://h"], "shards": ["1.tar"]}]
    }
    assert [list(found) for found in lists_of(MultiShardSample(spec))] == [[urls[0]], [urls[1]]]
    with pytest.raises(ConfigError, match="DirectoryShardList does not list them"):
        lists_of(DirectoryShardList(str(tmp_path), mode="keep"))


def test_all_is_well(origin: Origin, caplog: pytest.LogCaptureFixture) -> None:
    urls = [origin.add(f"{i}.tar", SHARD) for i in range(50)]
    caplog.set_level("INFO", "wds_async")
    check(*urls)
    assert len(origin.requests) == 50
    (line,) = [record.message for record in caplog.records if record.name == "wds_async"]
    assert line == "check='all': 50 shards are there and can be read"
    origin.forget()
    check(*urls, "-", which="ends")
    assert [request.path for request in origin.requests] == ["/0.tar"]
    assert caplog.records[-1].message.endswith(
        "1 shards are there and can be read; 1 can be read only once and were not"
    )
    assert not [thread for thread in threading.enumerate() if thread.name == "wds-async-probe"]


def test_all_that_is_missing_is_listed(origin: Origin) -> None:
    good = origin.add("good.tar", SHARD)
    urls = [origin.url(f"{i}.tar") for i in range(30)]
    with pytest.raises(ShardNotFound) as raised:
        check(good, *urls)
    first, *lines = str(raised.value).splitlines()
    assert first == "30 of 31 shards that were looked at are missing:"
    assert len(lines) == 21
    assert all(url in line and "404" in line for url, line in zip(urls, lines[:20], strict=False))
    assert lines[-1] == "  … and 10 more"
    assert isinstance(pickle.loads(pickle.dumps(raised.value)), ShardNotFound)


def test_the_class_says_what_all_have_in_common(origin: Origin) -> None:
    page, missing = origin.add("page.tar", b"<html>Log in</html>" * 50), origin.url("missing.tar")
    denied, empty = origin.add("denied.tar", SHARD), origin.add("empty.tar", b"")
    origin.behave(path="/denied.tar", status=403)
    with pytest.raises(NotATar, match="2 of 2 shards that were looked at are no shards"):
        check(page, empty)
    with pytest.raises(AccessDenied, match="1 of 1 shards that were looked at may not be read"):
        check(denied)
    with pytest.raises(StorageError, match="4 of 4 shards that were looked at cannot be read") as raised:
        check(page, missing, denied, empty)
    assert type(raised.value) is StorageError
    text = str(raised.value)
    assert all(words in text for words in ("an HTML page", "404", "403", "0 bytes"))


def test_secrets_are_not_listed(origin: Origin) -> None:
    url = f"{origin.url('x.tar')}?X-Amz-Signature=topsecret"
    with pytest.raises(ShardNotFound) as raised:
        check(url)
    assert "topsecret" not in str(raised.value)
    origin.add("x.tar", b"no shard" * 100)
    with pytest.raises(NotATar) as page:
        check(url)
    assert "topsecret" not in str(page.value)


def test_a_server_that_does_not_answer(origin: Origin) -> None:
    good, slow = origin.add("good.tar", SHARD), origin.add("slow.tar", SHARD)
    origin.behave(path="/slow.tar", stall_after=BEFORE_HEAD)
    with pytest.raises(StorageError, match="1 of 2") as raised:
        check(good, slow, timeout_s=0.3)
    assert isinstance(raised.value.__cause__, FetchTimeout)


def test_what_the_cache_has_need_not_be_there(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("x.tar", SHARD)
    cache = DiskCache(tmp_path)
    assert cache.fetch(url) is not None
    origin.files.clear()
    check(url, cache=cache)
    with pytest.raises(ShardNotFound):
        check(url)
