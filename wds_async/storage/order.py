"""The order of an epoch, as it follows from a list of shards and a seed: what a reader of shards leaves here, and the
loader service is told with the next plan (docs/service.md, "Orders of epochs")."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ShardOrder", "announce_order", "announced", "packed", "unpacked"]

_LAST_NUMBER = re.compile(r"(.*?)(\d{1,18})(\D*)", re.DOTALL)
_URL_BYTES = 4096
_ORDER_BYTES = 512 << 10
_RUN_OVERHEAD_BYTES = 40


@dataclass(eq=False, slots=True)
class ShardOrder:
    """An epoch of ``urls``: all shards of the list, of all ranks, and how the order follows from them (``facts``)."""

    urls: Sequence[str]
    facts: dict[str, Any]
    runs: list[list[Any]] | None = None
    """The packed list; empty if it is too long to be sent."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    def message(self) -> dict[str, Any]:
        """Return what is sent; an empty one for a list that is too long."""
        if self.runs is None:
            self.runs = packed(self.urls, _ORDER_BYTES)
        return {"id": self.id, **self.facts, "shards": self.runs} if self.runs else {}


_order: ShardOrder | None = None


def announce_order(urls: Sequence[str], **facts: Any) -> None:
    """Note the order of the epoch that this process begins: ``kind``, ``seed``, ``epoch``, ``size`` and ``initial`` say
    how it follows from the list, ``rank`` and ``world`` whose share is read here."""
    global _order
    known = _order is not None and (_order.urls is urls or list(_order.urls) == list(urls))
    _order = ShardOrder(urls, facts, _order.runs if known and _order is not None else None)


def announced() -> ShardOrder | None:
    """Return the order of the epoch that this process began last, if it follows from a list and a seed."""
    return _order


def packed(urls: Iterable[str], most_bytes: int = 1 << 62) -> list[list[Any]]:
    """Return URLs as runs of consecutive numbers: ``[prefix, width, first, count, suffix]``. A URL without a number is
    a run of width 0. Nothing is returned for what takes more than about ``most_bytes`` as JSON."""
    runs: list[list[Any]] = []
    size = 0
    for url in urls:
        match = _LAST_NUMBER.fullmatch(url)
        prefix, digits, suffix = match.groups() if match else (url, "", "")
        number, last = int(digits or 0), runs[-1] if runs else None
        if last is not None and digits and last == [prefix, len(digits), number - last[3], last[3], suffix]:
            last[3] += 1
            continue
        runs.append([prefix, len(digits), number, 1, suffix])
        size += len(prefix) + len(suffix) + _RUN_OVERHEAD_BYTES
        if size > most_bytes:
            return []
    return runs


def unpacked(runs: Iterable[Any], most: int) -> list[str]:
    """Return the URLs of `packed`. ValueError for anything else, and for more than ``most`` URLs."""
    urls: list[str] = []
    for run in runs:
        if not isinstance(run, list) or len(run) != 5:
            raise ValueError("has a run that is none")
        prefix, width, first, count, suffix = run
        if not (isinstance(prefix, str) and isinstance(suffix, str) and len(prefix) + len(suffix) <= _URL_BYTES):
            raise ValueError("has a run that is none")
        for number in (width, first, count):
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 62:
                raise ValueError("has a run that is none")
        if width > 18 or (width == 0 and count != 1):
            raise ValueError("has a run that is none")
        if len(urls) + count > most:
            raise ValueError(f"has more than {most} shards")
        if width == 0:
            urls.append(prefix + suffix)
        else:
            urls += [f"{prefix}{number:0{width}}{suffix}" for number in range(first, first + count)]
    return urls
