"""Door: every filter under the module name that WebDataset gives it, exported by the room that defines it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wds_async.decoding import batches, streamdecode
from wds_async.filters import basic, batch, buckets, fields, shuffling
from wds_async.handlers import reraise_exception
from wds_async.stages import FilterFunction, RestCurried, pipelinefilter

if TYPE_CHECKING:
    from wds_async.decoding.batches import *  # noqa: F403
    from wds_async.decoding.streamdecode import *  # noqa: F403
    from wds_async.filters.basic import *  # noqa: F403
    from wds_async.filters.batch import *  # noqa: F403
    from wds_async.filters.buckets import *  # noqa: F403
    from wds_async.filters.fields import *  # noqa: F403
    from wds_async.filters.shuffling import *  # noqa: F403

_ROOMS = (basic, batch, batches, buckets, fields, shuffling, streamdecode)

__all__ = ["FilterFunction", "RestCurried", "pipelinefilter", "reraise_exception"]
__all__ += basic.__all__
__all__ += batch.__all__
__all__ += batches.__all__
__all__ += buckets.__all__
__all__ += fields.__all__
__all__ += shuffling.__all__
__all__ += streamdecode.__all__


def __getattr__(name: str) -> Any:
    for room in _ROOMS:
        if hasattr(room, name):
            return getattr(room, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
