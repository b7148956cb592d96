"""Samples as a folder of images with ``metadata.jsonl``, which ``load_dataset("imagefolder")`` of Hugging Face reads.

https://huggingface.co/docs/datasets/image_dataset#imagefolder: a line has ``file_name``, the path of an image relative
to the file, and a column for everything else; columns that end with ``_file_name`` are images too.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from wds_async.decoding.images import IMAGE_EXTENSIONS
from wds_async.storage.options import StorageOptions
from wds_async.storage.sink import publish
from wds_async.tools.convert.mapping import KEY, NUMBERS

__all__ = ["METADATA", "row_of", "write_images"]

METADATA = "metadata.jsonl"
_AT_ONCE = 16
_WAITING = 4 * _AT_ONCE
"""Images that wait to be written."""


def write_images(
    rows: Iterable[tuple[Mapping[str, Any], Mapping[str, bytes]]], folder: str, options: StorageOptions
) -> Iterator[bytes]:
    """Write the images of each row below ``folder``, several at once, and yield its line of ``metadata.jsonl``; those
    of the last lines are there when the iteration ends. Raise what writing raises."""
    writing: list[Future[None]] = []
    with ThreadPoolExecutor(_AT_ONCE, "imagefolder") as threads:
        try:
            for line, images in rows:
                for name, data in images.items():
                    writing.append(threads.submit(publish, f"{folder}{name}", data, options))
                while len(writing) > _WAITING:
                    writing.pop(0).result()
                yield json.dumps(line, ensure_ascii=False).encode("utf-8") + b"\n"
            for one in writing:
                one.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def row_of(sample: Mapping[str, Any], fields: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the line of a sample and the bytes of its images by name.

    ``fields``: the column of each field that is wanted; by default all, under their own names. The first image, of a
    field without a dot if there is one, is ``file_name``; the others are ``FIELD_file_name``. ValueError for a sample
    without an image, and for a field that is neither an image, nor JSON, nor text.
    """
    line: dict[str, Any] = {}
    images: dict[str, bytes] = {}
    key = _path_of(sample[KEY])
    chosen = fields or {name: name for name in sample if not name.startswith("__")}
    for field in sorted(chosen, key=lambda field: "." in field):
        if field not in sample:
            raise ValueError(f"there is no field {field!r}; there are {[one for one in sample if one[:2] != '__']}")
        data, suffix = bytes(sample[field]), field.rpartition(".")[2]
        if suffix in IMAGE_EXTENSIONS:
            line["file_name" if not images else f"{chosen[field]}_file_name"] = name = f"{key}.{field}"
            images[name] = data
        else:
            line[chosen[field]] = _value(field, suffix, data)
    if not images:
        raise ValueError("there is no image among its fields")
    return {"file_name": line.pop("file_name"), KEY: sample[KEY], **line}, images


def _path_of(key: str) -> str:
    """Return ``key`` as a path within the folder. ValueError for one that leads out of it."""
    path = posixpath.normpath(key)
    if path != key or path.startswith(("/", "../")) or path in (".", "..") or "\0" in path:
        raise ValueError("its key is no path below a folder: rename the samples, as by wds-async map")
    return path


def _value(field: str, suffix: str, data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
        if suffix in ("json", "jsn"):
            return json.loads(text)
        return int(text) if suffix in NUMBERS else text
    except ValueError:
        raise ValueError(
            f"the field {field!r} is neither an image, JSON, a number nor text: name others by --field"
        ) from None
