"""WebDataset's filters: functions that take the source first (``_map``), and the stage made of each (``map``).

A ``handler`` decides what happens to a sample that raises: True drops it, False ends the stream, and it may raise.
"""

from __future__ import annotations

import builtins
import copy
import functools
import itertools
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from wds_async.arguments import check_function, check_slice, check_type, each, function, of_type, passing, size
from wds_async.checkpoint.states import Counted, Held, RandomState, StageState
from wds_async.errors import ConfigError
from wds_async.filters.fields import not_found
from wds_async.filters.threads import ThreadsState, on_threads
from wds_async.handlers import Handler, passed, reraise_exception
from wds_async.stages import PipelineStage, Traits, pipelinefilter
from wds_async.tar.group import at_place_of
from wds_async.tracebacks import located
from wds_async.world import global_draws

if TYPE_CHECKING:
    from wds_async.samplecache import LMDBCached

__all__ = [
    "Cached",
    "LMDBCached",
    "associate",
    "decode",
    "deterministic",
    "identity",
    "info",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "select",
    "slice",
    "transform_with",
]

Sample = dict[str, Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def deterministic(f: _Function) -> _Function:
    """Declare that ``f`` gives the same result whenever it is called with the same argument: it draws no random
    numbers. The state of a stage behind ``map(f)`` then has references to the samples that it holds, and not the dicts
    that ``f`` made of them (see `DataPipeline.state_dict`). Use it as a decorator, or around a function. TypeError for
    an object that takes no attributes: put it into a function."""
    try:
        vars(f)["deterministic"] = True
    except TypeError as exn:
        raise TypeError(f"deterministic({f!r:.80}) takes a function: write a def, or a lambda, around it") from exn
    return f


def _always(*args: Any, **kw: Any) -> bool:
    return True


def _all_deterministic(*args: Any, handler: Any = None, threads: int = 0, **kw: Any) -> bool:
    """Return whether all functions among the arguments were declared `deterministic`."""
    functions = [value for value in (*args, *kw.values()) if callable(value)]
    return all(getattr(function, "deterministic", False) is True for function in functions)


def _decodes_alike(
    *args: Any, pre: Any = None, post: Any = None, crop: Any = None, flip: bool = False, **kw: Any
) -> bool:
    """Return whether no image is cut at random, and the program's own decoders, if there are any, were declared
    `deterministic`."""
    return crop != "random" and not flip and _all_deterministic(*args, pre, post)


def identity(x: Any) -> Any:
    """Return ``x``."""
    return x


def transform_with(sample: Sequence[Any], transformers: Sequence[Callable[[Any], Any] | None] | None) -> Any:
    """Return ``sample`` as a list with the i-th transformer applied to the i-th value; None leaves it as it is."""
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
    width: int | None = 50,
    stream: Any = None,
    name: str = "",
) -> Iterator[Sample]:
    """Write the first ``n`` samples, and then every ``every``-th, to ``stream`` (standard error).

    ``fmt`` is filled by ``str.format`` from the fields; without it each field is, cut to ``width`` (None: whole).
    """
    source = iter(data)
    # Where no more is to be written the rest passes by untouched.
    for i, sample in enumerate(source if every > 0 else itertools.islice(source, max(n, 0))):
        if i < n or (i + 1) % every == 0:
            fields = (f"{k} {repr(v)[:width]}\n" for k, v in sample.items())
            text = f"--- {name}\n" + "".join(fields) if fmt is None else fmt.format(**sample) + "\n"
            (stream or sys.stderr).write(text)
        yield sample
    yield from source


info = pipelinefilter(
    _info,
    {"fmt": of_type("a text or None", str, NoneType), "n": size(), "every": size(), "width": size(optional=True)},
    Traits(one_to_one=True, state=True, pure=_always),
)


def _select(
    data: Iterable[Any], predicate: Callable[[Any], Any], handler: Handler = reraise_exception
) -> Iterator[Any]:
    """Keep the samples for which ``predicate(sample)`` is true. Its exceptions go to ``handler``."""
    for sample in data:
        try:
            if not predicate(sample):
                continue
        except Exception as exn:
            if passed(handler, located(exn, "select", sample), sample):
                continue
            return
        yield sample


select = pipelinefilter(_select, {"predicate": function()}, Traits(same_items=True, handler="handler", state=True))


