"""Indexes by headers alone are those of whole shards, for a fraction of the bytes."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Origin
from wds_async.errors import CostLimitReached, TruncatedShard
from wds_async.indexed import scan
from wds_async.indexed.scan import ScannedShard, scan_shards

LARGE = 400_000


def archive(
    first: int, count: int, sizes: tuple[int, ...], format: int = tarfile.USTAR_FORMAT, prefix: str = ""
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for n in range(first, first + count):
            for field, size in zip(("json", "mp4", "txt"), sizes, strict=False):
                info = tarfile.TarInfo(f"{prefix}{n:05d}.{field}")
                info.size, info.mtime = size, 1.5
                tar.addfile(info, io.BytesIO(bytes([n % 251]) * size))
    return out.getvalue()


SHARDS = {
    "ustar": archive(0, 9, (700, LARGE, 20)),
    "pax": archive(9, 8, (700, LARGE), tarfile.PAX_FORMAT),
    "long names": archive(17, 7, (3, LARGE), tarfile.GNU_FORMAT, "x" * 200 + "/"),
    "no end": archive(24, 5, (900, LARGE))[: 5 * (512 + 1024 + 512 + -(-LARGE // 512) * 512)],
}


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers alone are read from 200 kB for each on, in four shards."""
    monkeypatch.setattr(scan, "_ROUND_TRIP_BYTES", 600_000)


@pytest.fixture
def urls(origin: Origin) -> list[str]:
    for name, content in SHARDS.items():
        origin.add(f"/{name.replace(' ', '-')}.tar", content)
    return [f"{origin.base}/{name.replace(' ', '-')}.tar" for name in SHARDS]


def shown(scanned: ScannedShard) -> Any:
    one = scanned.index
    assert one is not None, scanned.error
    keys = [one.keys[i] for i in range(len(one))] if one.keys else None
    return one.facts, one.starts.tolist(), one.lengths.tolist(), keys, scanned.dali


def test_headers_alone_tell_the_same(urls: list[str], origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [shown(one) for one in scan_shards(urls, dali=True)]
    size = sum(map(len, SHARDS.values()))
    origin.wait_until(lambda origin: sum(sent.body_bytes for sent in origin.sent) > size)
    assert [len(keys) for _, _, _, keys, _ in whole] == [9, 8, 7, 5]
    origin.forget()
    monkeypatch.setattr(scan, "_ROUND_TRIP_BYTES", 600_000)
    taken: list[int] = []
    assert [shown(one) for one in scan_shards(urls, dali=True, received=taken.append)] == whole
    sent = sum(sent.body_bytes for sent in origin.sent)
    assert sum(taken) <= sent < sum(map(len, SHARDS.values())) / 5


def test_small_members_are_read_whole(urls: list[str], low: None, origin: Origin, tmp_path: Path) -> None:
    small, packed = archive(50, 200, (900, 20)), gzip.compress(SHARDS["ustar"])
    origin.add("/small.tar", small)
    origin.add("/packed.tar.gz", packed)
    mixed = [urls[0], f"{origin.base}/small.tar", f"{origin.base}/packed.tar.gz", urls[1]]
    found = {one.url: shown(one) for one in scan_shards(mixed)}
    assert list(found) == [mixed[0], mixed[3], mixed[1], mixed[2]]
    assert [len(found[url][3]) for url in mixed] == [9, 200, 9, 8]
    assert [found[url][0].plain for url in mixed] == [True, True, False, True]


def test_local_files(low: None, tmp_path: Path) -> None:
    for name, content in SHARDS.items():
        (tmp_path / f"{name}.tar").write_bytes(content)
    taken: list[int] = []
    found = list(scan_shards([str(tmp_path / f"{name}.tar") for name in SHARDS], received=taken.append))
    assert [len(shown(one)[3]) for one in found] == [9, 8, 7, 5]
    assert sum(taken) < sum(map(len, SHARDS.values())) / 5


def test_a_shard_that_is_cut_ends_for_itself(urls: list[str], low: None, origin: Origin) -> None:
    origin.add("/ustar.tar", SHARDS["ustar"][: 5 * LARGE])
    first, *others = scan_shards([*urls, f"{origin.base}/missing.tar"])
    assert isinstance(first.error, TruncatedShard)
    assert [one.error is None for one in others] == [True, True, True, False]
    assert f"ends at byte {5 * LARGE}" in str(first.error)


def test_the_cost_limit_holds(urls: list[str], low: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spent:
        def watch(self, counters: Any) -> None: ...

        def check(self) -> None:
            raise CostLimitReached("spent")

    monkeypatch.setattr(scan, "limit_of_job", Spent)
    with pytest.raises(CostLimitReached):
        list(scan_shards(urls))
