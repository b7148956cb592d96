"""Saved states and the programs they are of, as ``replay`` and ``seen`` take them from the command line."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from wds_async import packages, world
from wds_async.checkpoint.seen import states_of
from wds_async.cli import shards
from wds_async.errors import ConfigError, StateError

__all__ = ["program", "saved_states"]

_DEPTH = 8
_ZIP = b"PK\x03\x04"


def saved_states(paths: Iterable[str]) -> list[Mapping[str, Any]]:
    """Return the states of ranks in files: JSON, or what ``torch.save`` wrote, in which they may lie at any depth, as
    in the checkpoint of a model. ConfigError for a file that cannot be read, StateError for one without a state."""
    found: list[Mapping[str, Any]] = []
    for path in paths:
        states = list(_states_in(_content(path)))
        if not states:
            raise StateError(f"{path}: no state of a pipeline or loader is in it: give what state_dict() returned")
        found += states
    try:
        return states_of(found)
    except StateError as exn:
        raise StateError(f"{', '.join(paths)}: {exn}") from exn


def _content(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read(len(_ZIP))
            file.seek(0)
            if data != _ZIP:
                return json.load(file)
        torch = packages.optional("torch", "reading a checkpoint of torch", "torch")
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as exn:
        raise ConfigError(f"{path}: {exn.strerror or exn}") from exn
    except (ValueError, pickle.UnpicklingError, RuntimeError) as exn:
        raise StateError(f"{path}: neither JSON nor a checkpoint that torch.load reads safely: {exn}") from exn


def _states_in(content: Any, depth: int = _DEPTH) -> Iterator[Mapping[str, Any]]:
    """Yield the states within ``content``."""
    if isinstance(content, Mapping):
        if "version" in content and "stages" in content and ("run" in content or "merged" in content):
            yield content
            return
        content = content.values()
    elif not isinstance(content, list | tuple):
        return
    if depth:
        for one in content:
            yield from _states_in(one, depth - 1)


def program(name: str, state: Mapping[str, Any]) -> Any:
    """Return the loader or pipeline that ``module:function`` or ``file.py:function`` makes, at the place of ``state``.

    It runs code, which the user named. ConfigError where it is not there, or gives something else.
    """
    with world.standing_at(world.Place(state["place"][0], state["place"][1], 0, 1)):
        file, _, function = name.rpartition(":")
        made = _of_file(file, function, name) if file.endswith(".py") else _of_module(name)
    if not hasattr(made, "detached"):
        raise ConfigError(
            f"{name} gives a {type(made).__name__}: it must be a wds.WebLoader, WebDataset or DataPipeline"
        )
    return made


def _of_module(name: str) -> Any:
    if ":" not in name:
        raise ConfigError(f"--pipeline {name}: write module:function or file.py:function")
    return shards.made(name)


def _of_file(file: str, function: str, name: str) -> Any:
    if not os.path.isfile(file):
        raise ConfigError(f"{name}: there is no file {file}")
    folder, module = os.path.split(os.path.splitext(os.path.abspath(file))[0])
    sys.path.insert(0, folder)  # what it imports beside itself is found, as where it is run as a script
    return shards.made(f"{module}:{function}")
