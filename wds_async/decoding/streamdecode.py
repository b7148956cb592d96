"""`xdecode`: decoding by patterns, with functions that take a stream, as `PIL.Image.open` and `numpy.load` do."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from typing import IO, Any, Literal

from wds_async.arguments import each, passing
from wds_async.handlers import Handler, passed, reraise_exception
from wds_async.stages import Traits, pipelinefilter

__all__ = ["default_decoders", "xdecode"]

Sample = dict[str, Any]
StreamDecoder = Callable[[IO[bytes]], Any] | Literal[False]


def _bytes(stream: IO[bytes]) -> bytes:
    return stream.read()


def _text(stream: IO[bytes]) -> str:
    return stream.read().decode("utf-8")


def _unpickled(stream: IO[bytes]) -> Any:
    from wds_async.autodecode import unpickle_loads  # noqa: PLC0415 (it loads numpy; few pipelines have pickles)

    return unpickle_loads(stream.read())


default_decoders: list[tuple[str, StreamDecoder]] = [("*.bin", _bytes), ("*.txt", _text), ("*.pyd", _unpickled)]
"""Decoders of `xdecode`: bytes, text in UTF-8, and pickles under the rules of `autodecode.unpickle_loads`."""


def _xdecode(
    source: Iterable[Sample],
    *args: tuple[str, StreamDecoder],
    must_decode: bool = True,
    defaults: Sequence[tuple[str, StreamDecoder]] = default_decoders,
    handler: Handler = reraise_exception,
    **kw: StreamDecoder,
) -> Iterator[Sample]:
    """Decode fields with ``(pattern, f)`` pairs and ``extension=f`` arguments, where ``f`` takes a stream.

    A pattern (`fnmatch`) is held against ``jpg`` and ``.jpg``: the lower-cased name after its last ``/``, without
    and with a dot before it. The last pair that fits decides, so ``args`` go before ``defaults``
    (`default_decoders`), and ``kw`` before both. ``f=False`` leaves a field as it is. Bytes are given to ``f`` as a
    stream, anything else as it is; fields ``__x`` are passed on.

    A field that nothing fits is a ValueError, or passed on where not ``must_decode``. Pickles (``*.pyd``) of
    classes that are not harmless are `UnsafeContent`, and all of them are under ``WDS_SECURE=1``. What ``f`` raises
    carries a note that names the field, the sample and its shard.
    """
    rules = [*defaults, *args, *((f"*.{extension}", f) for extension, f in kw.items())][::-1]
    find = functools.lru_cache(1024)(functools.partial(_find, rules))
    for sample in source:
        try:
            decoded = {}
            for field, value in sample.items():
                f = find(field)
                if f is None and must_decode:
                    raise ValueError(f"xdecode: no decoder fits the field {field!r}{_where(sample)}")
                decoded[field] = value if f is None or f is False else _applied(f, field, sample)
        except Exception as exn:
            if passed(handler, exn, sample):
                continue
            return
        yield decoded


def _is_decoder(value: Any) -> bool:
    return callable(value) or value is False


def _is_rule(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str) and _is_decoder(value[1])


xdecode = pipelinefilter(
    _xdecode,
    {
        "args": each(passing("a pair of a pattern and a function", _is_rule)),
        "kw": each(passing("a function of a stream, or False", _is_decoder)),
    },
    Traits(one_to_one=True, handler="handler"),
)


def _find(rules: Sequence[tuple[str, StreamDecoder]], field: str) -> StreamDecoder | None:
    name = field.rsplit("/", 1)[-1].lower()
    if field.startswith("__") or name.startswith("__"):
        return False
    return next((f for pattern, f in rules if fnmatch(name, pattern) or fnmatch(f".{name}", pattern)), None)


def _applied(f: Callable[[Any], Any], field: str, sample: Sample) -> Any:
    value = sample[field]
    try:
        return f(io.BytesIO(value) if isinstance(value, bytes) else value)
    except Exception as exn:
        exn.add_note(f"while xdecode read the field {field!r}{_where(sample)}")
        raise


def _where(sample: Sample) -> str:
    from wds_async.redact import redact  # noqa: PLC0415 (errors only)

    return f" of sample {sample.get('__key__')!r} of {redact(str(sample.get('__url__')))}"
