"""OpenTelemetry: counts of a dataset as metrics, and a span for each shard. Its API alone is needed; where the program
has set no provider, nothing is recorded."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wds_async import packages
from wds_async.redact import redact
from wds_async.stages import Traits, pipelinefilter

__all__ = ["observe", "shard_spans"]

_SCOPE = "wds_async"
_COUNTERS = {
    "bytes": ("By", "Shard bytes handed to the decoder"),
    "wire_bytes": ("By", "Bytes of bodies received"),
    "requests": ("{request}", "Requests to stores"),
    "retries": ("{fault}", "Faults that were healed, or tried"),
    "hedges": ("{request}", "Parts that were requested twice"),
    "samples": ("{sample}", "Samples read"),
    "bad_samples": ("{sample}", "Samples that were skipped"),
    "shards": ("{shard}", "Shards that ended well"),
    "bad_shards": ("{shard}", "Shards that ended in an error"),
    "cache_hits": ("{shard}", "Shards read from the disk cache"),
    "wait_s": ("s", "Time in which the consumer waited for bytes"),
}
_GAUGES = {
    "window_bytes": ("By", "Memory in flight or waiting for the consumer"),
    "connections": ("{connection}", "Open connections"),
}


def observe(dataset: Any, name: str = "", *, meter_provider: Any = None) -> None:
    """Report the counts of ``dataset`` (a `WebDataset`, pipeline or `WebLoader`) as OpenTelemetry metrics.

    Counters ``wds_async.requests``, ``wds_async.bytes``, … and gauges, as in `DataPipeline.statistics`, of this process
    and its DataLoader workers, each with the attribute ``dataset``, which is ``name``. They are read when the program's
    provider exports, and end with the dataset. ``meter_provider``: None is the global one. MissingExtra without
    ``opentelemetry-api``.
    """
    metrics = packages.optional("opentelemetry.metrics", "observe", "otel")
    meter = (meter_provider or metrics.get_meter_provider()).get_meter(_SCOPE)
    known = weakref.ref(dataset)
    for field, (unit, text) in _COUNTERS.items():
        read = _reader(known, field, name, metrics.Observation)
        meter.create_observable_counter(f"{_SCOPE}.{field.removesuffix('_s')}", [read], unit, text)
    for field, (unit, text) in _GAUGES.items():
        meter.create_observable_gauge(
            f"{_SCOPE}.{field}", [_reader(known, field, name, metrics.Observation)], unit, text
        )


def _reader(known: weakref.ref[Any], field: str, name: str, observation: Any) -> Callable[[Any], Iterable[Any]]:
    def read(_options: Any) -> Iterable[Any]:
        dataset = known()
        counts = None if dataset is None else dataset.statistics()
        return [] if counts is None else [observation(getattr(counts, field), {"dataset": name})]

    return read


@functools.partial(
    pipelinefilter, traits=Traits(one_to_one=True, same_items=True, state=True, pure=lambda *_, **__: True)
)
def shard_spans(data: Iterable[Any], tracer_provider: Any = None) -> Iterator[Any]:
    """Pass on samples, and record a span ``read shard`` for each run of samples of one shard: a stage for `compose`,
    right behind the dataset.

    It has the attributes ``url.full`` (without secrets) and ``wds_async.samples``, and an error that ends it.
    ``tracer_provider``: None is the global one. MissingExtra without ``opentelemetry-api``.
    """
    trace = packages.optional("opentelemetry.trace", "shard_spans", "otel")
    tracer = (tracer_provider or trace.get_tracer_provider()).get_tracer(_SCOPE)
    span, shard, count = None, None, 0

    def end() -> None:
        if span is not None:
            span.set_attribute("wds_async.samples", count)
            span.end()

    try:
        for sample in data:
            if span is None or sample.get("__url__") != shard:
                end()
                shard, count = sample.get("__url__"), 0
                span = tracer.start_span("read shard", attributes={"url.full": redact(str(shard))})
            count += 1
            yield sample
    except Exception as exn:
        if span is None:
            span = tracer.start_span("read shard")
        span.record_exception(exn)
        span.set_status(trace.Status(trace.StatusCode.ERROR, str(exn)))
        raise
    finally:
        end()
