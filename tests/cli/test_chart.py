"""The charts are PNG files of a sensible size, whatever was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from wds_async.cli import chart
from wds_async.cli.measure import Job, Moment, Outcome

pytest.importorskip("matplotlib")
image = pytest.importorskip("PIL.Image")


def outcome(library: str, workers: int) -> Outcome:
    moments = tuple(Moment(0.2 * i, 10**7 * i, 100 * i, 0.1 * i, 10**8) for i in range(1, 10))
    return Outcome(Job([], library=library, workers=workers), 2.0, 0.1, 10**8, 1000, 1.0, 10**7, 10**8, moments=moments)


def drawn(path: Path) -> tuple[int, int]:
    """Width and height; fails for an empty canvas."""
    with image.open(path) as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 10
        size: tuple[int, int] = picture.size
        return size


@pytest.mark.parametrize("libraries", [["wds_async"], ["wds_async", "webdataset"]])
def test_bench(libraries: list[str], tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.png"
    chart.bench([outcome(library, workers) for workers in (0, 1, 4) for library in libraries], path)
    assert min(drawn(path)) > 400


def test_demo(tmp_path: Path) -> None:
    course = chart.Course(
        rates=[(0.25 * i, 1e8 / i, 5e7) for i in range(1, 20)],
        losses=[(64 * i, 2.0 / i) for i in range(1, 50)],
        tests=[(1600, 0.9), (3200, 0.97)],
    )
    chart.demo(course, [outcome("wds_async", 0), outcome("webdataset", 0)], tmp_path / "demo.png")
    assert min(drawn(tmp_path / "demo.png")) > 800


def test_a_run_too_short_to_sample_is_drawn_too(tmp_path: Path) -> None:
    course = chart.Course(rates=[], losses=[(64, 2.0)], tests=[(64, 0.1)])
    bare = Outcome(Job([]), 0.1, 0.1, 100, 1, 0.1, 0, 10**7)
    chart.demo(course, [bare], tmp_path / "demo.png")
    assert min(drawn(tmp_path / "demo.png")) > 800
