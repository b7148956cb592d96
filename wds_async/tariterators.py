"""Door: the functions from shards to samples under WebDataset's module name."""

from __future__ import annotations

from wds_async.reading.parts import (
    EndOfShard,
    group_by_keys,
    meta_prefix,
    meta_suffix,
    tar_file_expander,
    tar_file_iterator,
    url_opener,
    valid_sample,
)
from wds_async.reading.samples import base_plus_ext, tarfile_samples
from wds_async.reading.stage import TarStage, tarfile_to_samples

__all__ = [
    "EndOfShard", "TarStage", "base_plus_ext", "group_by_keys", "meta_prefix", "meta_suffix", "tar_file_expander",
    "tar_file_iterator", "tarfile_samples", "tarfile_to_samples", "url_opener", "valid_sample",
]  # fmt: skip
