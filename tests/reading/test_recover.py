"""Damage inside shards: ``on_corrupt``, what is given out, and what the ledger says."""

from __future__ import annotations

import contextlib
import gzip
import logging
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.servers import Origin, make_shard
from wds_async.errors import ChecksumMismatch, ConfigError, CorruptShard, NotATar, TruncatedShard
from wds_async.tariterators import tarfile_samples

COUNT = 40
MEMBER = 1024  # bytes of one: a header and a block
GOOD = make_shard({f"{i:03}": {"cls": b"%d" % i, "txt": b"x%d" % i} for i in range(COUNT)})
SAMPLE = 2 * MEMBER


def damaged(at: int, size: int = 512, data: bytes = GOOD) -> bytes:
    return data[:at] + b"\xff" * size + data[at + size :]


def dataset(urls: Any, **options: Any) -> wds.WebDataset:
    return wds.WebDataset(urls, **{"shardshuffle": False, "empty_check": False, **options})


def keys(samples: Any) -> list[int]:
    found = []
    for sample in samples:
        number = int(sample["__key__"])
        assert (sample["cls"], sample["txt"]) == (b"%d" % number, b"x%d" % number)  # whole, and of one sample
        found.append(number)
    return found


def facts(data: Any) -> list[tuple[Any, ...]]:
    return [(e.stage, e.kind, e.offset, e.bytes, e.samples, e.key, e.rest) for e in data.ledger]


def test_resync_in_the_middle_of_a_sample(put: Any) -> None:
    """The header of the second member of sample 10: it is cut, and so may be the first that comes after it."""
    at = 10 * SAMPLE + MEMBER
    data = dataset(put(damaged(at), GOOD), on_corrupt="resync")
    expected = [i for i in range(COUNT) if i not in (10, 11)]
    assert keys(data) == expected + list(range(COUNT))
    assert facts(data) == [
        ("tar", "CorruptShard", at, 1024, 1, "010", False),
        ("tar", "CorruptShard", at + 1024, None, 1, "011", False),
    ]
    stats = data.statistics()
    assert (stats.samples, stats.bad_samples, stats.passed_shards, stats.bad_bytes) == (78, 2, 0, 1024)


def test_resync_inside_one_sample(tmp_path: Path) -> None:
    """What is left of a sample behind the gap belongs to the one that was cut: one sample is lost, not two."""
    shard = make_shard({f"{i}": {"a": b"1", "b": b"2", "c": b"3"} for i in range(4)})
    path = tmp_path / "x.tar"
    path.write_bytes(damaged(3 * MEMBER + MEMBER, data=shard))  # 1.b
    data = dataset(str(path), on_corrupt="resync")
    assert [s["__key__"] for s in data] == ["0", "2", "3"]
    assert [e.samples for e in data.ledger] == [1]


def test_resync_at_several_places(put: Any) -> None:
    shard = GOOD
    for sample in (5, 20, 39):
        shard = damaged(sample * SAMPLE, data=shard)
    data = dataset(put(shard), on_corrupt="resync")
    lost = {4, 5, 19, 20, 38, 39}  # the one that ended there, and the one whose first member is gone
    assert keys(data) == [i for i in range(COUNT) if i not in lost]
    assert [e.samples for e in data.ledger] == [1] * 6


def test_resync_behind_a_damaged_first_header(put: Any) -> None:
    data = dataset(put(damaged(0), GOOD), on_corrupt="resync")
    assert keys(data) == [*range(1, COUNT), *range(COUNT)]
    with pytest.raises(NotATar):
        list(dataset(put(b"<html>" * 1000, GOOD), on_corrupt="resync"))


def test_resync_of_a_shard_without_an_end(put: Any) -> None:
    cut = GOOD[: 10 * SAMPLE + 700]
    data = dataset(put(cut, GOOD), on_corrupt="resync")
    assert keys(data) == [*range(10), *range(COUNT)]
    assert facts(data) == [("tar", "TruncatedShard", len(cut), None, 1, "010", True)]


def test_a_damaged_compressed_stream_cannot_be_read_on(put: Any) -> None:
    packed = gzip.compress(GOOD, compresslevel=0)
    data = dataset(put(packed[:30_000] + b"\xff" * 40_000 + packed[70_000:], GOOD), on_corrupt="resync")
    found = keys(data)
    assert found[-COUNT:] == list(range(COUNT))
    assert len(found) < 2 * COUNT
    assert [(e.kind, e.rest) for e in data.ledger][-1] == ("CorruptShard", True)


def test_damage_inside_a_good_compressed_stream(put: Any) -> None:
    data = dataset(put(gzip.compress(damaged(10 * SAMPLE + MEMBER))), on_corrupt="resync")
    assert keys(data) == [i for i in range(COUNT) if i not in (10, 11)]
    assert facts(data)[0][2:4] == (10 * SAMPLE + MEMBER, 1024)


@pytest.mark.parametrize("handler", [wds.reraise_exception, wds.ignore_and_stop])
def test_skip_shard_whatever_the_handler(put: Any, handler: Any, caplog: Any) -> None:
    at = 10 * SAMPLE
    shards = put(damaged(at), damaged(at), GOOD)
    data = dataset(shards, on_corrupt="skip_shard", handler=handler)
    with caplog.at_level(logging.WARNING, "wds_async"):
        assert keys(data) == [*range(9)] * 2 + list(range(COUNT))
    assert facts(data) == [("tar", "CorruptShard", at, len(GOOD) - at, 1, "009", True)] * 2
    assert sum("on_corrupt=skip_shard" in r.message for r in caplog.records) == 1  # warned once
    assert data.statistics().passed_shards == 2


