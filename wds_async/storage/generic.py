"""Whatever else fsspec knows: ranges through the filesystem's own ``_cat_file``, always with an explicit end.

Filesystems are made on the engine's loop, uncached (``skip_instance_cache``): an instance cached by fsspec belongs
to another loop, or to the parent of a fork.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from wds_async.errors import MissingExtra, UrlError
from wds_async.storage.base import Access, Answer, Fault, Request, Stream, Verdict
from wds_async.storage.http import explain_exception
from wds_async.storage.local import explain_os_error

__all__ = ["EXTRAS", "GenericBackend", "known_protocol"]

Call = Callable[..., Awaitable[Any]]

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


def known_protocol(scheme: str) -> bool:
    """Whether fsspec has a filesystem of this name (installed or not)."""
    from fsspec.registry import known_implementations, registry  # noqa: PLC0415 - slow, and often not needed

    return scheme in known_implementations or scheme in registry


class GenericBackend:
    """One for all fsspec filesystems; they are kept by protocol until `close`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._filesystems: dict[str, Any] = {}

    async def access(self, url: str) -> Access:
        filesystem, path = await self._locate(url)
        if _is_async(filesystem):
            info = await filesystem._info(path)
        else:
            info = await self._call(filesystem.info, path)
        if info.get("type") == "directory":
            raise IsADirectoryError(path)
        size = info.get("size")
        if size is None:
            raise UrlError(f"{url}: its filesystem does not tell its size; copy it to a store that does")
        return _FsspecRanges(self._call, filesystem, path, int(size), _identity(info))

    def streamed(self, request: Request) -> Stream:
        raise TypeError("an fsspec object is not requested")

    def classify(self, outcome: Answer | BaseException) -> Fault:
        if isinstance(outcome, FileNotFoundError | PermissionError | IsADirectoryError):
            return explain_os_error(outcome)
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
        protocol = url.partition("://")[0]
        key = url.rpartition("::")[0] + "::" + protocol
        if key not in self._filesystems:
            self._filesystems[key] = await self._call(_make, url, protocol)
        filesystem = self._filesystems[key]
        if _is_async(filesystem) and hasattr(filesystem, "set_session"):
            await filesystem.set_session()
        path = await self._call(_path, filesystem, url)
        return filesystem, path


def _is_async(filesystem: Any) -> bool:
    return bool(getattr(filesystem, "async_impl", False) and getattr(filesystem, "asynchronous", False))


def _make(url: str, protocol: str) -> Any:
    import fsspec  # noqa: PLC0415 - slow, and often not needed

    try:
        if "::" in url:
            return fsspec.core.url_to_fs(url)[0]
        cls = fsspec.get_filesystem_class(protocol)
        options = cls._get_kwargs_from_urls(url)
        if getattr(cls, "async_impl", False):
            return cls(asynchronous=True, skip_instance_cache=True, **options)
        return cls(**options)
    except ImportError as exn:
        extra = EXTRAS.get(protocol)
        if extra is None:
            raise MissingExtra(f"{protocol}:// needs a package that is not installed: {exn}") from exn
        raise MissingExtra(f'{protocol}:// needs: pip install "wds-async[{extra}]"') from exn


def _path(filesystem: Any, url: str) -> str:
    if "::" in url:
        import fsspec  # noqa: PLC0415

        return str(fsspec.core.url_to_fs(url)[1])
    return str(filesystem._strip_protocol(url))


def _identity(info: dict[str, Any]) -> str:
    for name in ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified", "created"):
        if info.get(name):
            return f"{name} {info[name]}, {info.get('size')} bytes"
    return f"{info.get('size')} bytes"


class _FsspecRanges:
    def __init__(self, call: Call, filesystem: Any, path: str, size: int, identity: str) -> None:
        self._call = call
        self._filesystem = filesystem
        self._path = path
        self.size = size
        self.identity = identity

    async def read(self, start: int, stop: int) -> bytes:
        if _is_async(self._filesystem):
            data = await self._filesystem._cat_file(self._path, start=start, end=stop)
        else:
            data = await self._call(self._filesystem.cat_file, self._path, start=start, end=stop)
        return bytes(data) if not isinstance(data, bytes) else data
