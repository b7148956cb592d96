"""Configuration of a service: a YAML file (``WDS_SERVE_CONFIG``), and the command line's options, which win over it."""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import math
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wds_async import environment
from wds_async.environment import MIB, parse_bytes
from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.service.peer_members import check_member
from wds_async.storage.stores import BY_SCHEME, known_protocol, similar_scheme
from wds_async.urls import rewrite, rules_from_env, scheme

__all__ = ["ServiceConfig", "cache_limit", "check_quotas", "kept_free", "load_config", "reloaded"]

_SCHEMES = frozenset({"", "file", *BY_SCHEME})
"""Schemes of allow and buckets, besides the protocols of fsspec."""
_EXAMPLES = "write gs://bucket/, https://host/path/ or /folder/"
_CHOICES = {
    "log": ("human", "json"),
    "cost_limit_per": ("total", "day"),
    "log_level": ("", "debug", "info", "warning", "error"),
}
_POSITIVE = (
    "clients", "client_requests", "connections", "origin_connections", "memory_bytes", "grace_s",
    "revalidate_timeout_s", "address_connections", "tenant_requests", "client_bytes_per_s", "tenant_bytes_per_s",
    "peer_timeout_s", "peer_bytes_per_s",
)  # fmt: skip
_NOT_NEGATIVE = ("freshness_s", "stale_while_revalidate_s", "stale_if_error_s", "scrub_bytes_per_s")
_FIXED = (
    "host", "port", "socket", "folder", "hand_from", "cache_size", "keep_free", "clients", "address_connections",
    "connections", "origin_connections", "bytes_per_s", "origin_bytes_per_s", "memory_bytes",
    "peers", "peer_address", "peer_name", "peer_token", "peer_ca", "peer_timeout_s", "peer_bytes_per_s",
)  # fmt: skip
"""Settings that hold after a restart only."""


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """One service. Sizes are bytes (in a file also ``"64M"``), times seconds. docs/service.md has the meaning of each
    setting."""

    host: str = "127.0.0.1"
    """Anything but loopback needs ``allow``, or it would be an open proxy."""
    port: int = 51080
    """AIStore's own; 0: any that is free (printed)."""
    socket: str = ""
    """Path of a Unix socket to listen at too; our own loader, on the same host, is handed cached files through it."""
    folder: str = ""
    """Folder of the cache. "": no disk is used, and everything is passed through."""
    hand_from: str = ""
    """The same folder by a read-only mount: files for clients on the Unix socket are opened there, so that root cannot
    open them again for writing. "": they are opened in ``folder``."""
    cache_size: str = "80%"
    """Bytes (``"500G"``), or a share of the file system that the folder is on."""
    keep_free: str = "2%"
    """Space that the folder's file system keeps free, whatever uses it: bytes, or a share of it. Below that nothing is
    written to the cache, and what was not used for longest goes. 0: as much as ``cache_size`` allows."""
    freshness_s: float = 300.0
    """Time for which an object's version is used before its store is requested again. 0: by each reader."""
    stale_while_revalidate_s: float = 3600.0
    """Time after ``freshness_s`` in which a whole copy is served at once, and checked behind that (RFC 5861). An
    object that was replaced within this time may be served once more as it was. 0: the request waits for the store."""
    stale_if_error_s: float = math.inf
    """Time after ``freshness_s`` in which a whole copy is served if its store does not answer. 0: never."""
    revalidate_timeout_s: float = 2.0
    """Time limit of the one request for whether a whole copy is still what the store has."""
    scrub_bytes_per_s: float = 8 * MIB
    """Rate of comparing the disk with its checksums in the background, once a day at most. 0: never."""
    allow: tuple[str, ...] = ()
    """Prefixes of the URLs that may be read, after rewriting: ``gs://bucket/``, ``https://host/data/``. Empty:
    the clouds' stores and ``buckets``, from loopback only, and without ``/url``."""
    urls: bool = True
    """True if ``/url/<escaped URL>`` is served where ``allow`` is given."""
    private: bool = False
    """True if web servers with private or link-local addresses may be read though ``allow`` names them by a name."""
    buckets: tuple[tuple[str, str], ...] = ()
    """``ais://`` buckets of its own: a name, and the URL that stands for it (``imagenet``, ``https://host/imagenet/``)."""
    tokens: str = ""
    """File of bearer tokens, a line each: token, then optionally the tenant's name. "": none is required."""
    certificate: str = ""
    """PEM file for TLS; with ``key``."""
    key: str = ""
    client_ca: str = ""
    """PEM file of the authority whose clients are let in (mutual TLS)."""
    clients: int = 4096
    """Most connections of clients."""
    address_connections: int | None = None
    """Most connections from one address, or of one process on the Unix socket. None: half of ``clients``."""
    client_requests: int = 256
    """Most requests of one client in flight; more are answered with 429."""
    tenant_requests: int | None = None
    """Most requests of all clients of one tenant in flight. None: where there are tenants (``tokens`` or ``client_ca``)
    half of ``clients``, else no limit."""
    client_bytes_per_s: float | None = None
    tenant_bytes_per_s: float | None = None
    """Most bytes a second to all clients of one tenant; they take turns."""
    bytes_per_s: float | None = None
    """Most bytes a second from all origins together."""
    connections: int = 128
    """Most connections to origins."""
    origin_connections: int = 128
    origin_bytes_per_s: float | None = None
    memory_bytes: int = 256 * MIB
    """Most bytes on their way between origins, the disk and clients."""
    ahead_bytes: int = 1024 * MIB
    """Most bytes that are fetched by plans before a client requests them, per client."""
    plan_lifetime_s: float = 60.0
    """Lifetime of a plan after the last sign of its client."""
    send_timeout_s: float = 60.0
    """Time for which a client may take no byte before its connection is closed."""
    header_timeout_s: float = 20.0
    """Time limit of a client for the head of a request, and for the TLS handshake."""
    grace_s: float = 30.0
    """Time for which transfers may go on after SIGTERM."""
    drain_s: float = 0.0
    """Time for which it goes on listening after SIGTERM, not ready, so that balancers see it."""
    quotas: tuple[tuple[str, float], ...] = ()
    """Tenants (as bearer tokens name them), and the share of the cache, from 0 to 1, that each may hold."""
    log: str = "human"
    log_file: str = ""
    """File that the log is appended to, opened anew by SIGHUP. "": standard error."""
    log_level: str = ""
    """"": ``WDS_LOG``, else ``info``."""
    prices: str = ""
    """YAML file of prices that replaces the built-in table."""
    region: str = ""
    """Region of this service, as its provider calls it (``us-east-1``): traffic within a region is priced so."""
    cost_limit: float | None = None
    """US dollars at which nothing more is fetched from origins; what is cached is served on. What was spent is kept in
    the folder, so that it counts after a restart too."""
    cost_limit_per: str = "total"
    """``day``: the limit is for a day, which begins at 00:00 UTC."""
    peers: tuple[str, ...] = ()
    """The services of the cluster, this one among them: ``host:port``, ``dns:name:port`` for all addresses of a name,
    or the path of a file with one member a line. Empty: ``WDS_PEERS``, separated by commas; none: it works alone."""
    peer_address: str = ""
    """This service's address among them. "": ``WDS_PEER_ADDRESS``, else found by this machine's addresses."""
    peer_name: str = ""
    """A name among them that stays when the address changes, such as the node's: with it go the chunks. All have one,
    or none. "": ``WDS_PEER_NAME``, else the address."""
    peer_token: str = ""
    """File of the token for the others. "": the first of ``tokens``."""
    peer_ca: str = ""
    """PEM file of the authority of the others' certificates. "": the system's."""
    peer_timeout_s: float = 1.0
    """Time without a sign after which a member is passed by."""
    peer_bytes_per_s: float | None = None
    """Most bytes a second to the other members together."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                *most, last = filter(None, choices)
                raise ConfigError(f"{name}: {value!r}; write {', '.join(most)} or {last}")
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("certificate and key: give both or neither")
        if self.client_ca and not self.certificate:
            raise ConfigError("client_ca needs a certificate and key of the service's own")
        if self.hand_from and not self.folder:
            raise ConfigError("hand_from is the cache's folder by another mount, and there is no folder")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} is none")
        for prefix in self.allow:
            _check_prefix("allow", prefix)
        for name, url in self.buckets:
            _check_prefix(f"buckets: {name}", url)
        if not self.allow and not self.loopback:
            raise ConfigError(
                f"host {self.host} can be reached from other machines, so allow must say what may be read there: "
                "--allow gs://bucket/ (as often as need be), or listen at 127.0.0.1"
            )
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name}: {value} must be more than 0")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: {getattr(self, name)} must be 0 or more")
        check_quotas(dict(self.quotas))
        for entry in self.peers:
            check_member(entry)

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def check_quotas(quotas: Mapping[str, float]) -> None:
    """Raise ConfigError for invalid shares."""
    if sum(quotas.values()) > 1 or any(not 0 < share <= 1 for share in quotas.values()):
        raise ConfigError("quotas: shares are from 0 to 1, and 1 together at most")


def _check_prefix(setting: str, prefix: str) -> None:
    """Raise ConfigError if ``prefix`` cannot describe what may be read."""
    shown = f"{setting}: {redact(prefix)!r}"
    kind = scheme(rewrite(prefix, rules_from_env()) if setting.startswith("buckets") else prefix)
    if kind == "pipe" or scheme(prefix) == "pipe":
        raise ConfigError(f"{shown} is a command; this service runs none. Name the store that it reads: gs://bucket/")
    if "://" not in prefix and not prefix.startswith("/"):
        raise ConfigError(f"{shown} is no URL's beginning; {_EXAMPLES}")
    if redact(prefix) != prefix:
        raise ConfigError(
            f"{shown} holds credentials (or control characters). What may be read is no place for them: credentials "
            "come from the environment, or from the service's role"
        )
    if kind not in _SCHEMES and not known_protocol(kind):
        near = similar_scheme(kind)
        hint = f"did you mean {near}://?" if near else _EXAMPLES
        raise ConfigError(f"{shown}: unknown scheme {kind!r}; {hint}")


def load_config(path: str | os.PathLike[str] | None = None, **overrides: Any) -> ServiceConfig:
    """Return the configuration of the file at ``path``, with ``overrides`` that are not None.

    ConfigError for a file that cannot be read, an unknown name and a value that does not parse.
    """
    settings: dict[str, Any] = {} if path is None else _read(Path(path))
    settings |= {name: value for name, value in overrides.items() if value is not None}
    if not settings.get("peers") and (named := environment.value("WDS_PEERS")):
        settings["peers"] = tuple(filter(None, map(str.strip, named.split(","))))
    if not settings.get("peer_address") and (own := environment.value("WDS_PEER_ADDRESS")):
        settings["peer_address"] = own
    if not settings.get("peer_name") and (name := environment.value("WDS_PEER_NAME")):
        settings["peer_name"] = name
    fields = {field.name: str(field.type) for field in dataclasses.fields(ServiceConfig)}
    if unknown := sorted(set(settings) - set(fields)):
        near = difflib.get_close_matches(unknown[0], fields, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"its settings are {', '.join(sorted(fields))}"
        raise ConfigError(f"{unknown[0]!r} is no setting of the service; {hint}")
    return ServiceConfig(**{name: _value(name, fields[name], value) for name, value in settings.items()})


def reloaded(old: ServiceConfig, new: ServiceConfig) -> tuple[ServiceConfig, list[str]]:
    """Return ``new`` with those settings of ``old`` that cannot change while the service runs, and the names of
    settings that differ there. ConfigError if the two do not fit together."""
    kept = {name: getattr(old, name) for name in _FIXED if getattr(old, name) != getattr(new, name)}
    return dataclasses.replace(new, **kept), list(kept)


def cache_limit(config: ServiceConfig) -> int:
    """Return the cache's size in bytes. ConfigError if it does not parse; OSError without the folder."""
    return _of_disk("cache_size", config.cache_size, config.folder, least=sys.float_info.min)


