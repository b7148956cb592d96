"""Folder of a job as a list of shards: its ``finished.json``, or the records of the tasks that are finished so far.

What a job keeps in ``OUT/_wds/JOB/`` is described in `distributed.folder`, which writes it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from wds_async.errors import AccessDenied, ConfigError, ShardNotFound, UrlError
from wds_async.redact import redact
from wds_async.shardlists.document import Document, read, read_all
from wds_async.storage.options import StorageOptions
from wds_async.urls import SHARD_SUFFIXES

__all__ = ["entries_of", "is_job_folder", "read_job"]

logger = logging.getLogger("wds_async")

_FOLDER = re.compile(r"(?:^|/)_wds/[A-Za-z0-9][A-Za-z0-9._-]*/?$")
_RECORD = re.compile(r"/\d{5,}\.json$")
_UP = "../../"
"""From a job's folder to that of its outputs."""


def is_job_folder(name: str) -> bool:
    """Return whether ``name`` is the path or URL of a job's folder, ``…/_wds/JOB``, by its spelling alone."""
    return _FOLDER.search(name) is not None and not name.rstrip("/").lower().endswith(SHARD_SUFFIXES)


def entries_of(outputs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries, in the list of shards, of the ``outputs`` in a record: those that hold samples."""
    return [
        {
            "url": one["url"] if "://" in one["url"] or one["url"].startswith("/") else f"{_UP}{one['url']}",
            "nsamples": one["samples"],
            "filesize": one["bytes"],
            "crc32c": one["crc32c"],
        }
        for one in outputs
        if one["samples"] is not None
    ]


def read_job(name: str, options: StorageOptions) -> Document:
    """Return the list of the shards that the job whose folder is ``name`` has finished; a warning says so where it has
    not finished all. URLs in it are relative to what ``name`` is relative to.

    Raises ShardNotFound where no task is finished or no such job is there, ConfigError for what is none, UrlError or
    AccessDenied where the folder of an unfinished job cannot be listed, and a StorageError where it cannot be read.
    """
    folder = name.rstrip("/")
    try:
        document = read(f"{folder}/finished.json", options, may_be_missing=True)
    except ShardNotFound:
        document = _recorded(folder, options)
    shards = document.data.get("shardlist") if isinstance(document.data, Mapping) else None
    if not isinstance(shards, list):
        raise document.error((), "this is not what a job has written: it holds no `shardlist`")
    if not shards:
        raise document.error((), "this job has written no shards: there is nothing to read")
    out = folder[: folder.rindex("_wds/")]
    return replace(document, data={**document.data, "shardlist": [_relative_to(out, one) for one in shards]}, base="")


def _relative_to(out: str, entry: Any) -> Any:
    """Return an entry with its URL behind ``out``, the folder of the outputs, if it lies there."""
    if isinstance(entry, Mapping) and str(entry.get("url")).startswith(_UP):
        return {**entry, "url": out + entry["url"].removeprefix(_UP)}
    return entry


def _recorded(folder: str, options: StorageOptions) -> Document:
    """Return the list of the shards that the records in ``folder`` name."""
    from wds_async.storage.listing.expand import folder_entries  # noqa: PLC0415 (asyncio)
    from wds_async.storage.registry import locate  # noqa: PLC0415 (the engine)

    shown = redact(folder)
    try:
        entries = folder_entries(f"{folder}/", options=options)
        records = sorted(entry.url for entry in entries if _RECORD.search(entry.url))
    except ShardNotFound:
        records = []
    except (AccessDenied, UrlError) as exn:
        raise type(exn)(
            f"{shown}: this job is not finished, or there is none: the folder holds no finished.json, and it cannot be"
            f" listed for what is finished. {exn}"
        ) from exn
    if not records:
        raise ShardNotFound(
            f"{shown}: no task of this job is finished, or there is no such job: the folder holds neither finished.json"
            " nor a record (00000.json)"
        )
    shards: list[dict[str, Any]] = []
    for record in read_all(records, options):
        try:
            shards += entries_of(record.data["outputs"])
        except (KeyError, TypeError, AttributeError) as exn:
            raise record.error((), f"no record of a task ({type(exn).__name__}: {exn})") from exn
    if not shards:
        raise ConfigError(
            f"{shown}: this job is not finished, and its {len(records)} finished tasks have written no shards"
        )
    logger.warning(
        "%s: this job is not finished: the %d shards of the %d tasks that are finished now are read. Later, and on"
        " other machines, they may be more; the list is the same for all once the job is finished",
        shown,
        len(shards),
        len(records),
    )
    name = folder.rpartition("/")[2]
    trusted = locate(folder, options=options).kind == "local"
    return Document(shown, {"wids_version": 1, "name": name, "shardlist": shards}, trusted=trusted, options=options)
