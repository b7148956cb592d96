"""Ordinal and world size, which start the runtime where they are asked first."""

from __future__ import annotations

import torch_xla


def global_ordinal() -> int:
    if torch_xla.ordinal is None:
        torch_xla.ordinal = 0
    return torch_xla.ordinal


def world_size() -> int:
    global_ordinal()
    return torch_xla.CORES
