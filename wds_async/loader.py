"""`WebLoader`: torch's DataLoader as the source of a pipeline."""

from __future__ import annotations

from typing import Any

from wds_async.dataset import FluidInterface
from wds_async.errors import MissingExtra
from wds_async.pipeline import DataPipeline

__all__ = ["WebLoader"]


class WebLoader(DataPipeline, FluidInterface):
    """A ``torch.utils.data.DataLoader`` made of these arguments, with the fluent methods behind it.

    Usual is ``WebLoader(dataset.batched(n), batch_size=None, num_workers=w)``: the batches are made in the
    workers, and ``.unbatched().shuffle(1000).batched(n)`` mixes samples of several of them. `with_epoch` counts
    batches here, of all workers together. Raises MissingExtra where torch is not installed.
    """

    def __init__(self, *args: Any, **kw: Any) -> None:
        try:
            from torch.utils.data import DataLoader  # noqa: PLC0415 (seconds, paid by those who load)
        except ModuleNotFoundError as exn:
            raise MissingExtra('WebLoader needs torch: pip install "wds-async[torch]"') from exn
        super().__init__(DataLoader(*args, **kw))