def test_over_http_in_small_pieces(origin: Origin) -> None:
    origin.add("x.tar", damaged(10 * SAMPLE + MEMBER))
    data = dataset(origin.url("x.tar"), on_corrupt="resync", transfer={"part_bytes": "64K", "first_part_bytes": "64K"})
    assert keys(data) == [i for i in range(COUNT) if i not in (10, 11)]


def test_raise_is_the_default(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = put(damaged(10 * SAMPLE), GOOD)
    with pytest.raises(CorruptShard):
        list(dataset(shards))
    monkeypatch.setenv("WDS_ON_CORRUPT", "resync")
    assert len(keys(dataset(shards))) == 2 * COUNT - 2
    assert len(keys(tarfile_samples(shards))) == 2 * COUNT - 2
    with pytest.raises(CorruptShard):
        list(dataset(shards, on_corrupt="raise"))


def test_choices(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="on_corrupt='skip': one of raise, skip_shard, resync"):
        dataset("x.tar", on_corrupt="skip")
    with pytest.raises(ConfigError, match="verify"):
        dataset("x.tar", verify="perhaps")
    with pytest.raises(ConfigError, match="give one of them"):
        dataset("x.tar", verify="never", transfer={"verify": "always"})
    stage = wds.tarfile_to_samples(verify="never", transfer={"verify": "never"})
    assert stage.kw["transfer"] == {"verify": "never"}
    monkeypatch.setenv("WDS_ON_CORRUPT", "x")
    with pytest.raises(ConfigError, match="WDS_ON_CORRUPT"):
        dataset("x.tar")


def test_a_bad_copy_does_not_stay_in_the_cache(origin: Origin, tmp_path: Path) -> None:
    url = origin.add("x.tar", damaged(10 * SAMPLE + MEMBER))
    data = dataset(url, on_corrupt="resync", cache_dir=tmp_path / "cache")
    assert len(keys(data)) == COUNT - 2
    assert not [p for p in (tmp_path / "cache").rglob("*.tar") if p.is_file()]


def test_a_truncated_tgz_where_the_handler_stops(tmp_path: Path) -> None:
    """WebDataset gives out what it has of the cut sample, which a stage behind it then stumbles on. Here nothing comes,
    and that is a ValueError too."""
    packed = gzip.compress(make_shard({"a": {"png": bytes(range(256)) * 4000}, "b": {"png": b""}}), 0)
    (tmp_path / "x.tgz").write_bytes(packed)
    url = f"pipe:dd if={tmp_path}/x.tgz bs=10000 count=10 2>/dev/null"
    with pytest.raises(TruncatedShard):
        list(wds.WebDataset(url, shardshuffle=False))
    with pytest.raises(ValueError, match=r"no sample came out|foo"):
        list(wds.WebDataset(url, shardshuffle=False, handler=wds.ignore_and_stop).to_tuple("foo"))


def _wrong_checksum(request: Any, answer: Any) -> None:
    answer.headers["x-goog-hash"] = "crc32c=AAAAAA=="


@pytest.mark.parametrize("handler", [wds.reraise_exception, wds.ignore_and_continue])
def test_samples_of_a_shard_whose_checksum_is_wrong_are_named(handler: Any) -> None:
    """They were delivered before that showed: the ledger has them even where the error is raised."""
    with Origin({"/x.tar": GOOD}, dialect=_wrong_checksum) as origin:
        data = dataset(origin.url("x.tar"), handler=handler)
        if handler is wds.reraise_exception:
            with pytest.raises(ChecksumMismatch):
                list(data)
        else:
            list(data)
        held = dataset(origin.url("x.tar"), handler=handler, verify="always")
        with contextlib.suppress(ChecksumMismatch):
            assert list(held) == []
    assert [(e.stage, e.kind, e.samples, e.rest) for e in data.ledger] == [
        ("checksum", "ChecksumMismatch", COUNT, True)
    ]
    noted = [(e.stage, e.samples, e.rest) for e in held.ledger]
    assert noted == ([("checksum", None, True)] if handler is wds.ignore_and_continue else [])


@pytest.mark.parametrize(
    ("shard", "doubt"),
    [
        (GOOD[: 5 * MEMBER], f"it ends at byte {5 * MEMBER}, behind a member"),
        (GOOD[: 4 * MEMBER] + bytes(200 << 10), f"its last {200 << 10:,} bytes, from byte {4 * MEMBER} on, are zeros"),
    ],
    ids=["no end", "a tail of zeros"],
)
def test_an_odd_end_is_told_and_noted(put: Any, caplog: pytest.LogCaptureFixture, shard: bytes, doubt: str) -> None:
    """Nothing in a tar shows that its rest was lost between two members; but programs end what they write."""
    data = dataset(put(shard, shard, GOOD))
    with caplog.at_level(logging.WARNING, "wds_async"):
        assert len(list(data)) >= COUNT + 4
    assert [entry.samples for entry in data.ledger] == [0, 0]
    assert all(doubt in entry.reason for entry in data.ledger)
    assert sum(doubt in record.getMessage() and "incomplete" in record.getMessage() for record in caplog.records) == 1


def test_a_good_end_is_not_doubted(put: Any, caplog: pytest.LogCaptureFixture) -> None:
    whole = GOOD.rstrip(b"\0")
    whole += bytes(-len(whole) % 512)
    data = dataset(put(whole + bytes(1024), whole + bytes(10240), gzip.compress(GOOD)))
    with caplog.at_level(logging.WARNING, "wds_async"):
        assert len(list(data)) == 3 * COUNT
    assert (len(data.ledger), caplog.records) == (0, [])
