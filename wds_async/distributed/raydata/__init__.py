"""Ray Data's source and sink of shards: `read` gives a dataset of Arrow blocks, `write` writes one."""

from wds_async.distributed.raydata.sink import write as write
from wds_async.distributed.raydata.source import read as read

__all__ = ["read", "write"]
