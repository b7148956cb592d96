"""Door: the names that programs import from ``webdataset.utils``."""

from wds_async.filters import identity
from wds_async.pipeline import PipelineStage
from wds_async.world import make_seed
from wds_async.world import place as pytorch_worker_info
from wds_async.world import worker_seed as pytorch_worker_seed

__all__ = ["PipelineStage", "identity", "make_seed", "pytorch_worker_info", "pytorch_worker_seed"]
