"""Functions that tests of `reshard` give to jobs by their names."""

from __future__ import annotations

from typing import Any

__all__ = ["broken", "by_length", "by_parity", "none", "not_a_name", "unordered"]

Sample = dict[str, Any]


def by_length(sample: Sample) -> tuple[int, str]:
    return len(sample["bin"]), sample["__key__"]


def by_parity(sample: Sample) -> str | None:
    """Name a split by the length, and drop what is empty."""
    size = len(sample["bin"])
    return None if not size else "odd" if size % 2 else "even"


def unordered(sample: Sample) -> float:
    return float("nan")


def broken(sample: Sample) -> str:
    raise KeyError("caption")


def not_a_name(sample: Sample) -> str:
    return "../elsewhere"


def none(sample: Sample) -> None:
    """Drop everything."""
