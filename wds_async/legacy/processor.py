"""`Processor` and its mixins (2020 to 2021): datasets that each hold the one before them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from wds_async import samplecache, world
from wds_async.errors import ConfigError
from wds_async.fluid import FluidInterface, FluidWrapper
from wds_async.legacy.fluent import OlderMethods
from wds_async.legacy.names import deprecated
from wds_async.legacy.resized import Chopped
from wds_async.pipeline import Inheriting, stage_of, stages_of

__all__ = ["Chain", "Composable", "DBCache", "Processor", "Shorthands"]

_TODAY = "DataPipeline(source, f), or .compose(f) of a WebDataset"


def _tell_of_subclass(cls: type, base: type) -> None:
    if base in cls.__bases__ and cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
        deprecated(base.__name__, "DataPipeline with FluidInterface")


class Composable(Inheriting):
    """Mixin of datasets that take their ``source`` and can be continued. A class that names it as a base warns when
    it is defined."""

    source: Any = None

    def __init_subclass__(cls, **kw: Any) -> None:
        super().__init_subclass__(**kw)
        _tell_of_subclass(cls, Composable)

    def source_(self, source: Any) -> Any:
        """Set the source; returns this object."""
        self.source = source
        return self

    def then(self, f: Any, *args: Any, **kw: Any) -> Any:
        """The dataset of ``f(iter(self), *args, **kw)``, or of a filter and its arguments."""
        return Chain(self, stage_of(f, *args, **kw))

    def compose(self, *args: Any, **kw: Any) -> Any:
        """``compose(cls, *args, **kw)``: an object of a class with ``source_`` that has this as its source. Else the
        arguments are stages, one after another."""
        if args and isinstance(args[0], type) and hasattr(args[0], "source_"):
            return args[0](*args[1:], **kw).source_(self)
        result: Any = self
        for stage in stages_of(*args, **kw):
            result = Chain(result, stage)
        return result


class Shorthands(FluidInterface, OlderMethods):
    """Mixin of today's fluent methods and the older ones. A class that names it as a base warns when it is defined."""

    def __init_subclass__(cls, **kw: Any) -> None:
        super().__init_subclass__(**kw)
        _tell_of_subclass(cls, Shorthands)

    def slice(self, *args: Any) -> Any:
        """``itertools.islice`` with these arguments; all without any."""
        return super().slice(*args) if args else self

    def repeat(self, nepochs: int | None = None, nbatches: int | None = None) -> Any:
        """Go through this ``nepochs`` times (without end by default), for at most ``nbatches`` items."""
        return FluidWrapper(self).repeat(nepochs or -1, nbatches or -1)

    def with_epoch(self, length: int, by_node: bool = False) -> Any:
        """Iterations of ``length`` items each, which go on where the last one stopped. ``by_node``: a rank's are
        ``length // world_size``."""
        return FluidWrapper(Chopped(self, length // world.place().world_size if by_node else length))

    def with_length(self, length: int) -> Any:
        """Make ``len`` give ``length``."""
        return FluidWrapper(self).with_length(length, silent=True)

    def ddp_equalize(self, length: int, with_length: bool = False) -> Any:
        """``length // world_size`` items on every rank, see `legacy.fluent.Equalized`."""
        return OlderMethods.ddp_equalize(FluidWrapper(self), length, with_length)


class Chain(world.TorchDataset, Composable, Shorthands):
    """``source`` run through one ``stage``."""

    def __init__(self, source: Any, stage: Any) -> None:
        self.source = source
        self.stage = stage

    def __iter__(self) -> Iterator[Any]:
        if self.source is None:
            raise ConfigError(f"{type(self).__name__} of {self.stage!r} has no source: call it with one, or source_")
        return iter(getattr(self.stage, "run", self.stage)(iter(self.source)))

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of ``epoch``, wherever shards are shuffled on the way to here."""
        for part in (self.source, self.stage):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def close(self) -> None:
        """Close what is open on the way to here."""
        for part in (self.stage, self.source):
            if callable(close := getattr(part, "close", None)):
                close()


class Processor(Chain):
    """A function as a dataset: ``f(iter(source), *args, **kw)``.

    ``Processor(source, f, *args, **kw)``, or ``Processor(f, *args, **kw)``, which called with a source gives the same.
    ``f`` is a function that gets the source first, or a filter (``wds.shuffle``) that is meant with these arguments;
    ``_kwa`` holds further arguments by name. Deprecated. Raises ConfigError without a function.
    """

    def __init__(self, *args: Any, _kwa: dict[str, Any] | None = None, **kw: Any) -> None:
        deprecated("Processor", _TODAY)
        arguments = list(args)
        source = None
        if "source" in kw:
            source = kw.pop("source")
        elif arguments and (arguments[0] is None or _is_source(arguments[0])):
            source = arguments.pop(0)
        f = arguments.pop(0) if arguments else kw.pop("f", None)
        if f is None:
            raise ConfigError("Processor(source, f, *args) or Processor(f, *args)(source): there is no function f")
        super().__init__(source, stage_of(f, *arguments, **(_kwa or {}), **kw))

    def __call__(self, source: Iterable[Any]) -> Any:
        """This processor over ``source``."""
        return copy.copy(self).source_(source)


def _is_source(x: Any) -> bool:
    return hasattr(x, "__iter__") and not isinstance(x, type)


class DBCache(samplecache.DBCache, Composable, Shorthands):
    """`samplecache.DBCache` as a dataset with fluent methods. Deprecated."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        deprecated("DBCache", "LMDBCached(folder), or cache_dir= of WebDataset to keep shards")
        super().__init__(*args, **kw)
