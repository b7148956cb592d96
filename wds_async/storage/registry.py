"""The packages that stores are read by, imported before workers are forked: once for all of them, not once in each."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import itertools
import logging
import multiprocessing
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from wds_async.config import settings
from wds_async.environment import SCHEME_ALIASES, value
from wds_async.errors import UnsafeContent, UrlError, WdsError
from wds_async.redact import redact
from wds_async.storage.base import Backend, Guard
from wds_async.storage.deadlines import BackendWithDeadlines, question_s
from wds_async.storage.filesystems import STORES_GROUP, installed_stores, known_protocol
from wds_async.storage.fsspec_config import configured
from wds_async.storage.generic import GenericBackend, reads_local_files
from wds_async.storage.growing import CachedBackend, CacheEntry
from wds_async.storage.http.backend import HttpBackend
from wds_async.storage.local import LocalBackend
from wds_async.storage.options import NO_OPTIONS, NOTHING_GIVEN, Options, StorageOptions
from wds_async.storage.pipe import PipeBackend, StdinBackend
from wds_async.storage.preload import import_client
from wds_async.storage.user_openers import OpenedBackend, default_opener, opener_of
from wds_async.urls import links, native_pipe, rewrite, rules_from_env, scheme

__all__ = ["Backends", "Location", "check_allowed", "import_clients", "locate", "tell_of_native_pipes"]

_PACKAGES = {
    "s3": ("wds_async.storage.s3.backend", "s3fs"),
    "gcs": ("wds_async.storage.gcs.backend", "google.auth.transport.requests", "google.oauth2.service_account"),
    "azure": ("wds_async.storage.azure.backend", "azure.storage.blob.aio", "azure.identity.aio"),
    "hf": ("wds_async.storage.hub.backend",),
    "ais": ("wds_async.storage.ais.backend",),
}


"""What the first read of a kind of location imports: for the clouds 0.2 to 0.4 s of CPU."""


_LOOKED_AT = 1000


def import_clients(urls: Iterable[str]) -> None:
    """Import what reading ``urls`` will need. Starts nothing; what is not installed is found out by who reads."""
    examples = {scheme(url): url for url in itertools.islice(urls, _LOOKED_AT)}
    for url in examples.values():
        with contextlib.suppress(WdsError):
            for package in _PACKAGES.get(locate(url).kind, ()):
                with contextlib.suppress(ImportError):
                    import_client(package)


logger = logging.getLogger("wds_async")


_told: set[str] = set()


_KINDS = {"s3": "s3", "gs": "gcs", "az": "azure", "hf": "hf", "ais": "ais"}


_ROUTABLE = frozenset({"s3", "gcs", "azure", "hf", "http", "generic"})


_OTHERS_CLIENTS = frozenset({"http", *_KINDS.values()})


"""Kinds of stores whose questions are asked by clients of others. The rest of fsspec (``generic``) takes turns at one
connection, so there each call has a deadline of its own (`filesystems`)."""


# WebDataset's other names: its htgs:// is gs:// without the tools, and scp goes over the protocol of sftp. And one of
# Hadoop's, which fsspec does not know.
_SYNONYMS = {"htgs://": "gs://", "scp://": "sftp://", "s3n://": "s3://"}


_SYNONYM = re.compile("^(?:" + "|".join(_SYNONYMS) + ")", re.IGNORECASE)


_PLUGIN = "plugin:"


_NAMEABLE = (
    "file",
    "http",
    "https",
    "pipe",
    "s3",
    "gs",
    "gcs",
    "az",
    "abfs",
    "hf",
    "ais",
    "sftp",
    "ftp",
    "webdav",
    "hdfs",
)


"""Schemes that a misspelt one may have meant."""


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


@dataclass(frozen=True, slots=True)
class Location:
    """Where a shard is: ``url`` as the user wrote it (expanded), ``target`` after rewriting, and the ``kind`` of its
    backend: ``local``, ``pipe``, ``stdin``, ``http``, ``s3``, ``gcs``, ``azure``, ``hf``, ``ais``, ``generic`` (the
    rest of fsspec), ``plugin:`` and the scheme for a store of an installed package, or ``opener`` for the program's
    own."""

    url: str
    target: str
    kind: str
    options: Options = field(default=NO_OPTIONS, compare=False)
    """What the program gave for its store (``storage_options``)."""
    fallback: Location | None = field(default=None, compare=False)
    """Where else it is read when its store cannot be reached (``WDS_AIS_FALLBACK``)."""
    entry: CacheEntry | None = field(default=None, compare=False)
    """The shard in a disk cache, where there is one: it says how to read the shard when the time has come."""

    @property
    def in_order(self) -> bool:
        """Whether it can only be read from the start on, by its kind."""
        return self.entry is None and self.kind in ("opener", "pipe", "stdin")


def check_allowed(kind: str) -> None:
    """Refuse what ``WDS_SECURE=1`` forbids: the one place that every opener passes.

    Standard input stays open to read, and so does what the program opens itself (kind ``opener``): secure mode is about
    data that names what to open, and both are the program's own choice.
    """
    if not settings().secure:
        return
    if kind == "pipe":
        raise UnsafeContent("gopen_pipe: unsafe_gopen is False, cannot open pipe URLs (WDS_SECURE=1)")
    if kind == "local":
        raise UnsafeContent("gopen: unsafe_gopen is False, cannot open local files (WDS_SECURE=1)")


def locate(url: str, *, final: bool = False, options: StorageOptions = NOTHING_GIVEN) -> Location:
    """Rewrite and route ``url``, then name its backend. `UrlError` for a scheme that nothing here knows.

    The program's openers (`schemes`) come first. A ``final`` URL is what such an opener was given: it goes to our own
    clients and is not rewritten again, so that an opener can call the one whose place it took.

    The order, everywhere: a URL is expanded (`urls.expand_urls`), rewritten (the first rule that matches it as written,
    else under its scheme's usual name), and routed: ``USE_AIS_FOR`` is asked about the scheme that came out of
    rewriting. ``__url__``, states and cache keys keep the expanded URL. ``wds-async resolve`` shows each step.
    """
    target = url if final else rewrite(url, rules_from_env())
    if not final and opener_of(target) is not None:
        return Location(url, target, "opener")
    if target.startswith("pipe:"):
        target = _native(target)
    target = _SYNONYM.sub(lambda found: _SYNONYMS[found[0].lower()], target)
    kind = _kind(target)
    if kind is None and not final and default_opener() is not None:
        return Location(url, target, "opener")
    if kind is None:
        raise UrlError(
            f"{redact(url)}: no gopen handler defined: unknown scheme {scheme(target)!r}.{_near(scheme(target))} "
            "Known are local paths, file:, http:, https:, pipe:, -, ais:, every protocol of fsspec (s3, gs, az, hf, "
            "sftp, …), stores of installed packages (wds_async.stores), and what the "
            "program puts into wds.gopen_schemes."
        )
    check_allowed("local" if kind == "generic" and reads_local_files(target) else kind)
    given = options.of("az://") if kind == "azure" else NO_OPTIONS
    place = Location(url, target, kind, given or options.of(target))
    return _routed(place, options) if kind in _ROUTABLE else place


def _kind(target: str) -> str | None:
    name = scheme(target)
    if target == "-":
        return "stdin"
    if name in ("", "file"):
        return "local"
    if name in ("http", "https"):
        return "azure" if _is_blob(target) else "http"
    if name == "pipe":
        return "pipe"
    if len(links(target)) > 1:
        return "generic"
    name = SCHEME_ALIASES.get(name, name)
    if name in _KINDS:
        return _KINDS[name]
    if name in installed_stores():
        return _PLUGIN + name
    return "generic" if known_protocol(name) else None


def _near(name: str) -> str:
    """The question after a scheme that was meant, where a known one is close to ``name``."""
    near = difflib.get_close_matches(name, _NAMEABLE, 1, 0.6)
    return f" Did you mean {near[0]}://?" if near else ""


def _is_blob(target: str) -> bool:
    if ".blob.core." not in target:
        return False
    from wds_async.storage.azure.backend import is_blob_url  # noqa: PLC0415 (see above)

    return is_blob_url(target)


def _routed(place: Location, options: StorageOptions) -> Location:
    """``place``, or AIStore in its stead where ``USE_AIS_FOR`` names its scheme."""
    given = options.named("ais")
    if not (given or value("AIS_ENDPOINT") or value("USE_AIS_FOR")):
        return place
    from wds_async.storage.ais.urls import has_own_store, routes  # noqa: PLC0415 (see above)

    if not routes(place.target, given):
        return place
    ais = Location(place.url, place.target, "ais", given)
    return replace(ais, fallback=place) if settings().ais_fallback and has_own_store(place.target) else ais


def _native(target: str) -> str:
    """The URL that a ``pipe:`` stands for, where the user asked for it; otherwise one notice a run."""
    native = native_pipe(target)
    if native is None:
        return target
    if settings().native_pipes:
        return native
    if multiprocessing.parent_process() is None:  # a worker's parent was told when it made the dataset
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


def _store(folder: str, name: str) -> Callable[..., Backend]:
    """The class of a store's backend, from the store's own folder."""
    found: Callable[..., Backend] = getattr(importlib.import_module(f"wds_async.storage.{folder}.backend"), name)
    return found


class Backends:
    """The backends of one engine, made when first needed; ``call`` runs a blocking function on a thread. ``direct``:
    whether requests are the engine's own (``WDS_DIRECT``). ``guard`` judges where web servers lead."""

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        *,
        direct: bool = True,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 30.0,
        guard: Guard | None = None,
    ) -> None:
        timeouts: dict[str, Any] = {"connect_timeout_s": connect_timeout_s, "stall_timeout_s": stall_timeout_s}
        self._makers: dict[str, Callable[[Options], Backend]] = {
            "local": lambda _: LocalBackend(call),
            "pipe": lambda _: PipeBackend(call),
            "stdin": lambda _: StdinBackend(call),
            "opener": lambda _: OpenedBackend(call),
            "http": lambda options: HttpBackend(options, call=call, direct=direct, guard=guard, **timeouts),
            "s3": lambda options: _store("s3", "S3Backend")(call, options, direct=direct, **timeouts),
            "gcs": lambda options: _store("gcs", "GcsBackend")(
                call, configured(options, "gcs", "gs"), direct=direct, **timeouts
            ),
            "azure": lambda options: _store("azure", "AzureBackend")(
                call, configured(options, "abfs", "az"), direct=direct, **timeouts
            ),
            "hf": lambda options: _store("hub", "HuggingFaceBackend")(call, options, direct=direct, **timeouts),
            "ais": lambda options: _store("ais", "AisBackend")(call, options, direct=direct, **timeouts),
            "generic": lambda options: GenericBackend(call, options, **timeouts),
        }
        self._made: dict[tuple[str, Options], Backend] = {}
        self._call = call
        self._question_s = question_s(connect_timeout_s, stall_timeout_s)

    def of(self, location: Location) -> Backend:
        """The backend for a located shard."""
        key = location.kind, location.options
        if key not in self._made:
            plugin = location.kind.removeprefix(_PLUGIN) if location.kind.startswith(_PLUGIN) else ""
            made = (
                _plugin_store(plugin, self._call, location.options)
                if plugin
                else self._makers[location.kind](location.options)
            )
            others = bool(plugin) or location.kind in _OTHERS_CLIENTS
            self._made[key] = BackendWithDeadlines(made, self._question_s) if others else made
        store = self._made[key]
        return store if location.entry is None else CachedBackend(self._call, location.entry, store)

    async def close(self) -> None:
        """Close every backend that was made."""
        made, self._made = self._made, {}
        for backend in made.values():
            await backend.close()
