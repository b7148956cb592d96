"""`WebLoader`: torch's DataLoader as the source of a pipeline."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

from wds_async import config, lengths, shared_batches, world
from wds_async.equalsteps import in_step
from wds_async.errors import ConfigError, MissingExtra
from wds_async.fluid import FluidInterface
from wds_async.misuse import warn_of_batches_twice, warn_of_uneven_ranks
from wds_async.pipeline import DataPipeline, epochs_of
from wds_async.transfer.stats import Board, Counters

__all__ = ["WebLoader"]

_LEAVES_WITHIN_S = 1.0


class WebLoader(DataPipeline, FluidInterface):
    """A ``torch.utils.data.DataLoader`` made of these arguments, with the fluent methods behind it.

    Usual is ``WebLoader(dataset.batched(n), batch_size=None, num_workers=w)``: the batches are made in the
    workers, and ``.unbatched().shuffle(1000).batched(n)`` mixes samples of several of them. `with_epoch` counts
    batches here, of all workers together.

    Where there are workers, on Linux, large bytes, arrays and tensors of a batch come through memory that is used
    again (see `handover`), not through torch's queue: ``WDS_HANDOVER=0`` turns that off.

    ``len`` is the number given to `with_length`, else to `with_epoch`, else the DataLoader's own where no stage
    follows it (its dataset needs a length then); TypeError otherwise. Raises MissingExtra where torch is not
    installed.
    """

    def __init__(self, *args: Any, **kw: Any) -> None:
        try:
            from torch.utils.data import DataLoader  # noqa: PLC0415 (seconds, paid by those who load)
        except ModuleNotFoundError as exn:
            raise MissingExtra('WebLoader needs torch: pip install "wds-async[torch]"') from exn
        loader = DataLoader(*args, **kw)
        if loader.num_workers and config.settings().handover and shared_batches.possible():
            loader.collate_fn = shared_batches.Handover(loader.collate_fn)
        warn_of_batches_twice(loader.dataset, loader.batch_size)
        dataset: Any = loader.dataset
        if getattr(dataset, "equal_steps", None) is not None:
            dataset.leave_steps_to_loader()
        super().__init__(loader)
        self.all_ranks = self.continues = False
        self._stream: Iterator[Any] | None = None
        self._pid = os.getpid()

    def with_epoch(
        self, nsamples: int = -1, nbatches: int = -1, *, all_ranks: bool = False, continue_stream: bool = False
    ) -> Self:
        """End each iteration after ``nsamples`` batches of all workers together, starting the workers again when they
        end earlier. Changes this object and returns it. A number below 1 sets no end.

        With ``all_ranks`` it is the number of the whole job: each rank gets its share, rounded down, so that all have
        as many. ConfigError, when it is iterated, for less than one batch a rank.

        By default every iteration begins the next epoch of the dataset; batches that the workers had ready when the
        last one ended are lost. With ``continue_stream`` it goes on where the last one ended, also where the loop was
        left early, through all of the data before any comes again: the workers stay, with what they have ready. Then
        `set_epoch` sets the number of the next pass over the data, and does not end the one that is under way; an
        error, and `close`, end it. Two iterations at once share one stream.
        """
        super().with_epoch(nsamples, nbatches)
        self.all_ranks, self.continues = all_ranks, continue_stream
        self._end_stream()
        return self

    def _epoch_length(self) -> int:
        if not self.all_ranks or self.nsamples < 1:
            return self.nsamples
        ranks = world.place().world_size
        if self.nsamples < ranks:
            raise ConfigError(
                f"with_epoch({self.nsamples}, all_ranks=True): there are {ranks} ranks, and each needs one batch"
            )
        return self.nsamples // ranks

    def iterator(self) -> Iterator[Any]:
        """Run the stages ``repetitions`` times; where the stream continues, go on in it."""
        if not self.continues:
            return super().iterator()
        if self._stream is None or self._pid != os.getpid():  # after a fork, what is open is the parent's
            self._stream, self._pid = super().iterator(), os.getpid()
        return _Continued(self)

    def _next_of_stream(self) -> Any:
        """Return the next batch of the stream that continues; after its end or an error the next one begins anew."""
        if self._stream is None:
            raise StopIteration
        try:
            return next(self._stream)
        except BaseException:
            self._stream = None
            raise

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if callable(close := getattr(stream, "close", None)):
            close()

    def close(self) -> None:
        """Close every stage that can be closed, and end the workers of a stream that continues. Idempotent."""
        self._end_stream()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stream": None}  # a copy begins a stream of its own

    def _check_use(self) -> None:
        warn_of_uneven_ranks(self)

    def iterator1(self) -> Iterator[Any]:
        """Run the workers once; they start now. Where the dataset has ``equal``, to as many batches as other ranks."""
        loader, run = self.pipeline[0], super().iterator1
        equal = getattr(loader.dataset, "equal_steps", None)
        if equal is None or equal.steps is not None or not loader.num_workers:  # else the dataset sees to it
            return _sweeping(run())
        return in_step(lambda: _sweeping(run()), equal, self._rewind)

    def _rewind(self) -> None:
        """Make the next run of the workers that of the same epoch."""
        for counter in epochs_of(self.pipeline[0].dataset.pipeline):
            counter.set(counter.latest() - 1)

    def invoke(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of stage ``f``. Where a DataLoader's is left early, workers that have not ended within a
        second (they wait for bytes, or are in the user's function) are terminated; torch gives each 5 s."""
        output = super().invoke(f, *args, **kwargs)
        workers = getattr(output, "_workers", None)
        if not workers:
            return output
        timed = _Timed(output, _counters_of(f.dataset))
        return timed if getattr(f, "persistent_workers", False) else _left_soon(timed, workers)

    def __len__(self) -> int:
        if self.size is None and self.repetitions == sys.maxsize and (length := self._epoch_length()) > 0:
            return length  # an epoch of `with_epoch` is cut to it, and filled by starting again
        if self.size is None and self.repetitions == 1:
            received = lengths.through(_received(self.pipeline[0]), self.pipeline[1:])
            if received is not None:
                return received.total
        return super().__len__()