def _log_keys(data: Iterable[Sample], logfile: str | None = None, *, state: Counted | None = None) -> Iterator[Sample]:
    """Append ``number, worker, rank, key`` (tabs between) of every sample to ``logfile``; None logs nothing.

    Each line is one append of its own, so the lines of several processes do not mix.
    """
    if not logfile:
        yield from data
        return
    state = state or Counted()
    with open(logfile, "ab", buffering=0) as stream:
        for i, sample in enumerate(data, state.count):
            state.add()
            fields = (i, sample.get("__worker__"), sample.get("__rank__"), sample.get("__key__"))
            stream.write(("\t".join(str(f) for f in fields) + "\n").encode())
            yield sample


log_keys = pipelinefilter(
    _log_keys,
    {"logfile": of_type("a path or None", str, os.PathLike, NoneType)},
    Traits(one_to_one=True, state=Counted, pure=_always),
)


def _decode(
    data: Iterable[Sample],
    *args: Any,
    pre: Any = None,
    post: Any = None,
    only: Any = None,
    partial: bool = False,
    allow_pickle: bool = False,
    min_size: int | None = None,
    size: int | tuple[int, int] | None = None,
    crop: str | None = None,
    resize: int | None = None,
    scale: tuple[float, float] | None = None,
    flip: bool = False,
    threads: int = 0,
    handler: Handler = reraise_exception,
    state: DecodeState | None = None,
) -> Iterator[Sample]:
    """Decode fields by extension; ``args`` are image specifications (``"torchrgb"``) and decoder functions
    ``f("." + field, data)``, tried in order before the built-in ones (None: not mine).

    ``only`` names the fields to decode (default: all), ``partial=True`` lets pass those that are no bytes any more;
    ``pre`` (decompression unless given) and ``post`` are decoders tried before and after all others. A field that
    fails is a `DecodingError`, for ``handler``.

    ``min_size`` decodes images at 1/2, 1/4 or 1/8 where both sides stay at least that many pixels, in a fraction
    of the time. With ``threads`` that many decode ahead, the order kept. ``allow_pickle`` trusts pickled fields of
    any class: they run code from the data. Raises ValueError at once for an unknown image specification.

    ``size`` (a side, or height and width, in pixels) gives all images that size. ``crop="random"`` takes a window
    of random area (a share of the image's within ``scale``, (0.08, 1) unless given), shape (ratios from 3/4 to
    4/3) and place, and resizes it. ``crop="center"`` resizes the image until its shorter side is ``resize``
    (unless given, until it just covers ``size``) and takes the middle. ``flip=True`` mirrors half of the images,
    at random. JPEGs are decoded at a scale that is enough. Images of one sample and one size are cut alike. The
    draws follow from the global ``random`` at the beginning of an iteration, and are part of the state.
    """
    from wds_async import autodecode  # noqa: PLC0415 (pipelines without decoding do not load the decoders)

    options = image_options(min_size, size, crop, resize, scale, flip)
    chosen = [autodecode.imagehandler(a, **options) if isinstance(a, str) else a for a in args]
    decoder = autodecode.Decoder(chosen, pre, post, only, partial, allow_pickle=allow_pickle)
    state = state or DecodeState()
    state.draws = decoder.draws
    return _each(data, decoder.decode, threads, handler, "decode", state)


def image_options(min_size: Any, size: Any, crop: Any, resize: Any, scale: Any, flip: Any) -> dict[str, Any]:
    """Return the arguments of `autodecode.imagehandler`. ConfigError for those that do not go together."""
    cut = {"crop": crop, "resize": resize, "scale": scale, "flip": flip or None}
    if size is None:
        if without := [name for name, value in cut.items() if value is not None]:
            raise ConfigError(f"decode: {without[0]}={cut[without[0]]!r} needs size=, the pixels of a side")
        return {"min_size": min_size}
    if min_size is not None:
        raise ConfigError(f"decode: size={size!r} and min_size={min_size!r}: give one of them")
    return {"size": size, **cut}


class NumbersState(RandomState):
    """State of a stage that draws numbers for images."""

    def number(self) -> int:
        """Return the next number."""
        if self.rng is None:
            # A generator of our own: draws of others from the global one change none of its numbers.
            self.begin(random.Random(global_draws()() if self._loaded is None else 0))
        number: int = self.rng.getrandbits(32)
        return number