def kept_free(config: ServiceConfig) -> int:
    """Return the bytes to be kept free. Errors as of `cache_limit`."""
    return _of_disk("keep_free", config.keep_free, config.folder, least=0)


def _of_disk(name: str, value: str, folder: str, *, least: float) -> int:
    """Return bytes: as given, or as a share (at least ``least``) of the file system of ``folder``."""
    text = str(value).strip()
    try:
        if not text.endswith("%"):
            return parse_bytes(text)
        share = float(text[:-1]) / 100
        if not least <= share <= 1:
            raise ValueError(f"a share is {'above' if least else 'at least'} 0% and at most 100%")
        return int(shutil.disk_usage(folder).total * share)
    except ValueError as exn:
        raise ConfigError(f"{name}: {exn}") from exn


def _read(path: Path) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 (only where there is a file)

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exn:
        raise ConfigError(
            f"the service's configuration {path} cannot be read: {exn.strerror or exn}. {_similar_file(path)}--config "
            "(or WDS_SERVE_CONFIG) must name a YAML file that this user may read. Without it, the service starts with "
            "the options of the command line and defaults (wds-async serve --help)"
        ) from exn
    except (ValueError, yaml.YAMLError) as exn:
        raise ConfigError(f"the service's configuration {path} (--config, WDS_SERVE_CONFIG) is no YAML: {exn}") from exn
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"the service's configuration {path} must be a mapping of settings")
    return settings


