"""Images for each second of CPU that ``decode(spec)`` gives, beside webdataset's."""

from __future__ import annotations

import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from rich.table import Table

from benchmarks.bench import Bench, scenario
from benchmarks.pictures import DISTINCT, noisy_jpeg, photo_jpeg

__all__ = ["main"]

SPECS = ("rgb8", "torchrgb", "rgb", "torchrgb8", "l8", "pil")
BARS = {"rgb8": 1.25, "torchrgb": 1.25}
IMAGES = 60


def _samples(images: list[bytes], count: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{n:06d}", "__url__": "u", "jpg": images[n % len(images)]} for n in range(count)]


def _seconds(stage: Callable[[Any], Iterable[Any]], samples: list[dict[str, Any]]) -> tuple[float, float]:
    """CPU and wall of taking everything out of ``stage``."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in stage(iter(samples)):
        pass
    return time.process_time() - cpu, time.perf_counter() - wall


def _compare(bench: Bench, case: str, spec: str, samples: list[dict[str, Any]]) -> dict[str, float]:
    """Images per second of CPU: medians of turns that take turns, in one process."""
    stages = {
        package: importlib.import_module(f"{package}.filters").decode(spec) for package in ("wds_async", "webdataset")
    }
    taken: dict[str, list[float]] = {package: [] for package in stages}
    for stage in stages.values():
        _seconds(stage, samples[:DISTINCT])
    for turn in range(4 * bench.repeat + 1):
        for package in sorted(stages, reverse=bool(turn % 2)):
            taken[package].append(len(samples) / _seconds(stages[package], samples)[0])
    bench.raw.append({"case": case, "spec": spec, "images_per_cpu_s": taken})
    return {package: statistics.median(rates) for package, rates in taken.items()}


def _threads(bench: Bench, samples: list[dict[str, Any]]) -> None:
    """What threads do for the wall clock; a note, because it depends on what else the machine does."""
    decode = importlib.import_module("wds_async.filters").decode
    walls: dict[int, list[float]] = {0: [], 2: []}
    for _ in range(2 * bench.repeat + 1):
        for threads, found in walls.items():
            found.append(_seconds(decode("rgb8", threads=threads), samples)[1])
    alone, two = (statistics.median(found) for found in walls.values())
    bench.raw.append({"case": "threads", "wall_s": walls})
    bench.notes.append(f'decode("rgb8", threads=2): {alone / two:.2f} times as fast by the wall clock as threads=0')


@scenario("decode", repeat=3)
def main(bench: Bench) -> None:
    """Images of 400 x 400 per second of CPU through ``decode(spec)``, over samples in memory."""
    warnings.simplefilter("ignore")
    import torch  # noqa: PLC0415 (two seconds that --help need not take)

    torch.set_num_threads(1)
    table = Table(title="images per second of CPU", title_justify="left")
    for title in ("images", "specification", "wds_async", "webdataset", "ratio"):
        table.add_column(title, justify="right" if title in ("wds_async", "webdataset", "ratio") else "left")
    for case, make in (("photo-like", photo_jpeg), ("noisy", noisy_jpeg)):
        images = [make(seed) for seed in range(DISTINCT)]
        samples = _samples(images, DISTINCT if bench.quick else IMAGES)
        size = f"{case}, {sum(map(len, images)) / len(images) / 1e3:.0f} KB"
        for spec in SPECS:
            rates = _compare(bench, case, spec, samples)
            ours, theirs = rates["wds_async"], rates["webdataset"]
            table.add_row(size, spec, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")
            if spec in BARS:
                bench.ratio_bar(f"{case}, {spec}: images per CPU second over webdataset's", BARS[spec], ours, theirs)
        if case == "photo-like":
            _threads(bench, samples)
    bench.console.print(table)
