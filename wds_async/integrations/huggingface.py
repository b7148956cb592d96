"""Hugging Face ``datasets``: ours as theirs, and theirs as samples."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from wds_async import packages
from wds_async.dataset import WebDataset
from wds_async.storage.listing.expand import Urls, expand_listed

__all__ = ["from_huggingface", "to_huggingface"]

_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "TIFF": "tif", "BMP": "bmp"}


def to_huggingface(urls: Urls, *, decode: Any = None, features: Any = None, **options: Any) -> Any:
    """Return a ``datasets.IterableDataset`` of the samples of the shards ``urls``: a column for each field.

    It has a shard for each of ours, so workers of a DataLoader and ``split_dataset_by_node`` share them out, and it
    resumes as ``datasets`` does: at the beginning of a shard, from which it skips. ``decode`` is an image specification
    or handler for `WebDataset.decode`, True for the rest of the fields only; None leaves bytes. ``features``:
    ``datasets.Features``, where the columns' types are not to be guessed. ``options`` are those of `WebDataset`.
    MissingExtra without ``datasets``.
    """
    package = packages.optional("datasets", "to_huggingface", "huggingface")
    generate = functools.partial(_rows, decode=decode, options=options)
    return package.IterableDataset.from_generator(generate, features, gen_kwargs={"shards": expand_listed(urls)})


def _rows(shards: list[str], decode: Any, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = {"shardshuffle": False, "nodesplitter": None, "workersplitter": None, "empty_check": False, **options}
    dataset: Any = WebDataset(shards, **given)
    if decode is not None:
        dataset = dataset.decode() if decode is True else dataset.decode(decode)
    for sample in dataset:
        yield dict(sample)


def from_huggingface(dataset: Iterable[Mapping[str, Any]], key: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a ``datasets.Dataset`` or ``IterableDataset`` as samples, for pipelines and `ShardWriter`.

    A column is a field, and images become files in their own format (PNG where they have none), with its extension
    behind the column's name. Texts, numbers and others stay values, which writers encode by the field's name: rename
    columns to end in ``txt``, ``cls``, ``json``. ``key`` is the column of the keys; None: ``__key__``, else the number
    of the row with nine digits.
    """
    for number, row in enumerate(dataset):
        name = row.get(key or "__key__", f"{number:09d}")
        fields = dict(_field(column, value) for column, value in row.items() if not column.startswith("__"))
        yield {"__key__": str(name), **fields}


def _field(column: str, value: Any) -> tuple[str, Any]:
    """Return the name of the field, and its value: the bytes of an image."""
    if isinstance(value, Mapping) and value.get("bytes") and "path" in value:  # not decoded
        extension = str(value["path"] or "").rpartition(".")[2].lower()
        return (f"{column}.{extension}" if extension else column), value["bytes"]
    if hasattr(value, "save") and hasattr(value, "mode"):  # an image of Pillow
        form = value.format if value.format in _EXTENSIONS else "PNG"
        stream = io.BytesIO()
        value.save(stream, form)
        return f"{column}.{_EXTENSIONS[form]}", stream.getvalue()
    return column, value
