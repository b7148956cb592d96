"""Functions of samples that the commands give to jobs: filter, select, rename, split, and commands run on files."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from wds_async import config
from wds_async.errors import ConfigError, MissingField, PipeError, UnsafeContent
from wds_async.filters import basic
from wds_async.handlers import Handler, reraise_exception
from wds_async.redact import redact
from wds_async.stages import Traits, pipelinefilter
from wds_async.storage import pipe
from wds_async.tools.expressions import fraction, value

__all__ = [
    "check_command", "filtered", "processed", "renamed", "selected", "split_by", "split_randomly", "weights_of",
]  # fmt: skip

Sample = Mapping[str, Any]

_PLACE = re.compile(r"\{\{|\}\}|\{([A-Za-z0-9_][\w.-]*)\}")
_SHOWN_BYTES = 2000
_STEM = "sample"


def filtered(sample: Sample, expression: str, invert: bool = False) -> Sample | None:
    """Return ``sample`` if ``expression`` is true for it (with ``invert``: if it is not), else None."""
    return sample if bool(value(sample, expression)) != invert else None


def selected(sample: Sample, fields: list[str], drop: bool = False, optional: bool = False) -> dict[str, Any]:
    """Return the sample with only the fields that ``fields`` names, or with ``drop`` without these. Names may be
    patterns (``seg.*``). MissingField where a name fits no field, unless ``optional``; ValueError where none is left.
    """
    names = [name for name in sample if not name.startswith("_")]
    chosen = {name for pattern in fields for name in fnmatch.filter(names, pattern)}
    if not optional and (missing := [one for one in fields if not fnmatch.filter(names, one)]):
        raise _missing(sample, missing, "--optional goes without them")
    result = {name: data for name, data in sample.items() if name.startswith("_") or (name in chosen) != drop}
    if len(result) == len(sample) - len(names):
        raise ValueError(f"no field is left of {', '.join(names)}")
    return result


def renamed(sample: Sample, names: Mapping[str, str], key: str = "") -> dict[str, Any]:
    """Return the sample with the fields ``names`` (new: old) renamed, and with the key that the expression ``key``
    gives. MissingField for an old name that is not there; ConfigError for a new one that is there already."""
    if missing := [old for old in names.values() if old not in sample]:
        raise _missing(sample, missing, "It is NEW=OLD, and the old name has to be there")
    moved = {old: new for new, old in names.items()}
    result = {moved.get(name, name): data for name, data in sample.items()}
    if len(result) < len(sample):
        twice = sorted(set(names) & (set(sample) - set(moved)))
        raise ConfigError(f"there is a field {', '.join(twice)} already: rename or drop it too")
    if key:
        new = value(sample, key)
        if not isinstance(new, str | int) or isinstance(new, bool) or new == "":
            raise ConfigError(f"the key {key!r} gives {new!r}: it has to be a text or a whole number")
        result["__key__"] = str(new)
    return result


def _missing(sample: Sample, missing: list[str], advice: str) -> MissingField:
    there = ", ".join(name for name in sample if not name.startswith("_")) or "none"
    return MissingField(f"no field {', '.join(missing)}; there are: {there}{f'. {advice}' if advice else ''}")


def split_by(sample: Mapping[str, Any], expression: str) -> str | None:
    """Return the name that ``expression`` gives for ``sample``: a text, a number, or true or false; None drops it."""
    name = value(sample, expression)
    return name if name is None or isinstance(name, str) else str(name).lower()


def split_randomly(sample: Mapping[str, Any], weights: Mapping[str, float], seed: int = 0) -> str | None:
    """Return one of the names in ``weights`` by the sample's key: the same key and seed always give the same name.
    A sample beyond their sum, where that is less than 1, is dropped."""
    place = fraction(str(sample["__key__"]), seed)
    for name, end in zip(weights, itertools.accumulate(weights.values()), strict=True):
        if place < end:
            return name
    return list(weights)[-1] if math.isclose(sum(weights.values()), 1) else None


def weights_of(text: str) -> dict[str, float]:
    """Return the weights in ``train=0.9,val=0.1``. ConfigError for others than numbers above 0 with a sum up to 1."""
    try:
        weights = {name: float(weight) for name, weight in (pair.split("=") for pair in text.split(","))}
    except ValueError:
        raise ConfigError(f"weights {text!r}: write names and shares, as in train=0.9,val=0.1") from None
    if not all(0 < weight <= 1 for weight in weights.values()) or sum(weights.values()) > 1 + 1e-9 or "" in weights:
        raise ConfigError(f"weights {text!r}: shares are above 0, and their sum is at most 1")
    return weights


def check_command(command: str, shell: bool = False) -> None:
    """Raise ConfigError for a command that cannot be started, and UnsafeContent under ``WDS_SECURE=1``."""
    if config.is_secure():
        raise UnsafeContent("proc runs commands, which WDS_SECURE=1 forbids")
    _arguments(command, {}, shell)


@functools.partial(pipelinefilter, traits=Traits(one_to_one=True, handler="handler"))
def processed(
    data: Iterable[Any],
    command: str,
    shell: bool = False,
    jobs: int = 2,
    timeout_s: float = 600.0,
    handler: Handler = reraise_exception,
) -> Iterator[Any]:
    """Run ``command`` on each sample, ``jobs`` at once.

    The fields are files in a folder of the sample's own, in which the command runs; ``{jpg}`` in it is the name of the
    file of a field, or of one to be made, and ``{key}`` the key. Afterwards the files there are the fields. A command
    that fails, or takes more than ``timeout_s`` seconds, is a PipeError for ``handler``. With ``shell`` the shell
    runs it.
    """
    check_command(command, shell)
    run = functools.partial(_run, command=command, shell=shell, timeout_s=timeout_s)
    yield from basic.map(run, handler=handler, threads=jobs)(data)


def _run(sample: Sample, command: str, shell: bool, timeout_s: float) -> dict[str, Any]:
    """Return what ``command`` makes of ``sample``."""
    fields = {name: data for name, data in sample.items() if not name.startswith("_")}
    with tempfile.TemporaryDirectory(prefix="wds-proc-") as folder, tempfile.TemporaryFile() as output:
        for name, data in fields.items():
            _file_of(folder, name).write_bytes(data)
        arguments = _arguments(command, {"key": str(sample["__key__"])}, shell)
        _call(arguments, folder, output, shell, timeout_s, f"sample {sample['__key__']!r}")
        return {**{name: sample[name] for name in sample if name.startswith("_")}, **_files(folder)}


def _file_of(folder: str, field: str) -> Path:
    name = f"{_STEM}.{field}"
    if "/" in name or "\0" in name or len(os.fsencode(name)) > 255:
        raise ValueError(f"the field {field!r:.300} cannot be the name of a file")
    return Path(folder) / name


def _arguments(command: str, values: Mapping[str, str], shell: bool) -> Any:
    """Return the arguments of ``command``, or for the shell its text, with the names of files and ``values``."""

    def put(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        text = values.get(match[1], f"{_STEM}.{match[1]}")
        return shlex.quote(text) if shell else text

    if shell:
        return _PLACE.sub(put, command)
    try:
        arguments = [_PLACE.sub(put, part) for part in shlex.split(command)]
    except ValueError as exn:
        raise ConfigError(f"the command {command!r}: {exn}") from None
    if not arguments:
        raise ConfigError("the command is empty: write for example 'convert {jpg} -resize 256 {jpg}'")
    return arguments


def _call(arguments: Any, folder: str, output: IO[bytes], shell: bool, timeout_s: float, what: str) -> None:
    """Run a command in ``folder``. PipeError where it fails, with ``what`` and the end of what it wrote."""
    shown = redact(arguments if isinstance(arguments, str) else shlex.join(arguments))
    try:
        process = pipe.start(
            arguments, writes=False, shell=shell, cwd=folder, stdin=pipe.NOTHING, stdout=output, stderr=output
        )
    except OSError as exn:
        raise PipeError(f"{what}: `{shown}` cannot be started: {exn}") from exn
    try:
        status = pipe.wait(process, timeout_s)
    finally:
        pipe.stop(process)
    if status != 0:
        ended = f"was ended after {timeout_s:g} s" if status is None else pipe.describe_status(status)
        output.seek(max(0, output.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        said = output.read().decode("utf-8", "replace").strip()
        raise PipeError(f"{what}: `{shown}`: {ended}{f': {said}' if said else ''}")


def _files(folder: str) -> dict[str, bytes]:
    """Return the fields that the files in ``folder`` are. ValueError for none, and for files that are no fields."""
    fields = {}
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            stem, _, field = entry.name.partition(".")
            if stem != _STEM or not field or not entry.is_file(follow_symlinks=False):
                raise ValueError(
                    f"the command left {entry.name!r}, which is no field: fields are files named {_STEM}.NAME, which "
                    "{NAME} stands for; have the command delete others"
                )
            fields[field] = Path(entry.path).read_bytes()
    if not fields:
        raise ValueError("the command left no files, and so no fields")
    return fields
