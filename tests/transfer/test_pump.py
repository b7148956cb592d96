"""One reader's side of the engine: what is dropped is given back, whenever it is dropped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.servers import Origin
from tests.transfer.reading import KIB, MIB, data, open_fds, quick, snapshot
from wds_async.errors import WdsError
from wds_async.transfer import engine as engine_module
from wds_async.transfer.reader import ShardReader, open_shards
from wds_async.transfer.stats import Counters

PART = 256 * KIB


def _held(reader: ShardReader) -> int:
    """What the engine's pool has given out, seen from its own thread."""
    import threading

    found: list[int] = []
    done = threading.Event()
    engine = reader.engine()
    engine.submit(lambda: (found.append(engine.slabs.used_bytes), done.set()))
    assert done.wait(5)
    return found[0]


def test_shards_that_are_skipped_at_once_leak_nothing(origin: Origin) -> None:
    # Parts that are dropped before their first step would never land if their tasks were simply cancelled.
    content = data(2 * PART)
    urls = [origin.add(f"{i}.tar", content) for i in range(60)]
    with open_shards(urls, config=quick(budget_bytes=1 * MIB, connections=4)) as reader:
        for number, shard in enumerate(reader):
            if number % 10 == 9:
                got = bytearray()
                while (piece := shard.read()) is not None:
                    got += piece
                assert got == content
        engine = engine_module._current
        assert engine is not None
        assert (engine._pumps, engine.slabs.used_bytes) == (set(), 0)


@pytest.mark.parametrize("seed", range(6))
def test_skipping_and_leaving_anywhere(origin: Origin, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    contents = [data(rng.choice([0, 10, 70_000, 600_000]), i) for i in range(24)]
    urls = []
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(content)
        urls.append(rng.choice([origin.add(f"{number}.tar", content), str(path), f"pipe:cat {path}"]))
    origin.behave(probability=0.1, ignore_range=True)
    before = open_fds()
    with open_shards(urls, config=quick(budget_bytes=1 * MIB)) as reader:
        for shard, content in zip(reader, contents, strict=True):
            wanted = rng.choice([0, 1, 100_000, 1 << 30])
            got = bytearray()
            while len(got) < wanted and (piece := shard.read()) is not None:
                got += piece
            assert got == content[: len(got)]
            assert len(got) >= min(wanted, len(content))
            if rng.random() < 0.03:
                break
    engine_module.end_idle()
    origin.wait_until(lambda server: server.open_connections == 0)
    assert open_fds() <= before


def test_memory_is_free_once_everything_was_read(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", data(2 * PART, i)) for i in range(4)]
    outer = open_shards(urls[:1], config=quick())
    shard = next(outer)  # keeps the engine running
    with open_shards(urls, config=quick()) as inner:
        for other in inner:
            while other.read() is not None:
                pass
    while shard.read() is not None:
        pass
    assert _held(outer) <= PART  # the last piece is given back with the next read
    outer.close()


def test_counters_tell_the_story(origin: Origin) -> None:
    urls = [origin.add(f"{i}.tar", data(2 * PART, i)) for i in range(4)]
    urls.insert(2, origin.url("missing.tar"))
    counters = Counters()
    with open_shards(urls, config=quick(), stats=counters) as reader:
        for shard in reader:
            try:
                while shard.read() is not None:
                    pass
            except WdsError:
                pass
    stats = snapshot(counters)
    assert stats.bytes == 8 * PART
    assert stats.wire_bytes >= stats.bytes
    assert (stats.shards, stats.bad_shards) == (4, 1)
    assert stats.requests >= 9
    assert 0 < stats.window_peak_bytes <= stats.budget_bytes == quick().budget_bytes
    assert stats.connections_peak >= 1
    assert stats.window_bytes == 0
    assert stats.read_s >= stats.wait_s > 0
