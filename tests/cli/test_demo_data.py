"""The demo's shards: the same bytes every time, test digits apart, complete or made again."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from wds_async.cli import demo_data
from wds_async.cli.demo_data import Plan, prepare, render
from wds_async.dataset import WebDataset

pytest.importorskip("sklearn")
image = pytest.importorskip("PIL.Image")

PLAN = Plan(train_bytes=300_000, shard_bytes=100_000, test_images=40, pixels=32)


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
    train, test = demo_data._digits("train")[0], demo_data._digits("test")[0]
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
