"""Openers by scheme: WebDataset's ``gopen_schemes``, which programs edit.

``wds.gopen_schemes["s3"] = f`` makes every URL of the scheme ``s3``, also ``s3:x``, be opened by ``f(url, mode,
bufsize, **kw)``, which returns a file-like object of bytes, wherever the URL is read or written. The entry
``__default__`` serves the schemes that nothing here knows. Entries of our own are there to be called and wrapped
(``old = gopen_schemes["http"]``), and mean that our clients read the scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wds_async.urls import recognise, scheme

__all__ = ["DEFAULT", "Opener", "by_user", "default_opener", "gopen_schemes", "install", "opener_of"]

Opener = Callable[..., Any]
"""``opener(url, mode, bufsize, **kw)`` gives a file-like object: ``read(n)`` or ``readinto`` for mode ``"rb"``,
``write`` for ``"wb"``. For the engine it runs on a thread, for several shards at once."""

DEFAULT = "__default__"

gopen_schemes: dict[str, Opener] = {}
"""The table. Keys are schemes in lower case, without colon."""

_ours: dict[str, Opener] = {}


def install(openers: Mapping[str, Opener]) -> None:
    """Put openers of our own into the table, where the program has put none. They are told apart from the program's
    by identity, name by name: to give ``"gs"`` the opener of ``"http"`` is the program's choice."""
    for name, opener in openers.items():
        _ours[name] = opener
        gopen_schemes.setdefault(name, opener)


def by_user(name: str) -> bool:
    """Whether the program has put an opener for the scheme ``name`` there."""
    return name in gopen_schemes and gopen_schemes[name] is not _ours.get(name)


def opener_of(url: str) -> Opener | None:
    """The program's opener for the scheme of ``url`` (rewritten), None where there is none."""
    name = scheme(url)
    return gopen_schemes[name] if name not in ("", "-", DEFAULT) and by_user(name) else None


def default_opener() -> Opener | None:
    """The program's opener for schemes that nothing here knows."""
    return gopen_schemes[DEFAULT] if by_user(DEFAULT) else None


recognise(by_user)
