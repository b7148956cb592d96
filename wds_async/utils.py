"""Door: the names that programs import from ``webdataset.utils``."""

from typing import Any

from wds_async import config
from wds_async.extradatasets import guess_batchsize, repeatedly
from wds_async.filters.basic import identity
from wds_async.stages import PipelineStage
from wds_async.world import make_seed
from wds_async.world import place as pytorch_worker_info
from wds_async.world import worker_seed as pytorch_worker_seed

__all__ = [
    "PipelineStage",
    "guess_batchsize",
    "identity",
    "make_seed",
    "pytorch_worker_info",
    "pytorch_worker_seed",
    "repeatedly",
]


def __getattr__(name: str) -> Any:
    if name == "enforce_security":  # what WDS_SECURE says, until the program sets it: `config.settings` heeds both
        return config.settings().secure
    raise AttributeError(f"module 'wds_async.utils' has no attribute {name!r}")
