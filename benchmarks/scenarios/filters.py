"""What each filter costs for a sample, beside webdataset's, over the same samples."""

from __future__ import annotations

import importlib
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.bench import Bench, scenario

__all__ = ["CASES", "main", "timed"]

SAMPLES = 20_000
NOISE = 0.05
"""Stages that do nothing but pass samples on cost the same in both: a generator's turn."""
PARTS = 4
"""Turns are cut into so many pieces: what else the machine does hits both libraries alike."""


def _raw(n: int) -> dict[str, Any]:
    return {
        "__key__": f"{n:08d}",
        "__url__": "shard-000000.tar",
        "jpg": b"x" * 64,
        "cls": b"%d" % (n % 1000),
        "json": b'{"index": %d, "label": "none"}' % n,
        "txt": b"a caption",
    }


def _decoded(n: int) -> dict[str, Any]:
    return {"__key__": f"{n:08d}", "__url__": "shard-000000.tar", "jpg": n, "cls": n % 1000, "txt": "a caption"}


def _row(n: int) -> tuple[Any, ...]:
    return n, n % 1000, "a caption"


_VECTOR = np.zeros(16, np.float32)

Make = Callable[[int], Any]
Stage = Callable[[Any], Any]
CASES: dict[str, tuple[Make, Stage]] = {
    "shuffle": (_decoded, lambda f: f.shuffle(1000, rng=random.Random(0))),
    "detshuffle": (_decoded, lambda f: f.detshuffle(1000).run),
    "rsample": (_decoded, lambda f: f.rsample(0.5)),
    "select": (_decoded, lambda f: f.select(lambda sample: sample["cls"] < 500)),
    "map": (_decoded, lambda f: f.map(lambda sample: {"x": sample["cls"]})),
    "map, to other than dicts": (_decoded, lambda f: f.map(lambda sample: sample["cls"])),
    "map_dict": (_decoded, lambda f: f.map_dict(cls=float, txt=len)),
    "map_tuple": (_row, lambda f: f.map_tuple(None, float, len)),
    "to_tuple": (_decoded, lambda f: f.to_tuple("png;jpg", "cls", "txt")),
    "to_tuple, in one string": (_decoded, lambda f: f.to_tuple("png;jpg cls")),
    "rename": (_decoded, lambda f: f.rename(image="png;jpg", label="cls")),
    "rename, keep=False": (_decoded, lambda f: f.rename(image="png;jpg", label="cls", keep=False)),
    "rename_keys": (_decoded, lambda f: f.rename_keys(("image", "*.png"), image="jpg", label="cl*", must_match=False)),
    "extract_keys": (_decoded, lambda f: f.extract_keys("*.jpg;*.png", "cls")),
    "associate": (_decoded, lambda f: f.associate({"00000001": {"more": 1}})),
    "decode, txt": (lambda n: {"__key__": "k", "txt": b"a caption"}, lambda f: f.decode()),
    "decode, cls": (lambda n: {"__key__": "k", "cls": b"%d" % n}, lambda f: f.decode()),
    "decode, json": (lambda n: {"__key__": "k", "json": b'{"label": %d}' % n}, lambda f: f.decode()),
    "decode, cls json txt": (_raw, lambda f: f.decode()),
    "decode, unknown fields": (lambda n: {"__key__": "k", "a.bin": b"1", "b.dat": b"2"}, lambda f: f.decode()),
    "decode, only=": (_raw, lambda f: f.decode(only="cls txt")),
    "xdecode": (_raw, lambda f: f.xdecode(jpg=lambda s: s, cls=lambda s: int(s.read()), json=lambda s: s.read())),
    "batched, lists": (_decoded, lambda f: f.batched(64, collation_fn=None)),
    "batched, dicts": (_decoded, lambda f: f.batched(64)),
    "batched, tuples": (_row, lambda f: f.batched(64)),
    "batched, arrays": (lambda n: (_VECTOR, n), lambda f: f.batched(64)),
    "unbatched, tuples": (_row, lambda f: _after(f, f.batched(64), f.unbatched())),
    "unbatched, dicts": (_decoded, lambda f: _after(f, f.batched(64), f.unbatched())),
    "unlisted": (_decoded, lambda f: _after(f, f.batched(64, collation_fn=None), f.unlisted())),
    "slice": (_decoded, lambda f: f.slice(10**9)),
    "info": (_decoded, lambda f: f.info(n=0)),
    "log_keys, off": (_decoded, lambda f: f.log_keys(None)),
    "Cached, first pass": (_decoded, lambda f: f.Cached().run),
}
"""Case: what makes its n-th sample, and the stage from a library's module of filters."""


class _after:
    """A stage over the prepared output of another, whose cost is left out."""

    def __init__(self, filters: Any, first: Stage, stage: Stage) -> None:
        self.first, self.stage = first, stage

    def __call__(self, source: Any) -> Any:
        return self.stage(source)


def timed(stage: Stage, samples: list[Any]) -> float:
    """Seconds of CPU for taking everything out of ``stage`` over ``samples``."""
    source: Iterator[Any] = iter(list(stage.first(iter(samples))) if isinstance(stage, _after) else samples)
    began = time.process_time()
    for _ in stage(source):
        pass
    return time.process_time() - began


def _measure(bench: Bench, name: str, count: int) -> tuple[float, float]:
    """Nanoseconds of CPU for a sample: ours and webdataset's, medians of turns that take turns."""
    make, stage_of = CASES[name]
    libraries = [importlib.import_module(f"{package}.filters") for package in ("wds_async", "webdataset")]
    taken: list[list[float]] = [[], []]
    for turn in range(2 * bench.repeat + 1):
        sums = [0.0, 0.0]
        for part in range(PARTS):
            order = (0, 1) if (turn + part) % 2 else (1, 0)
            for library in order:
                samples = [make(n) for n in range(1, count // PARTS + 1)]
                sums[library] += timed(stage_of(libraries[library]), samples)
        for library, seconds in enumerate(sums):
            taken[library].append(seconds / (count // PARTS * PARTS) * 1e9)
    ours, theirs = (statistics.median(turns) for turns in taken)
    bench.raw.append({"case": name, "ours_ns": taken[0], "webdataset_ns": taken[1]})
    return ours, theirs


@scenario("filters", repeat=3)
def main(bench: Bench) -> None:
    """CPU for each sample of each filter, ours over webdataset's (--only: these cases)."""
    warnings.simplefilter("ignore")
    table = Table(title="ns of CPU for a sample", title_justify="left")
    for title in ("filter", "wds_async", "webdataset", "ours over webdataset's"):
        table.add_column(title, justify="left" if title == "filter" else "right")
    ratios: dict[str, float] = {}
    for name in CASES:
        if bench.only and name not in bench.only:
            continue
        ours, theirs = _measure(bench, name, 2_000 if bench.quick else SAMPLES)
        table.add_row(name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")
        ratios[name] = ours / theirs
    bench.console.print(table)
    worst = max(ratios, key=lambda name: ratios[name])
    measure = f"CPU a sample, ours over webdataset's: the worst of {len(ratios)} filters, {worst}"
    bench.bar(measure, f"≤ 1 (noise {NOISE:.0%})", ratios[worst], ratios[worst] <= 1 + NOISE)
    middle = statistics.median(ratios.values())
    bench.bar(f"CPU a sample, ours over webdataset's: the middle of {len(ratios)} filters", "≤ 1", middle, middle <= 1)
