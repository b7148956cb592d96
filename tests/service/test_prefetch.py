"""Long lists of shards, kept small."""

from __future__ import annotations

import pytest

from wds_async.service.names import ObjectName
from wds_async.service.prefetch import BLOCK, Itinerary


def made(urls: list[str]) -> Itinerary:
    found = Itinerary(
        lambda url: None if "bad" in url else ObjectName(url.replace("gcs://", "gs://"), "gcp", "", "", "short")
    )
    for at in range(0, len(urls), BLOCK):
        found.add(urls[at : at + BLOCK])
    return found


def url_at(found: Itinerary, index: int) -> str:
    named = found.at(index)
    assert named is not None
    return named.url


URLS = [f"gcs://bucket/imagenet/train-{i:06}.tar" for i in range(100_000)]


def test_a_hundred_thousand_shards_are_small_and_found() -> None:
    found = made(URLS)
    assert len(found) == 100_000
    assert found.bytes < 10 * 100_000
    assert url_at(found, 99_999) == "gs://bucket/imagenet/train-099999.tar"
    assert url_at(found, 0) == "gs://bucket/imagenet/train-000000.tar"
    assert found.find("gs://bucket/imagenet/train-000600.tar", 500, 1012) == 600
    assert found.find("gs://bucket/imagenet/train-000600.tar", 601, 100_000) is None
    assert found.find("gs://bucket/imagenet/train-000600.tar", 0, 600) is None
    assert found.find(URLS[600], 0, 100_000) is None, "it is known by the name that requests have"


def test_ends_and_what_may_not_be_read() -> None:
    found = made([*URLS[:300], "bad", *URLS[300:310]])
    assert found.at(300) is None
    assert found.find(URLS[300].replace("gcs", "gs"), -5, 1000) == 301
    for index in (-1, 311):
        with pytest.raises(IndexError):
            found.at(index)
    assert made([]).find("x", 0, 10) is None


@pytest.mark.parametrize("block", [[], ["a"] * (BLOCK + 1), ["a\0b"]])
def test_blocks_that_are_none(block: list[str]) -> None:
    with pytest.raises(ValueError):
        made([]).add(block)


def test_only_the_last_block_is_short() -> None:
    found = made(["a", "b"])
    with pytest.raises(ValueError):
        found.add(["c"])
