"""One reading of a world, as a user's program reads it, and what is held against what was promised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import wds_async as wds
from tests.faults.expectations import ERROR, HEALED, LATE, UNSEEN, Expected
from tests.faults.objects import PART_BYTES, Objects
from tests.faults.script import Script
from tests.faults.worlds import World
from wds_async.config import RetryPolicy
from wds_async.errors import WdsError
from wds_async.transfer.stats import Stats

__all__ = [
    "ATTEMPTS",
    "BUDGET_PARTS",
    "CONNECTIONS",
    "NO_STALL_S",
    "RENEWALS",
    "STALL_S",
    "Reading",
    "check",
    "check_place",
    "read",
]

CONNECTIONS = 2
BUDGET_PARTS = 16
ATTEMPTS = 2
RENEWALS = 3
"""Requests that a store is asked for in place of a lapsed one, before it counts as refused."""
_PATIENT = RetryPolicy(base_s=0.001, cap_s=0.01, timeout_s=10.0)
_IMPATIENT = RetryPolicy(max_attempts=ATTEMPTS, base_s=0.001, cap_s=0.01, timeout_s=10.0)
STALL_S, NO_STALL_S = 0.2, 5.0
"""In which a part has to bring 16 KiB: where that is what is looked at, and where a busy machine must not matter."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The samples that came, the error that ended them, and what it cost."""

    samples: list[dict[str, bytes]]
    error: WdsError | None
    stats: Stats


def read(world: World, *, impatient: bool, stall_s: float, verify: str = "auto", **transfer: Any) -> Reading:
    """One epoch. ``impatient``: two attempts; otherwise as many as ten seconds hold."""
    settings: dict[str, Any] = {
        "budget_bytes": BUDGET_PARTS * PART_BYTES,
        "part_bytes": PART_BYTES,
        "first_part_bytes": PART_BYTES,
        "connections": CONNECTIONS,
        "direct": world.direct,
        "stall_timeout_s": stall_s,
        "connect_timeout_s": 1.0,
        "hedge_share": 0.0,  # hedges have tests of their own; here every byte is counted
        "retry": _IMPATIENT if impatient else _PATIENT,
        "verify": verify,
    }
    dataset = wds.WebDataset(
        world.urls, shardshuffle=False, transfer={**settings, **transfer}, storage_options=world.options
    )
    samples: list[dict[str, bytes]] = []
    error: WdsError | None = None
    try:
        for sample in dataset:
            kept = {name: value for name, value in sample.items() if not name.startswith("__")}
            samples.append({"__key__": sample["__key__"].encode(), **kept})
    except WdsError as exn:
        error = exn
    finally:
        dataset.close()
    return Reading(samples, error, dataset.statistics())


def check(reading: Reading, expected: Expected, objects: Objects, script: Script) -> None:
    """The samples and the error are those promised."""
    true = [fields for _, fields in objects.samples]
    wrong = _differing(reading.samples, true)
    if expected.kind in (HEALED, UNSEEN) and reading.error is not None:
        raise AssertionError(f"not healed: {reading.error!r}") from reading.error
    if expected.kind in (ERROR, LATE):
        assert reading.error is not None, f"{expected.error} did not come; {len(wrong)} samples are wrong"
        assert type(reading.error).__name__ == expected.error, repr(reading.error)
    if expected.kind in (HEALED, UNSEEN):
        assert len(reading.samples) == len(true)
    if expected.kind in (HEALED, ERROR):
        assert not wrong, f"wrong samples: {wrong}"
    else:
        assert 1 <= len(wrong) <= len(script.flipped)
    if expected.kind == LATE:
        names = [name for name, _ in objects.samples]
        shard, came = names[len(reading.samples) - 1], len(reading.samples)
        end = names.index(shard) + names.count(shard)
        assert end - 1 <= came <= end, "the shard was not at its end"  # its last sample may be held still
        assert reading.error is not None
        assert shard in str(reading.error)
        assert shard in {name for name, _ in script.flipped}


def check_place(reading: Reading, script: Script) -> None:
    """The error names the shard and the byte of a damaged header."""
    error = reading.error
    assert error is not None
    assert error.shard is not None
    assert (error.shard.rpartition("/")[2], error.offset) in script.flipped, f"{error!r}, not at {script.flipped}"


def _differing(got: Iterable[dict[str, bytes]], true: list[dict[str, bytes]]) -> list[int]:
    return [i for i, sample in enumerate(got) if i >= len(true) or sample != true[i]]
