"""What an object is kept under holds no secret, and is another one for another signature."""

from __future__ import annotations

import pytest

from wds_async.service.cache.index import key_of

SIGNED = (
    "https://host/a.tar?X-Amz-Credential=SECRET&X-Amz-Signature=SECRET",
    "https://account.blob.core.windows.net/c/a.tar?se=2030&sig=SECRET",
    "https://user:SECRET@host/a.tar",
    "https://SECRET@host/a.tar",
)


@pytest.mark.parametrize("url", ["s3://bucket/a.tar", "https://host/a.tar?part=3", "gs://bucket/a%20b.tar"])
def test_a_url_without_a_secret_is_its_own_key(url: str) -> None:
    assert key_of(url) == url


@pytest.mark.parametrize("url", SIGNED)
def test_a_secret_is_not_in_the_key(url: str) -> None:
    key = key_of(url)
    assert "SECRET" not in key
    assert "/a.tar" in key  # people find it, and prefixes do
    assert key_of(key) == key
    assert key == key_of(url) != key_of(url.replace("SECRET", "OTHER"))
