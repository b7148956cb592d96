"""``wds-async demo``: its shards, its server, its training."""

from __future__ import annotations

import http.client
import importlib.util
import io
import json
import shutil
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.servers.shards import make_shard
from wds_async.cli.demo import data
from wds_async.cli.demo.data import DemoPlan, prepare, render
from wds_async.cli.demo.server import serving
from wds_async.cli.demo.train import State, shrink, train
from wds_async.dataset import WebDataset

NEEDED = ("torch", "sklearn", "matplotlib", "webdataset", "PIL")
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED),  # imported here, they would take seconds of every run
    reason="the demo needs its extra",
)


def test_from_nothing_to_a_chart(program: Any, tmp_path: Path) -> None:
    png = tmp_path / "demo.png"
    done = program("demo", "--quick", "--folder", tmp_path / "data", "--png", png)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith("test accuracy ")
    said = done.stderr.decode()
    for step in ("1 · Images", "2 · Serve", "3 · Train", "4 · Compare", "5 · Chart", "better by"):
        assert step in said
    assert png.read_bytes().startswith(b"\x89PNG")


image = pytest.importorskip("PIL.Image")


PLAN = DemoPlan(train_bytes=300_000, shard_bytes=100_000, test_images=40, pixels=32)


def test_shards_are_complete_and_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    seen: list[int] = []
    made = prepare(folder, PLAN, seen.append)
    assert seen[-1] >= PLAN.train_bytes
    assert seen == sorted(seen)
    assert len(made.train) > 1
    samples = list(WebDataset([str(folder / name) for name in made.train], shardshuffle=False))
    assert len(samples) == made.train_images == len({sample["__key__"] for sample in samples})
    assert {int(sample["cls"]) for sample in samples} == set(range(10))
    tests = list(WebDataset([str(folder / name) for name in made.test], shardshuffle=False))
    assert len(tests) == made.test_images == PLAN.test_images
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare(folder, PLAN) == made
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before

    # Another plan, or one that was interrupted, is made anew; the same plan gives the same bytes.
    first = (folder / made.train[0]).read_bytes()
    shutil.move(folder / "complete.json", folder / "interrupted.json")
    assert json.loads((folder / "interrupted.json").read_text())["plan"]["pixels"] == 32
    assert prepare(folder, PLAN) == made
    assert (folder / made.train[0]).read_bytes() == first
    assert not (folder / "interrupted.json").exists()


def test_no_source_digit_is_in_both_parts() -> None:
    train, test = data._digits("train")[0], data._digits("test")[0]
    assert len(train) + len(test) == 1797
    parts = [{digit.tobytes() for digit in part} for part in (train, test)]
    assert len(parts[0] & parts[1]) == 0


def test_an_image_is_a_jpeg_that_shows_the_digit() -> None:
    digit = np.zeros((8, 8))
    digit[2:6, 3:5] = 16
    jpeg = render(digit, 64, np.random.default_rng(1))
    assert jpeg == render(digit, 64, np.random.default_rng(1))
    assert jpeg != render(digit, 64, np.random.default_rng(2))
    with image.open(io.BytesIO(jpeg)) as picture:
        assert (picture.format, picture.size) == ("JPEG", (64, 64))
        grey = np.asarray(picture.convert("L"), float)
    assert grey[20:44, 20:44].mean() > grey[:8].mean() + 20


def ask(base: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=20)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_ranges_identity_and_latency(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(bytes(range(200)))
    with serving(tmp_path, first_byte_s=0.05) as base:
        began = time.monotonic()
        status, headers, body = ask(base, "/x.tar", Range="bytes=10-19")
        assert time.monotonic() - began >= 0.05
        assert (status, body) == (206, bytes(range(10, 20)))
        assert headers["content-range"] == "bytes 10-19/200"
        tag = headers["etag"]
        assert ask(base, "/x.tar", If_Match=tag)[0] == 200
        assert ask(base, "/x.tar", If_Match='"other"')[0] == 412
        assert ask(base, "/none.tar")[0] == 404
    with pytest.raises(OSError):
        ask(base, "/x.tar")


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
