"""Functions that tests give to jobs by their names."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import wds_async as wds

__all__ = [
    "augment",
    "cached_stage",
    "fail_at_7",
    "fork_bomb_once",
    "interrupted",
    "kill_at_7",
    "kill_while_writing",
    "later",
    "made_each_time",
    "no_bytes",
    "shuffled",
    "slow",
    "slower",
    "split",
    "tagged",
    "tail",
    "with_rng",
    "without_key",
]  # fmt: skip

Sample = dict[str, Any]


def tagged(sample: Sample, rng: random.Random, tag: str, width: int = 0) -> Sample:
    """Add the arguments, and a draw."""
    return {**sample, "tag.txt": f"{tag} {width} {rng.random():.3f}"}


def augment(sample: Sample) -> Sample | None:
    """Drop samples that end in 7; add draws of both generators to the others."""
    if sample["__key__"].endswith("7"):
        return None
    return {**sample, "draw.txt": f"{random.random()} {np.random.random()}"}


def split(sample: Sample) -> Iterator[Sample]:
    for letter in "ab":
        yield {"__key__": f"{sample['__key__']}-{letter}", "txt": sample["txt"]}


def with_rng(sample: Sample, rng: random.Random) -> Sample:
    return {"__key__": sample["__key__"], "txt": str(rng.random())}


def fail_at_7(sample: Sample) -> Sample:
    if sample["__key__"] == "0001-007":
        raise ValueError("this one never works")
    return sample


def fork_bomb_once(sample: Sample) -> Sample:
    """Kill this process at the first sample that any process meets, once for each file that the sample names."""
    flag = Path(sample["txt"].decode())
    if flag.exists():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"__key__": sample["__key__"], "txt": b"x"}


def kill_at_7(sample: Sample) -> Sample:
    if sample["__key__"] == "0001-007":
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def slow(sample: Sample) -> Sample:
    time.sleep(0.002)
    return augment(sample) or {"__key__": sample["__key__"], "txt": b"7"}


def slower(sample: Sample) -> Sample:
    """The same, a second for a shard."""
    time.sleep(0.02)
    return slow(sample)


def interrupted(sample: Sample) -> Sample:
    raise SystemExit(3)


def tail(source: Iterable[Sample]) -> Iterator[Sample]:
    """A stage: the last three samples."""
    yield from list(source)[-3:]


cached_stage = [wds.shuffle(100), wds.map(augment)]
shuffled = wds.detshuffle(100)


class made_each_time(wds.PipelineStage):
    """A stage with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def run(self, source: Iterable[Sample]) -> Iterator[Sample]:
        for sample in source:
            self.count += 1
            yield {**sample, "count.txt": str(self.count)}


async def later(sample: Sample) -> Sample:
    return sample


def without_key(sample: Sample) -> Sample:
    return {"txt": b"x"}


def no_bytes(sample: Sample) -> Sample:
    return {"__key__": sample["__key__"], "xyz": object()}


def kill_while_writing(sample: Sample) -> Sample:
    """Encoder that ends its process at the first sample that names a file that is not there yet."""
    mark = sample.pop("mark", "")
    if mark:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return sample
        os.kill(os.getpid(), signal.SIGKILL)
    return sample
