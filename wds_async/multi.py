"""`MultiLoader`: worker processes without torch's collation, under the name that WebDataset's programs import."""

from __future__ import annotations

from typing import Any

from wds_async.fluid import FluidInterface
from wds_async.loader import WebLoader
from wds_async.pipeline import DataPipeline

__all__ = ["MultiLoader"]


class MultiLoader(DataPipeline, FluidInterface):
    """The items of ``dataset``, made in ``workers`` processes and passed on as they are.

    A `WebLoader` of one item at a time, which needs neither the ZeroMQ package nor files for its sockets: ``nokill``
    and ``prefix`` are accepted and have no effect, since torch's DataLoader ends its workers itself.
    """

    def __init__(
        self,
        dataset: Any,
        workers: int = 4,
        verbose: bool = False,
        nokill: bool = False,
        prefix: str = "/tmp/_multi-",
    ) -> None:
        self.dataset, self.workers, self.verbose = dataset, workers, verbose
        super().__init__(WebLoader(dataset, batch_size=None, num_workers=workers))

    def kill(self) -> None:
        """End the iteration; what workers it has end with it."""
        self.close()
