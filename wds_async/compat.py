"""Door: the names that programs import from ``webdataset.compat``."""

from wds_async.dataset import WebDataset, check_empty
from wds_async.fluid import FluidInterface, FluidWrapper
from wds_async.loader import WebLoader

__all__ = ["FluidInterface", "FluidWrapper", "WebDataset", "WebLoader", "check_empty"]
