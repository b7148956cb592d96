"""S3 URLs are taken literally."""

from __future__ import annotations

import pytest

from wds_async.storage.s3.options import S3Name


@pytest.mark.parametrize(
    ("url", "bucket", "key", "version"),
    [
        ("s3://b/a/x.tar", "b", "a/x.tar", ""),
        ("s3a://b/x%20y+z#1?q.tar", "b", "x%20y+z#1?q.tar", ""),
        ("s3://b//../x", "b", "/../x", ""),
        ("s3://b/x?versionId=a/b%2F=", "b", "x", "a/b%2F="),
        ("s3://b", "b", "", ""),
        ("s3://b/", "b", "", ""),
        ("s3://", "", "", ""),
        ("s3://mine-abc123-s3alias/x", "mine-abc123-s3alias", "x", ""),
        (
            "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/mine/a/b",
            "arn:aws:s3:us-west-2:123456789012:accesspoint/mine",
            "a/b",
            "",
        ),
        ("s3://arn:aws:s3::1:accesspoint:m.mrap/x:y", "arn:aws:s3::1:accesspoint:m.mrap", "x:y", ""),
        (
            "s3://arn:aws:s3-outposts:us-west-2:1:outpost/op-1/accesspoint/mine/x",
            "arn:aws:s3-outposts:us-west-2:1:outpost/op-1/accesspoint/mine",
            "x",
            "",
        ),
        (
            "s3://arn:aws:s3-object-lambda:us-west-2:1:accesspoint/l/x",
            "arn:aws:s3-object-lambda:us-west-2:1:accesspoint/l",
            "x",
            "",
        ),
    ],
)
def test_parts(url: str, bucket: str, key: str, version: str) -> None:
    name = S3Name.of(url)
    assert (name.bucket, name.key, name.version) == (bucket, key, version)
    assert f"{url}/".startswith(name.folder)


def test_keys_are_as_s3fs_takes_them() -> None:
    """Both ways of reading must name the same object."""
    s3fs = pytest.importorskip("s3fs")
    split = s3fs.S3FileSystem(anon=True, version_aware=True, skip_instance_cache=True, asynchronous=True).split_path
    for url in ("s3://b/x%20y+z#1?q", "s3://b//../x", "s3://b/x?versionId=v", "s3://b/[a]*{}"):
        name = S3Name.of(url)
        assert split(url) == (name.bucket, name.key, name.version or None)
