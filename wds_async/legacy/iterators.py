"""Older functions that have no equal today."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from wds_async.filters.basic import transform_with
from wds_async.handlers import Handler, passed, reraise_exception
from wds_async.pipeline import Traits, pipelinefilter
from wds_async.shardlists.lists import split_by_worker
from wds_async.tracebacks import located

__all__ = ["map_stream", "transformer", "worker_urls"]


def _map_stream(
    data: Iterable[Any], f: Callable[[Any], Any] | None = None, handler: Handler = reraise_exception
) -> Iterator[Any]:
    """``f(sample)``, None included; a dict made from a dict gets its ``__key__``. Without ``f``, the sample."""
    for sample in data:
        try:
            result = sample if f is None else f(sample)
        except Exception as exn:
            if passed(handler, located(exn, "map_stream", sample), sample):
                continue
            return
        if isinstance(result, dict) and isinstance(sample, dict):
            result["__key__"] = sample.get("__key__")
        yield result


map_stream = pipelinefilter(_map_stream, traits=Traits(handler="handler"))


def transformer(transformers: Sequence[Callable[[Any], Any] | None]) -> Callable[[Sequence[Any]], Any]:
    """`transform_with` as a function of the sample."""
    return functools.partial(transform_with, transformers=transformers)


def worker_urls(urls: Iterable[Any]) -> list[Any]:
    """This worker's share of ``urls``."""
    return list(split_by_worker(urls))
