"""Which blob of which account an Azure URL names, and what is known of that account's credentials: options, then
environment. Pure values; nothing here asks anybody.

The names are adlfs's. Where the program gives a credential of any kind, the environment's are left alone; within
either, a connection string comes first, then a credential object, a key, a shared access signature, a client's secret.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async.environment import variable
from wds_async.errors import ConfigError, UrlError, WdsError
from wds_async.redact import redact
from wds_async.storage.secrets import Secrets, Writer

__all__ = [
    "Account",
    "Blob",
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
        """Who we are before anybody was asked, for people."""
        return {
            "key": f"account key of {self.name}",
            "sas": f"shared access signature{_times(self.secret) if self.kind == 'sas' else ''}",
            "credential": type(self.secret).__name__,
            "client": f"client ID {self.secret[1]}" if self.kind == "client" else "",
            "anonymous": "anonymous",
            "found": "managed identity or another of Microsoft Entra ID",
        }[self.kind]


def has_credentials(url: str, options: Mapping[str, Any]) -> bool:
    """Whether an ``https`` URL of a blob names an account that we know something of. What is configured for another
    account, or without saying for which, is not."""
    if any(name in options for name in _CREDENTIALS):
        return True
    account = parse(url).account
    return bool(account) and account == _configured(_settings(options), redact(url))[0]


def without_ours(options: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``options`` is not for Azure, and so for a web server."""
    return {name: value for name, value in options.items() if name not in _OF_ADLFS}


def account_of(url: str, blob: Blob, options: Mapping[str, Any]) -> Account:
    """The account that ``blob`` is in. The one that its URL names is not asked with another's credentials.
    ConfigError where nobody names one."""
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
    """``options`` for the filesystem that writes ``url``, so that it goes where we read, as whom we read."""
    account = account_of(url, parse(url), options)
    secret = {"key": "AccountKey", "sas": "SharedAccessSignature"}.get(account.kind)
    if secret is not None:  # a connection string is the only way to plain http
        text = f"AccountName={account.name};BlobEndpoint={account.endpoint};{secret}={account.secret}"
        return {**options, "connection_string": text}
    more = {"client_id": account.secret[1]} if account.kind == "client" else {}
    named = {"account_name": account.name, "anon": account.kind == "anonymous", **more}
    return {**options, **named, "account_host": account.endpoint.partition("://")[2]}


def _times(signature: str) -> str:
    """From when to when a signature says that it is valid."""
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
    """The name and the endpoint of the account that the settings are for; "" where they say none."""
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
    """An object of azure.core's or azure.identity's, or the dict that azure.storage takes for a key."""
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
