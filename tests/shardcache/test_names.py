"""Names of shards on disk: readable, within the folder, and different for different URLs."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wds_async.errors import ConfigError
from wds_async.shardcache import names
from wds_async.shardcache.names import base_name, cache_name, claim, copied_name, elsewhere, given_name, is_own


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/train/x-000001.tar", "s3@bucket/train/x-000001.tar"),
        ("gs://bucket/train/x-000001.tar", "gs@bucket/train/x-000001.tar"),
        ("https://Host:8080/a/x.tar.gz", "https@host+8080/a/x.tar.gz"),
        ("https://user:secret@host/x.tar", "https@host/x.tar"),
        ("sftp://user:secret@host/x.tar", "sftp@user@host/x.tar"),
        ("az://container@account.dfs.core.windows.net/x.tar", "az@container@account.dfs.core.windows.net/x.tar"),
        ("/mnt/nas/x.tar", "file@/mnt/nas/x.tar"),
        ("file:///mnt/nas/x.tar", "file@/mnt/nas/x.tar"),
        ("x.tar", f"file@{os.getcwd()}/x.tar"),
        ("/mnt/elsewhere/../nas//x.tar", "file@/mnt/nas/x.tar"),
    ],
)
def test_plain_urls_are_themselves(url: str, name: str) -> None:
    assert cache_name(url) == name
    assert is_own(name)


@pytest.mark.parametrize(
    ("url", "pattern"),
    [
        ("https://host/x.tar?versionId=3", r"https@host/x-#\.tar"),
        ("s3://bucket/../x.tar", r"s3@bucket/_/x-#\.tar"),
        ("s3://bucket//x.tar", r"s3@bucket/_/x-#\.tar"),
        ("s3://bucket/a b/x.tar.gz", r"s3@bucket/a_b/x-#\.tar\.gz"),
        ("s3://bucket/" + "long" * 99 + ".tar", r"s3@bucket/(long)+lo-#"),
        ("s3://bucket/nul.tar", r"s3@bucket/_nul-#\.tar"),
        ("s3://bucket/" + "deep/" * 300 + "x.tar", r"s3@bucket/x-#\.tar"),
        ("pipe:aws s3 cp s3://bucket/a/x.tar -", r"pipe@bucket/a/x-#\.tar"),
        ("pipe:cat /mnt/x.tar | gzip -d", r"pipe@/cat_mnt_x-#\.tar_gzip_-d"),
        ("zip://x.tar::s3://bucket/y.zip", r"zip@x\.tar\+\+s3\+/_/bucket/y-#\.zip"),
    ],
)
def test_what_cannot_be_a_name_gets_a_hash(url: str, pattern: str) -> None:
    assert re.fullmatch(pattern.replace("#", "[0-9a-f]{16}"), cache_name(url))


def test_a_signature_is_no_part_of_the_name() -> None:
    signed = "https://b.s3.amazonaws.com/x.tar?X-Amz-Signature=abc&X-Amz-Date=2026&X-Amz-Expires=60"
    assert cache_name(signed) == cache_name(signed.partition("?")[0])
    assert cache_name("https://a.blob/x.tar?sv=1&sig=abc&se=2") == "https@a.blob/x.tar"
    assert cache_name(signed + "&versionId=1") == cache_name("https://b.s3.amazonaws.com/x.tar?versionId=1")
    assert cache_name(signed + "&versionId=1") != cache_name(signed + "&versionId=2")


def test_where_case_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_IGNORES_CASE", True)
    upper, lower = cache_name("s3://b/X.tar"), cache_name("s3://b/x.tar")
    assert upper.lower() != lower
    assert lower == "s3@b/x.tar"


_COMPONENT = st.text(st.sampled_from("aB.-_ %?&=é\\:@+"), max_size=4)
_URLS = st.builds(
    lambda kind, parts: kind + "/".join(parts),
    st.sampled_from(["s3://", "gs://", "http://", "/", "pipe:cat ", "pipe:cat s3://"]),
    st.lists(_COMPONENT, min_size=1, max_size=4),
)


@given(_URLS)
@example("s3://")
@example("pipe:")
@example("http://../..")
def test_names_stay_within_the_folder(url: str) -> None:
    parts = cache_name(url).split("/")
    assert len(parts) >= 2
    assert all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)
    assert is_own(cache_name(url))


@given(_URLS, _URLS)
@example("s3://a_b/x", "s3://a b/x")
@example("s3://b/x", "gs://b/x")
@example("s3://b/a/x", "s3://b/a//x")
@example("pipe:cat s3://b/x", "pipe:cat s3://b/x ")
@example("/", "/\\")
def test_different_urls_have_different_names(one: str, other: str) -> None:
    # A host in capitals is the same host, a URL with a bare '?' the same URL, and who logs in makes no difference.
    def same(url: str) -> str:
        if url.startswith("/"):
            return os.path.abspath(url).lstrip("/")
        return url if url.startswith("pipe:") else re.sub(r"[?&]+$|(?<=[?&])&+", "", url.lower())

    if same(one) != same(other) and "@" not in one + other and "?" not in one + other:
        assert cache_name(one) != cache_name(other)


def test_copies() -> None:
    assert copied_name("s3://bucket/a/x.tar") == "bucket/a/x.tar"
    assert copied_name("pipe:gsutil cat 'gs://bucket/a/x.tar'") == "bucket/a/x.tar"
    assert copied_name("https://host/a%20b/x.tar") == "host/a b/x.tar"
    assert copied_name("s3://bucket/../x.tar") is None
    assert copied_name("https://host/x.tar?versionId=1") is None
    assert copied_name("/mnt/x.tar") is None
    assert copied_name("pipe:cat x.tar") is None


def test_base_names() -> None:
    assert base_name("s3://bucket/a/x.tar") == "x.tar"
    assert base_name("pipe:aws s3 cp s3://bucket/a/x.tar -") == "x.tar"
    assert base_name("https://host/x.tar?versionId=1") == "x.tar"
    assert base_name("https://host/") is None
    assert base_name("https://host") is None


def test_given_names() -> None:
    assert given_name("s3://b/x.tar", lambda url: "a/b.tar") == "a/b.tar"
    assert given_name("pipe:cat s3://b/x.tar", lambda url: "s3://b/x.tar") == "s3@b/x.tar"
    for bad in ("", "/x.tar", "../x.tar", "a//b", "a/./b", "C:\\x.tar", "..\\x", None, 3):
        with pytest.raises(ConfigError, match=r"s3://b/x\.tar"):
            given_name("s3://b/x.tar", lambda url, bad=bad: bad)  # type: ignore[misc]


def test_a_function_that_fails() -> None:
    with pytest.raises(ConfigError, match=r"url_to_name failed for s3://b/x\.tar: KeyError"):
        given_name("s3://b/x.tar", dict[str, str]().__getitem__)


def test_another_endpoint_has_a_folder_of_its_own() -> None:
    name = cache_name("s3://bucket/train/x.tar")
    assert elsewhere(name, "") == name
    assert elsewhere(name, "abc") == "s3@bucket@abc/train/x.tar"
    assert is_own(elsewhere(name, "abc"))
    assert elsewhere("x.tar", "abc") == "x.tar@abc"


def test_a_name_belongs_to_the_first_that_claims_it(tmp_path: Path) -> None:
    assert claim(tmp_path, "x.tar", "s3@a/x.tar")
    assert not claim(tmp_path, "x.tar", "s3@b/x.tar")
    assert claim(tmp_path, "x.tar", "s3@a/x.tar")
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: claim(tmp_path, "y.tar", f"s3@{i % 8}/y.tar"), range(64)))
    assert len({i % 8 for i, yes in enumerate(won) if yes}) == 1
    (tmp_path / "file").write_bytes(b"")
    assert claim(tmp_path / "file", "x.tar", "s3@a/x.tar")  # nothing will be kept under it
