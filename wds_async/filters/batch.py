"""Batches: many samples as one, and one as many."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from wds_async import batch_memory, packages
from wds_async.arguments import check_size, function, size
from wds_async.checkpoint.states import Rest
from wds_async.stages import Traits, pipelinefilter
from wds_async.tracebacks import located

__all__ = ["batched", "default_collation_fn", "record_batches", "tree_collation_fn", "unbatched", "unlisted"]


def _combine(path: tuple[Any, ...], values: list[Any], combine_tensors: bool, combine_scalars: bool) -> Any:
    import numpy as np  # noqa: PLC0415 (only where batches are made)

    first = values[0]
    if isinstance(first, (int, float)):
        return np.array(values) if combine_scalars else values
    torch = packages.loaded("torch")
    tensor = torch is not None and isinstance(first, torch.Tensor)
    if not combine_tensors or not (tensor or isinstance(first, np.ndarray)):
        return values
    shapes = {tuple(v.shape) if hasattr(v, "shape") else type(v).__name__ for v in values}
    if len(shapes) > 1:
        raise AssertionError(
            f"{_field(path)}: all shapes must be equal in a batch, got {sorted(shapes, key=str)}; resize or pad before "
            "batching, or pass collation_fn=None (lists of samples) or a function of your own"
        )
    memory = batch_memory.empty(len(values) * first.nbytes) if _are_plain(values) else None
    if memory is None:
        return torch.stack(values) if torch is not None and tensor else np.stack(values)
    shape = (len(values), *first.shape)
    if torch is None or not tensor:
        return np.stack(values, out=np.frombuffer(memory, first.dtype).reshape(shape))
    return torch.stack(values, out=torch.frombuffer(memory, dtype=first.dtype).view(shape))


def _are_plain(values: list[Any]) -> bool:
    """Return whether ``values`` are arrays or tensors of one type that can be stacked into given memory."""
    first, torch = values[0], packages.loaded("torch")
    if any(type(v) is not type(first) or v.dtype != first.dtype for v in values):
        return False
    if torch is None or type(first) is not torch.Tensor:
        return type(first).__name__ == "ndarray" and not first.dtype.hasobject
    return first.layout == torch.strided and not any(
        v.device.type != "cpu" or v.requires_grad or v.is_quantized or v.is_conj() or v.is_neg() for v in values
    )


def _field(path: tuple[Any, ...]) -> str:
    """Return ``field 'meta.box'`` for the path ``("meta", "box")``."""
    return f"field {path[0]!r}" if len(path) == 1 else f"field {'.'.join(map(str, path))!r}"


def _transposed(samples: Sequence[Any], path: tuple[Any, ...] = ()) -> dict[Any, list[Any]]:
    """Return columns by name (dicts) or number (tuples, lists). AssertionError where they differ between samples."""
    first, where = samples[0], f"{_field(path)}: " if path else ""
    if isinstance(first, dict):
        if any(s.keys() != first.keys() for s in samples):
            shown = sorted({tuple(s) for s in samples}, key=str)
            raise AssertionError(f"{where}fields differ between samples of a batch: {shown}")
        return {k: [s[k] for s in samples] for k in first}
    if any(len(s) != len(first) for s in samples):
        raise AssertionError(f"{where}samples of a batch differ in length: {sorted({len(s) for s in samples})}")
    return dict(enumerate(map(list, zip(*samples, strict=True))))


def default_collation_fn(samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Return one batch of several samples: a dict of columns for dicts, a tuple of columns for tuples and lists.

    A column of int, float or bool becomes a numpy array (``combine_scalars``), one of arrays or tensors of one shape
    gains a first axis (``combine_tensors``), any other is a list, one of dicts too (see `tree_collation_fn`).
    AssertionError, naming the field, where shapes or fields differ.
    """
    return _collated(samples, (), (), combine_tensors, combine_scalars)


