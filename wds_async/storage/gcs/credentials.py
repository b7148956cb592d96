"""Credentials of Google: the identity that reads a store, and access tokens that are renewed before they expire.

The order is that of "Application Default Credentials": ``GOOGLE_APPLICATION_CREDENTIALS``, gcloud's file, the metadata
server of the machine; then anonymous, with one warning a process. A search that finds nothing takes 3 s at most.
"""

# google-auth says that it is typed, and is in parts.
# mypy: allow-untyped-calls

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import json
import logging
import math
import os
import pkgutil
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async.environment import variable
from wds_async.logs import warn_once
from wds_async.redact import redact
from wds_async.storage.base import Call
from wds_async.storage.http.service_client import Reply, ask_service
from wds_async.storage.preload import client_imports
from wds_async.storage.secrets import Secrets, Writer, hide_in_logs

__all__ = [
    "HOW_TO_GIVE",
    "AuthFailed",
    "GoogleIdentity",
    "GoogleTokens",
    "emulator",
    "find_identity",
    "gcsfs_options",
    "metadata_project",
    "translated",
    "writer",
]

logger = logging.getLogger("wds_async")

_TOKEN_REQUEST_S = 10.0
_RENEW_BEFORE_S = 240.0
_RENEW_NO_SOONER_S = 0.5  # a metadata server hands out the same token almost to its end
_KEEP_OLD_S = 5.0
_TOKEN_FIELD = re.compile(r"(_token['\"]?\s*[:=]\s*['\"]?)[\w.~+/\-]+=*")

Headers = tuple[tuple[str, str], ...]


