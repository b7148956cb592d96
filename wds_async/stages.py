"""Stages of pipelines, and the currying that makes a stage of a function.

A stage is an iterable or a callable without arguments (the first), a callable from iterator to iterator, or
an object with ``run(source)``.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from wds_async import packages
from wds_async.arguments import Check
from wds_async.errors import ConfigError
from wds_async.handlers import check_handler

if TYPE_CHECKING:
    from wds_async.checkpoint.states import StageState

__all__ = [
    "FilterFunction",
    "PipelineStage",
    "ProfiledItems",
    "RestCurried",
    "Sourced",
    "Traits",
    "bound_arguments",
    "pipelinefilter",
    "stage_maker",
    "stage_of",
    "stages_of",
    "traits_of",
]  # fmt: skip

_ANY_ARGUMENTS = inspect.signature(lambda source, *args, **kw: None)
"""The signature of built-in functions that have none."""


_Maker = TypeVar("_Maker", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts that a filter declares where it is defined, for `len`, warnings and the epoch's log."""

    one_to_one: bool = False  # one item comes out for each that comes in, unless a handler drops some
    same_items: bool = False  # the items that come out are those that came in
    reorders: bool = False  # in another order
    handler: str = ""  # the argument whose decisions on samples that raise are noted in the ledger
    count: Callable[..., int] | None = None  # (n, *args, **kw): the items that come out for n that come in
    batches: Callable[..., int | None] | None = None  # likewise the samples in the batches; None: not known
    takes_batches: bool = False  # batches come in and single samples come out
    cuts: bool = False  # the number of items may be bounded here, so that ranks have as many as each other
    # What the stage holds between two items, for `DataPipeline.state_dict`: a class of which it gets an object as
    # ``state``, or as the argument ``state_name``; True: nothing; False: unknown.
    state: bool | type[StageState] = False
    state_name: str = "state"
    # (*args, **kw): run again over the same sample it gives the same item; None: never.
    pure: Callable[..., bool] | None = None


def traits_of(stage: Any) -> Traits | None:
    """Return what a filter's stage, a class of stages or a function declared (``traits``); None where nothing is."""
    function = getattr(stage, "func", stage)  # of a functools.partial
    function = function.f if isinstance(function, FilterFunction) else function
    traits = getattr(function, "traits", None)
    return traits if isinstance(traits, Traits) else None


class PipelineStage:
    """Base for users' own stages that keep state: give them ``run(self, source)`` returning an iterator."""

    def run(self, *args: Any, **kw: Any) -> Iterable[Any]:
        """Return this stage's output over the source."""
        raise NotImplementedError(f"{type(self).__name__} is a stage without run(self, source)")


class FilterFunction:
    """A stage: function ``f`` that gets the source first, then ``args`` and ``kw``. Pickles if they do."""

    def __init__(self, f: Callable[..., Any], *args: Any, **kw: Any) -> None:
        self.f = f
        self.args = args
        self.kw = kw

    def __call__(self, source: Iterable[Any]) -> Any:
        return self.f(source, *self.args, **self.kw)

    run = __call__

    def with_state(self, state: StageState) -> Any:
        """Return this stage with ``state``, which it keeps what it holds in (see `Traits.state`)."""
        name = getattr(self.f, "traits", Traits()).state_name
        return FilterFunction(self.f, *self.args, **{**self.kw, name: state})

    def __repr__(self) -> str:
        return f"<{self.f.__name__} {self.args} {self.kw}>"

    def __getstate__(self) -> dict[str, Any]:
        # Decorating with pipelinefilter leaves the stage maker under the function's name, where pickle looks
        # for the function: so the maker is stored in its place.
        named = _under_its_name(self.f)
        decorated = isinstance(named, RestCurried) and named.f is self.f
        return {**self.__dict__, "f": named} if decorated else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.f, RestCurried):
            self.f = self.f.f


def _under_its_name(f: Any) -> Any:
    """Return the object that pickle finds in the place of ``f``."""
    module = packages.loaded(getattr(f, "__module__", None) or "")
    return getattr(module, getattr(f, "__qualname__", ""), None)


def _check_handler(stage: str, argument: str, value: Any) -> Any:
    if value is not None:
        check_handler(value)
    return value


