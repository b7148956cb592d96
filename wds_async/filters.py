"""WebDataset's filters: plain generator functions, and under the public name the stage made of each.

A function takes the source first; `pipelinefilter` makes the stage that takes everything else, so that
``wds.map(f)`` is a stage and ``filters._map(source, f)`` an iterator. Where there is a ``handler``, it decides
what happens to a sample that raises: True drops it, False ends the stream, and it may raise.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from wds_async.batches import batched, default_collation_fn, unbatched, unlisted
from wds_async.errors import ConfigError
from wds_async.fields import extract_keys, getfirst, rename, rename_keys, to_tuple
from wds_async.handlers import Handler, reraise_exception
from wds_async.pipeline import FilterFunction, PipelineStage, RestCurried, pipelinefilter
from wds_async.shuffles import _rsample, _shuffle, detshuffle, rsample, shuffle

__all__ = [
    "Cached",
    "FilterFunction",
    "RestCurried",
    "_rsample",
    "_shuffle",
    "associate",
    "batched",
    "decode",
    "default_collation_fn",
    "detshuffle",
    "extract_keys",
    "getfirst",
    "identity",
    "info",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "pipelinefilter",
    "rename",
    "rename_keys",
    "reraise_exception",
    "rsample",
    "select",
    "shuffle",
    "slice",
    "to_tuple",
    "transform_with",
    "unbatched",
    "unlisted",
]

Sample = dict[str, Any]


def identity(x: Any) -> Any:
    """``x``."""
    return x


def transform_with(sample: Sequence[Any], transformers: Sequence[Callable[[Any], Any] | None] | None) -> Any:
    """``sample`` as a list with the i-th transformer applied to the i-th value; None leaves it as it is."""
    if not transformers:
        return sample
    if len(transformers) > len(sample):
        raise ConfigError(f"{len(transformers)} transformers for a sample of {len(sample)} values")
    pairs = itertools.zip_longest(sample, transformers)
    return [value if f is None else f(value) for value, f in pairs]


def _info(
    data: Iterable[Sample],
    fmt: str | None = None,
    n: int = 3,
    every: int = -1,
    width: int = 50,
    stream: Any = None,
    name: str = "",
) -> Iterator[Sample]:
    """Write the first ``n`` samples, and then every ``every``-th, to ``stream`` (standard error).

    ``fmt`` is filled by ``str.format`` from the fields; without it, each field is written, cut to ``width``.
    """
    for i, sample in enumerate(data):
        if i < n or (every > 0 and (i + 1) % every == 0):
            fields = (f"{k} {repr(v)[:width]}\n" for k, v in sample.items())
            text = f"--- {name}\n" + "".join(fields) if fmt is None else fmt.format(**sample) + "\n"
            (stream or sys.stderr).write(text)
        yield sample


info = pipelinefilter(_info)


def _select(
    data: Iterable[Any], predicate: Callable[[Any], Any], handler: Handler = reraise_exception
) -> Iterator[Any]:
    """The samples for which ``predicate`` is true."""
    for sample in data:
        try:
            chosen = predicate(sample)
        except Exception as exn:
            if handler(exn):
                continue
            return
        if chosen:
            yield sample


select = pipelinefilter(_select)


def _log_keys(data: Iterable[Sample], logfile: str | None = None) -> Iterator[Sample]:
    """Append ``number, worker, rank, key`` (tabs between) of every sample to ``logfile``; None logs nothing.

    Each line is one append of its own, so the lines of several processes do not mix.
    """
    if not logfile:
        yield from data
        return
    with open(logfile, "ab", buffering=0) as stream:
        for i, sample in enumerate(data):
            fields = (i, sample.get("__worker__"), sample.get("__rank__"), sample.get("__key__"))
            stream.write(("\t".join(str(f) for f in fields) + "\n").encode())
            yield sample


log_keys = pipelinefilter(_log_keys)


def _decode(data: Iterable[Sample], *args: Any, handler: Handler = reraise_exception, **kw: Any) -> Iterator[Sample]:
    """Decode every field by its extension.

    ``args`` are decoders ``f("." + field, data)`` (None passes) or image specifications such as ``"torchrgb"``,
    tried in order before the built-in ones; ``kw`` goes to `autodecode.Decoder`.
    """
    from wds_async import autodecode  # noqa: PLC0415 (pipelines without decoding do not load the decoders)

    decoder = autodecode.Decoder([autodecode.imagehandler(a) if isinstance(a, str) else a for a in args], **kw)
    for sample in data:
        try:
            decoded = decoder(sample)
        except Exception as exn:
            if handler(exn):
                continue
            return
        yield decoded


decode = pipelinefilter(_decode)


def _map(data: Iterable[Any], f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Iterator[Any]:
    """``f(sample)``. None drops the sample; a dict made from a dict gets its ``__key__``."""
    for sample in data:
        try:
            result = f(sample)
        except Exception as exn:
            if handler(exn):
                continue
            return
        if result is None:
            continue
        if isinstance(result, dict) and isinstance(sample, dict):
            result["__key__"] = sample.get("__key__")
        yield result


map = pipelinefilter(_map)


def _map_dict(data: Iterable[Sample], handler: Handler = reraise_exception, **kw: Any) -> Iterator[Sample]:
    """Replace field ``k`` by ``f(field)`` for every ``k=f``, in place. KeyError for a missing field."""
    if not kw or not all(callable(f) for f in kw.values()):
        raise ConfigError(f"map_dict needs field=function arguments, got {kw}")
    functions = list(kw.items())
    for sample in data:
        try:
            for k, f in functions:
                sample[k] = f(sample[k])
        except Exception as exn:
            if handler(exn):
                continue
            return
        yield sample


map_dict = pipelinefilter(_map_dict)


def _map_tuple(data: Iterable[Any], *args: Any, handler: Handler = reraise_exception) -> Iterator[tuple[Any, ...]]:
    """Apply the i-th function to the i-th value; None leaves a value as it is, values beyond the functions too."""
    if not all(f is None or callable(f) for f in args):
        raise ConfigError(f"map_tuple takes functions and None, got {args}")
    functions = [(i, f) for i, f in enumerate(args) if f is not None]
    for sample in data:
        values = list(sample)
        n = len(values)
        try:
            for i, f in functions:
                if i < n:
                    values[i] = f(values[i])
        except Exception as exn:
            if handler(exn):
                continue
            return
        yield tuple(values)


map_tuple = pipelinefilter(_map_tuple)


def _associate(data: Iterable[Sample], associator: Any, **kw: Any) -> Iterator[Sample]:
    """Update every sample, in place, with ``associator(key)``, or ``associator[key]`` where it has the key."""
    look_up = associator if callable(associator) else lambda key: associator.get(key, {})
    for sample in data:
        sample.update(look_up(sample["__key__"]))
        yield sample


associate = pipelinefilter(_associate)


slice = pipelinefilter(itertools.islice)


class Cached(PipelineStage):
    """Keep what passes in memory during the first complete iteration, and yield it from there later.

    The samples are not copied: a later stage that changes them in place changes them for good.
    """

    def __init__(self) -> None:
        self.cached: list[Any] | None = None

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """The source, or what was kept of it."""
        if self.cached is not None:
            yield from self.cached
            return
        kept = []
        for sample in source:
            kept.append(sample)
            yield sample
        self.cached = kept
