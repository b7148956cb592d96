"""`NumpyLoader`: batches of numpy arrays without torch, for JAX and others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from wds_async.ahead import Ahead
from wds_async.arguments import check_size
from wds_async.errors import ConfigError, StateError
from wds_async.filters.threads import shared_threads
from wds_async.pipeline import DataPipeline

__all__ = ["NumpyLoader"]

_SAVED_EVERY = 16
_FORMAT = "numpy-loader-1"


class NumpyLoader:
    """Batches of ``dataset`` as numpy arrays, made ahead by threads of this process. torch is never imported.

    ``dataset`` is a `WebDataset` with its stages. Tuples become tuples of columns and dicts become dicts of columns, as
    `batched` collates them; tensors become arrays that share their memory.

    ``batch_size``: samples of a batch; None if the dataset makes batches itself (``.batched(n)``).
    ``drop_last``: a shorter last batch is dropped, for programs that compile one shape.
    ``threads``: the functions of `decode`, `map` and their like run on so many threads. They pay for functions that
    release Python's lock, as decoders of images do.
    ``ahead``: so many batches are made before they are taken (2).

    Each iteration is an epoch. ``state_dict`` is exact, also for batches that were made and not taken; for another
    number of processes see `merge_states`. Raise ConfigError for a dataset that is no pipeline and for numbers below 1.
    """

    def __init__(
        self, dataset: Any, batch_size: int | None = None, *, threads: int = 2, ahead: int = 2, drop_last: bool = False
    ) -> None:
        if not isinstance(dataset, DataPipeline):
            raise ConfigError(f"NumpyLoader reads a WebDataset or pipeline, not a {type(dataset).__name__}")
        made: Any = dataset
        if batch_size is not None:
            made = made.batched(check_size("NumpyLoader", "batch_size", batch_size, at_least=1), partial=not drop_last)
        self.dataset: Any = made
        self.threads = check_size("NumpyLoader", "threads", threads)
        self.ahead = check_size("NumpyLoader", "ahead", ahead, at_least=1)
        self._saved: Mapping[str, Any] | None = None
        self._since = self._again = 0
        self._running: Ahead | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        self.close()
        again, self._again = self._again, 0
        self._saved, self._since = self.dataset.state_dict(), 0
        within = shared_threads(self.threads) if self.threads else contextlib.nullcontext()
        self._running = running = Ahead(self._made, self.ahead, within)
        for state, batch in running:
            if state is not None:
                self._saved, self._since = state, 0
            self._since += 1
            if again:
                again -= 1
                continue
            yield batch
        self._saved, self._since = self.dataset.state_dict(), 0

    def _made(self) -> Iterator[tuple[Mapping[str, Any] | None, Any]]:
        """Yield each batch, with the state of the dataset before it, now and then."""
        batches = iter(self.dataset)
        number = 0
        while True:
            state = self.dataset.state_dict() if number and number % _SAVED_EVERY == 0 else None
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield state, _arrays(batch)
            number += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the last batch that was taken: JSON, like that of a dataset."""
        saved = self.dataset.state_dict() if self._saved is None else self._saved
        return {"format": _FORMAT, "dataset": saved, "since": self._since + self._again}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state`` in the next iteration. StateError for one of something else."""
        if state.get("format") != _FORMAT:
            raise StateError("this is no state of a NumpyLoader; that of a WebLoader goes to a WebLoader")
        self.close()
        self.dataset.load_state_dict(state["dataset"])
        self._saved, self._since, self._again = state["dataset"], 0, int(state["since"])

    def close(self) -> None:
        """End the thread of an iteration that was left."""
        running, self._running = self._running, None
        if running is not None:
            running.close()


def _arrays(value: Any) -> Any:
    """Return ``value`` with its tensors, at any depth, as numpy arrays."""
    if isinstance(value, Mapping):
        return {name: _arrays(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return type(value)(*map(_arrays, value)) if hasattr(value, "_fields") else tuple(map(_arrays, value))
    if isinstance(value, list):
        return [_arrays(one) for one in value]
    is_tensor = type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy")
    return np.asarray(value.detach().cpu()) if is_tensor else value
