"""Openers by scheme: WebDataset's ``gopen_schemes``, which programs edit.

``wds.gopen_schemes["s3"] = f`` makes every URL of the scheme ``s3``, also ``s3:x``, be opened by ``f(url, mode,
bufsize, **kw)``, which returns a file-like object of bytes, wherever the URL is read or written. The entry
``__default__`` serves the schemes that nothing here knows. Entries of our own are there to be called and wrapped
(``old = gopen_schemes["http"]``), and mean that our clients read the scheme.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from wds_async.errors import UrlError
from wds_async.storage.base import Access, Answer, Backend, Call, Description, Fault, Location, Verdict
from wds_async.storage.local import explain_os_error
from wds_async.urls import recognise

__all__ = [
    "DEFAULT",
    "GOPEN_BUFSIZE",
    "OpenedBackend",
    "OpenedStream",
    "Opener",
    "by_user",
    "default_opener",
    "gopen_schemes",
    "install",
    "named_opener",
    "opener_of",
]

Opener = Callable[..., Any]
"""``opener(url, mode, bufsize, **kw)`` gives a file-like object: ``read(n)`` or ``readinto`` for mode ``"rb"``,
``write`` for ``"wb"``. For the engine it runs on a thread, for several shards at once."""
DEFAULT = "__default__"
gopen_schemes: dict[str, Opener] = {}
"""The table. Keys are schemes in lower case, without colon."""
_ours: dict[str, Opener] = {}


def install(openers: Mapping[str, Opener]) -> None:
    """Put our own openers into the table, where the program has put none. They differ from the program's by identity,
    name by name: to give ``"gs"`` the opener of ``"http"`` is the program's choice."""
    for name, opener in openers.items():
        _ours[name] = opener
        gopen_schemes.setdefault(name, opener)


def by_user(name: str) -> bool:
    """Return whether the program has put an opener for the scheme ``name`` there."""
    return name in gopen_schemes and gopen_schemes[name] is not _ours.get(name)


def opener_of(name: str) -> Opener | None:
    """Return the program's opener for the scheme ``name``, None where there is none."""
    return gopen_schemes[name] if name not in ("", "-", DEFAULT) and by_user(name) else None


def default_opener() -> Opener | None:
    """Return the program's opener for unknown schemes."""
    return gopen_schemes[DEFAULT] if by_user(DEFAULT) else None


recognise(by_user)
GOPEN_BUFSIZE = 8192
"""The ``bufsize`` that WebDataset gives to openers, in bytes; it says nothing about how much is read at once."""
_CHUNK_BYTES = 512 << 10
_GRACE_S = 0.5


def named_opener(location: Location) -> Opener:
    """Return the program's opener for ``location``. Raise UrlError where the table has none any more."""
    opener = opener_of(location.scheme) or default_opener()
    if opener is None:
        raise UrlError(f"{location.shown}: its entry of gopen_schemes is gone; leave it there while shards are read")
    return opener


class OpenedStream:
    """A stream over the file that the program's opener returns for one URL.

    Reading goes through memory of its own, and one copy: a read that hangs in the program's code cannot be stopped, and
    must not write to a slab that has another owner by then. Its thread closes the file when it comes back.
    """

    restartable = False  # nothing says that opening again gives the same bytes

    def __init__(self, call: Call, location: Location) -> None:
        self._call, self._location = call, location
        self._job: asyncio.Future[Any] | None = None
        self._left = False
        self._file: Any = None
        self._buffer = bytearray()

    async def open(self) -> str:
        await self._run(self._open)
        return ""

    async def readinto(self, into: memoryview) -> int:
        data: memoryview = await self._run(self._read, min(len(into), _CHUNK_BYTES))
        into[: len(data)] = data
        return len(data)

    async def close(self) -> None:
        if self._left:
            return
        self._left = True
        job = self._job
        if job is not None and not job.done():
            await asyncio.wait([job], timeout=_GRACE_S)
            if not job.done():
                return
        with contextlib.suppress(Exception):  # errors about the rest, which is not read
            await self._call(self._close)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        self._job = asyncio.ensure_future(self._call(function, *args))
        self._job.add_done_callback(_retrieved)
        return await asyncio.shield(self._job)

    # On threads, one at a time

    def _open(self) -> None:
        self._file = named_opener(self._location)(self._location.target, "rb", GOPEN_BUFSIZE)
        if self._left:
            self._close()
        elif not hasattr(self._file, "read") and not hasattr(self._file, "readinto"):
            raise TypeError(f"the opener returned {type(self._file).__name__}, which has no read()")

    def _read(self, size: int) -> memoryview:
        try:
            data = self._some(size)
            if not data:
                # Now, because a file over a command tells here that the command failed, and not by its last read.
                self._close()
            return data
        finally:
            if self._left:
                self._close()

    def _some(self, size: int) -> memoryview:
        file = self._file
        if hasattr(file, "readinto"):
            if len(self._buffer) < size:
                self._buffer = bytearray(_CHUNK_BYTES)
            view = memoryview(self._buffer)[:size]
            count = file.readinto(view)
            if not isinstance(count, int):
                raise TypeError(f"the opener's readinto() returned {type(count).__name__}; open the file blocking")
            return view[:count]
        data = file.read(size)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"the opener's read() returned {type(data).__name__}; open the file blocking, in binary")
        if len(data) > size:
            raise ValueError(f"the opener's read({size}) returned {len(data)} bytes")
        return memoryview(data).cast("B")

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None and hasattr(file, "close"):
            file.close()


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned read, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


class OpenedBackend(Backend):
    """Backend of the program's own openers. ``call`` runs a blocking function on a thread."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def access(self, location: Location) -> Access:
        return OpenedStream(self._call, location)

    async def describe(self, location: Location) -> Description:
        return Description("the program's own opener", "", "the program", False, "gopen_schemes names an opener")

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        assert isinstance(outcome, BaseException)
        advice = "The opener is the program's own, in gopen_schemes."
        if isinstance(outcome, FileNotFoundError | PermissionError):
            fault = explain_os_error(outcome)
            return Fault(fault.verdict, f"its opener raised {type(outcome).__name__}: {outcome}", advice)
        return Fault(Verdict.FATAL, f"its opener raised {type(outcome).__name__}: {outcome}", advice)
