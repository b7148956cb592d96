"""URLs and settings of AIStore: objects, clusters and tokens.

A cluster is an HTTP endpoint, AIStore's proxy or our own service (`wds-async serve`), or the service's Unix socket on
the same host: ``AIS_ENDPOINT=unix:/run/wds-async/service.sock``.

``ais://bucket/object`` is a bucket of the cluster itself; ``ais://@uuid#namespace/bucket/object`` one of a namespace
or of an attached cluster (either half may be missing). With ``USE_AIS_FOR`` the URLs of clouds are read there
unchanged. A name is taken as it is written, with every character, up to a ``?`` that is followed by a parameter that
AIStore knows: ``?archpath=``, ``?archregx=&archmode=``, ``?etl_name=``, ``&etl_args=``, ``?latest-ver=true``. Values
may be percent-encoded; braces must be (``%7B``), because those are expanded.
"""

from __future__ import annotations

import json
import logging
import os
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async import environment
from wds_async.errors import ConfigError, UrlError
from wds_async.logs import warn_once
from wds_async.redact import redact
from wds_async.storage.base import Tls
from wds_async.storage.options import check_names
from wds_async.storage.stores import usual_scheme
from wds_async.urls import scheme

__all__ = [
    "ANONYMOUS",
    "OPTIONS",
    "PROVIDERS",
    "AisObject",
    "Cluster",
    "cluster_for",
    "has_own_store",
    "read_token",
    "routes",
]

logger = logging.getLogger("wds_async")

OPTIONS = {
    "endpoint": "AIS_ENDPOINT",
    "token": "AIS_AUTHN_TOKEN",
    "verify": "AIS_SKIP_VERIFY_CRT",
    "ca_file": "AIS_CLIENT_CA",
    "certificate": "AIS_CRT",
    "key": "AIS_CRT_KEY",
    "get_batch": "WDS_AIS_GET_BATCH",
}
"""The names of ``storage_options={"ais": {…}}``, each with the variable that says the same (``verify=False`` is
``AIS_SKIP_VERIFY_CRT=1``)."""

ANONYMOUS = "anonymous (no token)"
"""The identity without a token, in words."""

PROVIDERS = {"ais": "ais", "gs": "gcp", "s3": "aws", "az": "azure", "oci": "oci"}
"""AIStore's names of the providers, by the usual schemes of their URLs."""

_KNOWN_PARAMETERS = ("archpath", "archregx", "archmode", "etl_name", "etl_args", "etl_pipeline", "latest-ver")
_QUERY = re.compile(r"\?(?=(?:" + "|".join(_KNOWN_PARAMETERS) + ")=)")
_IN_ORDER = frozenset({"archpath", "archregx", "etl_name", "etl_pipeline"})
_NAMESPACE = re.compile(r"@?([\w-]*)(?:#([\w-]*))?")
_SOCKET_PATH_BYTES = 107  # sockaddr_un


