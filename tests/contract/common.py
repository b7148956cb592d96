"""What the comparisons share: samples, equality of streams, and what came out of a run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

__all__ = ["agree", "outcome", "read", "same", "samples", "tuples", "without_path"]


def same(a: Any, b: Any) -> bool:
    """Equal, in type too, arrays and tensors included; the order of a dict is not, for webdataset collates sets."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        if type(b) is not np.ndarray or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool((a == b).all()) if a.dtype == object else a.tobytes() == b.tobytes()
    if type(a).__module__.startswith("torch"):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return type(a) is type(b) and bool(a == b)


def outcome(make: Callable[[], Iterable[Any]]) -> tuple[list[Any], Exception | None]:
    """What came out, and the error that ended it."""
    seen: list[Any] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # webdataset leaves streams open
            for item in make():
                seen.append(dict(item) if isinstance(item, dict) else item)
    except Exception as exn:  # whatever it is, is compared
        return seen, exn
    return seen, None


def agree(theirs: tuple[list[Any], Exception | None], ours: tuple[list[Any], Exception | None]) -> None:
    """The same items, and an error that ``except`` clauses for theirs catch.

    Their own classes have ours of the same name. An ``assert`` of theirs is a ValueError of ours that says
    what is wrong (row "wrong arguments" of the table).
    """
    assert same(theirs[0], ours[0]), (theirs[0][:3], ours[0][:3])
    expected, got = theirs[1], ours[1]
    assert (expected is None) == (got is None), (expected, got)
    if expected is None or got is None:
        return
    by_name = {base.__name__ for base in type(got).__mro__}
    checked = isinstance(expected, AssertionError) and isinstance(got, ValueError)
    assert checked or type(expected).__name__ in by_name, (expected, got)


def read(wds: Any, urls: Any, steps: Callable[[Any], Any] = lambda d: d, **kw: Any) -> list[Any]:
    """What a `WebDataset` over ``urls`` with ``steps`` gives, without a shard shuffle unless told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(steps(wds.WebDataset(urls, **{"shardshuffle": False, **kw})))


def without_path(items: Iterable[Any]) -> Iterator[Any]:
    """The items; of samples, without ``__local_path__``."""
    for item in items:
        yield {k: v for k, v in item.items() if k != "__local_path__"} if isinstance(item, dict) else item


def samples() -> list[dict[str, Any]]:
    """47 samples with a field of every plain type."""
    rng = random.Random(0)
    return [
        {
            "__key__": f"k{i}",
            "__url__": "u.tar",
            "jpg": rng.randbytes(3),
            "cls": i,
            "w": i / 2,
            "ok": i % 2 == 0,
            "v": np.full((2, 2), i, "f4"),
        }
        for i in range(47)
    ]


def tuples() -> list[tuple[Any, ...]]:
    """`samples` as tuples of four."""
    return [(s["cls"], s["w"], s["jpg"], s["v"]) for s in samples()]
