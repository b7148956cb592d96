"""Accounts of Azure: which blob a URL names, as whom it is read, and the grants (signature, token) that open it."""

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
    "API_VERSION",
    "VERSIONS",
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
# What adlfs takes for other ends; what it does not know is for azure.identity's DefaultAzureCredential.
_OF_ADLFS = frozenset(
    {
        *_VARIABLES,
        *("credential", "account_host", "request_session", "socket_timeout", "blocksize", "location_mode", "loop"),
        *("asynchronous", "default_fill_cache", "default_cache_type", "version_aware", "assume_container_exists"),
        *("max_concurrency", "timeout", "connection_timeout", "read_timeout", "use_listings_cache"),
        *("listings_expiry_time", "max_paths", "skip_instance_cache", "protocol"),
    }
)
# The emulator's account, the same everywhere and published by Microsoft.
_EMULATOR = {
    "accountname": "devstoreaccount1",
    "accountkey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "blobendpoint": "http://127.0.0.1:10000/devstoreaccount1",
}


@dataclass(frozen=True, slots=True)
class Blob:
    """What a URL names. ``account`` and ``endpoint`` are "" where it names none; ``container`` and ``name`` are plain
    text, not quoted, and "" where the URL ends before them. ``version`` is ``("versionid", …)`` or ``("snapshot",
    …)``."""

    account: str
    endpoint: str
    container: str
    name: str
    version: tuple[str, str] | None = None


def parse(url: str) -> Blob:
    """``az://container/name``, ``abfss://container@account.dfs.core.windows.net/name`` or
    ``https://account.blob.core.windows.net/container/name``. In the first two the name stands as it is; in the last
    it is quoted, as everywhere in HTTP."""
    protocol, _, rest = url.partition("://")
    if protocol.lower() == "https":
        parts = urllib.parse.urlsplit(url)
        container, _, name = parts.path[1:].partition("/")
        name, container = urllib.parse.unquote(name), urllib.parse.unquote(container)
        found = _VERSION.search("?" + parts.query)
        host = parts.netloc.rpartition("@")[2]
    else:
        container, _, name = rest.partition("/")
        container, at, host = container.rpartition("@")
        if not at:
            container, host = (host, "") if _SERVICE.fullmatch(host) is None else ("", host)
        if host and not container:
            container, _, name = name.partition("/")
        found = _VERSION.search(name)
        name = name[: found.start()] if found else name
    service = _SERVICE.fullmatch(host)
    if host and service is None:
        raise UrlError(f"{redact(url)}: {host!r} is no blob service; write {protocol}://container@account.dfs.core.…")
    account, endpoint = (service[1], f"https://{service[1]}.blob.{service[2]}") if service else ("", "")
    version = (found[1].lower(), urllib.parse.unquote(found[2])) if found else None
    return Blob(account, endpoint, container, name, version)


@dataclass(frozen=True, slots=True)
class Account:
    """An account and what is known of its credentials, by ``kind``: ``key``, ``sas``, ``credential`` (an object of the
    program's), ``client`` (id, secret and tenant), ``anonymous`` (as the user says), or ``found``: whatever
    azure.identity finds, and else anonymous."""

    name: str
    endpoint: str
    """URL of its blob service, without a final slash; Azurite's ends with the account's name."""
    kind: str
    secret: Any = field(default=None, repr=False)
    """Key, signature, credential object, or ``(tenant, client, secret)``."""
    more: tuple[tuple[str, Any], ...] = field(default=(), repr=False, compare=False)
    """What the program says to DefaultAzureCredential."""

    @property
    def identity(self) -> str:
        """The identity in words, before any token."""
        return {
            "key": f"account key of {self.name}",
            "sas": f"shared access signature{_times(self.secret) if self.kind == 'sas' else ''}",
            "credential": type(self.secret).__name__,
            "client": f"client ID {self.secret[1]}" if self.kind == "client" else "",
            "anonymous": "anonymous",
            "found": "managed identity or another of Microsoft Entra ID",
        }[self.kind]


