"""wds_async: a drop-in for WebDataset with an asyncio engine. ``import wds_async as wds``.

This is a door: names are looked up when they are first used (PEP 562), so that importing the package imports
neither torch nor numpy nor any cloud's client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wds_async import tenbin as tenbin
    from wds_async import utils as utils
    from wds_async.asyncreader import AsyncReader as AsyncReader
    from wds_async.autodecode import Continue as Continue
    from wds_async.autodecode import Decoder as Decoder
    from wds_async.autodecode import gzfilter as gzfilter
    from wds_async.autodecode import handle_extension as handle_extension
    from wds_async.autodecode import imagehandler as imagehandler
    from wds_async.dataset import WebDataset as WebDataset
    from wds_async.errors import DecodingError as DecodingError
    from wds_async.errors import WdsError as WdsError
    from wds_async.fluid import FluidInterface as FluidInterface
    from wds_async.fluid import FluidWrapper as FluidWrapper
    from wds_async.filters import Cached as Cached
    from wds_async.filters import associate as associate
    from wds_async.filters import batched as batched
    from wds_async.filters import decode as decode
    from wds_async.filters import default_collation_fn as default_collation_fn
    from wds_async.filters import detshuffle as detshuffle
    from wds_async.filters import extract_keys as extract_keys
    from wds_async.filters import getfirst as getfirst
    from wds_async.filters import info as info
    from wds_async.filters import log_keys as log_keys
    from wds_async.filters import map as map
    from wds_async.filters import map_dict as map_dict
    from wds_async.filters import map_tuple as map_tuple
    from wds_async.filters import rename as rename
    from wds_async.filters import rename_keys as rename_keys
    from wds_async.filters import rsample as rsample
    from wds_async.filters import select as select
    from wds_async.filters import shuffle as shuffle
    from wds_async.filters import slice as slice
    from wds_async.filters import to_tuple as to_tuple
    from wds_async.filters import transform_with as transform_with
    from wds_async.filters import unbatched as unbatched
    from wds_async.filters import unlisted as unlisted
    from wds_async.handlers import ignore_and_continue as ignore_and_continue
    from wds_async.handlers import ignore_and_stop as ignore_and_stop
    from wds_async.handlers import reraise_exception as reraise_exception
    from wds_async.handlers import warn_and_continue as warn_and_continue
    from wds_async.handlers import warn_and_stop as warn_and_stop
    from wds_async.loader import WebLoader as WebLoader
    from wds_async.pipeline import DataPipeline as DataPipeline
    from wds_async.pipeline import PipelineStage as PipelineStage
    from wds_async.pipeline import pipelinefilter as pipelinefilter
    from wds_async.shardlists import ResampledShards as ResampledShards
    from wds_async.shardlists import SimpleShardList as SimpleShardList
    from wds_async.shardlists import non_empty as non_empty
    from wds_async.shardlists import resampled as resampled
    from wds_async.shardlists import single_node_only as single_node_only
    from wds_async.shardlists import split_by_node as split_by_node
    from wds_async.shardlists import split_by_worker as split_by_worker
    from wds_async.tariterators import tarfile_samples as tarfile_samples
    from wds_async.tariterators import tarfile_to_samples as tarfile_to_samples
    from wds_async.writer import ShardWriter as ShardWriter
    from wds_async.writer import TarWriter as TarWriter

__version__ = "0.1.0"

_HOMES = {
    "asyncreader": "AsyncReader",
    "autodecode": "Continue Decoder gzfilter handle_extension imagehandler",
    "dataset": "WebDataset",
    "fluid": "FluidInterface FluidWrapper",
    "errors": "DecodingError WdsError",
    "filters": "Cached associate batched decode default_collation_fn detshuffle extract_keys getfirst info log_keys "
    "map map_dict map_tuple rename rename_keys rsample select shuffle slice to_tuple transform_with unbatched "
    "unlisted",
    "handlers": "ignore_and_continue ignore_and_stop reraise_exception warn_and_continue warn_and_stop",
    "loader": "WebLoader",
    "pipeline": "DataPipeline PipelineStage pipelinefilter",
    "shardlists": "ResampledShards SimpleShardList non_empty resampled single_node_only split_by_node split_by_worker",
    "tariterators": "tarfile_samples tarfile_to_samples",
    "writer": "ShardWriter TarWriter",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = ("tenbin", "utils")
# Rooms that are reached as attributes (``wds.filters``) without being imported first; WebDataset has these too.
_ROOMS = frozenset((*_HOMES, *_MODULES, "compat", "shuffles", "urls", "world"))

__all__ = sorted((*_HOME, *_MODULES))  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"wds_async.{_HOME[name]}"), name)
        globals()[name] = value  # the next look-up finds it without coming here
        return value
    if name in _ROOMS:
        return importlib.import_module(f"wds_async.{name}")
    raise AttributeError(f"module 'wds_async' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
