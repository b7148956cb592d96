"""wds_async: a drop-in for WebDataset with an asyncio engine. ``import wds_async as wds``.

This is a door: names are looked up when they are first used (PEP 562), so that importing the package imports
neither torch nor numpy nor any cloud's client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wds_async._version import __version__ as __version__
from wds_async._version import __webdataset_version__ as __webdataset_version__

if TYPE_CHECKING:
    from wds_async import autodecode as autodecode
    from wds_async import cache as cache
    from wds_async import compat as compat
    from wds_async import dataset as dataset
    from wds_async import extradatasets as extradatasets
    from wds_async import filters as filters
    from wds_async import handlers as handlers
    from wds_async import legacy as legacy
    from wds_async import loader as loader
    from wds_async import mix as mix
    from wds_async import multi as multi
    from wds_async import pipeline as pipeline
    from wds_async import pytorch as pytorch
    from wds_async import shardlists as shardlists
    from wds_async import tariterators as tariterators
    from wds_async import tenbin as tenbin
    from wds_async import urls as urls
    from wds_async import utils as utils
    from wds_async import wids as wids
    from wds_async import world as world
    from wds_async import writer as writer
    from wds_async.asyncreader import AsyncReader as AsyncReader
    from wds_async.autodecode import Continue as Continue
    from wds_async.autodecode import Decoder as Decoder
    from wds_async.autodecode import gzfilter as gzfilter
    from wds_async.autodecode import handle_extension as handle_extension
    from wds_async.autodecode import imagehandler as imagehandler
    from wds_async.autodecode import pytorch_weights_only as pytorch_weights_only
    from wds_async.autodecode import torch_audio as torch_audio
    from wds_async.autodecode import torch_loads as torch_loads
    from wds_async.autodecode import torch_video as torch_video
    from wds_async.cache import LRUCleanup as LRUCleanup
    from wds_async.cache import cached_tarfile_samples as cached_tarfile_samples
    from wds_async.cache import cached_tarfile_to_samples as cached_tarfile_to_samples
    from wds_async.cache import pipe_cleaner as pipe_cleaner
    from wds_async.dataset import WebDataset as WebDataset
    from wds_async.errors import DecodingError as DecodingError
    from wds_async.errors import WdsError as WdsError
    from wds_async.extradatasets import MockDataset as MockDataset
    from wds_async.extradatasets import repeatedly as repeatedly
    from wds_async.extradatasets import with_epoch as with_epoch
    from wds_async.extradatasets import with_length as with_length
    from wds_async.filters import Cached as Cached
    from wds_async.filters import LMDBCached as LMDBCached
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
    from wds_async.filters import shuffling as shuffles  # noqa: F401
    from wds_async.filters import slice as slice
    from wds_async.filters import to_tuple as to_tuple
    from wds_async.filters import transform_with as transform_with
    from wds_async.filters import tree_collation_fn as tree_collation_fn
    from wds_async.filters import unbatched as unbatched
    from wds_async.filters import unlisted as unlisted
    from wds_async.filters import xdecode as xdecode
    from wds_async.fluid import FluidInterface as FluidInterface
    from wds_async.fluid import FluidWrapper as FluidWrapper
    from wds_async.handlers import ignore_and_continue as ignore_and_continue
    from wds_async.handlers import ignore_and_stop as ignore_and_stop
    from wds_async.handlers import reraise_exception as reraise_exception
    from wds_async.handlers import warn_and_continue as warn_and_continue
    from wds_async.handlers import warn_and_stop as warn_and_stop
    from wds_async.legacy.datasets import ChoppedDataset as ChoppedDataset
    from wds_async.legacy.datasets import Composable as Composable
    from wds_async.legacy.datasets import Dataset as Dataset
    from wds_async.legacy.datasets import DBCache as DBCache
    from wds_async.legacy.datasets import MultiDataset as MultiDataset
    from wds_async.legacy.datasets import Processor as Processor
    from wds_async.legacy.datasets import PytorchShardList as PytorchShardList
    from wds_async.legacy.datasets import ResizedDataset as ResizedDataset
    from wds_async.legacy.datasets import ShardList as ShardList
    from wds_async.legacy.datasets import Shorthands as Shorthands
    from wds_async.loader import WebLoader as WebLoader
    from wds_async.mix import RandomMix as RandomMix
    from wds_async.mix import RoundRobin as RoundRobin
    from wds_async.pipeline import DataPipeline as DataPipeline
    from wds_async.pipeline import PipelineStage as PipelineStage
    from wds_async.pipeline import pipelinefilter as pipelinefilter
    from wds_async.reading import records as records
    from wds_async.reading.records import cbors2_to_samples as cbors2_to_samples
    from wds_async.reading.records import cbors_to_samples as cbors_to_samples
    from wds_async.reading.records import msgpacks_to_samples as msgpacks_to_samples
    from wds_async.reading.url_files import gopen as gopen
    from wds_async.reading.url_files import gopen_schemes as gopen_schemes
    from wds_async.shardlists import MultiShardSample as MultiShardSample
    from wds_async.shardlists import ResampledShards as ResampledShards
    from wds_async.shardlists import SimpleShardList as SimpleShardList
    from wds_async.shardlists import non_empty as non_empty
    from wds_async.shardlists import resampled as resampled
    from wds_async.shardlists import shardspec as shardspec
    from wds_async.shardlists import single_node_only as single_node_only
    from wds_async.shardlists import spec as spec
    from wds_async.shardlists import split_by_node as split_by_node
    from wds_async.shardlists import split_by_worker as split_by_worker
    from wds_async.tariterators import tarfile_samples as tarfile_samples
    from wds_async.tariterators import tarfile_to_samples as tarfile_to_samples
    from wds_async.writer import ShardWriter as ShardWriter
    from wds_async.writer import TarWriter as TarWriter
    from wds_async.writer import numpy_dumps as numpy_dumps
    from wds_async.writer import torch_dumps as torch_dumps


_HOMES = {
    "asyncreader": "AsyncReader",
    "autodecode": "Continue Decoder gzfilter handle_extension imagehandler pytorch_weights_only torch_audio "
    "torch_loads torch_video",
    "cache": "LRUCleanup cached_tarfile_samples cached_tarfile_to_samples pipe_cleaner",
    "dataset": "WebDataset",
    "errors": "DecodingError WdsError",
    "extradatasets": "MockDataset repeatedly with_epoch with_length",
    "filters": "Cached LMDBCached associate batched decode default_collation_fn detshuffle extract_keys getfirst info "
    "log_keys map map_dict map_tuple rename rename_keys rsample select shuffle slice to_tuple transform_with "
    "tree_collation_fn unbatched unlisted xdecode",
    "fluid": "FluidInterface FluidWrapper",
    "handlers": "ignore_and_continue ignore_and_stop reraise_exception warn_and_continue warn_and_stop",
    "loader": "WebLoader",
    "mix": "RandomMix RoundRobin",
    "reading.url_files": "gopen gopen_schemes",
    "pipeline": "DataPipeline PipelineStage pipelinefilter",
    "reading.records": "cbors2_to_samples cbors_to_samples msgpacks_to_samples",
    "shardlists": "MultiShardSample ResampledShards SimpleShardList non_empty resampled shardspec single_node_only "
    "split_by_node split_by_worker",
    "tariterators": "tarfile_samples tarfile_to_samples",
    "writer": "ShardWriter TarWriter numpy_dumps torch_dumps",
}
# Names of older versions: classes that say so when they are used, and (in `legacy.names`) functions that say so when
# they are looked up here.
_OLDER_HOMES = {
    "legacy.datasets": "ChoppedDataset Composable DBCache Dataset MultiDataset Processor PytorchShardList "
    "ResizedDataset ShardList Shorthands",
    "legacy.names": "Curried batch group_by_keys ignore_exception map_stream stage tar_file_expander tar_file_iterator "
    "tarfile_expander transformer url_opener warn_exception worker_urls",
}
# Not kept here once they were looked up: what warns at each look-up, and a switch of `autodecode`, which would be
# taken for set here.
_NEVER_KEPT = {*_OLDER_HOMES["legacy.names"].split(), "pytorch_weights_only"}
_HOME = {name: home for homes in (_HOMES, _OLDER_HOMES) for home, names in homes.items() for name in names.split()}
_MODULES = ("tenbin", "utils")
# Rooms that are reached as attributes (``wds.filters``) without being imported first; WebDataset has these too.
_ROOMS = {
    name: f"wds_async.{name}"
    for names in (
        "autodecode cache compat dataset extradatasets filters handlers legacy loader mix multi pipeline pytorch",
        "shardlists tariterators tenbin urls utils wids world writer",
    )
    for name in names.split()
} | {
    "records": "wds_async.reading.records",
    "shuffles": "wds_async.filters.shuffling",
    "spec": "wds_async.shardlists.spec",
}

__all__ = sorted((*(name for names in _HOMES.values() for name in names.split()), *_MODULES))  # noqa: PLE0605


if not TYPE_CHECKING:  # for a type checker, a name that is not there is an error

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is not None:
            value = getattr(importlib.import_module(f"wds_async.{home}"), name)
            if name not in _NEVER_KEPT:
                globals()[name] = value  # the next look-up finds it without coming here
            return value
        if name in _ROOMS:
            return importlib.import_module(_ROOMS[name])
        raise AttributeError(f"module 'wds_async' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES, *_ROOMS})
