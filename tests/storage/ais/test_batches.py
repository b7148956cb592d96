"""Batches of ranges from AIStore (GetBatch), as random access reads them: the double takes its SDK's requests too."""

# ruff: noqa: F811 - fixtures that are imported

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.clouds.ais import ais, no_settings  # noqa: F401 (fixtures)
from tests.servers import make_shard
from tests.servers.aistore import AisDouble
from wds_async.errors import ObjectChanged, ShardNotFound
from wds_async.indexed.scan import scan_shards
from wds_async.indexed.shardindex import ShardIndex

SHARDS, SAMPLES = 3, 60
FAR = list(range(0, SHARDS * SAMPLES, 4))
"""Samples, none beside another: 45 ranges with ``gap_bytes=0``."""


@pytest.fixture
def urls(ais: AisDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setenv("WIDS_CACHE", str(tmp_path))
    monkeypatch.setenv("WDS_AIS_GET_BATCH", "1")
    monkeypatch.setenv("USE_AIS_FOR", "gs")
    for shard in range(SHARDS):
        ais.put(f"gcp/b/{'long/' * 30 * (shard == 2)}s-{shard}.tar", shard_of(shard))
    return ["gs://b/s-0.tar", "gs://b/s-1.tar", f"gs://b/{'long/' * 30}s-2.tar"]


def shard_of(shard: int, text: str = "") -> bytes:
    numbers = range(shard * SAMPLES, (shard + 1) * SAMPLES)
    return make_shard({f"{n:04d}": {"txt": f"{text}{n}".encode(), "bin": bytes(n * 20)} for n in numbers})


def indexes(urls: list[str]) -> list[ShardIndex]:
    return [one.index for one in scan_shards(urls) if one.index is not None]


def dataset(urls: list[str], **more: Any) -> wds.IndexedDataset:
    return wds.IndexedDataset(urls, index=indexes(urls), gap_bytes=0, **more)


def texts(samples: list[Any]) -> list[int]:
    return [int(sample["txt"]) for sample in samples]


def requests(ais: AisDouble) -> tuple[int, int]:
    """Return the number of requests for objects and for batches, and forget them."""
    seen = [one.path for one in ais.at("proxy")]
    ais.seen.clear()
    return sum("/objects/" in path for path in seen), sum("/moss/" in path for path in seen)


def test_a_batch_is_one_request_once_versions_were_compared(
    ais: AisDouble, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ais.token = "t"  # for the proxy: a target of the double refuses it
    monkeypatch.setenv("AIS_AUTHN_TOKEN", "t")
    with dataset(urls) as data:
        requests(ais)
        assert texts(data[FAR]) == FAR
        assert requests(ais) == (45, 0)  # which compare the version of each shard with its index
        for wanted in (FAR, FAR[::-1], FAR[3:30] * 2):
            assert texts(data[wanted]) == wanted
            assert requests(ais) == (0, 1)
        assert texts(data[FAR[:15]]) == FAR[:15]
        assert requests(ais) == (15, 0)  # too few for a batch
        traffic = data._ranges._traffic.origins["ais://b"]
        assert traffic.requests == 2 * (45 + 15) + 3  # a range alone counts its redirect too
        assert traffic.bytes > 3 * 27 * 1024
    assert {entry["provider"] for entry in itertools.chain(*ais.batches)} == {"gcp"}


def test_an_index_without_a_version_has_nothing_to_compare(ais: AisDouble, urls: list[str]) -> None:
    known = [ShardIndex.of(one.facts.url, 0, "", one.starts, one.starts + one.lengths) for one in indexes(urls)]
    with wds.IndexedDataset(urls, index=known, gap_bytes=0) as data:
        requests(ais)
        assert texts(data[FAR]) == FAR
        assert requests(ais) == (0, 1)


def test_only_on_request(ais: AisDouble, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with dataset(urls, storage_options={"ais": {"get_batch": False}}) as data:
        assert texts(data[FAR] + data[FAR]) == FAR * 2
    monkeypatch.delenv("WDS_AIS_GET_BATCH")
    with dataset(urls) as data:
        assert texts(data[FAR] + data[FAR]) == FAR * 2
    assert requests(ais)[1] == 0


def test_a_shard_that_was_replaced_before_is_an_error(ais: AisDouble, urls: list[str]) -> None:
    with dataset(urls) as data:
        ais.put("gcp/b/s-1.tar", shard_of(1, "9"))
        with pytest.raises(ObjectChanged, match=r"s-1\.tar"):
            data[FAR]
        assert ais.batches == []


@pytest.mark.parametrize("status", [400, 404, 405, 501])
def test_a_cluster_without_batches_is_not_asked_again(
    status: int, ais: AisDouble, urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with dataset(urls) as data:
        data[FAR]
        requests(ais)
        ais.script("proxy", status=status, message="unknown")
        assert texts(data[FAR]) == FAR
        assert requests(ais) == (45, 1)
        assert texts(data[FAR]) == FAR
        assert requests(ais) == (45, 0)
    assert [f"it answered {status}" in text for text in caplog.messages if "batches" in text] == [True]


def test_a_cluster_that_sends_whole_objects_is_not_asked_again(
    ais: AisDouble, urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    ais.batch_ranges = False
    with dataset(urls) as data:
        for wanted in (FAR, FAR, FAR):
            assert texts(data[wanted]) == wanted
    assert len(ais.batches) == 1
    assert ["AIStore 5.0" in text for text in caplog.messages if "batches" in text] == [True]


def test_small_objects_sent_whole_are_no_ranges(ais: AisDouble, urls: list[str]) -> None:
    """An answer that is no longer than one of ranges may be."""
    ais.batch_ranges = False
    small = [f"gs://b/small-{n}.tar" for n in range(20)]
    for n in range(20):
        ais.put(f"gcp/b/small-{n}.tar", make_shard({"a": {"txt": str(n).encode()}}))
    with dataset(small) as data:
        assert texts(data[:]) == texts(data[:]) == list(range(20))
    assert len(ais.batches) == 1


@pytest.mark.parametrize(
    "fault", [{"status": 429}, {"status": 503}, {"node": "t*", "cut_at": 30_000}, {"node": "t*", "cut_at": 0}]
)
def test_a_batch_that_fails_is_read_by_ranges_and_the_next_is_tried(
    fault: dict[str, Any], ais: AisDouble, urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "wds_async")
    with dataset(urls) as data:
        data[FAR]
        requests(ais)
        ais.script(**{"node": "proxy", **fault})
        assert texts(data[FAR]) == FAR
        assert requests(ais) == (45, 1)
        assert any("a batch of 45 ranges did not come" in text for text in caplog.messages)
        assert texts(data[FAR]) == FAR
        assert requests(ais) == (0, 1)


def test_an_object_that_is_gone_is_named(ais: AisDouble, urls: list[str]) -> None:
    with dataset(urls) as data:
        data[FAR]
        del ais._buckets["gcp/@#/b"]["s-1.tar"]
        requests(ais)
        with pytest.raises(ShardNotFound, match=r"s-1\.tar"):
            data[FAR]
        assert requests(ais)[0] < 45  # of the others all have come
        assert texts(data[FAR[:15] + FAR[30:]]) == FAR[:15] + FAR[30:]
        assert requests(ais)[1] == 1


def test_large_batches_are_several_requests(ais: AisDouble, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_async.transfer.ranges._BATCH_BYTES", 100_000)
    with dataset(urls) as data:
        data[FAR]
        assert texts(data[::2]) == list(range(0, SHARDS * SAMPLES, 2))
    assert len(ais.batches) == 3
    assert all(len(batch) >= 16 and sum(entry["length"] for entry in batch) <= 100_000 for batch in ais.batches)
