"""Whatever else fsspec knows: ranges through the filesystem's own ``_cat_file``, always with an explicit end.

Filesystems are made on the engine's loop, uncached (``skip_instance_cache``): an instance cached by fsspec belongs
to another loop, or to the parent of a fork.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from wds_async.errors import MissingExtra, UrlError
from wds_async.redact import redact
from wds_async.storage.base import Access, Answer, Fault, Request, Stream, Verdict
from wds_async.storage.http import explain_exception
from wds_async.storage.local import explain_os_error

__all__ = ["EXTRAS", "GenericBackend", "known_protocol", "reads_local_files"]

Call = Callable[..., Awaitable[Any]]

# The first four are this machine's files, git and dvc a repository among them; what the last two read is said by what
# they find elsewhere, and may be any file.
_LOCAL = frozenset({"", "file", "local", "asynclocal", "git", "dvc", "generic", "reference"})

EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "adl": "azure",
}
"""The extra that brings the filesystem of a scheme."""


_NO_CREDENTIALS = frozenset(
    {"ClientAuthenticationError", "DefaultCredentialsError", "NoCredentialsError", "PartialCredentialsError"}
)
_CREDENTIALS_ADVICE = (
    "Give credentials as the store's own tools take them (AWS_* or a profile, GOOGLE_APPLICATION_CREDENTIALS, "
    "AZURE_STORAGE_*), or make the objects public and read them by https."
)


def reads_local_files(url: str) -> bool:
    """Whether a URL for fsspec ends at this machine's files."""
    return not _LOCAL.isdisjoint(_protocols(url))


def known_protocol(scheme: str) -> bool:
    """Whether fsspec has a filesystem of this name (installed or not)."""
    from fsspec.registry import known_implementations, registry  # noqa: PLC0415 (slow, and often not needed)

    return scheme in known_implementations or scheme in registry


class GenericBackend:
    """One for all fsspec filesystems; they are kept by protocol until `close`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._filesystems: dict[str, Any] = {}
        self._turns: dict[int, _Turn] = {}

    async def access(self, url: str) -> Access:
        filesystem, path = await self._locate(url)
        turn = self._turns.setdefault(id(filesystem), _Turn(self._call))
        if _is_async(filesystem):
            info = await filesystem._info(path)
        else:
            info = await turn.take(filesystem.info, path)
        if info.get("type") == "directory":
            raise IsADirectoryError(path)
        size = info.get("size")
        if size is None:
            raise UrlError(f"{redact(url)}: its filesystem does not tell its size; copy it to a store that does")
        return _FsspecRanges(turn, filesystem, path, int(size), _identity(info))

    def streamed(self, request: Request) -> Stream:
        raise TypeError("an fsspec object is not requested")

    def classify(self, outcome: Answer | BaseException) -> Fault:
        if isinstance(outcome, FileNotFoundError | PermissionError | IsADirectoryError):
            return explain_os_error(outcome)
        if type(outcome).__name__ in _NO_CREDENTIALS:  # of packages that are not imported for their names
            reason = f"{type(outcome).__name__}: {outcome}".rstrip(".")
            return Fault(Verdict.DENIED, reason, _CREDENTIALS_ADVICE)
        if isinstance(outcome, BaseException):
            fault = explain_exception(outcome)
            if fault.verdict is Verdict.FATAL and isinstance(outcome, OSError):
                return Fault(Verdict.TRANSIENT, fault.reason, fault.advice)
            return fault
        return Fault(Verdict.FATAL, f"the store answered {outcome.status}")

    async def close(self) -> None:
        for filesystem in self._filesystems.values():
            session = getattr(filesystem, "_session", None)
            if _is_async(filesystem) and session is not None and hasattr(session, "close"):
                await session.close()
        self._filesystems.clear()

    async def _locate(self, url: str) -> tuple[Any, str]:
        filesystem, path = await self._call(self._find, url)
        if _is_async(filesystem) and hasattr(filesystem, "set_session"):
            await filesystem.set_session()
        return filesystem, path

    def _find(self, url: str) -> tuple[Any, str]:
        import fsspec  # noqa: PLC0415 (slow, and often not needed)

        try:
            if "::" in url:  # fsspec keeps the instances of chains, by all their arguments
                filesystem, path = fsspec.core.url_to_fs(url)
                return filesystem, str(path)
            protocol = _protocols(url)[0]
            cls = fsspec.get_filesystem_class(protocol)
            options = cls._get_kwargs_from_urls(url)  # host and user, where the URL names them
            key = f"{protocol} {sorted(options.items())}"
            if key not in self._filesystems:
                if getattr(cls, "async_impl", False):
                    options |= {"asynchronous": True, "skip_instance_cache": True}
                self._filesystems.setdefault(key, cls(**options))
            return self._filesystems[key], str(cls._strip_protocol(url))
        except ImportError as exn:
            extra = next((EXTRAS[name] for name in _protocols(url) if name in EXTRAS), None)
            if extra is None:
                raise MissingExtra(f"{redact(url)} needs a package that is not installed: {exn}") from exn
            raise MissingExtra(f'{redact(url)} needs: pip install "wds-async[{extra}]"') from exn


def _protocols(url: str) -> list[str]:
    """The protocol of each link of an fsspec chain; "" for a path."""
    links = url.split("::")
    return [link.partition("://")[0] if "://" in link or link is not links[-1] else "" for link in links]


def _is_async(filesystem: Any) -> bool:
    return bool(getattr(filesystem, "async_impl", False) and getattr(filesystem, "asynchronous", False))


def _identity(info: dict[str, Any]) -> str:
    for name in ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified", "created"):
        if info.get(name):
            return f"{name} {info[name]}, {info.get('size')} bytes"
    return f"{info.get('size')} bytes"


class _Turn:
    """One call at a time: blocking filesystems promise nothing for threads. ``ftp`` has one connection, and
    ``simplecache`` shows a file to all while it is still being written."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._queue = asyncio.Lock()
        self._running = threading.Lock()  # a call that was cancelled goes on in its thread

    async def take(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async with self._queue:
            return await self._call(self._run, function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._running:
            return function(*args, **kwargs)


class _FsspecRanges:
    def __init__(self, turn: _Turn, filesystem: Any, path: str, size: int, identity: str) -> None:
        self._turn = turn
        self._filesystem = filesystem
        self._path = path
        self.size = size
        self.identity = identity

    async def read(self, start: int, stop: int) -> bytes:
        if _is_async(self._filesystem):
            data = await self._filesystem._cat_file(self._path, start=start, end=stop)
        else:
            data = await self._turn.take(self._filesystem.cat_file, self._path, start=start, end=stop)
        return bytes(data) if not isinstance(data, bytes) else data