class AuthFailed(Exception):
    """Named credentials cannot be used, or no token could be had for them."""

    def __init__(self, words: str, *, retryable: bool = False) -> None:
        super().__init__(words)
        self.retryable = retryable


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise `AuthFailed` for what google-auth raises in this block, with its words and without its cause, which may
    hold the answer of a token endpoint."""
    try:
        yield
    except (AuthFailed, ImportError):
        raise
    except Exception as exn:
        first = exn.args[0] if exn.args else ""
        words = _TOKEN_FIELD.sub(r"\1***", re.sub(r"\s+", " ", redact(str(first))))[:300].strip()
        if isinstance(exn, KeyError):
            words = f"{words} is missing"
        elif isinstance(exn, AttributeError | TypeError):
            words = "something is missing, or of the wrong kind"
        retryable = bool(getattr(exn, "retryable", False)) or any(
            "TransportError" in type(one).__name__ for one in (exn, exn.__cause__, first)
        )
        raise AuthFailed(f"{what}: {type(exn).__name__}: {words}", retryable=retryable) from None


class GoogleTokens:
    """Headers that prove an identity (google-auth's ``credentials``, None for anonymous), kept fresh: renewed four
    minutes before the token expires, or after three quarters of its remaining life where that is less. ``call``
    refreshes on a thread, once for all who wait for it. ``former``: the tokens that these replace; gcsfs may hold
    their bearer."""

    def __init__(
        self, call: Call, credentials: Any, former: GoogleTokens | None = None, secrets: Secrets | None = None
    ) -> None:
        self._call = call
        self._credentials = credentials
        self._lock = asyncio.Lock()
        self._headers: Headers = ()
        self._renew_after = math.inf if credentials is None else -math.inf
        self._refused_at = self._renewed_at = -math.inf
        self._secrets = secrets or Secrets()
        hide_in_logs(self._secrets, "google.auth", "google.oauth2", "gcsfs")
        self.bearer: Any = "anon" if former is None else former.bearer
        """gcsfs's ``token=``: always the newest, so that gcsfs never refreshes on the loop."""
        # A bare access token is all there is of some (google.oauth2's, without a refresh token).
        self.refreshable = credentials is not None and getattr(credentials, "refresh_token", "") is not None

    def refuse(self) -> None:
        """Renew the token before the next request: the store has refused this one."""
        self._refused_at = time.monotonic()

    async def headers(self) -> tuple[Headers, float]:
        """Return the headers to send, and when to ask again (time.monotonic). `AuthFailed` where there is no token."""
        if self._stale():
            async with self._lock:
                if self._stale():
                    await self._renew()
        return self._headers, self._renew_after

    def _refused(self) -> bool:
        return self.refreshable and self._refused_at > -math.inf and self._refused_at >= self._renewed_at

    def _stale(self) -> bool:
        return self._credentials is not None and (time.monotonic() >= self._renew_after or self._refused())

    async def _renew(self) -> None:
        refused = self._refused()
        try:
            headers, left_s, bearer = await self._call(self._fetch, refused)
        except AuthFailed as exn:
            left_s = _left_s(self._credentials)
            if not exn.retryable or refused or not self._headers or left_s < _KEEP_OLD_S:
                raise
            self._renew_after = time.monotonic() + left_s / 4  # the old one still holds
            return
        self._headers, self._renewed_at = headers, time.monotonic()
        self._secrets.add_headers(headers)
        self._renew_after = self._renewed_at + max(left_s - min(_RENEW_BEFORE_S, left_s / 4), _RENEW_NO_SOONER_S)
        if self.bearer == "anon":
            self.bearer = bearer
        else:
            self.bearer.token = bearer.token

    def _fetch(self, refused: bool) -> tuple[Headers, float, Any]:
        """Refresh where that is needed, and return the headers, the remaining life and the bearer. Blocks."""
        with client_imports():
            import requests  # noqa: PLC0415
            from google.auth.transport.requests import Request  # noqa: PLC0415
            from google.oauth2.credentials import Credentials  # noqa: PLC0415

        credentials = self._credentials
        with translated("no token could be had"), requests.Session() as session:
            # A metadata server is this machine's own: no proxy leads there.
            session.trust_env = "compute_engine" not in type(credentials).__module__
            held = credentials.token is not None and _left_s(credentials) > _RENEW_BEFORE_S and not self._headers
            if refused or not held:
                bounded = functools.partial(Request(session), timeout=_TOKEN_REQUEST_S)
                bounded.session = session  # type: ignore[attr-defined] # google-auth mounts its TLS adapter there
                credentials.refresh(bounded)
            headers: dict[str, str] = {}
            credentials.apply(headers)
            bearer = Credentials(credentials.token, quota_project_id=getattr(credentials, "quota_project_id", None))
            return tuple(headers.items()), _left_s(credentials), bearer


def _left_s(credentials: Any) -> float:
    """Return seconds until the token expires; google-auth's ``expiry`` is UTC without a time zone."""
    expiry = credentials.expiry
    if expiry is None:
        return math.inf
    utc = expiry if expiry.tzinfo is not None else expiry.replace(tzinfo=datetime.UTC)
    return float((utc - datetime.datetime.now(datetime.UTC)).total_seconds())


# -- identities --------------------------------------------------------------------------------------------------------

HOW_TO_GIVE = (
    "Set GOOGLE_APPLICATION_CREDENTIALS to a key or workload identity file, run `gcloud auth application-default "
    "login`, give the machine a service account, or pass storage_options={'token': …}."
)
# By the ``type`` of a file of credentials: the maker of google-auth, and the identity in words.
_KINDS = {
    "service_account": ("google.oauth2.service_account:Credentials.from_service_account_info", "service account"),
    "authorized_user": ("google.oauth2.credentials:Credentials.from_authorized_user_info", "user account"),
    "external_account": ("google.auth.identity_pool:Credentials.from_info", "workload identity"),
    "external_account_authorized_user": (
        "google.auth.external_account_authorized_user:Credentials.from_info",
        "workforce identity",
    ),
    "impersonated_service_account": (
        "google.auth.impersonated_credentials:Credentials.from_impersonated_service_account_info",
        "impersonated service account",
    ),
}


@dataclass(frozen=True, slots=True)
class GoogleIdentity:
    """The identity that reads. ``name`` is for people; ``credentials`` are google-auth's, None for anonymous;
    ``missed``: credentials were looked for and not found."""

    name: str
    credentials: Any = field(default=None, repr=False)
    project: str = ""
    missed: bool = False

    @property
    def who(self) -> str:
        """``name``, and the machine's account where its metadata server has named it."""
        email = getattr(self.credentials, "service_account_email", None)
        named = isinstance(email, str) and email not in ("", "default") and email not in self.name
        return f"{self.name}, service account {email}" if named else self.name

    @property
    def account(self) -> str:
        """The principal that a role can be granted to, as far as it is known."""
        return self.who.partition(" (")[0] if "account" in self.who else "this identity"


def emulator() -> str:
    """Return the URL that ``STORAGE_EMULATOR_HOST`` names, "" without one."""
    host = (variable("STORAGE_EMULATOR_HOST") or "").rstrip("/")
    if host in ("", "default"):
        return ""
    return host if host.startswith(("http://", "https://")) else f"http://{host}"


def find_identity(options: Mapping[str, Any]) -> GoogleIdentity:
    """Return the identity of gcsfs's ``token=`` among ``options``, else of the environment. Blocks, 3 s at most where
    there is none. `AuthFailed` where credentials are named and cannot be used.

    An emulator gets no credentials but those of ``token=``: a real token is not for it.
    """
    scopes = [f"https://www.googleapis.com/auth/devstorage.{options.get('access') or 'read_only'}"]
    token, project = options.get("token"), _project(options, {})
    with translated("credentials"):
        if token == "anon":
            return GoogleIdentity("anonymous (token='anon')")
        if token is None and emulator() and not options.get("endpoint_url"):
            return GoogleIdentity("anonymous (STORAGE_EMULATOR_HOST)", project=project)
        if token not in (None, "google_default", "cloud"):
            return _of_token(token, options, scopes)
        if token != "cloud":
            file = os.path.join(_gcloud_folder(), "application_default_credentials.json")
            if named := variable("GOOGLE_APPLICATION_CREDENTIALS"):
                return _from_file(named, "GOOGLE_APPLICATION_CREDENTIALS", options, scopes)
            if os.path.isfile(file):
                return _from_file(file, "gcloud's application default credentials", options, scopes)
        if token == "cloud" or _has_metadata():
            with client_imports():
                from google.auth import compute_engine  # noqa: PLC0415

            return GoogleIdentity("metadata server", compute_engine.Credentials(scopes=scopes), project)
    if token == "google_default":
        raise AuthFailed("token='google_default': there are no application default credentials")
    warn_once(
        logger,
        "gcs anonymous",
        "Google Cloud Storage is read anonymously: no credentials were found (no GOOGLE_APPLICATION_CREDENTIALS, "
        "none of gcloud's, no metadata server); storage_options={'token': 'anon'} says that this is meant "
        "(logged once a process)",
    )
    return GoogleIdentity("anonymous (no credentials were found)", project=project, missed=True)


def gcsfs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with a ``token``, for which gcsfs would search for 15 s. Blocks like `find_identity`."""
    return {**options, "token": find_identity({"access": "full_control", **options}).credentials or "anon"}


def writer(url: str, options: Mapping[str, Any], filesystem: Any) -> Writer:
    """Return the identity and secrets that a gcsfs writes with. Blocks like `find_identity`."""
    used = getattr(getattr(filesystem, "credentials", None), "credentials", None)
    secrets = Secrets(getattr(used, "token", None), options.get("token"))
    return Writer(find_identity({"access": "full_control", **options}).who, secrets)


def _gcloud_folder() -> str:
    if folder := variable("CLOUDSDK_CONFIG"):
        return folder
    if os.name == "nt":
        return os.path.join(variable("APPDATA") or "", "gcloud")
    return os.path.join(os.path.expanduser("~"), ".config", "gcloud")


@client_imports()
def _of_token(token: Any, options: Mapping[str, Any], scopes: list[str]) -> GoogleIdentity:
    """Return the identity of ``token=``: a file, its content, an access token, or credentials."""
    from google.auth.credentials import Credentials as AnyCredentials  # noqa: PLC0415
    from google.oauth2.credentials import Credentials  # noqa: PLC0415

    project = _project(options, {})
    if token == "browser":
        raise AuthFailed("token='browser' cannot log in from here; run `gcloud auth application-default login` before")
    if token == "cache":
        from gcsfs.credentials import GoogleCredentials  # noqa: PLC0415

        cached = GoogleCredentials(options.get("project"), options.get("access", "full_control"), token)
        return GoogleIdentity("gcsfs's token='cache'", cached.credentials, project)
    if isinstance(token, Mapping):
        return _from_info(dict(token), "storage_options", options, scopes)
    if isinstance(token, str):
        if os.path.exists(token):
            return _from_file(token, "storage_options", options, scopes)
        return GoogleIdentity("access token (storage_options)", Credentials(token), project)
    if isinstance(token, AnyCredentials):
        email = getattr(token, "service_account_email", "")
        name = f"service account {email}" if email else type(token).__name__
        return GoogleIdentity(f"{name} (storage_options)", token, project)
    raise AuthFailed(f"token= is a file, a dict, an access token or credentials, not {type(token).__name__}")


def _from_file(path: str, source: str, options: Mapping[str, Any], scopes: list[str]) -> GoogleIdentity:
    try:
        with open(path, encoding="utf-8") as file:
            info = json.load(file)
    except OSError as exn:
        raise AuthFailed(f"the file that {source} names cannot be read: {exn.strerror or exn}: {path!r}") from None
    except ValueError:
        raise AuthFailed(f"the file that {source} names is not JSON: {path!r}") from None
    if not isinstance(info, dict):
        raise AuthFailed(f"the file that {source} names holds no credentials: {path!r}")
    return _from_info(info, source, options, scopes)


@client_imports()
def _from_info(info: dict[str, Any], source: str, options: Mapping[str, Any], scopes: list[str]) -> GoogleIdentity:
    """Return the identity of a file of credentials. User credentials get no scopes: theirs are set at login."""
    from google.auth.credentials import with_scopes_if_required  # noqa: PLC0415

    kind = info.get("type") or ("authorized_user" if "refresh_token" in info else None)
    if kind not in _KINDS:
        raise AuthFailed(f"{source}: credentials of a type that is not known here: {kind!r:.60}")
    maker, name = _KINDS[kind]
    if kind == "authorized_user":
        info = {"client_id": "", "client_secret": "", **info}
    elif kind == "external_account" and info.get("subject_token_type") == _AWS_TOKEN:
        maker = "google.auth.aws:Credentials.from_info"
    elif kind == "external_account" and (info.get("credential_source") or {}).get("executable") is not None:
        # Google's library runs it only where GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1 allows that.
        maker = "google.auth.pluggable:Credentials.from_info"
    credentials = with_scopes_if_required(pkgutil.resolve_name(maker)(info), scopes)
    if hasattr(credentials, "with_quota_project_from_environment"):
        credentials = credentials.with_quota_project_from_environment()
    account = info.get("account") if kind == "authorized_user" else getattr(credentials, "service_account_email", None)
    if account and kind == "external_account":
        name += " as service account"
    return GoogleIdentity(f"{name} {account or ''}".rstrip() + f" ({source})", credentials, _project(options, info))


_AWS_TOKEN = "urn:ietf:params:aws:token-type:aws4_request"


def _project(options: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    named = options.get("project") or variable("GOOGLE_CLOUD_PROJECT") or variable("GCLOUD_PROJECT")
    return str(named or info.get("project_id") or info.get("quota_project_id") or "")


# -- the machine's metadata server -------------------------------------------------------------------------------------

_METADATA_TRIES, _METADATA_TRY_S = 2, 1.0
_ABSENT_FOR_S = 600.0
_MACHINE = "/sys/class/dmi/id/product_name"
_answering: set[str] = set()
"""Metadata addresses that have answered this process."""
_silent_until: dict[str, float] = {}
"""Those that have not, and until when (time.monotonic) they are not asked again."""


def metadata_project() -> str:
    """Return the machine's project, "" without a metadata server. Blocks."""
    reply = _metadata("/computeMetadata/v1/project/project-id")
    return reply.body.decode("ascii", "replace").strip() if reply is not None and reply.status == 200 else ""


def _has_metadata() -> bool:
    """Return whether this machine has a metadata server. One that has ever answered counts also when it is slow; one
    that has not is tried again only after ten minutes."""
    if variable("NO_GCE_CHECK") == "true":
        return False
    with contextlib.suppress(OSError), open(_MACHINE, encoding="utf-8") as file:
        if file.read().strip().startswith("Google"):
            return True
    address = _metadata_address()
    if address not in _answering and _silent_until.get(address, 0.0) <= time.monotonic():
        reply = _metadata("/")
        if reply is not None and reply.fields.get("metadata-flavor") == "Google":
            _answering.add(address)
        else:
            _silent_until[address] = time.monotonic() + _ABSENT_FOR_S
    return address in _answering


def _metadata_address() -> str:
    names = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
    return next(filter(None, map(variable, names)), "169.254.169.254")


def _metadata(path: str) -> Reply | None:
    """Return the answer to a quick GET, None without one. Never by a proxy."""
    try:
        timeout_s = float(variable("GCE_METADATA_TIMEOUT") or _METADATA_TRY_S)
    except ValueError:
        timeout_s = _METADATA_TRY_S
    address, headers = f"http://{_metadata_address()}", {"Metadata-Flavor": "Google"}
    for _ in range(_METADATA_TRIES):
        try:
            return ask_service(address, "GET", path, timeout_s=timeout_s, limit_bytes=4096, headers=headers)
        except TimeoutError:
            continue
        except OSError:
            break
    return None