class DecodeState(ThreadsState, NumbersState):
    """State of `decode`: the samples ahead with the numbers drawn for them, where images are cut at random."""

    def __init__(self) -> None:
        ThreadsState.__init__(self)
        NumbersState.__init__(self)
        self.draws = False
        self._drawn: deque[int] = deque()

    def arguments(self, item: Any) -> tuple[Any, ...]:
        """Return the sample and, if there is something to draw, its number."""
        return (item, self.number()) if self.draws else (item,)

    def number(self) -> int:
        """Return the next number: those of an earlier run come first."""
        return self._drawn.popleft() if self._drawn else super().number()

    def save(self) -> dict[str, Any]:
        if not self.draws:
            return ThreadsState.save(self)
        numbers = [*(arguments[1] for arguments, _ in self.jobs), *self._drawn]
        return {**RandomState.save(self), "ahead": Held(self.ahead), "numbers": numbers}

    def load(self, saved: dict[str, Any]) -> None:
        if "ahead" in saved:  # not where a pass is run again from its beginning
            ThreadsState.load(self, saved)
        RandomState.load(self, saved)
        self._drawn = deque(saved.get("numbers", ()))


def _each(
    data: Iterable[Any], f: Callable[..., Any], threads: int, handler: Handler, stage: str, state: ThreadsState
) -> Iterator[Any]:
    results, data = on_threads(data, f, threads, handler, stage, state)
    yield from results
    for sample in data:
        try:
            result = f(*state.arguments(sample))
        except Exception as exn:
            if passed(handler, located(exn, stage, sample), sample):
                continue
            return
        yield result


