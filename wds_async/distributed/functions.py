"""Functions of the program by their names, ``module:function``: workers on other machines import them."""

from __future__ import annotations

import functools
import importlib
import operator
import socket
from typing import Any

from wds_async import packages
from wds_async.errors import ConfigError

__all__ = ["function_named", "name_of"]


def name_of(function: Any, argument: str = "function") -> str:
    """Return the name ``module:function`` of a function, or of a name that is one, after importing it.

    ConfigError for a lambda, a function in a function, a method of an object, one of a script or a notebook: no worker
    can import these; and for a name that is not there.
    """
    if isinstance(function, str):
        function_named(function, argument)
        return function
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


_ADVICE = "Workers import the function by its name: define it at the top of a module that they can import"


@functools.lru_cache(maxsize=64)
def function_named(name: str, argument: str = "function") -> Any:
    """Return the object ``module:name``, importing its module. ConfigError where the module or the name is not there;
    errors that the module raises itself pass."""
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
