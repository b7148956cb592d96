"""The presentation of errors and warnings to the program: its own frames, and the sample that a function failed on."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from wds_async.environment import value
from wds_async.errors import DecodingError, WdsError
from wds_async.redact import redact

__all__ = ["Shortened", "located", "shortened", "warn"]

_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_INSTALLED = {"site-packages", "dist-packages"}
_OURS, _LOADERS = ("wds_async.",), ("torch.utils.data.", "torch._utils")
"""Modules whose frames only show how the program's functions are called."""
_BETWEEN = {"wds_async", "abc", "contextlib", "importlib", "multiprocessing", "torch", "typing"}
"""Packages whose frames may stand between the program's line and a warning."""


class Shortened:
    """A context manager for a call or an iteration of the program: its errors leave it by `shortened`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exn: BaseException | None, traceback: object) -> None:
        if isinstance(exn, Exception):
            shortened(exn)


def shortened(exn: BaseException) -> None:
    """Take the frames of this package out of the traceback of ``exn`` and of the errors chained to it.

    The frames of the program's functions stay, with what they call; of this package only the one that raised another
    error than its own. A `WdsError` loses the frames of libraries too, and its cause, unless the program's functions
    raised that; it remains as ``__context__``. Only `DecodingError` keeps it. Nothing is done under ``WDS_LOG=debug``.
    Raise the error again by a bare ``raise``, which adds no frame.
    """
    if value("WDS_LOG").lower() == "debug":
        return
    seen: set[int] = set()
    chained: BaseException | None = exn
    while chained is not None and id(chained) not in seen:
        seen.add(id(chained))
        _shorten(chained)
        cause = chained.__cause__
        complete = isinstance(chained, WdsError) and not isinstance(chained, DecodingError)
        if complete and cause is not None and not any(map(_of_program, _links(cause.__traceback__))):
            chained.__context__ = chained.__context__ or cause
            chained.__cause__ = cause = None
        chained = cause or (None if chained.__suppress_context__ else chained.__context__)


def _shorten(exn: BaseException) -> None:
    ours = isinstance(exn, WdsError)
    in_program, kept = not ours, []
    for link in _links(exn.__traceback__):
        in_program = in_program or _of_program(link)
        raises = link.tb_next is None and not ours and _of(link, _OURS)
        if in_program and (raises or not _of(link, _OURS + _LOADERS)):
            kept.append(link)
    for link, following in zip(kept, [*kept[1:], None], strict=False):
        link.tb_next = following
    exn.__traceback__ = kept[0] if kept else None


def _links(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _of(link: TracebackType, modules: tuple[str, ...]) -> bool:
    return str(link.tb_frame.f_globals.get("__name__", "")).startswith(modules)


def _of_program(link: TracebackType) -> bool:
    """Return whether a frame belongs to the program itself: not to this package, an installed one or the standard
    library.
    """
    frame = link.tb_frame  # the module's file: compiled modules name no folder in their code
    file = str(frame.f_globals.get("__file__") or frame.f_code.co_filename)
    installed = file.startswith(("<frozen ", _STANDARD_LIBRARY)) or not _INSTALLED.isdisjoint(Path(file).parts)
    return not installed and not _of(link, _OURS)


def located(exn: Exception, stage: str, sample: Any) -> Exception:
    """Return ``exn`` with a note of the stage, and of the key and shard of ``sample`` where it is a dict, unless its
    message names them. Another note suggests `decode` where a function wanted something else than bytes. Errors of ours
    are left as they are."""
    if isinstance(exn, WdsError):
        return exn
    key, where = None, ""
    if isinstance(sample, dict) and "__key__" in sample:
        key = sample["__key__"]
        where = f": sample {key!r} of {redact(str(sample.get('__url__')))}"
    elif isinstance(sample, tuple):
        where = "; put __key__ into to_tuple() to see which sample"
    if key is None or repr(key) not in str(exn):
        exn.add_note(f"in the stage {stage}{where}")
    if "bytes" in str(exn) and (raw := _raw(sample)):
        exn.add_note(
            f"{', '.join(raw)} of the sample are bytes: .decode(...) before this stage makes arrays, texts and numbers "
            "of fields, by their names"
        )
    return exn


def _raw(sample: Any) -> list[str]:
    """Return the values in ``sample`` that are bytes."""
    if isinstance(sample, dict):
        return [repr(name) for name, value in sample.items() if isinstance(value, bytes)]
    if isinstance(sample, tuple | list):
        return [f"value {number}" for number, value in enumerate(sample) if isinstance(value, bytes)]
    return ["the value"] if isinstance(sample, bytes) else []


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the program that led here, whatever frames of this package are in between; in a forked
    DataLoader worker, the line that began to iterate the loader."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, registry)
