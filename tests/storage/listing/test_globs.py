"""What a pattern is, where its folder begins, and which names match."""

from __future__ import annotations

import pytest

from wds_async.errors import UrlError
from wds_async.storage.listing.globs import Pattern, matcher, parse


@pytest.mark.parametrize(
    ("url", "folder", "steps"),
    [
        ("s3://b/a/x-*.tar", "s3://b/a/", ("x-*.tar",)),
        ("gs://b/x-?.tar", "gs://b/", ("x-?.tar",)),
        ("gs://b/dir/", "gs://b/dir/", ("",)),
        ("s3://b/", "s3://b/", ("",)),
        ("s3://b/*/", "s3://b/", ("*", "")),
        ("s3://b/a/**/x-[0-9].tar", "s3://b/a/", ("**", "x-[0-9].tar")),
        ("az://c/*/train/x.tar", "az://c/", ("*", "train", "x.tar")),
        ("https://host/dir/*.tar", "https://host/dir/", ("*.tar",)),
        ("http://[::1]:80/[ab].tar", "http://[::1]:80/", ("[ab].tar",)),
        ("sftp://me:p*w@host/d/*.tar", "sftp://me:p*w@host/d/", ("*.tar",)),
        ("memory://x*.tar", "memory://", ("x*.tar",)),
        ("simplecache::s3://b/d/*.tar", "simplecache::s3://b/d/", ("*.tar",)),
        ("s3://b/a//*.tar", "s3://b/a//", ("*.tar",)),
    ],
)
def test_the_folder_and_the_steps(url: str, folder: str, steps: tuple[str, ...]) -> None:
    assert parse(url) == Pattern(url, folder, steps)


def test_a_query_follows_what_is_found() -> None:
    assert parse("ais://b/x-*.tar?etl_name=E") == Pattern(
        "ais://b/x-*.tar?etl_name=E", "ais://b/", ("x-*.tar",), "?etl_name=E"
    )
    assert parse("hf://datasets/o/n@main/d/*.tar") == Pattern(
        "hf://datasets/o/n@main/d/*.tar", "hf://datasets/o/n@main/d/", ("*.tar",)
    )


@pytest.mark.parametrize(
    "url",
    [
        "a-*.tar", "/x/", "file:///x/*.tar", "-", "pipe:cat *.tar", "s3://b/x.tar", "s3://b", "memory://",
        "http://h/x.tar?a=[1]&b=*", "http://h/dir/?page=1", "https://h/x-?.tar", "http://h/#*", "http://[::1]/x.tar",
        "s3://b/x.tar?versionId=a*b", "gs://b/x[.tar", "zip://*.tar::s3://b/y.zip", "hf://datasets/o/n/x.tar?a=*",
        "foo:t?table=*",
    ],
)  # fmt: skip
def test_what_stands_for_itself(url: str) -> None:
    assert parse(url) is None


@pytest.mark.parametrize("url", ["s3://b*/x.tar", "gs://*", "http://h*/x.tar", "memory://*/x.tar"])
def test_a_bucket_is_no_pattern(url: str) -> None:
    with pytest.raises(UrlError, match="bucket or host cannot be a pattern"):
        parse(url)


def test_names() -> None:
    assert matcher("x-*.tar")("x-1.tar")
    assert not matcher("x-*.tar")("x-1.tar.part")
    assert not matcher("x-*.tar")("X-1.tar")
    assert matcher("[!a]")("b")
    assert not matcher("*")(".hidden")
    assert matcher(".h*")(".hidden")
    assert matcher("")("A.TAR.GZ")
    assert not matcher("")("a.txt")
    assert matcher("a b*", True)("a%20b.tar")
    assert not matcher("a b*")("a%20b.tar")
    assert matcher("x.*")("x.a\nb")


def test_a_name_of_many_stars_is_matched_soon() -> None:
    assert not matcher("*a" * 20 + "b")("a" * 5000)
