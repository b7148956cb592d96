"""Accounts of Azure: the blob that a URL names, the credentials of its account, and the grants (signature, token) that
open it."""

from __future__ import annotations

import asyncio
import datetime
import inspect
import logging
import math
import re
import shutil
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from wds_async.environment import variable
from wds_async.errors import ConfigError, UrlError, WdsError
from wds_async.logs import warn_once
from wds_async.redact import redact
from wds_async.storage.base import Call
from wds_async.storage.preload import client_imports, extra_needed
from wds_async.storage.secrets import Secrets, Writer, hide_in_logs

__all__ = [
    "Account",
    "AccountAccess",
    "Blob",
    "Grant",
    "NoToken",
    "account_of",
    "adlfs_options",
    "has_credentials",
    "origin_of",
    "parse",
    "without_ours",
    "write_options",
    "writer",
]

logger = logging.getLogger("wds_async")

_SERVICE = re.compile(r"([^./@]+)\.(?:blob|dfs)\.([^/@]+)", re.IGNORECASE)
_VERSION = re.compile(r"\?(versionid|snapshot)=([^?&=]+)$", re.IGNORECASE)
_VARIABLES: dict[str, tuple[str, ...]] = {
    "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"),
    "connection_string": ("AZURE_STORAGE_CONNECTION_STRING",),
    "sas_token": ("AZURE_STORAGE_SAS_TOKEN",),
    "client_id": ("AZURE_STORAGE_CLIENT_ID",),
    "client_secret": ("AZURE_STORAGE_CLIENT_SECRET",),
    "tenant_id": ("AZURE_STORAGE_TENANT_ID",),
    "anon": ("AZURE_STORAGE_ANON",),
}
_CREDENTIALS = ("connection_string", "credential", "account_key", "sas_token", "client_id", "anon")
# Options of adlfs; all others are for azure.identity's DefaultAzureCredential.
_OF_ADLFS = frozenset({
    *_VARIABLES, "credential", "account_host", "request_session", "socket_timeout", "blocksize", "location_mode",
    "loop", "asynchronous", "default_fill_cache", "default_cache_type", "version_aware", "assume_container_exists",
    "max_concurrency", "timeout", "connection_timeout", "read_timeout", "use_listings_cache", "listings_expiry_time",
    "max_paths", "skip_instance_cache", "protocol",
})  # fmt: skip
# The emulator's account, the same everywhere and published by Microsoft.
_EMULATOR = {
    "accountname": "devstoreaccount1",
    "accountkey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "blobendpoint": "http://127.0.0.1:10000/devstoreaccount1",
}


@dataclass(frozen=True, slots=True)
class Blob:
    """The parts of a URL. ``account`` and ``endpoint`` are "" where it names none; ``container`` and ``name`` are plain
    text, not quoted, and "" where the URL ends before them. ``version`` is ``("versionid", …)`` or ``("snapshot",
    …)``."""

    account: str
    endpoint: str
    container: str
    name: str
    version: tuple[str, str] | None = None


def parse(url: str) -> Blob:
    """Return the parts of ``az://container/name``, ``abfss://container@account.dfs.core.windows.net/name`` or
    ``https://account.blob.core.windows.net/container/name``. In the first two the name stands as it is; in the last
    it is quoted, as everywhere in HTTP."""
    protocol, _, rest = url.partition("://")
    if protocol.lower() == "https":
        parts = urllib.parse.urlsplit(url)
        container, _, name = (urllib.parse.unquote(part) for part in parts.path[1:].partition("/"))
        version = _VERSION.search("?" + parts.query)
        host = parts.netloc.rpartition("@")[2]
    else:
        first, _, name = rest.partition("/")
        container, at, host = first.rpartition("@")
        if not at and _SERVICE.fullmatch(host) is None:
            container, host = host, ""
        if host and not container:
            container, _, name = name.partition("/")
        version = _VERSION.search(name)
        name = name[: version.start()] if version else name
    service = _SERVICE.fullmatch(host)
    if host and service is None:
        raise UrlError(f"{redact(url)}: {host!r} is no blob service; write {protocol}://container@account.dfs.core.…")
    account, endpoint = (service[1], f"https://{service[1]}.blob.{service[2]}") if service else ("", "")
    pinned = (version[1].lower(), urllib.parse.unquote(version[2])) if version else None
    return Blob(account, endpoint, container, name, pinned)


