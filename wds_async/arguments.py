"""Checks of the arguments of stages, made where a stage is made: in the user's line, not at the first sample."""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

from wds_async import packages
from wds_async.errors import ConfigError

__all__ = [
    "Check", "check_device", "check_function", "check_number", "check_probability", "check_size", "check_slice",
    "check_type", "each", "function", "of_type", "passing", "size",
]  # fmt: skip

Check = Callable[[str, str, Any], Any]
"""``check(stage, argument, value)`` returns the value to use; raises TypeError or ConfigError naming all three."""


def check_number(stage: str, argument: str, value: Any) -> float:
    """Return ``value`` as a float. TypeError if it is none; numpy's numbers and tensors of one element are."""
    if not isinstance(value, (str, bytes)) and hasattr(type(value), "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError):  # an array of several numbers
            pass
    raise TypeError(f"{stage}: {argument}={value!r:.80} is of type {type(value).__name__}; it must be a number")


def check_size(stage: str, argument: str, value: Any, at_least: int | None = None) -> int:
    """Return a number of items as an int: a fraction is rounded up, and ``sys.maxsize`` is the most.

    TypeError for what is no number, ConfigError for NaN and for a value below ``at_least``.
    """
    try:
        result = operator.index(value)
    except TypeError:
        number = check_number(stage, argument, value)
        if math.isnan(number):
            raise ConfigError(f"{stage}: {argument}={value!r} is not a number of items") from None
        result = math.ceil(max(-sys.maxsize, min(number, sys.maxsize)))
    if at_least is not None and result < at_least:
        raise ConfigError(f"{stage}: {argument}={value!r}: it must be at least {at_least}")
    return min(result, sys.maxsize)


def check_device(stage: str, device: Any) -> Any:
    """Return ``device`` as a ``torch.device``. ConfigError for one that torch does not know, or does not have here."""
    torch = packages.optional("torch", stage, "torch")
    try:
        result = torch.device(device)
    except (RuntimeError, TypeError) as exn:
        raise ConfigError(f"{stage}: device={device!r} is not a device of torch: {str(exn).splitlines()[0]}") from None
    runtime: Any = getattr(torch, result.type, None)
    if not hasattr(runtime, "is_available"):  # such as "meta"
        return result
    count = runtime.device_count() if runtime.is_available() else 0
    if (result.index or 0) < count:
        return result
    if torch.version.cuda is None and result.type == "cuda":
        why = f"torch {torch.__version__} was built without CUDA: install one with it"
    else:
        why = f"torch {torch.__version__} sees {count} devices of this kind here"
    raise ConfigError(f'{stage}: device={device!r}: {why}, or give device="cpu"')


def _check_optional_size(stage: str, argument: str, value: Any, at_least: int | None) -> int | None:
    return None if value is None else check_size(stage, argument, value, at_least)


def size(at_least: int | None = None, *, optional: bool = False) -> Check:
    """Return a `Check` by `check_size`; with ``optional``, None stays None."""
    return functools.partial(_check_optional_size if optional else check_size, at_least=at_least)


def check_type(stage: str, argument: str, value: Any, types: tuple[type, ...], what: str) -> Any:
    """Return an instance of one of ``types``. TypeError, which says that it must be ``what``, for anything else."""
    if isinstance(value, types):
        return value
    raise TypeError(f"{stage}: {argument}={value!r:.80} is of type {type(value).__name__}; it must be {what}")


def of_type(what: str, *types: type) -> Check:
    """Return a `Check` by `check_type`."""
    return functools.partial(check_type, types=types, what=what)


def passing(what: str, predicate: Callable[[Any], bool]) -> Check:
    """Return a `Check` of values for which ``predicate`` is true. TypeError, which names ``what`` it must be, for
    others.
    """

    def check(stage: str, argument: str, value: Any) -> Any:
        return value if predicate(value) else check_type(stage, argument, value, (), what)

    return check


def check_function(stage: str, argument: str, value: Any, optional: bool = False) -> Any:
    """Return what can be called; with ``optional``, None too. TypeError for anything else."""
    if callable(value) or (optional and value is None):
        return value
    return check_type(stage, argument, value, (), f"a function{' or None' if optional else ''}")


def function(*, optional: bool = False) -> Check:
    """Return a `Check` by `check_function`."""
    return functools.partial(check_function, optional=optional)


def each(check: Check) -> Check:
    """Return a `Check` of ``*args`` or ``**kw``: of each value by ``check``."""
    return functools.partial(_each, check)


def _each(check: Check, stage: str, argument: str, values: Any) -> Any:
    if isinstance(values, dict):
        return {name: check(stage, name, value) for name, value in values.items()}
    return tuple(check(stage, f"{argument}[{number}]", value) for number, value in enumerate(values))


def check_probability(stage: str, argument: str, value: Any) -> Any:
    """Return a number from 0 to 1. TypeError for what is no number, ConfigError for other numbers."""
    if not 0.0 <= check_number(stage, argument, value) <= 1.0:
        raise ConfigError(f"{stage}: {argument}={value!r} is not a probability, which is from 0 to 1")
    return value


def check_slice(stage: str, argument: str, values: Any) -> tuple[int | None, ...]:
    """Return the arguments of ``itertools.islice``: stop; or start, stop and step, each of which may be None.

    TypeError for another number of them, else what `check_size` raises.
    """
    if not 1 <= len(values) <= 3:
        raise TypeError(f"{stage}: {len(values)} arguments; write {stage}(stop) or {stage}(start, stop, step)")
    rules = [("stop", 0)] if len(values) == 1 else [("start", 0), ("stop", 0), ("step", 1)]
    pairs = zip(rules, values, strict=False)
    return tuple(_check_optional_size(stage, name, value, at_least) for (name, at_least), value in pairs)
