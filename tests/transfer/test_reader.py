"""The plain face of the engine: order, bounds, and shards that come from anywhere."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Behaviour, Origin
from tests.transfer.reading import KIB, MIB, bytes_of, data, outcomes, quick, snapshot, spans
from wds_async.config import TransferConfig
from wds_async.errors import ConfigError
from wds_async.shardcache.cache import DiskCache
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters

PART = 256 * KIB


def test_order_under_random_delays(origin: Origin) -> None:
    contents = [data(random.Random(i).choice([100, 50_000, 400_000]), i) for i in range(60)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    rng = random.Random(1)
    for _ in range(8):
        origin.behave(Behaviour(probability=0.3, delay_s=rng.uniform(0, 0.03)))
    assert bytes_of(urls) == contents


def test_a_thousand_tiny_shards(origin: Origin) -> None:
    contents = [b"%06d" % i * 100 for i in range(1000)]
    urls = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    assert bytes_of(urls, TransferConfig()) == contents
    assert origin.most_in_flight <= 64


def test_a_few_samples_of_a_big_shard_fetch_little() -> None:
    content = bytes(64 * MIB)
    with Origin({"/x.tar": content}) as origin:
        counters = Counters()
        with open_shards([origin.url("x.tar")], config=TransferConfig(), stats=counters) as reader:
            shard = next(reader)
            got = 0
            while got < 300_000:  # three samples of 100 KB
                got += len(shard.read() or b"")
            time.sleep(0.3)  # whatever it would fetch ahead, it has asked for by now
        asked = sum(stop - start for start, stop in spans(origin.requests))
        assert asked <= 4 * MIB
        assert snapshot(counters).wire_bytes <= 4 * MIB


def test_the_source_is_pulled_lazily(origin: Origin) -> None:
    url = origin.add("x.tar", b"x")
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield url

    for lookahead in (1, 5):
        taken = 0
        with open_shards(endless(), lookahead=lookahead) as reader:
            assert taken == 0
            for number, shard in zip(range(10), reader, strict=False):
                assert shard.number == number
                assert taken <= number + 1 + lookahead


def test_an_error_of_the_source_comes_in_its_place(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", b"%d" % i) for i in range(3)]

    def source() -> Iterator[str]:
        yield from urls
        raise LookupError("the list broke")

    read: list[bytes] = []
    reader = open_shards(source())
    with pytest.raises(LookupError, match="the list broke"):
        read.extend(bytes(shard.read() or b"") for shard in reader)
    assert read == [b"0", b"1", b"2"]
    assert reader.closed


def test_dicts_keep_what_they_say(origin: Origin) -> None:
    url = origin.add("x.tar", b"x")
    with open_shards([{"url": url, "dataset": 7}, url]) as reader:
        first, second = next(reader), next(reader)
    assert (first.info, first.url, first.local_path) == ({"url": url, "dataset": 7}, url, None)
    assert second.info == {"url": url}


def test_local_paths_are_told(tmp_path: Any) -> None:
    (tmp_path / "x.tar").write_bytes(b"x")
    with open_shards([(tmp_path / "x.tar").as_uri()]) as reader:
        assert next(reader).local_path == str(tmp_path / "x.tar")


def test_pieces_die_with_the_next_read(origin: Origin) -> None:
    with open_shards([origin.add("x.tar", data(3 * PART))], config=quick()) as reader:
        shard = next(reader)
        piece = shard.read()
        assert piece is not None
        shard.read()
        with pytest.raises(ValueError, match="released"):
            bytes(piece)


def test_a_mixture_of_everything(origin: Origin, tmp_path: Any) -> None:
    contents = [data(size, i) for i, size in enumerate([0, 1, 5 * PART, 300, 70_000, 2 * PART])]
    urls: list[str] = []
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(content)
        urls += [
            origin.add(f"{number}.tar", content),
            str(path),
            f"pipe:cat {path}",
            origin.url(f"{number}.tar") + "?plain",
        ]
    origin.behave(when=lambda request: "plain" in request.target, chunked=True, ignore_range=True)
    random.Random(3).shuffle(urls)
    expected = [contents[int(url.rpartition("/")[2].partition(".")[0])] for url in urls]
    assert bytes_of(urls) == expected
    assert bytes_of(urls, quick(part_bytes=64 * KIB, budget_bytes=256 * KIB, connections=1)) == expected


def test_configurations_that_cannot_work() -> None:
    for values in ({"part_bytes": 100_000}, {"part_bytes": 1 << 10}, {"budget_bytes": 1}, {"connections": 0}):
        with pytest.raises(ConfigError):
            TransferConfig(**values)


def test_an_odd_budget_is_not_exceeded(origin: Origin) -> None:
    counters = Counters()
    config = quick(budget_bytes=5 * PART - 1)
    content = data(30 * PART)
    assert outcomes([origin.add("x.tar", content)] * 2, config, counters) == [(content, None)] * 2
    assert snapshot(counters).window_peak_bytes <= config.budget_bytes


def test_a_cache_sees_each_shard_once(origin: Origin, tmp_path: Path) -> None:
    contents = [data(size, i) for i, size in enumerate([0, 5, 5 * PART, 300])]
    urls: list[Any] = [origin.add(f"{i}.tar", content) for i, content in enumerate(contents)]
    (tmp_path / "local.tar").write_bytes(b"local")
    urls += [{"url": str(tmp_path / "local.tar"), "dataset": 7}, origin.url("missing.tar")]
    cache, counters = DiskCache(tmp_path / "cache"), Counters()
    told = []
    with open_shards(urls, config=quick(), stats=counters, cache=cache) as reader:
        for shard in reader:
            got = bytearray()
            with contextlib.suppress(FileNotFoundError):
                while (piece := shard.read()) is not None:
                    got += piece
                assert shard.read() is None
            told.append((shard.local_path, bytes(got), shard.info.get("dataset")))
    paths = [str(tmp_path / "cache" / cache.name(url)) for url in [*urls[:4], urls[5]]]
    assert told[:4] == [(path, content, None) for path, content in zip(paths[:4], contents, strict=True)]
    assert told[4:] == [(str(tmp_path / "local.tar"), b"local", 7), (paths[4], b"", None)]
    assert [Path(path).exists() for path in paths] == [True] * 4 + [False]
    stats = snapshot(counters)
    assert (stats.cache_hits, stats.cache_misses) == (0, 5)  # the local file is none of the cache's business


def test_a_shard_that_is_rejected_is_left(origin: Origin, tmp_path: Path) -> None:
    urls = [origin.add(f"{i}.tar", data(5 * PART, i)) for i in range(2)]
    for cache in (None, DiskCache(tmp_path)):
        with open_shards(urls, config=quick(), cache=cache) as reader:
            first = next(reader)
            first.read()
            first.reject()
            assert first.read() is None
            assert b"".join(bytes(piece) for piece in iter(next(reader).read, None)) == data(5 * PART, 1)
    assert [path.name for path in tmp_path.rglob("*.tar")] == ["1.tar"]
