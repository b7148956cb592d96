"""Work on many machines: map, reshard and index shards, feed trainers, and Ray Data's source and sink.

This is a door: names are looked up when they are first used (PEP 562). Ray and Dask are imported by the engines of
these names only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wds_async.distributed import raydata as raydata
    from wds_async.distributed.engines.dask import DaskEngine as DaskEngine
    from wds_async.distributed.engines.ray import RayEngine as RayEngine
    from wds_async.distributed.feed.feed import Feed as Feed
    from wds_async.distributed.feed.loader import FeedError as FeedError
    from wds_async.distributed.feed.loader import FeedLoader as FeedLoader
    from wds_async.distributed.folder import JobFolder as JobFolder
    from wds_async.distributed.indexing import index as index
    from wds_async.distributed.jobs import Job as Job
    from wds_async.distributed.mapping import map_shards as map_shards
    from wds_async.distributed.progress import JobProgress as JobProgress
    from wds_async.distributed.progress import JobStatus as JobStatus
    from wds_async.distributed.progress import JobSummary as JobSummary
    from wds_async.distributed.reopening import reopened as reopened
    from wds_async.distributed.resharding import ReshardJob as ReshardJob
    from wds_async.distributed.resharding import reshard as reshard

_HOMES = {
    "engines.dask": "DaskEngine",
    "engines.ray": "RayEngine",
    "feed.feed": "Feed",
    "feed.loader": "FeedError FeedLoader",
    "folder": "JobFolder",
    "indexing": "index",
    "jobs": "Job",
    "mapping": "map_shards",
    "progress": "JobProgress JobStatus JobSummary",
    "reopening": "reopened",
    "resharding": "ReshardJob reshard",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}
_ROOMS = ("raydata",)

__all__ = sorted((*_MODULES, *_ROOMS))  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
