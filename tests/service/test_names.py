"""From raw paths to URLs: every name that a store can hold comes through unchanged, and what is none is refused."""

from __future__ import annotations

import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.service.config import ServiceConfig
from wds_async.service.names import bucket_of, name_of, name_of_url, url_of
from wds_async.service.refusals import Refusal

CONFIG = ServiceConfig(
    buckets=(
        ("@#team/photos", "s3://team-photos/"),
        ("disk", "/data/shards"),
        ("imagenet", "https://host/imagenet/"),
        ("plain", "s3://other/sub/"),
    ),
    allow=("s3://bucket/",),
)

# What `names` refuses: control characters, and what no URL of UTF-8 can carry.
KEYS = st.text(st.characters(blacklist_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=60).filter(
    lambda key: len(key.encode()) <= 1024
)


def refused(path: str, query: str = "", config: ServiceConfig = CONFIG) -> Refusal:
    with pytest.raises(Refusal) as caught:
        name_of(path, query, config)
    return caught.value


@given(KEYS, st.sampled_from(["/v1/objects/b/", "/gs/b/", "/s3/b/", "/az/b/"]), st.booleans())
def test_every_key_comes_through_as_it_is(key: str, prefix: str, slashes_escaped: bool) -> None:
    escaped = urllib.parse.quote(key, safe="" if slashes_escaped else "/")
    named = name_of(prefix + escaped, "provider=gcp" if "objects" in prefix else "", CONFIG)
    assert named.object == key
    assert named.bucket == "b"
    assert named.url.partition("://")[2] == f"b/{key}"


@pytest.mark.parametrize(
    ("escaped", "key"),
    [("a%20b+c.tar", "a b+c.tar"), ("100%25.tar", "100%.tar"), ("a%2520b", "a%20b"), ("/lead.tar", "/lead.tar"),
     ("a//b.tar", "a//b.tar"), ("a%2F..%2Fb", "a/../b"), ("a%3Fversion%3D1%23x", "a?version=1#x"),
     ("%C3%BC%E2%82%AC.tar", "ü€.tar"), ("zip%3A%2F%2Fx%3A%3As3%3A%2F%2Fb", "zip://x::s3://b"),
     ("pipe%3Acat", "pipe:cat")],
)  # fmt: skip
def test_names_are_decoded_once(escaped: str, key: str) -> None:
    assert name_of(f"/gs/bucket/{escaped}", "", CONFIG).url == f"gs://bucket/{key}"


@pytest.mark.parametrize(
    ("provider", "scheme"),
    [("aws", "s3"), ("s3", "s3"), ("gcp", "gs"), ("gs", "gs"), ("AZURE", "az"), ("az", "az"), ("oci", "oci")],
)
def test_providers_by_the_names_that_clients_write(provider: str, scheme: str) -> None:
    named = name_of("/v1/objects/b/o", f"provider={provider}&archpath=a%2Fb.jpg&pid=x", CONFIG)
    assert named.url == f"{scheme}://b/o"
    assert named.params == {"archpath": "a/b.jpg"}


@pytest.mark.parametrize(
    ("path", "query", "url"),
    [("/v1/objects/imagenet/a%20b%3F%25.tar", "", "https://host/imagenet/a%20b%3F%25.tar"),
     ("/v1/objects/imagenet/x.tar", "provider=ais", "https://host/imagenet/x.tar"),
     ("/ais/disk/a%20b%25.tar", "", "/data/shards/a b%.tar"), ("/s3/plain/x.tar", "", "s3://other/sub/x.tar"),
     ("/s3/bucket/x.tar", "versionId=7", "s3://bucket/x.tar?versionId=7"),
     ("/v1/objects/photos/x.tar", "namespace=%40%23team", "s3://team-photos/x.tar")],
)  # fmt: skip
def test_buckets_of_the_configuration(path: str, query: str, url: str) -> None:
    assert name_of(path, query, CONFIG).url == url


def test_unknown_buckets_of_ais_are_missing_and_those_of_a_cluster_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AIS_ENDPOINT", raising=False)
    assert refused("/ais/nothing/x.tar").status == 404
    monkeypatch.setenv("AIS_ENDPOINT", "http://cluster:51080")
    assert name_of("/ais/nothing/x.tar", "", CONFIG).url == "ais://nothing/x.tar"
    assert name_of("/ais/b/x", "namespace=ns", CONFIG).url == "ais://@ns#/b/x"


@pytest.mark.parametrize(
    ("rest", "query", "url"),
    [
        ("https%3A%2F%2Fhost%2Fa%2520b.tar%3Fx%3D1", "", "https://host/a%20b.tar?x=1"),
        ("https://host/a.tar", "", "https://host/a.tar"),
        ("https%3A//host/a.tar", "X-Amz-Signature=a%2Bb&y=2", "https://host/a.tar?X-Amz-Signature=a%2Bb&y=2"),
        ("hf%3A%2F%2Fdatasets/o/n/x.tar", "", "hf://datasets/o/n/x.tar"),
    ],
)
def test_urls(rest: str, query: str, url: str) -> None:
    named = name_of(f"/url/{rest}", query, CONFIG)
    assert (named.url, named.api) == (url, "url")


def test_ht_is_aistores_way_to_say_url() -> None:
    query = urllib.parse.urlencode({"provider": "ht", "original_url": "https://host/a b.tar"})
    named = name_of("/v1/objects/whatever/x", query, CONFIG)
    assert (named.url, named.api) == ("https://host/a b.tar", "url")
    assert refused("/v1/objects/b/x", "provider=ht").status == 400


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "/etc/passwd", "etc/passwd", "-", "pipe:cat /etc/passwd", "pipe://cat",
     "zip://x.tar::s3://bucket/y.zip", "simplecache::https://host/x", "https:/host/x", "https:///etc/passwd",
     "https://", "https://user@host/x", "https://user:pw@host/x", "https://allowed@evil/", "https://host\\@evil/x",
     "https://host/a\\b", "https://ho st/x", "https://h\u00f6st/x", "https://ho%73t/x", "https://host:0/x",
     "https://host:port/x", "https://[::1/x", " https://host/x", "//host/x", "gs:bucket/x"],
)  # fmt: skip
def test_no_such_url_by_url(url: str) -> None:
    assert refused("/url/" + urllib.parse.quote(url, safe="")).status == 400


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("/gs/b/a%00b", "", 400),
        ("/gs/b/a%0Ab", "", 400),
        ("/gs/b/a%7Fb", "", 400),
        ("/gs/b/a%C2%85b", "", 400),
        ("/gs/b/a%zzb", "", 400),
        ("/gs/b/a%2", "", 400),
        ("/gs/b/a%FFb", "", 400),
        ("/gs/b/a%C0%AE%C0%AE/b", "", 400),  # ".." in more bytes than UTF-8 allows for it
        ("/gs/b/a\udcff", "", 400),
        ("/gs/b/" + "a" * 4097, "", 414),
        ("/gs/b/" + "%C3%A4" * 2049, "", 414),
        ("/url/https://host/" + "a" * 4096, "", 414),
        ("/gs/b/", "", 400),
        ("/gs/b", "", 400),
        ("/gs//o", "", 400),
        ("/gs/../o", "", 400),
        ("/gs/%2e%2e/o", "", 400),
        ("/gs/a%2Fb/o", "", 400),
        ("/gs/c@account.blob.evil.com/o", "", 400),
        ("/az/c@account.dfs.evil.com/o", "", 400),
        ("/gs/a..b/o", "", 400),
        ("/gs/a:b/o", "", 400),
        ("/v1/objects/b/o", "provider=zzz", 400),
        ("/v1/objects/b/o", "provider=gcp&provider=aws", 400),
        ("/v1/objects/b/o", "provider=gcp&namespace=ns", 400),
        ("/v1/objects/b/o", "provider=gcp&namespace=../x", 400),
        ("/v1/objects/b/o", "provider=gcp&archpath=a%00b", 400),
        ("/v1/objects/b/o", "provider=gcp&x=%FF", 400),
        ("/s3/b/o", "versionId=1&versionId=2", 400),
        ("/url/https%3A%2F%2Fhost%2Fa%3Fb", "c=d", 400),
        ("/url/https%3A%2F%2Fhost%2Fa", "c=\x01", 400),
        ("/v2/objects/b/o", "", 404),
        ("/etc/passwd", "", 404),
        ("", "", 404),
    ],
)
def test_what_is_no_name_is_refused(path: str, query: str, status: int) -> None:
    assert refused(path, query).status == status


