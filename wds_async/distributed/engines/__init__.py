"""Engines carry attempts at tasks to processes and machines. The job decides what a task does and when it is done."""

from wds_async.distributed.engines.choice import ENGINES, engine_of

__all__ = ["ENGINES", "engine_of"]
