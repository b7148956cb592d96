"""Data sets converted: shards to and from TFRecord, MDS and LitData, and to Parquet."""

from wds_async.tools.convert.job import convert_shards

__all__ = ["convert_shards"]