@given(st.text(max_size=40), st.text(max_size=20), st.sampled_from(["", "/gs/", "/url/", "/v1/objects/b/", "/s3/b/"]))
def test_whatever_comes_it_is_a_name_or_a_refusal(path: str, query: str, prefix: str) -> None:
    try:
        named = name_of(prefix + path, query, CONFIG)
        ended = "://" in named.url or named.url.startswith("/data/shards/")
    except Refusal as exn:
        ended = exn.status in (400, 404, 414) and bool(exn.reason)
    assert ended


def test_buckets_for_listings() -> None:
    assert bucket_of("/v1/buckets/b", "provider=gcp", CONFIG).url == "gs://b/"
    assert bucket_of("/s3/b", "list-type=2&prefix=a%2Fb", CONFIG).url == "s3://b/"
    assert bucket_of("/s3/b/", "", CONFIG).url == "s3://b/"
    assert bucket_of("/v1/buckets/disk", "", CONFIG).url == "/data/shards/"
    for path in ("/v1/buckets/", "/v1/buckets/b/o", "/url/b", "/v1/buckets/%2e%2e"):
        with pytest.raises(Refusal):
            bucket_of(path, "", CONFIG)
    assert url_of("https://host/f/", "a b%?") == "https://host/f/a%20b%25%3F"
    assert url_of("s3://host/f/", "a b%?") == "s3://host/f/a b%?"


@given(KEYS)
def test_plans_name_what_requests_name(key: str) -> None:
    by_request = name_of("/gs/b/" + urllib.parse.quote(key), "", CONFIG)
    assert name_of_url(f"gs://b/{key}", CONFIG).url == name_of_url(f"gcs://b/{key}", CONFIG).url == by_request.url
    ours = name_of("/ais/imagenet/" + urllib.parse.quote(key), "", CONFIG)
    assert name_of_url(f"ais://imagenet/{key}", CONFIG).url == ours.url


def test_plans_name_nothing_that_requests_may_not() -> None:
    assert name_of_url("https://host/x", CONFIG).api == "url"
    for url in (
        "/etc/passwd",
        "pipe:cat x",
        "gs://b",
        "gs://b/",
        "gs://../x",
        "az://c@a.dfs.evil.com/x",
        "gs://b/a\0b",
    ):
        with pytest.raises(Refusal):
            name_of_url(url, CONFIG)
    for url in ("gs://b/a\udcff", "gs://b/" + "a" * 4097, "https://u:p@host/x"):
        with pytest.raises(Refusal):
            name_of_url(url, CONFIG)


def test_a_key_in_the_place_of_a_bucket_is_not_said() -> None:
    with pytest.raises(Refusal) as caught:
        name_of_url("s3://KEY:SECRET@bucket/a.tar", ServiceConfig())
    assert caught.value.status == 400
    assert "SECRET" not in caught.value.message
    assert "bucket" in caught.value.message