# -- accounts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Account:
    """An account and its credentials, by ``kind``: ``key``, ``sas``, ``credential`` (an object of the program's),
    ``client`` (id, secret and tenant), ``anonymous`` (as the user asks), or ``found``: what azure.identity finds, and
    else anonymous."""

    name: str
    endpoint: str
    """URL of its blob service, without a final slash; Azurite's ends with the account's name."""
    kind: str
    secret: Any = field(default=None, repr=False)
    """Key, signature, credential object, or ``(tenant, client, secret)``."""
    more: tuple[tuple[str, Any], ...] = field(default=(), repr=False, compare=False)
    """Arguments of DefaultAzureCredential."""

    @property
    def identity(self) -> str:
        """The identity in words, before any token."""
        match self.kind:
            case "key":
                return f"account key of {self.name}"
            case "sas":
                return f"shared access signature{_validity(self.secret)}"
            case "credential":
                return type(self.secret).__name__
            case "client":
                return f"client ID {self.secret[1]}"
            case "anonymous":
                return "anonymous"
        return "managed identity or another of Microsoft Entra ID"

    def hide(self, secrets: Secrets) -> None:
        """Add its credentials to ``secrets``."""
        for secret in self.secret if isinstance(self.secret, tuple) else (self.secret,):
            if isinstance(secret, str):
                secrets.add(secret)
                secrets.add_query(secret)


def _validity(signature: str) -> str:
    fields = urllib.parse.parse_qs(signature)
    start, stop = (fields.get(name, [""])[0] for name in ("st", "se"))
    return f" (valid {f'from {start} ' if start else ''}to {stop})" if stop else ""


def has_credentials(url: str, options: Mapping[str, Any]) -> bool:
    """Return whether credentials for the account of an ``https`` URL are configured. Those of another account, or of
    none that is named, do not count."""
    if any(name in options for name in _CREDENTIALS):
        return True
    account = parse(url).account
    return bool(account) and account == _configured(_settings(options), redact(url))[0]