def has_credentials(url: str, options: Mapping[str, Any]) -> bool:
    """Return whether an ``https`` URL of a blob names an account that we know something of. What is configured for
    another account, or without saying for which, is not."""
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
    place = endpoint if ours and endpoint else blob.endpoint or f"https://{name}.blob.core.windows.net"
    kind, secret = _credential(settings, ours)
    more = tuple(sorted(without_ours(options).items()))
    return Account(name, place.rstrip("/"), kind, secret, more)


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


def _times(signature: str) -> str:
    """Return the validity of a signature in words."""
    said = urllib.parse.parse_qs(signature)
    start, stop = (said.get(name, [""])[0] for name in ("st", "se"))
    return f" (valid {f'from {start} ' if start else ''}to {stop})" if stop else ""


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value not in (None, "")}
    alone = any(name in given for name in _CREDENTIALS)
    found: dict[str, Any] = {}
    for name, variables in _VARIABLES.items():
        if alone and name not in ("account_name", "tenant_id", "client_secret"):
            continue
        found[name] = next((text for text in map(variable, variables) if text), None)
    if found.get("anon"):
        found["anon"] = found["anon"].lower() not in ("false", "0", "f")
    settings = {**found, **given}
    if text := settings.get("connection_string"):
        settings["connection"] = _connection(str(text))
    return settings


def _connection(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.strip().strip(";").split(";")]
    found = {name.strip().lower(): value for name, equals, value in pairs if equals}
    if found.get("usedevelopmentstorage", "").lower() == "true":
        return {**_EMULATOR, **found}
    if "blobendpoint" not in found and "accountname" not in found:
        raise ConfigError(
            "AZURE_STORAGE_CONNECTION_STRING (connection_string=) names neither AccountName nor BlobEndpoint; copy it "
            "whole from the account's access keys."
        )
    return found


def _configured(settings: Mapping[str, Any], shown: str) -> tuple[str, str]:
    """Return the name and the endpoint of the account that the settings are for; "" where they say none."""
    connection: dict[str, str] = settings.get("connection") or {}
    if connection:
        endpoint = connection.get("blobendpoint") or (
            f"{connection.get('defaultendpointsprotocol', 'https')}://{connection['accountname']}.blob."
            f"{connection.get('endpointsuffix', 'core.windows.net')}"
        )
        host = urllib.parse.urlsplit(endpoint).hostname
        if not host:
            raise ConfigError(f"{shown}: the connection string's BlobEndpoint is no URL")
        return connection.get("accountname") or host.partition(".")[0], endpoint
    name = str(settings.get("account_name") or "")
    host = str(settings.get("account_host") or "")
    return name, host if not host or "://" in host else f"https://{host}"


def _credential(settings: Mapping[str, Any], ours: bool) -> tuple[str, Any]:
    """Kind and secret. Keys and signatures are for ``ours`` only, who we are is for every account."""
    connection: dict[str, str] = settings.get("connection") or {}
    credential = settings.get("credential")
    if ours and connection:
        if "accountkey" in connection:
            return "key", connection["accountkey"]
        if "sharedaccesssignature" in connection:
            return "sas", connection["sharedaccesssignature"].lstrip("?")
    if credential is not None and not isinstance(credential, str):
        return _credential_object(credential)
    if ours and settings.get("account_key"):
        return "key", str(settings["account_key"])
    if ours and (signature := settings.get("sas_token") or credential):
        return "sas", str(signature).lstrip("?")
    if settings.get("client_id"):
        return "client", (settings.get("tenant_id"), settings["client_id"], settings.get("client_secret"))
    return ("anonymous", None) if settings.get("anon") is True else ("found", None)


def _credential_object(credential: Any) -> tuple[str, Any]:
    """Return kind and secret of an object of azure.core or azure.identity, or of azure.storage's dict for a key."""
    if isinstance(credential, Mapping):
        return "key", str(credential.get("account_key", ""))
    if hasattr(credential, "named_key"):  # AzureNamedKeyCredential
        return "key", credential.named_key.key
    if hasattr(credential, "signature"):  # AzureSasCredential
        return "sas", str(credential.signature).lstrip("?")
    if not hasattr(credential, "get_token"):
        raise ConfigError(f"storage_options: credential= is a {type(credential).__name__}, which gives no tokens")
    return "credential", credential


