"""The demo's training, on images that are easy to tell apart."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from tests.servers.shards import make_shard
from wds_async.cli.demo_train import State, shrink, train

pytest.importorskip("torch")
image = pytest.importorskip("PIL.Image")


def shard(path: Path, count: int) -> str:
    """Ten classes: a bright bar at one of ten heights."""
    samples = {}
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 60, (64, 64), dtype=np.uint8)
        pixels[6 * (i % 10) : 6 * (i % 10) + 6] += 180
        buffer = io.BytesIO()
        image.fromarray(pixels).save(buffer, "JPEG")
        samples[f"{i:04d}"] = {"jpg": buffer.getvalue(), "cls": str(i % 10).encode()}
    path.write_bytes(make_shard(samples))
    return str(path)


def test_it_learns_and_tells_how_it_goes(tmp_path: Path) -> None:
    urls = [shard(tmp_path / f"{i}.tar", 200) for i in range(2)]
    states: list[State] = []
    course, stats = train(
        urls, [shard(tmp_path / "test.tar", 50)], epochs=3, workers=2, sample_bytes=1e3, show=states.append, batch=16
    )
    # 2 workers, 200 samples each, 12 whole batches of 16
    assert [seen for seen, _ in course.tests] == [384, 768, 1152]
    assert course.tests[-1][1] > 0.5
    assert course.losses[-1][1] < course.losses[0][1]
    assert states[-1].samples == 1152
    assert states[-1].epoch == 3
    assert stats.bytes == 3 * sum(Path(url).stat().st_size for url in urls)


def test_shrink_is_the_mean_of_blocks() -> None:
    pixels = np.arange(64 * 64).reshape(64, 64) % 251
    small, label = shrink((pixels, 7))
    assert label == 7
    assert small.shape == (32, 32)
    assert small[0, 0] == int(pixels[:2, :2].mean())
    assert small[31, 31] == int(pixels[62:, 62:].mean())
    assert shrink((np.ones((70, 70)), 0))[0].shape == (32, 32)
