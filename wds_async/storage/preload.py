"""Imports of the stores' client packages: one at a time in the process, with errors that name the extra."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator

from wds_async.errors import MissingExtra

__all__ = ["client_imports", "extra_needed", "import_client"]

_lock = threading.RLock()


@contextlib.contextmanager
def client_imports() -> Iterator[None]:
    """Import clients of stores in this block, while no other thread does. Blocks, so not for an event loop.

    When one thread imports a package (aiohttp) while another imports a module of it (aiohttp.abc), each can need what
    the other holds. Python ends that deadlock of its import locks by giving one of them a module that is not complete,
    and a package that is installed raises ImportError."""
    with _lock:
        yield


def import_client(name: str) -> None:
    """Import the module ``name`` as in `client_imports`. Blocks."""
    with client_imports():
        importlib.import_module(name)


@contextlib.contextmanager
def extra_needed(what: str, extra: str | None) -> Iterator[None]:
    """Raise MissingExtra for an ImportError in this block. Where a module is not installed, its message says that
    ``what`` needs ``extra`` (None: a package that no extra brings); otherwise why the module cannot be imported."""
    try:
        yield
    except ImportError as exn:
        reason: BaseException = exn
        while isinstance(reason.__cause__, ImportError):  # fsspec says "install s3fs" whatever has failed
            reason = reason.__cause__
        if not isinstance(reason, ModuleNotFoundError):
            raise MissingExtra(f"{what} needs a package that is installed, but cannot be imported: {reason}") from exn
        if extra is None:
            raise MissingExtra(f"{what} needs a package that is not installed: {exn}") from exn
        raise MissingExtra(f'{what} needs: pip install "wds-async[{extra}]" ({reason})') from exn


def _replace_lock() -> None:
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock)