def origin_of(url: str, options: Mapping[str, Any]) -> str:
    """Return ``az://account/container`` of a blob's URL; ``az://`` where the URL is wrong: its read reports that."""
    try:
        blob = parse(url)
        return f"az://{blob.account or account_of(url, blob, options).name}/{blob.container}"
    except WdsError:
        return "az://"


def writer(url: str, options: Mapping[str, Any], filesystem: Any) -> Writer:
    """Return the identity and secrets that an adlfs writes ``url`` with."""
    account = account_of(url, parse(url), options)
    secrets = Secrets()
    for secret in account.secret if isinstance(account.secret, tuple) else (account.secret,):
        if isinstance(secret, str):
            secrets.add(secret)
            secrets.add_query(secret)
    return Writer(account.identity, secrets, {"kind": account.kind})


def write_options(url: str, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the URL and options with which adlfs writes ``url``. It knows no ``https`` URLs: the options name the
    account."""
    blob = parse(url)
    address = f"az://{blob.container}/{blob.name}" if url.lower().startswith("https:") else url
    return address, adlfs_options(url, options)


logger = logging.getLogger("wds_async")
API_VERSION = "2023-11-03"
"""Of the protocol; tokens need one, and answers to anonymous requests are of 2009 without it."""
_VALID_S = 3600.0
_RENEWED_AT = 5 / 6
_BACKDATED_S = 300.0  # a service whose clock is behind ours would call a signature of this moment not yet valid
_TOKEN_MARGIN_S = 300.0
VERSIONS = {"versionid": "version_id", "snapshot": "snapshot"}
"""What Azure's client calls the two parameters of a URL."""
_SCOPE = "https://storage.azure.com/.default"
_LOOKED_FOR_S = 3.0
_TOOLS = ("az", "azd", "pwsh")
_TOOLS_S = 10.0  # they are programs that azure.identity starts, and take a second or more each
_ASKED_S = 60.0
_NOTHING_FOUND_FOR_S = 300.0
_FRESH_S = 5.0
_TRIED = {"retry_total": 2, "retry_status": 2}
"""How often azure.identity itself asks a metadata service again; its own five times take 24 s, and we ask again too."""
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
    """Whether an earlier one went before it, whose requests may still be under way."""

    @property
    def fresh(self) -> bool:
        return time.monotonic() - self.made_at < min(_FRESH_S, self.valid_s / 2)


class AccountAccess:
    """Access to one account. ``call`` runs a blocking function on a thread."""

    def __init__(self, call: Call, account: Account) -> None:
        self.account = account
        self.identity = account.identity
        self._call = call
        self._grants: dict[str, Grant] = {}
        self._turn = asyncio.Lock()
        self._kind = account.kind
        self._credential: Any = account.secret if account.kind == "credential" else None
        self._had_token = False
        self._service: Any = None
        self.secrets = Secrets()
        hide_in_logs(self.secrets, "azure.core", "azure.identity", "adlfs")
        """What was sent as proof, or proof is made of."""
        for secret in account.secret if isinstance(account.secret, tuple) else (account.secret,):
            if isinstance(secret, str):
                self.secrets.add(secret)
                self.secrets.add_query(secret)

    @property
    def kind(self) -> str:
        """The account's, or what became of ``found``."""
        return self._kind

    @property
    def renewable(self) -> bool:
        """Whether another grant can replace one that has lapsed."""
        return self._kind in ("key", "client", "credential", "found")

    async def grant(self, blob: Blob) -> Grant:
        """To read ``blob``. Made when first needed, shared by all blobs of its container, renewed in time."""
        async with self._turn:
            key = self._scope(blob)
            known = self._grants.get(key)
            if known is None or known.renew_after <= time.monotonic():
                self._grants[key] = await self._made(blob, replaces=known is not None)
            return self._grants[key]

    def lapsed(self, blob: Blob, *, surely: bool) -> bool:
        """Return whether `grant` has, or will make, another grant than the one that the service refused. ``surely``:
        the service gave its time as the reason."""
        if not self.renewable:
            return False
        key = self._scope(blob)
        known = self._grants.get(key)
        if known is not None and known.fresh:
            return surely or known.replaces
        if known is not None:
            self._grants[key] = replace(known, renew_after=-math.inf)
            if self._kind != "credential":  # what it remembers was refused
                self._credential = None
        return True

    async def service(self) -> Any:
        """Azure's own asynchronous client of the account, made at first use."""
        await self.grant(Blob("", "", "", ""))  # settles who we are
        async with self._turn:
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

    # Grants

    def _scope(self, blob: Blob) -> str:
        """Return what of the account one grant covers. A version or snapshot has a signature of its own."""
        if self._kind != "key":
            return ""
        return blob.container if blob.version is None else f"{blob.container}/{blob.name}?{blob.version}"

    async def _made(self, blob: Blob, *, replaces: bool) -> Grant:
        version = (("x-ms-version", API_VERSION),)
        if self._kind == "key":
            return await self._call(self._signed, blob, replaces) if blob.container else Grant()
        if self._kind == "sas":
            return Grant(self.account.secret)
        if self._kind == "anonymous":
            return Grant(headers=version)
        if not self.account.endpoint.startswith("https:"):
            raise ConfigError(f"{self.account.endpoint}: a bearer token is not sent over plain http; use https")
        token = await self._token()
        if token is None:
            return Grant(headers=version)
        left_s = max(0.0, token.expires_on - time.time())
        renew_after = time.monotonic() + left_s - min(_TOKEN_MARGIN_S, left_s / 3)
        headers = (("Authorization", f"Bearer {token.token}"), *version)
        return Grant("", headers, renew_after, left_s, replaces=replaces)

    def _signed(self, blob: Blob, replaces: bool) -> Grant:
        with _azure_imports():
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
                version: dict[str, Any] = {VERSIONS[blob.version[0]]: blob.version[1]}
                signature = generate_blob_sas(blob_name=blob.name, **version, **terms)
        except Exception:  # what it says may show the key
            raise ConfigError(
                f"the account key of {self.account.name} is not base64: copy it whole from the account's access keys"
            ) from None
        self.secrets.add_query(signature)
        return Grant(signature, (), time.monotonic() + _VALID_S * _RENEWED_AT, _VALID_S, replaces=replaces)

    # Tokens

    async def _token(self) -> Any:
        """Return an access token, or None (anonymous) where none can be had and no credential was named."""
        looking = self._kind == "found" and not self._had_token
        if looking and _nothing_found_until.get(self.account.endpoint, 0.0) > time.monotonic():
            return self._turn_anonymous("nothing was found a moment ago")
        if self._credential is None:
            self._credential = await self._call(self._made_credential)
        tools = looking and any(shutil.which(tool) for tool in _TOOLS)
        limit_s = _LOOKED_FOR_S + (_TOOLS_S if tools else 0.0) if looking else _ASKED_S
        try:
            async with asyncio.timeout(limit_s):
                token = await self._call(_ask, self._credential, looking)
        except TimeoutError:
            if not looking:
                raise TimeoutError(f"no token from {self.identity} within {limit_s:g} s") from None
            _nothing_found_until[self.account.endpoint] = time.monotonic() + _NOTHING_FOUND_FOR_S
            return self._turn_anonymous(f"nothing answered within {limit_s:g} s")
        except Exception as exn:
            if self._had_token:
                raise NoToken(f"no new token from {self.identity}: {_first_line(exn)}") from None
            if not looking or not _is_authentication(exn):
                raise
            _nothing_found_until[self.account.endpoint] = time.monotonic() + _NOTHING_FOUND_FOR_S
            return self._turn_anonymous("no identity that azure.identity knows of")
        self._had_token = True
        self.secrets.add(token.token)
        if self._kind == "found":
            chosen = getattr(self._credential, "_successful_credential", None)
            self.identity = _WORDS.get(type(chosen).__name__, "Microsoft Entra ID")
        return token

    def _turn_anonymous(self, why: str) -> None:
        self._kind, self.identity = "anonymous", "anonymous"
        warn_once(
            logger,
            ("azure anonymous", self.account.endpoint),
            "%s: no credentials (%s): reading anonymously. Set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN "
            "or AZURE_STORAGE_CONNECTION_STRING, give this machine an identity, or say AZURE_STORAGE_ANON=1",
            self.account.endpoint,
            why,
        )

    def _made_credential(self) -> Any:
        with _azure_imports():
            import azure.identity  # noqa: PLC0415 (slow, and often not needed)
        if self._kind == "client":
            tenant, client, secret = self.account.secret
            if not tenant or not secret:
                raise ConfigError(
                    f"client ID {client}: set AZURE_STORAGE_CLIENT_SECRET and AZURE_STORAGE_TENANT_ID too "
                    "(client_secret=, tenant_id=)"
                )
            return azure.identity.ClientSecretCredential(tenant, client, secret)
        return azure.identity.DefaultAzureCredential(**{**_TRIED, **dict(self.account.more)})

    # Azure's client

    def _client(self) -> Any:
        with _azure_imports():
            from azure.core.credentials import AzureSasCredential  # noqa: PLC0415 (slow, and often not needed)
            from azure.storage.blob.aio import BlobServiceClient  # noqa: PLC0415
        credential: Any = None
        if self._kind == "key":
            credential = {"account_name": self.account.name, "account_key": self.account.secret}
        elif self._kind == "sas":
            credential = AzureSasCredential(self.account.secret)
        elif self._kind != "anonymous":
            credential = _AsyncCredential(self)
        more: dict[str, Any] = {"retry_total": 0}  # the engine tries again itself
        if ca_file := variable("SSL_CERT_FILE"):  # aiohttp's own context is as old as its import
            more["connection_verify"] = ca_file
        return BlobServiceClient(self.account.endpoint, credential=credential, user_agent="wds-async", **more)

    async def token(self) -> Any:
        """Return a token for Azure's client. ConnectionError where there is none any more."""
        async with self._turn:
            token = await self._token()
        if token is None:
            raise NoToken(f"no token for {self.account.endpoint}")
        return token


class _AsyncCredential:
    """An `AccountAccess` as azure.core's asynchronous clients take a credential."""

    def __init__(self, authority: AccountAccess) -> None:
        self._authority = authority

    async def get_token(self, *scopes: str, **kwargs: Any) -> Any:
        return await self._authority.token()

    async def close(self) -> None:
        """The authority outlives its client."""

    async def __aenter__(self) -> _AsyncCredential:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None


def _ask(credential: Any, quietly: bool) -> Any:
    """Return a token, in a thread; ``quietly``: without azure.identity's own warning that it found nothing, which
    `_turn_anonymous` says in fewer words. A program's asynchronous credential keeps its session with the loop that
    first asked it, so it is always asked on the one loop that lives as long as the process: fsspec's."""
    if not inspect.iscoroutinefunction(credential.get_token):
        with _quiet() if quietly else nullcontext():
            return credential.get_token(_SCOPE)
    with client_imports():
        from fsspec.asyn import get_loop, sync  # noqa: PLC0415 (slow, and often not needed)

    return sync(get_loop(), credential.get_token, _SCOPE)


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of azure.identity from this thread."""
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


def _is_authentication(exn: BaseException) -> bool:
    return any(cls.__name__ == "ClientAuthenticationError" for cls in type(exn).__mro__)


def _first_line(exn: BaseException) -> str:
    lines = str(exn).strip().splitlines()
    return lines[0] if lines else type(exn).__name__


@contextmanager
def _azure_imports() -> Iterator[None]:
    with extra_needed("Azure Blob Storage", "azure"), client_imports():
        yield