@dataclass(frozen=True, slots=True)
class AisObject:
    """An object, or with a ``name`` that ends with "/" (or is empty) a folder."""

    provider: str
    bucket: str
    namespace: str
    """``@uuid#name``, "" for the cluster's own."""
    name: str
    query: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, url: str) -> AisObject:
        """Return the object that ``url`` (rewritten) names. UrlError without a bucket, or for a provider that AIStore
        lacks."""
        name = usual_scheme(scheme(url))
        provider = PROVIDERS.get(name)
        if provider is None:
            raise UrlError(f"{redact(url)}: AIStore reads ais, gs, s3, az and oci; take {name} out of USE_AIS_FOR")
        path, query = _split_query(url.partition("://")[2])
        namespace = ""
        if path[:1] in ("@", "#"):
            first, _, path = path.partition("/")
            parts = _NAMESPACE.fullmatch(first)
            if parts is None or first in ("@", "#", "@#"):
                raise UrlError(f"{redact(url)}: {first!r} is no namespace; write ais://@uuid#name/bucket/object")
            namespace = f"@{parts[1]}#{parts[2] or ''}"
        bucket, _, rest = path.partition("/")
        if provider == "azure":  # abfs://container@account.dfs.core.windows.net/path
            bucket = bucket.partition("@")[0]
        if not re.fullmatch(r"[\w.-]+", bucket, re.ASCII):
            raise UrlError(f"{redact(url)}: names no bucket; write {name}://bucket/object")
        return cls(provider, bucket, namespace, rest, query)

    @property
    def in_order(self) -> bool:
        """True if it can only be read from its start: a member of an archive, or the result of an ETL."""
        return any(name in _IN_ORDER for name, _ in self.query)

    def object_url(self, endpoint: str) -> str:
        """Return its URL at the proxy ``endpoint``."""
        return f"{endpoint}/v1/objects/{self.bucket}/{urllib.parse.quote(self.name)}?{self._parameters()}"

    def bucket_url(self, endpoint: str) -> str:
        """Return the URL that lists its bucket at the proxy ``endpoint``."""
        return f"{endpoint}/v1/buckets/{self.bucket}?{self._parameters()}"

    def batch_url(self, endpoint: str) -> str:
        """Return the URL at the proxy ``endpoint`` that reads ranges of objects of its bucket (see `batches`)."""
        return f"{endpoint}/v1/ml/moss/{self.bucket}?provider={self.provider}"

    def _parameters(self) -> str:
        pairs = [("provider", self.provider), *([("namespace", self.namespace)] if self.namespace else []), *self.query]
        return urllib.parse.urlencode(pairs, quote_via=urllib.parse.quote)


