"""The loader that moves batches to the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class MpDeviceLoader:
    def __init__(self, loader: Iterable[Any], device: str) -> None:
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield tuple(column.to(self.device) for column in batch)
