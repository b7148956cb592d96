"""From a URL to its backend: rewrite, route, refuse what the security rules forbid, and choose."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from wds_async.config import settings
from wds_async.errors import UnsafeContent, UrlError
from wds_async.storage.base import Backend
from wds_async.storage.generic import GenericBackend, known_protocol, reads_local_files
from wds_async.storage.http import HttpBackend
from wds_async.storage.local import LocalBackend
from wds_async.storage.pipe import PipeBackend, StdinBackend
from wds_async.urls import native_pipe, redact, rewrite, route, rules_from_env, scheme

__all__ = ["Backends", "Location", "check_allowed", "locate", "tell_of_native_pipes"]

logger = logging.getLogger("wds_async")

_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class Location:
    """Where a shard is: ``url`` as the user wrote it (expanded), ``target`` after rewriting and routing, and the
    ``kind`` of backend: ``local``, ``pipe``, ``stdin``, ``http`` or ``generic``."""

    url: str
    target: str
    kind: str


def check_allowed(kind: str) -> None:
    """Refuse what ``WDS_SECURE=1`` forbids: the one place that every opener passes."""
    if not settings().secure:
        return
    if kind == "pipe":
        raise UnsafeContent("gopen_pipe: unsafe_gopen is False, cannot open pipe URLs (WDS_SECURE=1)")
    if kind in ("local", "stdin"):
        raise UnsafeContent("gopen: unsafe_gopen is False, cannot open local files (WDS_SECURE=1)")


def locate(url: str) -> Location:
    """Rewrite and route ``url``, then name its backend. `UrlError` for a scheme that nothing here knows."""
    target = route(rewrite(url, rules_from_env()))
    if target.startswith("pipe:"):
        target = _native(target)
    name = scheme(target)
    if target == "-":
        kind = "stdin"
    elif name in ("", "file"):
        kind = "local"
    elif name == "pipe":
        kind = "pipe"
    elif name in ("http", "https"):
        kind = "http"
    elif known_protocol(name) or "::" in target:
        kind = "generic"
    else:
        raise UrlError(
            f"{redact(url)}: unknown scheme {name!r}. Known are local paths, file:, http:, https:, pipe:, - and "
            "every protocol of fsspec (s3, gs, az, hf, sftp, …)."
        )
    check_allowed("local" if kind == "generic" and reads_local_files(target) else kind)
    return Location(url, target, kind)


def _native(target: str) -> str:
    """The URL that a ``pipe:`` stands for, where the user asked for it; otherwise one notice a run."""
    native = native_pipe(target)
    if native is None:
        return target
    if settings().native_pipes:
        return native
    if multiprocessing.parent_process() is None:  # a worker's parent was told when it made the data set
        _tell(target, native)
    return target


def tell_of_native_pipes(urls: Iterable[str]) -> None:
    """Log, once a run and tool, which ``pipe:`` commands among ``urls`` need not be commands."""
    for url in urls:
        if url.startswith("pipe:") and (native := native_pipe(url)) is not None and not settings().native_pipes:
            _tell(url, native)


def _tell(target: str, native: str) -> None:
    tool = target.removeprefix("pipe:").split()[0]
    if tool not in _told and not settings().secure:
        _told.add(tool)
        logger.warning(
            "%s can be read without a command, faster and with retries, as %s; "
            "set WDS_NATIVE_PIPES=1 or write that URL (said once a run)",
            redact(target),
            redact(native),
        )


class Backends:
    """The backends of one engine, made when first needed; ``call`` runs a blocking function on a thread, and
    ``http_options`` are those of `HttpBackend`."""

    def __init__(self, call: Callable[..., Awaitable[Any]], **http_options: Any) -> None:
        self._makers: dict[str, Callable[[], Backend]] = {
            "local": lambda: LocalBackend(call),
            "pipe": lambda: PipeBackend(call),
            "stdin": lambda: StdinBackend(call),
            "http": lambda: HttpBackend(**http_options),
            "generic": lambda: GenericBackend(call),
        }
        self._made: dict[str, Backend] = {}

    def of(self, location: Location) -> Backend:
        """The backend for a located shard."""
        if location.kind not in self._made:
            self._made[location.kind] = self._makers[location.kind]()
        return self._made[location.kind]

    async def close(self) -> None:
        """Close every backend that was made."""
        made, self._made = self._made, {}
        for backend in made.values():
            await backend.close()
