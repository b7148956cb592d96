"""Lookup of a URL's store: rewriting, routing, and the backends of one engine."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from wds_async.config import is_secure
from wds_async.environment import value
from wds_async.errors import UnsafeContent, UrlError, WdsError
from wds_async.logs import warn_once
from wds_async.redact import redact
from wds_async.storage.base import Backend, Guard, Location
from wds_async.storage.deadlines import BackendWithDeadlines, question_s
from wds_async.storage.fsspec_config import configured
from wds_async.storage.generic import reads_local_files
from wds_async.storage.growing import CachedBackend
from wds_async.storage.options import NO_OPTIONS, NOTHING_GIVEN, Options, StorageOptions
from wds_async.storage.preload import import_client
from wds_async.storage.spec import StoreSpec
from wds_async.storage.stores import (
    BY_SCHEME,
    PLUGIN,
    STORES,
    STORES_GROUP,
    installed_stores,
    known_protocol,
    load,
    similar_scheme,
    spec_of,
    web_store,
)
from wds_async.storage.user_openers import default_opener, opener_of
from wds_async.urls import links, native_pipe, rewrite, rules_from_env, scheme

__all__ = ["Backends", "check_allowed", "import_clients", "locate", "tell_of_native_pipes"]

_EXAMPLES_FROM = 1000


def import_clients(urls: Iterable[str]) -> None:
    """Import what reading ``urls`` needs, before workers are forked: once for all of them. Start nothing, and leave
    missing packages to the read."""
    examples = {scheme(url): url for url in itertools.islice(urls, _EXAMPLES_FROM)}
    for url in examples.values():
        with contextlib.suppress(WdsError):
            spec = locate(url).spec
            for module in (spec.backend.partition(":")[0], *spec.imports) if spec.schemes else ():
                with contextlib.suppress(ImportError):
                    import_client(module)


logger = logging.getLogger("wds_async")

# Schemes that no client knows: WebDataset's htgs:// and scp://, Hadoop's s3n://.
_REPLACED = {name: spec.schemes[0] for spec in STORES for name in spec.replaced} | {"scp": "sftp"}

_ROUTERS = tuple(spec for spec in STORES if spec.router)


def _plugin_store(name: str, call: Callable[..., Awaitable[Any]], options: Options) -> Backend:
    point = installed_stores()[name]
    try:
        backend: Backend = point.load()(call, options)
    except Exception as exn:
        raise UrlError(
            f"{name}://: its store, {point.value} of the group {STORES_GROUP}, cannot be made: "
            f"{type(exn).__name__}: {redact(str(exn))}. Mend or uninstall the package that brings it."
        ) from exn
    return backend


def check_allowed(kind: str) -> None:
    """Raise UnsafeContent for what ``WDS_SECURE=1`` forbids; every opener passes here.

    Standard input stays open to read, and so does what the program opens itself (kind ``opener``): secure mode is about
    data that names what to open, and both are the program's own choice.
    """
    if not is_secure():
        return
    if kind == "pipe":
        raise UnsafeContent("gopen_pipe: unsafe_gopen is False, cannot open pipe URLs (WDS_SECURE=1)")
    if kind == "local":
        raise UnsafeContent("gopen: unsafe_gopen is False, cannot open local files (WDS_SECURE=1)")


def locate(url: str, *, final: bool = False, options: StorageOptions = NOTHING_GIVEN) -> Location:
    """Rewrite and route ``url``, and return its location. Raise UrlError for an unknown scheme.

    The program's openers (`user_openers`) come first. A ``final`` URL comes from such an opener: it goes to our own
    clients and is not rewritten again, so that an opener can call the one it replaced.

    The order, everywhere: a URL is expanded (`urls.expand_urls`), rewritten (the first rule that matches it as written,
    else under its scheme's usual name), and routed: ``USE_AIS_FOR`` is asked about the scheme that came out of
    rewriting. ``__url__``, states and cache keys keep the expanded URL. ``wds-async resolve`` shows each step.
    """
    target = url if final else rewrite(url, rules_from_env())
    name = scheme(target)
    if not final and opener_of(name) is not None:
        return Location(url, target, "opener")
    if target.startswith("pipe:"):
        target = _native(target)
        name = scheme(target)
    if name in _REPLACED and target.startswith("://", len(name)):
        target, name = _REPLACED[name] + target[len(name) :], _REPLACED[name]
    kind = _kind(target, name)
    if kind is None and not final and default_opener() is not None:
        return Location(url, target, "opener")
    if kind is None:
        near = similar_scheme(name)
        hint = f" Did you mean {near}://?" if near else ""
        raise UrlError(
            f"{redact(url)}: no gopen handler defined: unknown scheme {name!r}.{hint} "
            "Known are local paths, file:, http:, https:, pipe:, -, ais:, every protocol of fsspec (s3, gs, az, hf, "
            "sftp, …), stores of installed packages (wds_async.stores), and what the "
            "program puts into wds.gopen_schemes."
        )
    check_allowed("local" if kind == "generic" and reads_local_files(target) else kind)
    spec = spec_of(kind)
    own_options = options.of(f"{spec.schemes[0]}://") if spec.web_services else NO_OPTIONS
    location = Location(url, target, kind, own_options or options.of(target))
    return _routed(location, options) if spec.routable else location


def _kind(target: str, name: str) -> str | None:
    """Return the kind of the store of ``target``, whose scheme is ``name``; None where nothing reads it."""
    if target == "-":
        return "stdin"
    if name in ("", "file"):
        return "local"
    if name == "pipe":
        return "pipe"
    if (spec := BY_SCHEME.get(name)) is not None and (spec.guarded or len(links(target)) == 1):
        return web_store(target).kind if spec.guarded else spec.kind
    if len(links(target)) == 1 and name in installed_stores():
        return PLUGIN + name
    return "generic" if len(links(target)) > 1 or known_protocol(name) else None


def _routed(location: Location, options: StorageOptions) -> Location:
    """Return ``location``, or where a router takes its URL (``USE_AIS_FOR``), the location at that router."""
    for spec in _ROUTERS:
        own_options = options.named(spec.schemes[0])
        if not own_options and not any(value(name) for name in spec.router_variables):
            continue
        if load(spec.router)(location.target, own_options):
            falls_back = value("WDS_AIS_FALLBACK") and load(spec.has_origin)(location.target)
            return Location(location.url, location.target, spec.kind, own_options, location if falls_back else None)
    return location


def _native(target: str) -> str:
    """Return the URL that a ``pipe:`` stands for with ``WDS_NATIVE_PIPES``; else log it once a run."""
    if value("WDS_NATIVE_PIPES"):
        return native_pipe(target) or target
    if multiprocessing.parent_process() is None:  # a worker's parent logged it when it made the dataset
        tell_of_native_pipes((target,))
    return target


def tell_of_native_pipes(urls: Iterable[str]) -> None:
    """Log, once a run and tool, the ``pipe:`` commands among ``urls`` that could be plain URLs."""
    if value("WDS_NATIVE_PIPES") or is_secure():
        return
    for target in urls:
        if not target.startswith("pipe:") or (native := native_pipe(target)) is None:
            continue
        tool = target.removeprefix("pipe:").split()[0]
        warn_once(
            logger,
            ("native", tool),
            "%s can be read without a command, faster and with retries, as %s; "
            "set WDS_NATIVE_PIPES=1 or write that URL (logged once a run)",
            redact(target),
            redact(native),
        )


class Backends:
    """The backends of one engine, made when first needed. ``call`` runs a blocking function on a thread; ``direct``:
    whether requests are the engine's own (``WDS_DIRECT``); ``guard`` allows or refuses redirects of web servers."""

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        *,
        direct: bool = True,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 30.0,
        guard: Guard | None = None,
    ) -> None:
        self._call, self._direct, self._guard = call, direct, guard
        self._timeouts: dict[str, Any] = {"connect_timeout_s": connect_timeout_s, "stall_timeout_s": stall_timeout_s}
        self._made: dict[tuple[str, Options], Backend] = {}

    def of(self, location: Location) -> Backend:
        """Return the backend for a located shard, made when its store is first read."""
        key = location.kind, location.options
        if key not in self._made:
            made = self._make(location.spec, location.options)
            deadline_s = question_s(*self._timeouts.values())
            self._made[key] = BackendWithDeadlines(made, deadline_s) if location.spec.deadlines else made
        store = self._made[key]
        return store if location.entry is None else CachedBackend(self._call, location.entry, store)

    def _make(self, spec: StoreSpec, options: Options) -> Backend:
        if spec.kind.startswith(PLUGIN):
            return _plugin_store(spec.schemes[0], self._call, options)
        make: Callable[..., Backend] = load(spec.backend)
        if not spec.has_server:
            return make(self._call)
        arguments = {"call": self._call, "options": options, **self._timeouts}
        if spec.configuration:
            arguments["options"] = configured(options, *spec.configuration)
        if spec.schemes:
            arguments["direct"] = self._direct
        if spec.guarded:
            arguments["guard"] = self._guard
        return make(**arguments)

    async def close(self) -> None:
        """Close every backend that was made."""
        made, self._made = self._made, {}
        for backend in made.values():
            await backend.close()
