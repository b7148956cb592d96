"""Every name of webdataset's surface is there, and every call that it takes is taken."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

import wds_async as ours
from tests.contract import surface

theirs = pytest.importorskip("webdataset")

NAMES = [(room, name) for room in surface.SUBMODULES if room != "multi" for name in surface.defined(room)]
REQUIRED = [(room, name) for room, name in NAMES if name not in surface.INNER.get(room, "").split()]
REQUIRED += [(room, name) for room, names in surface.BORROWED.items() for name in names.split()]
CALLS = [
    (room, name, value)
    for room in surface.SUBMODULES
    if room != "multi"
    for name, value in surface.callables(room)
    if name.split(".")[0] not in surface.INNER.get(room, "").split()
]


def exported() -> list[str]:
    """The names of webdataset's top level that are no modules, and the two modules that it imports by name."""
    modules = {*surface.SUBMODULES, "typecheck"} - {"tenbin", "utils", "gopen"}
    return sorted(name for name in vars(theirs) if not name.startswith("__") and name not in modules)


@pytest.mark.parametrize("name", [*exported(), "__version__"])
def test_top_level(name: str) -> None:
    assert hasattr(ours, name)
    assert name.startswith("__") or name in ours.__all__
    assert name in dir(ours)


@pytest.mark.parametrize("name", surface.OLDER)
def test_older_names(name: str) -> None:
    """There, whether with a word about today's way or without one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert getattr(ours, name) is not None
    assert all(w.category is DeprecationWarning for w in caught)


@pytest.mark.parametrize("room", surface.SUBMODULES)
def test_submodules(room: str) -> None:
    """Each can be imported, and is an attribute of the package but for ``gopen``, which is the function."""
    found = surface.module("wds_async", room)
    if room == "gopen":
        assert callable(ours.gopen)
        assert found.gopen is ours.gopen
    else:
        assert getattr(ours, room) is found


@pytest.mark.parametrize(("room", "name"), sorted(set(REQUIRED)), ids=str)
def test_names_of_submodules(room: str, name: str) -> None:
    assert hasattr(importlib.import_module(f"wds_async.{room}"), name)


@pytest.mark.parametrize(("room", "name", "other"), CALLS, ids=[f"{room}.{name}" for room, name, _ in CALLS])
def test_calls(room: str, name: str, other: Any) -> None:
    mine: Any = surface.module("wds_async", room)
    for part in name.split("."):
        mine = getattr(mine, part)
    found = surface.complaints(mine, other)
    excepted = {key for key in surface.SIGNATURES if key.startswith(f"{room}.{name}(")}
    assert {f"{room}.{name}({parameter})" for parameter in found} == excepted, found


def test_the_exceptions_are_real() -> None:
    """Every name in the tables of exceptions is a name of webdataset, so that no entry outlives its cause."""
    for room, names in surface.INNER.items():
        assert set(names.split()) <= set(surface.defined(room)), room
    called = {f"{room}.{name}" for room, name, _ in CALLS}
    assert {key.partition("(")[0] for key in surface.SIGNATURES} <= called
    assert all(surface.SIGNATURES.values())