def _similar_file(path: Path) -> str:
    """Return a sentence that suggests a file for a ``path`` that is none: the folder's YAML file with the most similar
    name. "" if there is nothing to suggest."""
    folder, name = (path, "serve.yaml") if path.is_dir() else (path.parent, path.name)
    try:
        files = [file.name for file in folder.iterdir() if file.suffix in (".yaml", ".yml")]
    except OSError:
        return f"There is no folder {folder}. " if not folder.exists() else ""
    near = difflib.get_close_matches(name, files, 1, 0.6)
    return f"Did you mean {folder / near[0]}? " if near and folder / near[0] != path else ""


def _value(name: str, kind: str, value: Any) -> Any:
    """Return ``value`` as the field ``name`` of type ``kind`` holds it."""
    try:
        if name in ("buckets", "quotas"):
            pairs = sorted(dict(value).items())
            return tuple((str(key), str(one) if name == "buckets" else float(one)) for key, one in pairs)
        if name in ("allow", "peers"):
            return (value,) if isinstance(value, str) else tuple(str(one) for one in value)
        if "bytes" in name and isinstance(value, str):
            return parse_bytes(value)
        if kind == "bool" and not isinstance(value, bool):
            raise ValueError("write true or false")
        for of in (int, float):
            if kind.startswith(of.__name__):
                return None if value is None else of(value)
        return str(value) if kind == "str" else value
    except (TypeError, ValueError) as exn:
        raise ConfigError(f"{name}: {value!r} does not parse: {exn}") from exn