def tree_collation_fn(samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Collate like `default_collation_fn`, but go into dicts and tuples inside samples: a column of dicts with the same
    fields becomes a dict of columns, one of tuples of the same length a tuple of columns. Lists stay values.

    For ``batched(16, collation_fn=tree_collation_fn)``; `unbatched` takes apart dicts in dicts again. AssertionError,
    naming the field's path (``'meta.box'``), where shapes, fields or lengths differ.
    """
    return _collated(samples, (), (dict, tuple), combine_tensors, combine_scalars)


def _collated(samples: Sequence[Any], path: tuple[Any, ...], nested: tuple[type, ...], *combine: bool) -> Any:
    """Collate ``samples``, columns of the types ``nested`` in turn."""
    batch = {
        k: _collated(column, (*path, k), nested, *combine)
        if isinstance(column[0], nested) and all(isinstance(v, type(column[0])) for v in column)
        else _combine((*path, k), column, *combine)
        for k, column in _transposed(samples, path).items()
    }
    return batch if isinstance(samples[0], dict) else tuple(batch.values())


def _batched(
    data: Iterable[Any],
    batchsize: int = 20,
    collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
    partial: bool = True,
) -> Iterator[Any]:
    """Collate ``batchsize`` samples at a time to columns; ``partial=False`` drops a shorter last batch.

    Tuples become a tuple of columns, dicts a dict of columns: numbers as a numpy array, arrays and tensors stacked
    (AssertionError where their shapes differ), everything else as a list (see `default_collation_fn`).
    ``collation_fn(samples)`` does it otherwise; None gives the list of samples. ConfigError for a ``batchsize``
    below 1; a fraction is rounded up.
    """
    batchsize = check_size("batched", "batchsize", batchsize, at_least=1)
    source = iter(data)
    while batch := list(itertools.islice(source, batchsize)):
        if len(batch) == batchsize or partial:
            yield collate(batch, collation_fn)


def collate(batch: list[Any], collation_fn: Callable[[list[Any]], Any] | None, stage: str = "batched") -> Any:
    """Return ``collation_fn(batch)``, the list itself where that is None. Errors have a note of ``stage``."""
    try:
        return batch if collation_fn is None else collation_fn(batch)
    except Exception as exn:
        located(exn, f"{stage}, {len(batch)} samples of which this is the first", batch[0])
        raise


def _count(n: int, batchsize: int = 20, collation_fn: Any = None, partial: bool = True) -> int:
    return -(-n // batchsize) if partial else n // batchsize


def _samples_in_batches(
    n: int, batchsize: int = 20, collation_fn: Any = default_collation_fn, partial: bool = True
) -> int | None:
    """Return the samples in the batches of ``n``; None where a program's own collation may change the number."""
    if collation_fn not in (None, default_collation_fn):
        return None
    return n if partial else n // batchsize * batchsize


batched = pipelinefilter(
    _batched,
    {"batchsize": size(at_least=1), "collation_fn": function(optional=True)},
    Traits(count=_count, batches=_samples_in_batches, state=True),
)


def _unlisted(data: Iterable[Iterable[Any]], *, state: Rest | None = None) -> Iterator[Any]:
    """Yield the samples of lists of samples one by one."""
    return _one_by_one(_lists(data), state or Rest())


def _one_by_one(batches: Iterable[Iterable[Any]], state: Rest) -> Iterator[Any]:
    """Yield the items of each of ``batches``, those that are left of the first one in ``state``."""
    yield from state.rest()
    for batch in batches:
        state.hold(batch)
        yield from state.rest()


def _lists(data: Iterable[Iterable[Any]]) -> Iterator[Iterable[Any]]:
    for batch in data:
        if not isinstance(batch, (list, tuple)):
            raise ValueError(f"unlisted takes lists of samples, got a {type(batch).__name__}")
        yield batch


unlisted = pipelinefilter(_unlisted, traits=Traits(takes_batches=True, state=Rest))


def _unbatched(data: Iterable[Any], *, state: Rest | None = None) -> Iterator[Any]:
    """Yield the single samples of batches, the reverse of `batched`.

    A batch is a tuple or dict of columns, each of which is taken apart along its first axis; a column that is a
    dict of columns itself gives dicts. ValueError, naming the lengths, where the columns of a batch differ in
    length.
    """
    return _one_by_one(map(_samples_of, data), state or Rest())


def _samples_of(batch: Any) -> Iterable[Any]:
    if isinstance(batch, dict):
        return _rows(batch)
    if not isinstance(batch, (list, tuple)):
        raise ValueError(f"unbatched takes tuples or dicts of columns, got a {type(batch).__name__}")
    return zip(*_columns(dict(enumerate(batch))), strict=True)


def _rows(batch: dict[Any, Any]) -> list[dict[Any, Any]]:
    columns = _columns(batch)
    rows: list[dict[Any, Any]] = [{} for _ in columns[0]] if columns else []
    for name, column in zip(batch, columns, strict=True):
        for row, value in zip(rows, column, strict=True):
            row[name] = value
    return rows


def _columns(batch: dict[Any, Any]) -> list[Any]:
    columns = [_rows(c) if isinstance(c, dict) else c for c in batch.values()]
    try:
        lengths = [len(c) for c in columns]
    except TypeError as exn:
        kinds = {k: type(c).__name__ for k, c in zip(batch, columns, strict=True)}
        raise ValueError(f"unbatched: a column of a batch has no length: {kinds}") from exn
    if len(set(lengths)) > 1:
        shown = dict(zip(batch, lengths, strict=True))
        raise ValueError(f"unbatched: the columns of a batch differ in length: {shown}")
    return columns


unbatched = pipelinefilter(_unbatched, traits=Traits(takes_batches=True, state=Rest))


def record_batches(samples: Iterable[Mapping[str, Any]], batchsize: int, schema: Any = None) -> Iterator[Any]:
    """Yield ``samples`` as ``pyarrow.RecordBatch`` of ``batchsize`` rows. See `FluidInterface.to_arrow_batches`."""
    arrow = packages.optional("pyarrow", "to_arrow_batches", "arrow")
    size = check_size("to_arrow_batches", "batchsize", batchsize, at_least=1)
    rows = iter(samples)
    while batch := list(itertools.islice(rows, size)):
        names = schema.names if schema is not None else list(dict.fromkeys(itertools.chain.from_iterable(batch)))
        columns = {name: [_without_dimensions(row.get(name)) for row in batch] for name in names}
        yield arrow.RecordBatch.from_pydict(columns, schema=schema)


def _without_dimensions(value: Any) -> Any:
    """Return an array of several dimensions, a numpy number or a tensor as what Arrow takes: lists, numbers."""
    return value.tolist() if hasattr(value, "tolist") and getattr(value, "ndim", 0) != 1 else value
