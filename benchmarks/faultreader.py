"""A training's side of the scenario ``faults``: reads, compares every sample, and notes how fast it went when.

``python -m benchmarks.faultreader``: a job is a JSON object on standard input, what came of it one on standard output.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

import crc32c

import wds_async as wds

_TICK_S = 0.5


def read(job: dict[str, Any]) -> dict[str, Any]:
    """Read ``urls`` once, or ``epochs`` times, or for ``seconds``; ``sums`` has each sample's checksum by key."""
    sums: dict[str, int] = job["sums"]
    dataset = wds.WebDataset(job["urls"], shardshuffle=False, repeat=bool(job.get("seconds")), **job.get("options", {}))
    wrong = samples = received = 0
    ticks: list[tuple[float, int]] = []
    epochs_s: list[float] = []
    began, before = time.monotonic(), os.times()
    following = began
    for _ in range(job.get("epochs", 1)):
        epoch_began = time.monotonic()
        for sample in dataset:
            total = 0
            for field, data in sample.items():
                if not field.startswith("__"):
                    total = crc32c.crc32c(data, total)
                    received += len(data)
            samples += 1
            wrong += sums.get(sample["__key__"]) != total
            now = time.monotonic()
            if now >= following:
                ticks.append((now - began, received))
                following = now + _TICK_S
                if job.get("seconds") and now - began > job["seconds"]:
                    break
        epochs_s.append(time.monotonic() - epoch_began)
    wall_s, after = time.monotonic() - began, os.times()
    leaving = time.monotonic()
    dataset.close()
    return {
        "wall_s": wall_s,
        "cpu_s": after.user + after.system - before.user - before.system,
        "samples": samples,
        "wrong": wrong,
        "bytes": received,
        "ticks": ticks,
        "epochs_s": epochs_s,
        "close_s": time.monotonic() - leaving,
        "stats": dataset.statistics().as_dict(),
    }


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("LEVEL", "ERROR"))
    print(json.dumps(read(json.load(sys.stdin))))
