"""`WebLoader`: torch's DataLoader as the source of a pipeline."""

from __future__ import annotations

import sys
from typing import Any

from wds_async.errors import MissingExtra
from wds_async.fluid import FluidInterface
from wds_async.pipeline import DataPipeline

__all__ = ["WebLoader"]


class WebLoader(DataPipeline, FluidInterface):
    """A ``torch.utils.data.DataLoader`` made of these arguments, with the fluent methods behind it.

    Usual is ``WebLoader(dataset.batched(n), batch_size=None, num_workers=w)``: the batches are made in the
    workers, and ``.unbatched().shuffle(1000).batched(n)`` mixes samples of several of them. `with_epoch` counts
    batches here, of all workers together.

    ``len`` is the number given to `with_length`, else to `with_epoch`, else the DataLoader's own where no stage
    follows it (its dataset needs a length then); TypeError otherwise. Raises MissingExtra where torch is not
    installed.
    """

    def __init__(self, *args: Any, **kw: Any) -> None:
        try:
            from torch.utils.data import DataLoader  # noqa: PLC0415 (seconds, paid by those who load)
        except ModuleNotFoundError as exn:
            raise MissingExtra('WebLoader needs torch: pip install "wds-async[torch]"') from exn
        super().__init__(DataLoader(*args, **kw))

    def __len__(self) -> int:
        if self.size is None and self.repetitions == sys.maxsize and self.nsamples > 0:
            return self.nsamples  # an epoch of `with_epoch` is cut to it, and filled by starting again
        if self.size is None and self.repetitions == 1 and len(self.pipeline) == 1:
            return len(self.pipeline[0])
        return super().__len__()
