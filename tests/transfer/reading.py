"""Reading through the engine, as short as the tests of its rooms need it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from wds_async.config import RetryPolicy, TransferConfig
from wds_async.errors import WdsError
from wds_async.transfer import engine
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters, Stats

__all__ = ["KIB", "MIB", "QUICK", "bytes_of", "data", "open_fds", "outcomes", "quick", "snapshot", "spans"]

KIB, MIB = 1 << 10, 1 << 20

QUICK = RetryPolicy(max_attempts=3, refusal_timeout_s=0.0, base_s=0.001, cap_s=0.01)
"""Three attempts within milliseconds; a refusal ends a read at once."""


def quick(**overrides: Any) -> TransferConfig:
    """Small parts and quick retries, so that little shards take all the ways that large ones do."""
    values: dict[str, Any] = {
        "budget_bytes": 8 * MIB,
        "part_bytes": 256 * KIB,
        "first_part_bytes": 64 * KIB,
        "retry": QUICK,
    }
    return TransferConfig(**{**values, **overrides})


def data(size: int, seed: int = 0) -> bytes:
    """Bytes that differ everywhere."""
    return random.Random(f"{seed}-{size}").randbytes(size)


def outcomes(
    urls: Iterable[Any],
    config: TransferConfig | None = None,
    counters: Counters | None = None,
    after: Callable[[], Any] | None = None,
) -> list[tuple[bytes, WdsError | None]]:
    """For each shard what was read of it, and the error that ended it. ``after`` runs after each piece."""
    found: list[tuple[bytes, WdsError | None]] = []
    with open_shards(urls, config=config or quick(), stats=counters) as reader:
        for shard in reader:
            got, error = bytearray(), None
            try:
                while (piece := shard.read()) is not None:
                    got += piece
                    if after is not None:
                        after()
            except WdsError as exn:
                error = exn
            found.append((bytes(got), error))
    return found


def bytes_of(
    urls: Iterable[Any], config: TransferConfig | None = None, counters: Counters | None = None
) -> list[bytes]:
    """The bytes of each shard; raises the first error."""
    found = outcomes(urls, config, counters)
    for _, error in found:
        if error is not None:
            raise error
    return [got for got, _ in found]


def snapshot(counters: Counters) -> Stats:
    """What one row of counters says."""
    return Stats(*counters.values())


def open_fds() -> int:
    """How many file descriptors this process has open, without an engine that waits for another reader."""
    engine.end_idle()
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


def spans(requests: Iterable[Any], path: str | None = None) -> list[tuple[int, int]]:
    """``(start, stop)`` of every range asked for, in order of arrival."""
    found = []
    for request in requests:
        if request.range is not None and path in (None, request.path):
            first, _, last = request.range.removeprefix("bytes=").partition("-")
            found.append((int(first), int(last) + 1))
    return found