def _check_decoders(stage: str, argument: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return image specifications and decoders. ValueError for an unknown specification."""
    from wds_async import autodecode  # noqa: PLC0415 (here, so that forked workers need not load the decoders)

    for number, value in enumerate(values):
        if isinstance(value, str):
            autodecode.imagehandler(value)
        elif not callable(value):
            what = "an image specification or a function f(key, data)"
            check_type(stage, f"{argument}[{number}]", value, (), what)
    return values


def _check_decode(
    *args: Any,
    min_size: Any = None,
    size: Any = None,
    crop: Any = None,
    resize: Any = None,
    scale: Any = None,
    flip: Any = False,
    **other: Any,
) -> None:
    """Raise ConfigError for a crop without an image specification, or for one that cannot be."""
    from wds_async import autodecode  # noqa: PLC0415 (here, so that forked workers need not load the decoders)

    options = image_options(min_size, size, crop, resize, scale, flip)
    if size is None:
        return
    specs = [value for value in args if isinstance(value, str)]
    if not specs:
        raise ConfigError(f'decode: size={size!r} is for images: name what they become, as in decode("rgb8", size=…)')
    autodecode.imagehandler(specs[0], **options)


decode = pipelinefilter(
    _decode,
    {
        "args": _check_decoders,
        "threads": size(at_least=0),
        "min_size": size(at_least=1, optional=True),
    },
    Traits(one_to_one=True, handler="handler", state=DecodeState, pure=_decodes_alike),
    _check_decode,
)


def _map(
    data: Iterable[Any],
    f: Callable[[Any], Any],
    handler: Handler = reraise_exception,
    threads: int = 0,
    *,
    state: ThreadsState | None = None,
) -> Iterator[Any]:
    """Replace each sample by ``f(sample)``. None drops the sample; a dict made from a dict gets its ``__key__``.

    An exception of ``f`` goes to ``handler`` (`handlers`); the default raises it. With ``threads`` that many
    threads run ``f`` ahead of the consumer, the order kept: for what releases the GIL (see `threads.ordered_map`).
    """
    results, data = on_threads(data, functools.partial(_applied, f), threads, handler, "map", state)
    yield from (result for result in results if result is not None)
    keeps_place = _all_deterministic(f)
    for sample in data:
        try:
            result = f(sample)
        except Exception as exn:
            if passed(handler, located(exn, "map", sample), sample):
                continue
            return
        if result is None:
            continue
        if isinstance(result, dict) and isinstance(sample, dict):
            result["__key__"] = sample.get("__key__")
            if keeps_place:
                result = at_place_of(sample, result)
        yield result


def _applied(f: Callable[[Any], Any], sample: Any) -> Any:
    result = f(sample)
    if isinstance(result, dict) and isinstance(sample, dict):
        result["__key__"] = sample.get("__key__")
        if _all_deterministic(f):
            result = at_place_of(sample, result)
    return result


map = pipelinefilter(
    _map,
    {"f": function(), "threads": size(at_least=0)},
    Traits(handler="handler", state=ThreadsState, pure=_all_deterministic),
)


def _map_dict(
    data: Iterable[Sample], handler: Handler = reraise_exception, *, __state__: ThreadsState | None = None, **kw: Any
) -> Iterator[Sample]:
    """Replace field ``k`` by ``f(field)`` for every ``k=f``, in place: ``map_dict(jpg=augment)``.

    A missing field is a KeyError with its likely cause, for ``handler``.
    """
    functions = list(_check_functions("map_dict", "kw", kw).items())
    applied = functools.partial(_fields_replaced, functions)
    results, data = on_threads(data, applied, 0, handler, "map_dict", __state__)
    yield from results
    for sample in data:
        try:
            for k, f in functions:
                if k not in sample:
                    raise KeyError(not_found(sample, [k]))
                sample[k] = f(sample[k])
        except Exception as exn:
            if passed(handler, located(exn, f"map_dict, field {k!r}", sample), sample):
                continue
            return
        yield sample


def _fields_replaced(functions: Sequence[tuple[str, Callable[[Any], Any]]], sample: Sample) -> Sample:
    """Return a copy of ``sample`` with its fields replaced: a state may have the sample itself, as it came."""
    sample = copy.copy(sample)
    for k, f in functions:
        if k not in sample:
            raise KeyError(not_found(sample, [k]))
        sample[k] = _noted(f, sample[k], "field", k)
    return sample


def _noted(f: Callable[[Any], Any], value: Any, kind: str, which: Any) -> Any:
    """Return ``f(value)``, whose error has a note of which value of the sample it is."""
    try:
        return f(value)
    except Exception as exn:
        exn.add_note(f"of its {kind} {which!r}")
        raise


def _check_functions(stage: str, argument: str, values: dict[str, Any]) -> dict[str, Any]:
    if not values:
        raise ConfigError(f"{stage} needs field=function arguments")
    return {name: check_function(stage, name, value) for name, value in values.items()}


map_dict = pipelinefilter(
    _map_dict,
    {"kw": _check_functions},
    Traits(one_to_one=True, handler="handler", state=ThreadsState, state_name="__state__", pure=_all_deterministic),
)


def _map_tuple(
    data: Iterable[Any], *args: Any, handler: Handler = reraise_exception, state: ThreadsState | None = None
) -> Iterator[tuple[Any, ...]]:
    """Apply the i-th function to the i-th value of a tuple; None, or no function, leaves a value as it is.

    Exceptions go to ``handler``.
    """
    functions = [(i, check_function("map_tuple", f"args[{i}]", f)) for i, f in enumerate(args) if f is not None]
    results, data = on_threads(data, functools.partial(_values_replaced, functions), 0, handler, "map_tuple", state)
    yield from results
    for sample in data:
        values = list(sample)
        n = len(values)
        try:
            for i, f in functions:
                if i < n:
                    values[i] = f(values[i])
        except Exception as exn:
            if passed(handler, located(exn, f"map_tuple, value {i}", sample), sample):
                continue
            return
        yield tuple(values)


def _values_replaced(functions: Sequence[tuple[int, Callable[[Any], Any]]], sample: Any) -> tuple[Any, ...]:
    values = list(sample)
    for i, f in functions:
        if i < len(values):
            values[i] = _noted(f, values[i], "value", i)
    return tuple(values)


map_tuple = pipelinefilter(
    _map_tuple,
    {"args": each(function(optional=True))},
    Traits(one_to_one=True, handler="handler", state=ThreadsState, pure=_all_deterministic),
)


def _associate(data: Iterable[Sample], associator: Any, **kw: Any) -> Iterator[Sample]:
    """Update every sample, in place, with ``associator(key)``, or ``associator[key]`` where it has the key."""
    called = callable(associator)
    find = associator if called else associator.get
    for sample in data:
        try:
            if (more := find(sample["__key__"])) or called:
                sample.update(more)
        except Exception as exn:
            located(exn, "associate", sample)
            raise
        yield sample


_ASSOCIATOR = passing("a function of the key, or a mapping", lambda value: callable(value) or hasattr(value, "get"))
associate = pipelinefilter(
    _associate, {"associator": _ASSOCIATOR}, Traits(one_to_one=True, state=True, pure=_all_deterministic)
)


class SliceState(StageState):
    """State of a slice: ``skip`` items come before the next one that its worker gives, and it gives ``left`` more
    (None: no bound). With other numbers of ranks or workers, each gives its share of what all had still to give."""

    amounts = ("left",)

    def __init__(self) -> None:
        self.skip = 0
        self.left: int | None = None
        self.begun = False

    def begin(self, start: int, stop: int | None, step: int) -> None:
        """Take the items of a range, unless a state was loaded."""
        if not self.begun:
            self.skip, self.left, self.begun = start, None if stop is None else len(range(start, stop, step)), True

    def save(self) -> dict[str, Any]:
        counts = {"skip": self.skip} if self.left is None else {"skip": self.skip, "left": self.left}
        return counts if self.begun else {}

    def load(self, saved: dict[str, Any]) -> None:
        self.skip, self.left, self.begun = saved["skip"], saved.get("left"), True

    @classmethod
    def shared(cls, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"skip": max(state["skip"] for state in states)} if all("skip" in state for state in states) else {}


def islice(data: Iterable[Any], *args: int | None, state: SliceState | None = None) -> Iterator[Any]:
    """Take the items that ``itertools.islice`` takes with these arguments; the count is that of each worker."""
    if state is None:
        return itertools.islice(data, *args)
    wanted = builtins.slice(*args)
    state.begin(wanted.start or 0, wanted.stop, wanted.step or 1)
    return _sliced(data, wanted.step or 1, state)


def _sliced(data: Iterable[Any], step: int, state: SliceState) -> Iterator[Any]:
    if state.left == 0:
        return
    for item in data:
        if state.skip:
            state.skip -= 1
            continue
        state.skip = step - 1
        if state.left is not None:
            state.left -= 1
        yield item
        if state.left == 0:
            return


# The function has the name that WebDataset shows of such a stage.
slice = pipelinefilter(
    islice,
    {"args": check_slice},
    Traits(count=lambda n, *args: len(range(n)[builtins.slice(*args)]), cuts=True, state=SliceState),
)


_KEPT_BYTES = 64 << 20
"""The most that a state has of samples in a `Cached`, which may be all that there are."""


class CachedState(StageState):
    """State of `Cached`: the items that it keeps, and how many of them were given."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        """Those of earlier iterations, or of this one."""
        self.given = 0
        """Number of items given, of those that were there when it began."""
        self.filled = False
        """The items are all there are."""
        self.whole = True
        """Nothing is missing of the items of this iteration."""
        self.filling = False

    def save(self) -> dict[str, Any]:
        given = len(self.items) if self.filling else self.given
        kept, left = self.items[:given], self.items[given:]
        items = {"kept": Held(kept, limit_bytes=_KEPT_BYTES), "left": Held(left, limit_bytes=_KEPT_BYTES)}
        return {**items, "filled": self.filled, "whole": self.whole, "without_source": self.filled}

    def load(self, saved: dict[str, Any]) -> None:
        self.items, self.given = [*saved["kept"], *saved["left"]], len(saved["kept"])
        self.filled, self.whole = saved["filled"], saved["whole"]

    @classmethod
    def shared(cls, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"kept": [], "filled": False, "whole": False}


class Cached(PipelineStage):
    """Keep what passes in memory during the first complete iteration, and yield it from there later.

    The samples are not copied: a later stage that changes them in place changes them for good, which a state that
    refers to them does not have. A state within an iteration has references to the samples that are kept (or, after
    `decode` and functions that are not `deterministic`, the samples; StateError for more than 64 MB), and they are read
    again when it is loaded. Between two iterations it has none: the next one fills the cache anew, as it does for
    another number of ranks or workers.
    """

    traits = Traits(one_to_one=True, same_items=True, state=CachedState)

    def __init__(self) -> None:
        self.cached: list[Any] | None = None

    def run(self, source: Iterable[Any], *, state: CachedState | None = None) -> Iterator[Any]:
        """Yield the source, or what was kept of it."""
        state = state or CachedState()
        if state.filled:
            self.cached = state.items
        elif self.cached is not None and not state.items and state.whole:
            state.items, state.filled = self.cached, True
        return self._items(source, state)

    def _items(self, source: Iterable[Any], state: CachedState) -> Iterator[Any]:
        if state.filled or not state.whole:
            while state.given < len(state.items):
                state.given += 1
                yield state.items[state.given - 1]
        if state.filled:
            return
        if not state.whole:
            yield from source
            return
        state.filling = True
        for sample in source:
            state.items.append(sample)
            yield sample
        self.cached = state.items


def __getattr__(name: str) -> Any:
    if name == "LMDBCached":  # with it come the decoders and SQLite, which most pipelines do without
        from wds_async.samplecache import LMDBCached  # noqa: PLC0415

        return LMDBCached
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
