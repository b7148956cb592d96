"""NVIDIA DALI: raw samples for ``fn.external_source``. DALI itself is not imported."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from wds_async.arguments import check_size
from wds_async.dataset import WebDataset
from wds_async.errors import ConfigError
from wds_async.pipeline import DataPipeline

__all__ = ["dali_source"]


def dali_source(
    source: Any, fields: str | Sequence[str] = ("jpg", "cls"), batch_size: int = 64, **options: Any
) -> DataPipeline:
    """Return the iterable of batches for ``fn.external_source(source, num_outputs=len(fields), cycle="raise")``.

    ``source`` is a dataset whose samples are dicts, or the URLs of one, with the ``options`` of `WebDataset`: then
    texts, numbers and arrays are decoded, and other fields stay bytes. ``fields`` are names, as a list or separated by
    blanks, as in `to_tuple`.

    A batch is a tuple of lists, one a field, of ``batch_size`` numpy arrays; the last one of an epoch may be shorter.
    Bytes and texts are arrays of uint8, for DALI's decoders; numbers are arrays of shape (1,), int64 or float32. The
    arrays of bytes are read-only and copied by DALI.

    Each ``iter()`` is an epoch, so that with ``cycle="raise"`` a reset of the pipeline begins the next one. DALI calls
    the source in the program's process: leave ``parallel`` at its default; the engine reads ahead. Raises ConfigError
    where a field has values of another type.
    """
    names = fields.split() if isinstance(fields, str) else list(fields)
    size = check_size("dali_source", "batch_size", batch_size, at_least=1)
    if isinstance(source, DataPipeline):
        if options:
            raise ConfigError(f"dali_source: {', '.join(options)} of a dataset: give them to the dataset")
        dataset: Any = source
    else:
        dataset = WebDataset(source, **options).decode(partial=True)
    batches: DataPipeline = dataset.to_tuple(*names).batched(size, collation_fn=functools.partial(_columns, names))
    return batches


def _columns(names: list[str], samples: list[tuple[Any, ...]]) -> tuple[list[Any], ...]:
    """Return the samples of a batch as a list of arrays for each of the fields ``names``."""
    return tuple(
        [_array(name, value) for value in column]
        for name, column in zip(names, zip(*samples, strict=True), strict=True)
    )


def _array(name: str, value: Any) -> Any:
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, (bool, int, np.integer)):
        return np.array([value], np.int64)
    if isinstance(value, (float, np.floating)):
        return np.array([value], np.float32)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value
    raise ConfigError(
        f"dali_source: field {name!r} is a {type(value).__name__}; DALI takes bytes, texts, numbers and numpy arrays: "
        "make one of them by dataset.map_dict(…) before"
    )
