"""Shards as Arrow record batches, for Daft, Polars, DuckDB and everything else that reads Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wds_async.distributed.outputs import bytes_of
from wds_async.distributed.plan import planned
from wds_async.distributed.raydata.blocks import BlockOptions, read_blocks
from wds_async.storage.listing.expand import Urls
from wds_async.storage.options import StorageOptions

__all__ = ["arrow_batches"]


def arrow_batches(
    urls: Urls,
    *,
    fields: Sequence[str] | None = None,
    batch_bytes: float | str = "16M",
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Yield the samples of the shards ``urls`` as ``pyarrow.RecordBatch``, one after another, read ahead.

    A row is a sample, with the columns ``__key__``, ``__url__``, ``__offset__`` and a binary one for each field; a
    field that a sample lacks is null.
    ``fields``: only these columns, in this order, so that all batches have one schema; else those of its samples.
    ``batch_bytes``: the most bytes of a batch of more than one row.
    ``options``: ``handler``, ``on_corrupt``, ``verify`` and others of `BlockOptions`, as for `WebDataset`.

    The bytes are copied once, from the tar. Raise what reading raises, and MissingExtra without pyarrow.
    """
    storage = StorageOptions(storage_options)
    chosen = BlockOptions(
        bytes_of(batch_bytes, "batch_bytes"),
        None if fields is None else tuple(fields),
        storage=storage,
        **options,
    )
    chosen.check()
    infos = [{"url": one.url} | ({"version": one.version} if one.version else {}) for one in planned(urls, storage)]
    for table in read_blocks(infos, chosen):
        yield from table.to_batches()
