"""``import webdataset`` (and its submodules) and ``import wids`` resolving to wds_async, for ``wds-async run``.

The folder ``shim`` holds modules named webdataset and wids, which install this finder. Being a folder on
``sys.path`` it reaches the processes that a script spawns too: multiprocessing hands its path on.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__all__ = ["SHIM", "Alias", "install", "prepare"]

SHIM = str(Path(__file__).with_name("shim"))
_OLD, _NEW, _WIDS = "webdataset", "wds_async", "wids"  # webdataset 0.2 came with a package wids


class Alias(MetaPathFinder, Loader):
    """A finder and loader: ``webdataset.x`` is the module ``wds_async.x`` itself, not a copy."""

    def __init__(self) -> None:
        self._own_specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for ``webdataset``, for what is below it and for ``wids``; None for any other name."""
        if not _is_theirs(name) or importlib.util.find_spec(_ours(name)) is None:
            return None
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of wds_async."""
        module = importlib.import_module(_ours(spec.name))
        self._own_specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Put the module's own spec back: there is nothing to run, but the import system has put its spec on the
        module.
        """
        spec = module.__spec__
        if spec is not None:
            module.__spec__ = self._own_specs[spec.name]


def _is_theirs(name: str) -> bool:
    return name in (_OLD, _WIDS) or name.startswith(_OLD + ".")


def _ours(name: str) -> str:
    return f"{_NEW}.{_WIDS}" if name == _WIDS else _NEW + name[len(_OLD) :]


def install() -> ModuleType:
    """Make every later ``import webdataset…`` and ``import wids`` give wds_async; the package itself is returned."""
    if not any(isinstance(finder, Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, Alias())
    for name in [n for n in sys.modules if _is_theirs(n)]:
        del sys.modules[name]
    package = importlib.import_module(_NEW)
    sys.modules[_OLD] = package
    return package


def prepare() -> None:
    """Put the shim first on ``sys.path``, for this process and those that it spawns."""
    if SHIM not in sys.path:
        sys.path.insert(0, SHIM)
    install()
