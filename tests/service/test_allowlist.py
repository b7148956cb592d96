"""Places: parts are compared whole, and one place has one spelling."""

from __future__ import annotations

import pytest

from wds_async.errors import UrlError
from wds_async.service.allowlist import dotted, url_prefix


def covers(entry: str, url: str) -> bool:
    return url_prefix(entry).covers(url_prefix(url))


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("gs://bucket/", "gs://bucket/a/b"),
        ("gs://bucket", "gs://bucket/a"),
        ("GS://bucket/", "gcs://bucket/a"),
        ("s3://bucket/", "s3a://bucket//a"),
        ("gs://bucket/data", "gs://bucket/data"),
        ("gs://bucket/data", "gs://bucket/data/x"),
        ("gs://bucket/data/", "gs://bucket/data/"),
        ("gs://bucket/data/", "gs://bucket/data/x"),
        ("https://host/", "HTTPS://HOST/x"),
        ("https://host", "https://host:443/x"),
        ("https://host./data/", "https://host/data/x"),
        ("https://host/data/", "https://host/d%61ta/x?q=../.."),
        ("https://host/", "https://host/a%2Fb"),
        ("http://[::1]:8080/", "http://[::1]:8080/x"),
        ("hf://datasets/owner/", "hf://datasets/owner/name@main/x"),
        ("hf://datasets/owner/name/", "hf://datasets/owner/name@refs%2Fpr%2F1/x"),
        ("hf://owner/name", "hf://models/owner/name/x"),
        ("ais://@#ns/bucket/", "ais://@#ns/bucket/x"),
    ],
)
def test_covered(entry: str, url: str) -> None:
    assert covers(entry, url)


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("gs://bucket", "gs://bucket-evil/a"),
        ("gs://bucket/", "gs://Bucket/a"),
        ("gs://bucket/", "s3://bucket/a"),
        ("gs://bucket/data", "gs://bucket/database"),
        ("gs://bucket/data/", "gs://bucket/data"),
        ("gs://bucket/data/", "gs://bucket//data/x"),
        ("gs://bucket/data/", "gs://bucket/%64ata/x"),  # in a store's key that is another name
        ("https://host/data", "https://host/database"),
        ("https://host/data/", "https://host/data%2Fx"),
        ("https://host/data/", "https://host/data/%2Fx"),
        ("https://host/data/", "https://host/data/%252Fx"),
        ("https://host/data/", "https://host/data/a%5Cb"),
        ("https://host/", "https://host.evil/"),
        ("https://host/", "https://host@evil/"),
        ("https://host/", "https://evil#@host/"),
        ("https://host/", "https://evil?@host/"),
        ("https://host/", "http://host/"),
        ("https://host/", "https://host:8443/"),
        ("hf://datasets/owner/name@main/", "hf://datasets/owner/name@other/x"),
        ("hf://datasets/owner/name/", "hf://datasets/owner/name2@main/x"),
    ],
)
def test_not_covered(entry: str, url: str) -> None:
    assert not covers(entry, url)


@pytest.mark.parametrize(
    "url",
    ["https://ho\\st/", "https://h\u00f6st/", "https://host:0/", "https:///x", "https://ho_st%2f/", "https://a b/",
     "zip://x::s3://b/y", "/data/x", "https://[::1/"],
)  # fmt: skip
def test_what_cannot_be_taken_apart(url: str) -> None:
    with pytest.raises(UrlError):
        url_prefix(url)


@pytest.mark.parametrize(
    "url",
    ["https://h/a/../b", "https://h/..", "https://h/a/./b", "https://h/%2e%2e/b", "https://h/a/%2E./b",
     "https://h/a/%252e%252e/b", "https://h/a%2f..%2fb", "https://h/a\\..\\b", "https://h/..;x/b", "https://h/a/..%3bx",
     "/data/../etc", "/data/x://../y", "az://c/a/../b", "s3://b/a?/../x"],
)  # fmt: skip
def test_dots_in_every_spelling(url: str) -> None:
    assert dotted(url)


@pytest.mark.parametrize(
    "url", ["https://h/a..b/...", "https://h/.hidden/x", "https://h/x?y=/../z", "/data/..x", "https://h/a/b.#/../c"]
)
def test_what_only_looks_like_dots(url: str) -> None:
    assert not dotted(url)