def _sweeping(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from batches
    finally:
        shared_batches.sweep()


class _Continued(Iterator[Any]):
    """The stream of ``loader`` from where it is. An iterator over it that is closed leaves the stream open."""

    def __init__(self, loader: WebLoader) -> None:
        self._loader = loader

    def __next__(self) -> Any:
        return self._loader._next_of_stream()


class _Timed(Iterator[Any]):
    """``batches``, with the time spent waiting for them, and between them. The first one, which waits for the workers
    to start, is not counted. No batch is kept: its memory is used again when the program lets go of it."""

    def __init__(self, batches: Iterator[Any], counters: Counters) -> None:
        self._batches = batches
        self._counters = counters
        self._gave_at = 0.0

    def __next__(self) -> Any:
        asked_at, gave_at = time.monotonic(), self._gave_at
        batch = next(self._batches)
        self._gave_at = now = time.monotonic()
        self._counters.add("batches")
        if gave_at:
            self._counters.add("consumer_s", asked_at - gave_at)
            self._counters.add("starved_s", now - asked_at)
        return batch


def _counters_of(dataset: Any) -> Counters:
    """Those of the first stage that reads shards; unused ones where there is none."""
    for stage in getattr(dataset, "pipeline", ()):
        board = getattr(stage, "board", None)
        if isinstance(board, Board):
            return board.aside()
        for source in getattr(stage, "datasets", ()):
            return _counters_of(source)
    return Counters()


def _left_soon(batches: Iterator[Any], workers: Sequence[Any]) -> Iterator[Any]:
    ended = False
    try:
        yield from batches
        ended = True
    finally:
        if not ended and not sys.is_finalizing():  # then no thread starts any more, and the workers are terminated
            # While torch joins one after the other.
            threading.Thread(target=_end, args=(list(workers),), name="leave-workers", daemon=True).start()


def _end(workers: Sequence[Any]) -> None:
    from multiprocessing.connection import wait  # noqa: PLC0415 (loaded where there are workers)

    deadline = time.monotonic() + _LEAVES_WITHIN_S
    running = {worker.sentinel: worker for worker in workers}
    while running and (left_s := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(running), left_s):
            del running[sentinel]
    for worker in running.values():
        worker.terminate()


def _received(loader: Any) -> lengths.Length | None:
    """The length of a DataLoader; None where its dataset has none."""
    dataset = loader.dataset
    if not isinstance(dataset, DataPipeline) or dataset.size is not None:
        try:
            return lengths.Length(len(loader), (len(loader),))
        except TypeError:
            return None
    known = dataset.repetitions == 1 and getattr(dataset, "equal_steps", None) is None
    length = lengths.of(dataset.pipeline, max(1, loader.num_workers)) if known else None
    if length is None:
        return None
    if loader.batch_size is None:
        return lengths.Length(length.total, (length.total,), length.in_batches and (sum(length.in_batches),))
    collate = getattr(loader.collate_fn, "collate_fn", loader.collate_fn)  # `Handover` is around it
    whole = getattr(collate, "__module__", "").startswith("torch.")
    return lengths.batched(length, loader.batch_size, partial=not loader.drop_last, whole=whole)
