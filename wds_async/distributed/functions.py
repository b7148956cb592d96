"""Functions of the program by their names, ``module:function``: workers on other machines import them.

A name may have keyword arguments behind it, as JSON: ``module:function {"width": 256}`` is a `functools.partial`.
"""

from __future__ import annotations

import functools
import importlib
import json
import operator
import socket
from typing import Any

from wds_async import packages
from wds_async.errors import ConfigError

__all__ = ["function_named", "name_of"]


def name_of(function: Any, argument: str = "function") -> str:
    """Return the name ``module:function`` of a function, or of a name that is one, after importing it. That of a
    `functools.partial` ends with its keyword arguments.

    ConfigError for a lambda, a function in a function, a method of an object, one of a script or a notebook: no worker
    can import these; for a partial with arguments by position, or others than JSON has; and for a name that is not
    there.
    """
    if isinstance(function, str):
        function_named(function, argument)
        return function
    if isinstance(function, functools.partial):
        return f"{name_of(function.func, argument)} {_json(function, argument)}"
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name:
        what = f"an object of type {type(function).__name__}"
        raise ConfigError(f"{argument}={what}: {_ADVICE}; give its name, {argument}='package.module:name'")
    if module == "__main__":
        spec = getattr(packages.loaded("__main__"), "__spec__", None)
        if spec is None:
            raise ConfigError(f"{argument}={name}: it is defined in the program's own script. {_ADVICE}")
        module = spec.name
    if "<" in name:
        raise ConfigError(f"{argument}={module}:{name}: a lambda, or a function within a function. {_ADVICE}")
    full = f"{module}:{name}"
    same = function_named(full, argument)
    # A module that is run by ``python -m`` is imported a second time, with functions of its own.
    if same is not function and getattr(function, "__module__", None) != "__main__":
        raise ConfigError(f"{argument}={full}: under this name stands another object, {same!r:.80}. {_ADVICE}")
    return full


def _json(function: functools.partial[Any], argument: str) -> str:
    """Return the keyword arguments of ``function`` as JSON."""
    try:
        text = json.dumps(function.keywords, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as exn:
        raise ConfigError(f"{argument}={function!r:.200}: its arguments have to be what JSON can say: {exn}") from exn
    if function.args or json.loads(text) != function.keywords:
        raise ConfigError(f"{argument}={function!r:.200}: give arguments by keyword, and only what JSON can say")
    return text


_ADVICE = "Workers import the function by its name: define it at the top of a module that they can import"


@functools.lru_cache(maxsize=64)
def function_named(name: str, argument: str = "function") -> Any:
    """Return the object ``module:name``, importing its module, with the keyword arguments that stand behind it.
    ConfigError where the module or the name is not there; errors that the module raises itself pass."""
    full, _, keywords = name.partition(" ")
    if keywords:
        return functools.partial(function_named(full, argument), **_keywords(keywords, name, argument))
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"{argument}={name!r}: write 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exn:
        if exn.name is None or not f"{module_name}.".startswith(f"{exn.name}."):
            raise
        host = socket.gethostname()
        raise ConfigError(
            f"{argument}={name!r}: Python finds no module {exn.name!r} on {host}; is it on PYTHONPATH there?"
        ) from exn
    try:
        return operator.attrgetter(path)(module)
    except AttributeError as exn:
        raise ConfigError(f"{argument}={name!r}: {module.__file__} has no {path!r}") from exn


def _keywords(text: str, name: str, argument: str) -> dict[str, Any]:
    """Return the keyword arguments that ``text`` is the JSON of."""
    try:
        keywords = json.loads(text)
    except ValueError as exn:
        raise ConfigError(f"{argument}={name!r}: behind the function stand its arguments as JSON ({exn})") from None
    if not isinstance(keywords, dict):
        raise ConfigError(f"{argument}={name!r}: arguments are a JSON object, {{name: value}}")
    return keywords