def _split_query(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    start = _QUERY.search(text)
    if start is None:
        return text, ()
    pairs = (pair.partition("=") for pair in text[start.end() :].split("&") if pair)
    return text[: start.start()], tuple((name, urllib.parse.unquote(value)) for name, _, value in pairs)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The address and TLS of a cluster. ``token`` is the program's, "" for that of `read_token`; ``get_batch``: whether
    ranges of many objects are read by one request (see `batches`)."""

    endpoint: str
    """``http://host:51080``, or ``unix:/path``."""
    tls: Tls
    token: str = field(default="", repr=False)
    get_batch: bool = False

    @property
    def socket(self) -> str:
        """Path of the Unix socket, "" for TCP."""
        return self.endpoint.removeprefix("unix:") if self.endpoint.startswith("unix:") else ""

    @property
    def base(self) -> str:
        """First part of the URLs of requests."""
        return "http://localhost" if self.socket else self.endpoint

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Cluster:
        """Return the cluster that ``storage_options`` of "ais" (see `OPTIONS`) name, else the environment. ConfigError
        for an unknown option, and for an endpoint that is missing or malformed."""
        check_names("ais", options, tuple(OPTIONS))
        verify = options.get("verify")
        if verify is None:
            verify = not environment.value("AIS_SKIP_VERIFY_CRT")
        files = (
            str(options.get(name) or environment.value(OPTIONS[name])) for name in ("ca_file", "certificate", "key")
        )
        get_batch = options.get("get_batch")
        if get_batch is None:
            get_batch = environment.value("WDS_AIS_GET_BATCH")
        tls, token = Tls(bool(verify), *files), str(options.get("token") or "")
        return cls(_endpoint(options), tls, token, bool(get_batch))


def cluster_for(url: str, options: Mapping[str, Any]) -> Cluster:
    """Return `Cluster.of`; its ConfigError names ``url``."""
    try:
        return Cluster.of(options)
    except ConfigError as exn:
        raise ConfigError(f"{redact(url)}: {exn}") from None


def _endpoint(options: Mapping[str, Any]) -> str:
    name = "endpoint" if options.get("endpoint") else "AIS_ENDPOINT"
    text = str(options.get("endpoint") or environment.value("AIS_ENDPOINT")).strip()
    if not text:
        raise ConfigError(
            "AIS_ENDPOINT is not set: AIStore is read at its proxy, for instance AIS_ENDPOINT=http://ais-proxy:51080"
        )
    if text.startswith("unix:"):
        return _socket(text, name)
    try:
        parts = urllib.parse.urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(
            f"{name}={redact(text)!r} is not a URL of AIStore's proxy; write http://host:51080, or unix:/path "
            "for the socket of a service on this host"
        )
    if "@" in parts.netloc:
        raise ConfigError(f"{name}: AIStore takes no user and password; give its token as AIS_AUTHN_TOKEN")
    return text.rstrip("/").removesuffix("/v1")


def _socket(text: str, name: str) -> str:
    """Return ``unix:/path`` for that, or for the same with the slashes of a URL."""
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = "/" + path.lstrip("/") if path.startswith("///") else ""
    if not path.startswith("/"):
        raise ConfigError(f"{name}={text!r} names no socket; write its whole path: unix:/run/wds-async/service.sock")
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise ConfigError(f"{name}={text!r}: the path of a socket has at most {_SOCKET_PATH_BYTES} bytes")
    return f"unix:{path}"


def read_token(token: str = "") -> tuple[str, str, str]:
    """Return the token, the file that it was read from ("" for none), and its source in words. Blocks (a file).

    The order: the program's ``token``, ``AIS_AUTHN_TOKEN``, ``AIS_AUTHN_TOKEN_FILE``, and the file that AIStore's own
    command line writes at a login. ConfigError for a file that is named but cannot be used.
    """
    if token:
        return token, "", "token of storage_options"
    if token := environment.value("AIS_AUTHN_TOKEN").strip():
        return token, "", "token of AIS_AUTHN_TOKEN"
    named = environment.value("AIS_AUTHN_TOKEN_FILE")
    folder = environment.variable("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = os.path.expanduser(named) if named else os.path.join(folder, "ais", "cli", "auth.token")
    try:
        with open(path, encoding="utf-8") as file:
            token = str(json.load(file)["token"])
    except FileNotFoundError as exn:
        if not named:
            return "", "", ANONYMOUS
        raise ConfigError(f"AIS_AUTHN_TOKEN_FILE={named!r}: there is no such file; log in with ais auth login") from exn
    except (OSError, ValueError, KeyError, TypeError) as exn:
        reason = exn.strerror if isinstance(exn, OSError) else 'it is not JSON with a "token"'
        raise ConfigError(f"AIStore's token file {path!r}: {reason} (AIS_AUTHN_TOKEN_FILE names another)") from exn
    return token, path, f"token file {path}"


def routes(url: str, options: Mapping[str, Any]) -> bool:
    """Return whether ``url`` (rewritten), which names another store, is read through AIStore. ``options`` are those for
    "ais". Settings that contradict each other are logged once a process."""
    name = usual_scheme(scheme(url))
    if name == "ais":  # it is anyway
        return False
    used = environment.schemes(environment.value("USE_AIS_FOR"))
    has_endpoint = bool(options.get("endpoint") or environment.value("AIS_ENDPOINT"))
    if name in used and name in PROVIDERS and has_endpoint:
        return True
    words = ""
    if name in used and name not in PROVIDERS:
        words = "USE_AIS_FOR names %s, for which AIStore has no provider: it is read directly (logged once)"
    elif name in used:
        words = (
            "USE_AIS_FOR names %s, but AIS_ENDPOINT is not set: read from its own store "
            "(AIS_ENDPOINT=http://host:51080 is AIStore's proxy; logged once)"
        )
    elif has_endpoint and not used and name in PROVIDERS:
        words = (
            "AIS_ENDPOINT is set, but USE_AIS_FOR is not: %s:// is read from its own store, and only ais:// from "
            "AIStore (USE_AIS_FOR=gs:s3:az changes that; logged once)"
        )
    if words:
        warn_once(logger, words, words, name)
    return False


def has_own_store(url: str) -> bool:
    """Return whether the object can be read without AIStore: not what its ETLs make, nor a member of an archive."""
    return scheme(url) != "ais" and not AisObject.of(url).in_order
