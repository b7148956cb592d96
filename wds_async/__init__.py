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
    # fmt: off
    # isort: off
    from wds_async import (
        autodecode as autodecode, cache as cache, compat as compat, dataset as dataset,
        extradatasets as extradatasets, filters as filters, handlers as handlers, legacy as legacy,
        loader as loader, mix as mix, multi as multi, pipeline as pipeline, pytorch as pytorch,
        shardlists as shardlists, tariterators as tariterators, tenbin as tenbin, urls as urls, utils as utils,
        wids as wids, world as world, writer as writer,
    )
    from wds_async.asyncreader import AsyncReader as AsyncReader
    from wds_async.autodecode import (
        Continue as Continue, Decoder as Decoder, gzfilter as gzfilter, handle_extension as handle_extension,
        imagehandler as imagehandler, pytorch_weights_only as pytorch_weights_only, torch_audio as torch_audio,
        torch_loads as torch_loads, torch_video as torch_video,
    )
    from wds_async.cache import (
        LRUCleanup as LRUCleanup, cached_tarfile_samples as cached_tarfile_samples,
        cached_tarfile_to_samples as cached_tarfile_to_samples, pipe_cleaner as pipe_cleaner,
    )
    from wds_async.checkpoint.merge import merge_states as merge_states
    from wds_async.checkpoint.ranks import AllRanks as AllRanks
    from wds_async.checkpoint.replay import replay as replay
    from wds_async.checkpoint.seen import seen as seen
    from wds_async.dataset import WebDataset as WebDataset
    from wds_async.errors import DecodingError as DecodingError, StateError as StateError, WdsError as WdsError
    from wds_async.extradatasets import (
        MockDataset as MockDataset, repeatedly as repeatedly, with_epoch as with_epoch,
        with_length as with_length,
    )
    from wds_async.filters import (  # noqa: F401
        Cached as Cached, LMDBCached as LMDBCached, associate as associate, batched as batched, bucketed as bucketed,
        decode as decode, decode_batch as decode_batch, default_collation_fn as default_collation_fn,
        deterministic as deterministic, detshuffle as detshuffle,
        epochshuffle as epochshuffle, extract_keys as extract_keys, getfirst as getfirst, info as info,
        log_keys as log_keys, map as map, map_dict as map_dict, map_tuple as map_tuple, rename as rename,
        rename_keys as rename_keys, rsample as rsample, select as select, shuffle as shuffle, shuffling as shuffles,
        slice as slice, to_tuple as to_tuple, transform_with as transform_with,
        tree_collation_fn as tree_collation_fn, unbatched as unbatched, unlisted as unlisted, xdecode as xdecode,
    )
    from wds_async.fluid import FluidInterface as FluidInterface, FluidWrapper as FluidWrapper
    from wds_async.handlers import (
        ignore_and_continue as ignore_and_continue, ignore_and_stop as ignore_and_stop,
        reraise_exception as reraise_exception, warn_and_continue as warn_and_continue,
        warn_and_stop as warn_and_stop,
    )
    from wds_async.indexed.randomaccess import IndexedDataset as IndexedDataset
    from wds_async.integrations.dali import dali_source as dali_source
    from wds_async.integrations.huggingface import (
        from_huggingface as from_huggingface, to_huggingface as to_huggingface,
    )
    from wds_async.legacy.datasets import (
        ChoppedDataset as ChoppedDataset, Composable as Composable, Dataset as Dataset, DBCache as DBCache,
        MultiDataset as MultiDataset, Processor as Processor, PytorchShardList as PytorchShardList,
        ResizedDataset as ResizedDataset, ShardList as ShardList, Shorthands as Shorthands,
    )
    from wds_async.loader import WebLoader as WebLoader
    from wds_async.mix import RandomMix as RandomMix, RoundRobin as RoundRobin
    from wds_async.numpy_loader import NumpyLoader as NumpyLoader
    from wds_async.pipeline import DataPipeline as DataPipeline
    from wds_async.stages import PipelineStage as PipelineStage, pipelinefilter as pipelinefilter
    from wds_async.reading import records as records
    from wds_async.reading.records import (
        cbors2_to_samples as cbors2_to_samples, cbors_to_samples as cbors_to_samples,
        msgpacks_to_samples as msgpacks_to_samples,
    )
    from wds_async.reading.url_files import gopen as gopen, gopen_schemes as gopen_schemes
    from wds_async.shardlists import (
        MultiShardSample as MultiShardSample, ResampledShards as ResampledShards,
        SimpleShardList as SimpleShardList, non_empty as non_empty, resampled as resampled,
        shardspec as shardspec, single_node_only as single_node_only, spec as spec,
        split_by_node as split_by_node, split_by_worker as split_by_worker,
    )
    from wds_async.tariterators import tarfile_samples as tarfile_samples, tarfile_to_samples as tarfile_to_samples
    from wds_async.tools.arrow import arrow_batches as arrow_batches
    from wds_async.writer import (
        ShardWriter as ShardWriter, TarWriter as TarWriter, numpy_dumps as numpy_dumps,
        torch_dumps as torch_dumps,
    )
    # isort: on
    # fmt: on

_HOMES = {
    "asyncreader": "AsyncReader",
    "autodecode": "Continue Decoder gzfilter handle_extension imagehandler pytorch_weights_only torch_audio "
    "torch_loads torch_video",
    "cache": "LRUCleanup cached_tarfile_samples cached_tarfile_to_samples pipe_cleaner",
    "checkpoint.merge": "merge_states",
    "checkpoint.ranks": "AllRanks",
    "checkpoint.replay": "replay",
    "checkpoint.seen": "seen",
    "dataset": "WebDataset",
    "errors": "DecodingError StateError WdsError",
    "extradatasets": "MockDataset repeatedly with_epoch with_length",
    "filters": "Cached LMDBCached associate batched bucketed decode decode_batch default_collation_fn deterministic "
    "detshuffle epochshuffle extract_keys getfirst info log_keys map map_dict map_tuple rename rename_keys rsample "
    "select shuffle slice to_tuple transform_with tree_collation_fn unbatched unlisted xdecode",
    "fluid": "FluidInterface FluidWrapper",
    "integrations.dali": "dali_source",
    "integrations.huggingface": "from_huggingface to_huggingface",
    "handlers": "ignore_and_continue ignore_and_stop reraise_exception warn_and_continue warn_and_stop",
    "indexed.randomaccess": "IndexedDataset",
    "loader": "WebLoader",
    "mix": "RandomMix RoundRobin",
    "numpy_loader": "NumpyLoader",
    "reading.url_files": "gopen gopen_schemes",
    "pipeline": "DataPipeline",
    "stages": "PipelineStage pipelinefilter",
    "reading.records": "cbors2_to_samples cbors_to_samples msgpacks_to_samples",
    "shardlists": "MultiShardSample ResampledShards SimpleShardList non_empty resampled shardspec single_node_only "
    "split_by_node split_by_worker",
    "tariterators": "tarfile_samples tarfile_to_samples",
    "tools.arrow": "arrow_batches",
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
_ROOMS = {"records": "reading.records", "shuffles": "filters.shuffling", "spec": "shardlists.spec"}
_SAME_NAMED = (
    "autodecode cache compat dataset extradatasets filters handlers legacy loader mix multi pipeline pytorch "
    "shardlists tariterators tenbin urls utils wids world writer"
)
_ROOMS |= {name: name for name in _SAME_NAMED.split()}

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
            return importlib.import_module(f"wds_async.{_ROOMS[name]}")
        raise AttributeError(f"module 'wds_async' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES, *_ROOMS})
