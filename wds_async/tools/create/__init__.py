"""Shards from folders, tables and recipes."""

from wds_async.tools.create.job import create_shards as create_shards
from wds_async.tools.create.tables import TableColumns as TableColumns

__all__ = ["TableColumns", "create_shards"]
