"""The optimizer's step."""

from __future__ import annotations

from typing import Any


def optimizer_step(optimizer: Any) -> None:
    optimizer.step()
