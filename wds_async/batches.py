"""Batches: many samples as one, and one as many."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from wds_async.pipeline import pipelinefilter

__all__ = ["batched", "default_collation_fn", "unbatched", "unlisted"]


def _combine(name: Any, values: list[Any], combine_tensors: bool, combine_scalars: bool) -> Any:
    first = values[0]
    if isinstance(first, (int, float)):
        return np.array(values) if combine_scalars else values
    torch = sys.modules.get("torch")
    tensor = torch is not None and isinstance(first, torch.Tensor)
    if not combine_tensors or not (tensor or isinstance(first, np.ndarray)):
        return values
    shapes = {tuple(v.shape) for v in values}
    if len(shapes) > 1:
        raise AssertionError(
            f"field {name!r}: all shapes must be equal in a batch, got {sorted(shapes)}; resize, or pass collation_fn"
        )
    return torch.stack(values) if torch is not None and tensor else np.stack(values)


def default_collation_fn(samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """One batch of several samples: a dict of columns for dicts, a tuple of columns for tuples and lists.

    A column of int, float or bool becomes a numpy array (``combine_scalars``), one of arrays or tensors of one shape
    gains a first axis (``combine_tensors``), any other is a list. AssertionError where shapes or fields differ.
    """
    first = samples[0]
    if isinstance(first, dict):
        if any(s.keys() != first.keys() for s in samples):
            raise AssertionError(f"fields differ between samples of a batch: {sorted({tuple(s) for s in samples})}")
        return {k: _combine(k, [s[k] for s in samples], combine_tensors, combine_scalars) for k in first}
    if any(len(s) != len(first) for s in samples):
        raise AssertionError(f"samples of a batch differ in length: {sorted({len(s) for s in samples})}")
    columns = zip(*samples, strict=True)
    return tuple(_combine(i, list(c), combine_tensors, combine_scalars) for i, c in enumerate(columns))


def _batched(
    data: Iterable[Any],
    batchsize: int = 20,
    collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
    partial: bool = True,
) -> Iterator[Any]:
    """``batchsize`` samples at a time through ``collation_fn`` (None: lists); ``partial`` keeps a short last one."""
    source = iter(data)
    while batch := list(itertools.islice(source, batchsize)):
        if len(batch) == batchsize or partial:
            yield batch if collation_fn is None else collation_fn(batch)


batched = pipelinefilter(_batched)


def _unlisted(data: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """The samples of lists of samples."""
    for batch in data:
        if not isinstance(batch, (list, tuple)):
            raise ValueError(f"unlisted takes lists of samples, got a {type(batch).__name__}")
        yield from batch


unlisted = pipelinefilter(_unlisted)


def _unbatched(data: Iterable[Any]) -> Iterator[Any]:
    """The samples of batches: tuples or dicts whose values are indexed along their first axis.

    ValueError, naming the lengths, where the columns of a batch differ in length.
    """
    for batch in data:
        if isinstance(batch, dict):
            names, columns = list(batch), list(batch.values())
        elif isinstance(batch, (list, tuple)):
            names, columns = [], list(batch)
        else:
            raise ValueError(f"unbatched takes tuples or dicts of columns, got a {type(batch).__name__}")
        lengths = [len(c) for c in columns]
        if len(set(lengths)) > 1:
            shown = dict(zip(names or range(len(columns)), lengths, strict=True))
            raise ValueError(f"unbatched: the columns of a batch differ in length: {shown}")
        for i in range(lengths[0] if lengths else 0):
            row = [c[i] for c in columns]
            yield dict(zip(names, row, strict=True)) if names else tuple(row)


unbatched = pipelinefilter(_unbatched)
