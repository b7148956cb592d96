"""Door: the classes of torch that programs import from ``webdataset.pytorch``, looked up when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, IterableDataset

__all__ = ["DataLoader", "IterableDataset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'wds_async.pytorch' has no attribute {name!r}")
    import torch.utils.data  # noqa: PLC0415 (seconds, paid by those who ask)

    return getattr(torch.utils.data, name)