def without_ours(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``options`` that are not for Azure, and so for a web server."""
    return {name: value for name, value in options.items() if name not in _OF_ADLFS}


def account_of(url: str, blob: Blob, options: Mapping[str, Any]) -> Account:
    """Return the account of ``blob``. Credentials of another account are never sent to it. ConfigError where none is
    named."""
    settings = _settings(options)
    configured, endpoint = _configured(settings, redact(url))
    name = blob.account or configured
    if not name and not endpoint:
        raise ConfigError(
            f"{redact(url)}: which storage account? Set AZURE_STORAGE_ACCOUNT_NAME (or "
            "AZURE_STORAGE_CONNECTION_STRING), give storage_options={'account_name': …}, or write "
            "abfss://container@account.dfs.core.windows.net/…"
        )
    ours = not configured or name == configured
    base = endpoint if ours and endpoint else blob.endpoint or f"https://{name}.blob.core.windows.net"
    kind, secret = _credential(settings, ours)
    return Account(name, base.rstrip("/"), kind, secret, tuple(sorted(without_ours(options).items())))


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` over the environment's, without the latter's credentials where ``options`` have some; a
    connection string also taken apart, as ``connection``."""
    own = {name: value for name, value in options.items() if value not in (None, "")}
    names = ("account_name", "tenant_id", "client_secret") if any(n in own for n in _CREDENTIALS) else tuple(_VARIABLES)
    settings: dict[str, Any] = {n: next(filter(None, map(variable, _VARIABLES[n])), None) for n in names}
    if settings.get("anon"):
        settings["anon"] = settings["anon"].lower() not in ("false", "0", "f")
    settings |= own
    settings["connection"] = _connection(str(settings.get("connection_string") or ""))
    return settings


def _connection(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.strip().strip(";").split(";")]
    fields = {name.strip().lower(): value for name, equals, value in pairs if equals}
    if fields.get("usedevelopmentstorage", "").lower() == "true":
        return {**_EMULATOR, **fields}
    if text and "blobendpoint" not in fields and "accountname" not in fields:
        raise ConfigError(
            "AZURE_STORAGE_CONNECTION_STRING (connection_string=) names neither AccountName nor BlobEndpoint; copy it "
            "whole from the account's access keys."
        )
    return fields


def _configured(settings: Mapping[str, Any], shown: str) -> tuple[str, str]:
    """Return the name and the endpoint of the account that the settings are for; "" where they name none."""
    connection: dict[str, str] = settings["connection"]
    if not connection:
        host = str(settings.get("account_host") or "")
        return str(settings.get("account_name") or ""), host if not host or "://" in host else f"https://{host}"
    endpoint = connection.get("blobendpoint") or (
        f"{connection.get('defaultendpointsprotocol', 'https')}://{connection['accountname']}.blob."
        f"{connection.get('endpointsuffix', 'core.windows.net')}"
    )
    hostname = urllib.parse.urlsplit(endpoint).hostname
    if not hostname:
        raise ConfigError(f"{shown}: the connection string's BlobEndpoint is no URL")
    return connection.get("accountname") or hostname.partition(".")[0], endpoint


def _credential(settings: Mapping[str, Any], ours: bool) -> tuple[str, Any]:
    """Return kind and secret. Keys and signatures are for ``ours`` only, an identity is for every account."""
    connection: dict[str, str] = settings["connection"]
    credential: Any = settings.get("credential")
    if ours and "accountkey" in connection:
        return "key", connection["accountkey"]
    if ours and "sharedaccesssignature" in connection:
        return "sas", connection["sharedaccesssignature"].lstrip("?")
    if isinstance(credential, Mapping):  # azure.storage's own form of a key
        return "key", str(credential.get("account_key", ""))
    if hasattr(credential, "named_key"):  # AzureNamedKeyCredential
        return "key", credential.named_key.key
    if hasattr(credential, "signature"):  # AzureSasCredential
        return "sas", str(credential.signature).lstrip("?")
    if credential is not None and not isinstance(credential, str):
        if not hasattr(credential, "get_token"):
            raise ConfigError(f"storage_options: credential= is a {type(credential).__name__}, which gives no tokens")
        return "credential", credential
    if ours and settings.get("account_key"):
        return "key", str(settings["account_key"])
    if ours and (signature := settings.get("sas_token") or credential):
        return "sas", str(signature).lstrip("?")
    if settings.get("client_id"):
        return "client", (settings.get("tenant_id"), settings["client_id"], settings.get("client_secret"))
    return ("anonymous" if settings.get("anon") is True else "found"), None


# -- writing by adlfs --------------------------------------------------------------------------------------------------


def adlfs_options(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` for the filesystem that writes ``url``, with the account and identity of reading."""
    account = account_of(url, parse(url), options)
    secret = {"key": "AccountKey", "sas": "SharedAccessSignature"}.get(account.kind)
    if secret is not None:  # a connection string is the only way to plain http
        text = f"AccountName={account.name};BlobEndpoint={account.endpoint};{secret}={account.secret}"
        return {**options, "connection_string": text}
    more = {"client_id": account.secret[1]} if account.kind == "client" else {}
    named = {"account_name": account.name, "anon": account.kind == "anonymous", **more}
    return {**options, **named, "account_host": account.endpoint.partition("://")[2]}


def write_options(url: str, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the URL and options with which adlfs writes ``url``. It takes no ``https`` URLs: the options name the
    account."""
    blob = parse(url)
    address = f"az://{blob.container}/{blob.name}" if url.lower().startswith("https:") else url
    return address, adlfs_options(url, options)


def writer(url: str, options: Mapping[str, Any], filesystem: Any) -> Writer:
    """Return the identity and secrets that an adlfs writes ``url`` with."""
    account, secrets = account_of(url, parse(url), options), Secrets()
    account.hide(secrets)
    return Writer(account.identity, secrets, {"kind": account.kind})


def origin_of(url: str, options: Mapping[str, Any]) -> str:
    """Return ``az://account/container`` of a blob's URL; ``az://`` where the URL is wrong: its read reports that."""
    try:
        blob = parse(url)
        return f"az://{blob.account or account_of(url, blob, options).name}/{blob.container}"
    except WdsError:
        return "az://"


# -- signatures and tokens ---------------------------------------------------------------------------------------------

# Tokens need a version of the protocol, and answers to anonymous requests are of 2009 without it.
_VERSION_HEADER = (("x-ms-version", "2023-11-03"),)
_VALID_S = 3600.0
_RENEWED_AT = 5 / 6
_BACKDATED_S = 300.0  # a service whose clock is behind ours would call a signature of this moment not yet valid
_TOKEN_MARGIN_S = 300.0
_SCOPE = "https://storage.azure.com/.default"
_SEARCH_S = 3.0
_TOOLS = ("az", "azd", "pwsh")
_TOOLS_S = 10.0  # they are programs that azure.identity starts, and take a second or more each
_TOKEN_S = 60.0
_NOTHING_FOUND_FOR_S = 300.0
_FRESH_S = 5.0
# Retries of azure.identity at a metadata service. Its own five take 24 s, and the engine retries too.
_RETRIES = {"retry_total": 2, "retry_status": 2}
_TALKATIVE = ("azure.identity._credentials.chained", "azure.identity._internal.get_token_mixin",
              "azure.identity._internal.decorators")  # fmt: skip
_WORDS = {
    "AzureCliCredential": "az login",
    "AzureDeveloperCliCredential": "azd auth login",
    "AzurePowerShellCredential": "Azure PowerShell",
    "EnvironmentCredential": "client ID of AZURE_CLIENT_ID",
    "ManagedIdentityCredential": "managed identity",
    "WorkloadIdentityCredential": "workload identity",
}
_nothing_found_until: dict[str, float] = {}


class NoToken(ConnectionError):
    """A credential that gave a token before gives none now."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Credentials of a request: ``query`` (without "?") and ``headers``. Instants are of ``time.monotonic``."""

    query: str = field(default="", repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    renew_after: float = math.inf
    valid_s: float = math.inf
    made_at: float = field(default_factory=time.monotonic)
    replaces: bool = False
    """True if requests of an earlier grant may still be under way."""

    @property
    def fresh(self) -> bool:
        return time.monotonic() - self.made_at < min(_FRESH_S, self.valid_s / 2)


class AccountAccess:
    """Access to one account. ``call`` runs a blocking function on a thread; ``secrets`` learns what is sent.

    It is a credential of azure.core too (`get_token`), for Azure's own client."""

    def __init__(self, call: Call, account: Account, secrets: Secrets | None = None) -> None:
        self.account, self.identity, self.kind = account, account.identity, account.kind
        self.secrets = secrets or Secrets()
        account.hide(self.secrets)
        hide_in_logs(self.secrets, "azure.core", "azure.identity", "adlfs")
        self._call = call
        self._grants: dict[str, Grant] = {}
        self._lock = asyncio.Lock()
        self._credential: Any = account.secret if account.kind == "credential" else None
        self._had_token = False
        self._service: Any = None

    async def grant(self, blob: Blob) -> Grant:
        """Return a grant to read ``blob``: made when first needed, shared by its container, renewed in time."""
        async with self._lock:
            scope = self._scope(blob)
            former = self._grants.get(scope)
            if former is None or former.renew_after <= time.monotonic():
                self._grants[scope] = replace(await self._new_grant(blob), replaces=former is not None)
            return self._grants[scope]

    def lapsed(self, blob: Blob, *, surely: bool) -> bool:
        """Return whether `grant` has, or will make, another grant than the one that the service refused. ``surely``:
        the service gave its time as the reason."""
        if self.kind not in ("key", "client", "credential", "found"):
            return False
        scope = self._scope(blob)
        grant = self._grants.get(scope)
        if grant is not None and grant.fresh:
            return surely or grant.replaces
        if grant is not None:
            self._grants[scope] = replace(grant, renew_after=-math.inf)
            if self.kind != "credential":  # the token that it keeps was refused
                self._credential = None
        return True

    async def service(self) -> Any:
        """Return Azure's own asynchronous client of the account, made at first use."""
        await self.grant(Blob("", "", "", ""))  # settles the identity
        async with self._lock:
            if self._service is None:
                self._service = await self._call(self._client)
        return self._service

    async def close(self) -> None:
        """Close the client, and the credential that is ours."""
        service, self._service = self._service, None
        if service is not None:
            await service.close()
        credential, self._credential = self._credential, None
        if credential is not None and self.account.kind != "credential" and hasattr(credential, "close"):
            await self._call(credential.close)

    async def get_token(self, *scopes: str, **kwargs: Any) -> Any:
        """Return a token for Azure's client. ConnectionError where there is none any more."""
        async with self._lock:
            token = await self._token()
        if token is None:
            raise NoToken(f"no token for {self.account.endpoint}")
        return token

    def _scope(self, blob: Blob) -> str:
        """Return what of the account one grant covers. A version or snapshot has a signature of its own."""
        if self.kind != "key":
            return ""
        return blob.container if blob.version is None else f"{blob.container}/{blob.name}?{blob.version}"

    async def _new_grant(self, blob: Blob) -> Grant:
        if self.kind == "key":
            return await self._call(self._signed, blob) if blob.container else Grant()
        if self.kind == "sas":
            return Grant(self.account.secret)
        if self.kind == "anonymous":
            return Grant(headers=_VERSION_HEADER)
        if not self.account.endpoint.startswith("https:"):
            raise ConfigError(f"{self.account.endpoint}: a bearer token is not sent over plain http; use https")
        token = await self._token()
        if token is None:
            return Grant(headers=_VERSION_HEADER)
        left_s = max(0.0, token.expires_on - time.time())
        renew_after = time.monotonic() + left_s - min(_TOKEN_MARGIN_S, left_s / 3)
        return Grant("", (("Authorization", f"Bearer {token.token}"), *_VERSION_HEADER), renew_after, left_s)

    def _signed(self, blob: Blob) -> Grant:
        with extra_needed("Azure Blob Storage", "azure"), client_imports():
            from azure.storage.blob import generate_blob_sas, generate_container_sas  # noqa: PLC0415 (slow)
        now = datetime.datetime.now(datetime.UTC)
        terms: dict[str, Any] = {
            "account_name": self.account.name,
            "container_name": blob.container,
            "account_key": self.account.secret,
            "permission": "r",
            "start": now - datetime.timedelta(seconds=_BACKDATED_S),
            "expiry": now + datetime.timedelta(seconds=_VALID_S),
            "protocol": "https" if self.account.endpoint.startswith("https:") else None,
        }
        try:
            if blob.version is None:
                signature = generate_container_sas(**terms)
            else:
                parameter, value = blob.version
                version: dict[str, Any] = {"version_id" if parameter == "versionid" else "snapshot": value}
                signature = generate_blob_sas(blob_name=blob.name, **version, **terms)
        except Exception:  # its text may show the key
            raise ConfigError(
                f"the account key of {self.account.name} is not base64: copy it whole from the account's access keys"
            ) from None
        self.secrets.add_query(signature)
        return Grant(signature, (), time.monotonic() + _VALID_S * _RENEWED_AT, _VALID_S)

    async def _token(self) -> Any:
        """Return an access token, or None (anonymous) where none can be had and no credential was named."""
        endpoint, searching = self.account.endpoint, self.kind == "found" and not self._had_token
        if searching and _nothing_found_until.get(endpoint, 0.0) > time.monotonic():
            return self._turn_anonymous("nothing was found a moment ago")
        if self._credential is None:
            self._credential = await self._call(self._new_credential)
        tools_s = _TOOLS_S if any(map(shutil.which, _TOOLS)) else 0.0
        limit_s = _SEARCH_S + tools_s if searching else _TOKEN_S
        try:
            async with asyncio.timeout(limit_s):
                token = await self._call(_request_token, self._credential, searching)
        except TimeoutError:
            if not searching:
                raise TimeoutError(f"no token from {self.identity} within {limit_s:g} s") from None
            why = f"nothing answered within {limit_s:g} s"
        except Exception as exn:
            if self._had_token:
                line = next(iter(str(exn).strip().splitlines()), type(exn).__name__)
                raise NoToken(f"no new token from {self.identity}: {line}") from None
            if not searching or not any(cls.__name__ == "ClientAuthenticationError" for cls in type(exn).__mro__):
                raise
            why = "no identity that azure.identity knows of"
        else:
            self._had_token = True
            self.secrets.add(token.token)
            if self.kind == "found":
                chosen = getattr(self._credential, "_successful_credential", None)
                self.identity = _WORDS.get(type(chosen).__name__, "Microsoft Entra ID")
            return token
        _nothing_found_until[endpoint] = time.monotonic() + _NOTHING_FOUND_FOR_S
        return self._turn_anonymous(why)

    def _turn_anonymous(self, why: str) -> None:
        self.kind = self.identity = "anonymous"
        warn_once(
            logger,
            ("azure anonymous", self.account.endpoint),
            "%s: no credentials (%s): reading anonymously. Set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN "
            "or AZURE_STORAGE_CONNECTION_STRING, give this machine an identity, or set AZURE_STORAGE_ANON=1",
            self.account.endpoint,
            why,
        )

    def _new_credential(self) -> Any:
        with extra_needed("Azure Blob Storage", "azure"), client_imports():
            import azure.identity  # noqa: PLC0415 (slow, and often not needed)
        if self.kind != "client":
            return azure.identity.DefaultAzureCredential(**{**_RETRIES, **dict(self.account.more)})
        tenant, client, secret = self.account.secret
        if not tenant or not secret:
            raise ConfigError(
                f"client ID {client}: set AZURE_STORAGE_CLIENT_SECRET and AZURE_STORAGE_TENANT_ID too "
                "(client_secret=, tenant_id=)"
            )
        return azure.identity.ClientSecretCredential(tenant, client, secret)

    def _client(self) -> Any:
        with extra_needed("Azure Blob Storage", "azure"), client_imports():
            from azure.core.credentials import AzureSasCredential  # noqa: PLC0415 (slow, and often not needed)
            from azure.storage.blob.aio import BlobServiceClient  # noqa: PLC0415
        credential: Any = self
        if self.kind == "key":
            credential = {"account_name": self.account.name, "account_key": self.account.secret}
        elif self.kind == "sas":
            credential = AzureSasCredential(self.account.secret)
        elif self.kind == "anonymous":
            credential = None
        more: dict[str, Any] = {"retry_total": 0}  # the engine retries itself
        if ca_file := variable("SSL_CERT_FILE"):  # aiohttp's own context is as old as its import
            more["connection_verify"] = ca_file
        return BlobServiceClient(self.account.endpoint, credential=credential, user_agent="wds-async", **more)


def _request_token(credential: Any, quiet: bool) -> Any:
    """Return a token. Blocks. ``quiet``: without azure.identity's own warning that it found nothing. A program's
    asynchronous credential keeps its session with the loop that first used it, so it always runs on the one loop that
    lives as long as the process: fsspec's."""
    if not inspect.iscoroutinefunction(credential.get_token):
        with _quiet() if quiet else nullcontext():
            return credential.get_token(_SCOPE)
    with client_imports():
        from fsspec.asyn import get_loop, sync  # noqa: PLC0415 (slow, and often not needed)

    return sync(get_loop(), credential.get_token, _SCOPE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop the warnings of azure.identity from this thread."""
    thread = threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.ERROR

    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    for each in loggers:
        each.addFilter(keep)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(keep)