class RestCurried:
    """Maker of stages, by `pipelinefilter`: called with everything but the source, it gives the stage.

    Wrong arguments raise here, in the user's line, and not when the first sample is asked for.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        checks: Mapping[str, Check] | None = None,
        traits: Traits | None = None,
        rule: Callable[..., object] | None = None,
    ) -> None:
        if traits is not None:
            vars(f)["traits"] = traits
        functools.update_wrapper(self, f)
        self.f = f
        self.checks = checks or {}
        self.rule = rule

    def __call__(self, *args: Any, **kw: Any) -> FilterFunction:
        name = getattr(self.f, "__name__", "stage").lstrip("_")
        try:
            signature = inspect.signature(self.f)
        except ValueError:
            signature = _ANY_ARGUMENTS
        try:
            signature.bind(None, *args, **kw)
        except TypeError as exn:
            raise TypeError(f"{name}(): {exn}") from None
        for i, parameter in enumerate(list(signature.parameters.values())[1:]):
            check = self.checks.get(parameter.name, _check_handler if parameter.name == "handler" else None)
            if check is None:
                continue
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                args = (*args[:i], *check(name, parameter.name, args[i:]))
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                kw |= check(name, parameter.name, {k: v for k, v in kw.items() if k not in signature.parameters})
            elif parameter.name in kw:
                kw[parameter.name] = check(name, parameter.name, kw[parameter.name])
            elif i < len(args) and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                args = (*args[:i], check(name, parameter.name, args[i]), *args[i + 1 :])
        if self.rule is not None:
            self.rule(*args, **kw)
        return FilterFunction(self.f, *args, **kw)

    def __reduce__(self) -> Any:
        # By name where the decorated name is this object, else by the function it wraps.
        name = getattr(self, "__qualname__", "")
        return name if _under_its_name(self) is self else (pipelinefilter, (self.f, self.checks, None, self.rule))


def pipelinefilter(
    f: Callable[..., Any],
    checks: Mapping[str, Check] | None = None,
    traits: Traits | None = None,
    rule: Callable[..., object] | None = None,
) -> RestCurried:
    """Make stages of ``f(source, *args, **kw)``: the result takes all arguments but the source.

    ``checks`` are functions by the name of an argument, called where a stage is made (see `arguments.Check`).
    ``traits`` are facts about the stage, for `traits_of`. ``rule`` is called with all arguments where a stage is made,
    and raises for those that do not go together.

    >>> double = pipelinefilter(lambda source, by: (by * x for x in source))
    >>> list(DataPipeline([1, 2], double(2)))
    [2, 4]
    """
    return RestCurried(f, checks, traits, rule)


def stage_maker(f: _Maker) -> _Maker:
    """Decorator of functions that return a stage (``tarfile_to_samples``): `stage_of` calls them without a source."""
    f.makes_stages = True  # type: ignore[attr-defined]
    return f


def stage_of(f: Any, *args: Any, **kw: Any) -> Any:
    """Return the stage of ``f`` and its arguments.

    A filter of ours (``wds.shuffle, 100``), a `stage_maker` and a class of stages (``wds.DBCache, "x.db", 1000``) are
    called with the arguments; a function gets the source before them (``add_noise, noise=0.02``). A class with
    ``source_`` is a dataset that takes its source that way. Raises ConfigError for what cannot be called.
    """
    if isinstance(f, RestCurried) or _makes_stages(f):
        made = f(*args, **kw)
        return made if hasattr(made, "run") else Sourced(made)
    if hasattr(f, "run") and not args and not kw:
        return f
    if not callable(f):
        raise ConfigError(f"{f!r:.80} of type {type(f).__name__} is no function from an iterator to an iterator")
    return FilterFunction(f, *args, **kw)


def stages_of(*stages: Any, **kw: Any) -> list[Any]:
    """Return the stages of ``compose(*stages)``: these, or the one of a class of stages, or of a function with an
    argument that is no stage, written with its arguments behind it (``compose(DBCache, "x.db", 1000)``)."""
    arguments = any(not callable(stage) and not hasattr(stage, "run") for stage in stages[1:])
    return [stage_of(*stages, **kw)] if kw or arguments or _makes_stages(*stages[:1]) else list(stages)


def _makes_stages(f: Any = None) -> bool:
    if isinstance(f, type):
        return hasattr(f, "run") or hasattr(f, "source_")
    return getattr(f, "makes_stages", False) is True


class Sourced(PipelineStage):
    """A dataset with ``source_(source)`` as a stage."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a copy of the dataset that has this source."""
        bound = copy.copy(self.dataset)
        bound.source_(source)
        return iter(bound)


def bound_arguments(stage: FilterFunction) -> inspect.BoundArguments | None:
    """Return the arguments of a filter's stage by their names; None if they do not fit, which raises when it runs."""
    try:
        return inspect.signature(stage.f).bind(None, *stage.args, **stage.kw)
    except TypeError:
        return None


class ProfiledItems(Iterator[Any]):
    """The output of a stage, each item within a range of torch's profiler and, on a GPU, of NVTX (``WDS_PROFILE=1``).

    The range of a stage has those of the stages before it inside. Without torch in the program there are none.
    """

    def __init__(self, source: Any, name: str) -> None:
        self._source, self._next, self._name = source, iter(source).__next__, name

    def __next__(self) -> Any:
        torch = packages.loaded("torch")
        if torch is None:
            return self._next()
        is_on_gpu = torch.cuda.is_initialized()
        if is_on_gpu:
            torch.cuda.nvtx.range_push(self._name)
        try:
            with torch.profiler.record_function(self._name):
                return self._next()
        finally:
            if is_on_gpu:
                torch.cuda.nvtx.range_pop()

    def close(self) -> None:
        """Close the stage's output."""
        if hasattr(self._source, "close"):
            self._source.close()
