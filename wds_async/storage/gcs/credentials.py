"""Credentials of Google: as whom a store is read, and access tokens that are renewed before they expire.

The order is that of "Application Default Credentials": ``GOOGLE_APPLICATION_CREDENTIALS``, gcloud's file, the metadata
server of the machine; then anonymous, with one warning a process. A search that finds nothing takes 3 s at most. What
google-auth raises may hold the answer of a token endpoint, so only its words are passed on (`AuthFailed`).
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
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async.environment import variable
from wds_async.logs import warn_once
from wds_async.redact import redact
from wds_async.storage.base import Call
from wds_async.storage.http.service_client import ask_service
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

_TOKEN_REQUEST_S = 10.0
_RENEW_BEFORE_S = 240.0
_RENEW_NO_SOONER_S = 0.5  # a metadata server hands out the same token almost to its end
_KEEP_OLD_S = 5.0
_TOKEN_SAID = re.compile(r"(_token['\"]?\s*[:=]\s*['\"]?)[\w.~+/\-]+=*")


class AuthFailed(Exception):
    """Named credentials cannot be used, or no token could be had for them."""

    def __init__(self, words: str, *, retryable: bool = False) -> None:
        super().__init__(words)
        self.retryable = retryable


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Whatever google-auth raises, as `AuthFailed` with its words and without its cause."""
    try:
        yield
    except (AuthFailed, ImportError):
        raise
    except Exception as exn:
        first = exn.args[0] if exn.args else ""
        words = _TOKEN_SAID.sub(r"\1***", re.sub(r"\s+", " ", redact(str(first))))[:300].strip()
        kind = type(exn).__name__
        if isinstance(exn, KeyError):
            words = f"{words} is missing"
        elif isinstance(exn, AttributeError | TypeError):
            words = "something is missing, or of the wrong kind"
        retryable = bool(getattr(exn, "retryable", False)) or any(
            "TransportError" in type(one).__name__ for one in (exn, exn.__cause__, first)
        )
        raise AuthFailed(f"{what}: {kind}: {words}", retryable=retryable) from None


class GoogleTokens:
    """The headers that prove an identity (google-auth's ``credentials``, None for nobody), kept fresh: asked for again
    four minutes before the token expires, or after three quarters of what it has left where that is less. ``call``
    refreshes on a thread, once for all who wait for it. ``former``: what these replace; gcsfs may hold its bearer."""

    def __init__(self, call: Call, credentials: Any, former: GoogleTokens | None = None) -> None:
        self._call = call
        self._credentials = credentials
        self._lock = asyncio.Lock()
        self._headers: tuple[tuple[str, str], ...] = ()
        self._renew_after = math.inf if credentials is None else -math.inf
        self._refused_at = self._got_at = -math.inf
        self.secrets: Secrets = Secrets() if former is None else former.secrets
        hide_in_logs(self.secrets, "google.auth", "google.oauth2", "gcsfs")
        """What was sent as proof."""
        self.bearer: Any = "anon" if former is None else former.bearer
        """For gcsfs, as ``token=``: always what was fetched last, so that gcsfs never refreshes on the loop."""

    @property
    def refreshable(self) -> bool:
        """Whether another token can be requested."""
        credentials = self._credentials
        if credentials is None:
            return False
        # A bare access token is all there is of some (google.oauth2's, without a refresh token).
        return getattr(credentials, "refresh_token", "") is not None

    def refuse(self) -> None:
        """Request another token before the next request: the store has refused this one."""
        self._refused_at = time.monotonic()

    async def headers(self) -> tuple[tuple[tuple[str, str], ...], float]:
        """Return the headers to send, and when to ask again (time.monotonic). `AuthFailed` where there is no token."""
        if self._stale():
            async with self._lock:
                if self._stale():
                    await self._renew()
        return self._headers, self._renew_after

    def _stale(self) -> bool:
        if self._credentials is None:
            return False
        return time.monotonic() >= self._renew_after or (self.refreshable and self._refused_at >= self._got_at)

    async def _renew(self) -> None:
        refused = self.refreshable and self._refused_at > -math.inf and self._refused_at >= self._got_at
        try:
            headers, left_s, bearer = await self._call(self._fetch, refused)
        except AuthFailed as exn:
            left_s = _left_s(self._credentials)
            if not exn.retryable or refused or not self._headers or left_s < _KEEP_OLD_S:
                raise
            self._renew_after = time.monotonic() + left_s / 4  # the old one still holds
            return
        now = time.monotonic()
        self._headers, self._got_at = headers, now
        self.secrets.add_headers(headers)
        self._renew_after = now + max(left_s - min(_RENEW_BEFORE_S, left_s / 4), _RENEW_NO_SOONER_S)
        if self.bearer == "anon":
            self.bearer = bearer
        else:
            self.bearer.token = bearer.token

    def _fetch(self, refused: bool) -> tuple[tuple[tuple[str, str], ...], float, Any]:
        """Refresh where that is needed, and return the headers. Blocks."""
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
    """Return seconds until the token expires; google-auth's ``expiry`` is UTC without saying so."""
    expiry = credentials.expiry
    if expiry is None:
        return math.inf
    utc = expiry if expiry.tzinfo is not None else expiry.replace(tzinfo=datetime.UTC)
    return float((utc - datetime.datetime.now(datetime.UTC)).total_seconds())


logger = logging.getLogger("wds_async")
HOW_TO_GIVE = (
    "Set GOOGLE_APPLICATION_CREDENTIALS to a key or workload identity file, run `gcloud auth application-default "
    "login`, give the machine a service account, or pass storage_options={'token': …}."
)
_METADATA_ADDRESS = "169.254.169.254"
_METADATA_TRIES, _METADATA_TRY_S = 2, 1.0
_ABSENT_FOR_S = 600.0
_MACHINE = "/sys/class/dmi/id/product_name"
_answering: set[str] = set()
"""Metadata addresses that have answered this process."""
_silent_until: dict[str, float] = {}
"""Those that have not, and until when (time.monotonic) they are not asked again."""


@dataclass(frozen=True, slots=True)
class GoogleIdentity:
    """Who reads. ``name`` is for people; ``credentials`` are google-auth's, None for anonymous; ``missed`` says that
    credentials were looked for and not found."""

    name: str
    credentials: Any = field(default=None, repr=False)
    project: str = ""
    missed: bool = False

    @property
    def who(self) -> str:
        """``name``, and the machine's account where its metadata server has named it."""
        email = getattr(self.credentials, "service_account_email", None)
        known = isinstance(email, str) and email not in ("", "default") and email not in self.name
        return f"{self.name}, service account {email}" if known else self.name

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
    """Who reads, by gcsfs's ``token=`` of ``options`` or by what the environment has. Blocks, 3 s at most where there
    is nothing. `AuthFailed` where credentials are named and cannot be used.

    An emulator gets no credentials but those of ``token=``: a real token is none of its business.
    """
    scopes = [f"https://www.googleapis.com/auth/devstorage.{options.get('access') or 'read_only'}"]
    token = options.get("token")
    with translated("credentials"):
        if token == "anon":
            return GoogleIdentity("anonymous (token='anon')")
        if token is None and emulator() and not options.get("endpoint_url"):
            return GoogleIdentity("anonymous (STORAGE_EMULATOR_HOST)", project=_project(options, {}))
        if token in (None, "google_default"):
            return _default(options, scopes)
        if token == "cloud":
            return _metadata(options, scopes)
        return _given(token, options, scopes)


def gcsfs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with a ``token``, for which gcsfs would search for 15 s. Blocks like `find_identity`."""
    return {**options, "token": find_identity({"access": "full_control", **options}).credentials or "anon"}


def metadata_project() -> str:
    """Return the machine's project, "" without a metadata server. Blocks."""
    status, _, body = _ask_metadata("/computeMetadata/v1/project/project-id")
    return body.decode("ascii", "replace").strip() if status == 200 else ""


def _default(options: Mapping[str, Any], scopes: list[str]) -> GoogleIdentity:
    named = variable("GOOGLE_APPLICATION_CREDENTIALS")
    if named:
        return _from_file(named, "GOOGLE_APPLICATION_CREDENTIALS", options, scopes)
    known = _gcloud_file()
    if os.path.isfile(known):
        return _from_file(known, "gcloud's application default credentials", options, scopes)
    if _has_metadata():
        return _metadata(options, scopes)
    if options.get("token") == "google_default":
        raise AuthFailed("token='google_default': there are no application default credentials")
    warn_once(
        logger,
        "gcs anonymous",
        "Google Cloud Storage is read anonymously: no credentials were found (no GOOGLE_APPLICATION_CREDENTIALS, "
        "none of gcloud's, no metadata server); storage_options={'token': 'anon'} says that this is meant "
        "(logged once a process)",
    )
    return GoogleIdentity("anonymous (no credentials were found)", project=_project(options, {}), missed=True)


def _gcloud_file() -> str:
    folder = variable("CLOUDSDK_CONFIG")
    if not folder and os.name == "nt":
        folder = os.path.join(variable("APPDATA") or "", "gcloud")
    folder = folder or os.path.join(os.path.expanduser("~"), ".config", "gcloud")
    return os.path.join(folder, "application_default_credentials.json")


@client_imports()
def _given(token: Any, options: Mapping[str, Any], scopes: list[str]) -> GoogleIdentity:
    """Return the identity of ``token=``: a file, its content, an access token, or credentials."""
    from google.auth.credentials import Credentials as AnyCredentials  # noqa: PLC0415
    from google.oauth2.credentials import Credentials  # noqa: PLC0415

    if token == "browser":
        raise AuthFailed("token='browser' cannot log in from here; run `gcloud auth application-default login` before")
    if token == "cache":
        from gcsfs.credentials import GoogleCredentials  # noqa: PLC0415

        made = GoogleCredentials(options.get("project"), options.get("access", "full_control"), token)
        return GoogleIdentity("gcsfs's token='cache'", made.credentials, _project(options, {}))
    if isinstance(token, str) and os.path.exists(token):
        return _from_file(token, "storage_options", options, scopes)
    if isinstance(token, str):
        return GoogleIdentity("access token (storage_options)", Credentials(token), _project(options, {}))
    if isinstance(token, Mapping):
        return _from_info(dict(token), "storage_options", options, scopes)
    if isinstance(token, AnyCredentials):
        email = getattr(token, "service_account_email", "")
        name = f"service account {email}" if email else type(token).__name__
        return GoogleIdentity(f"{name} (storage_options)", token, _project(options, {}))
    raise AuthFailed(f"token= is a file, a dict, an access token or credentials, not {type(token).__name__}")


def _from_file(path: str, where: str, options: Mapping[str, Any], scopes: list[str]) -> GoogleIdentity:
    try:
        with open(path, encoding="utf-8") as file:
            info = json.load(file)
    except OSError as exn:
        raise AuthFailed(f"the file that {where} names cannot be read: {exn.strerror or exn}: {path!r}") from None
    except ValueError:
        raise AuthFailed(f"the file that {where} names is not JSON: {path!r}") from None
    if not isinstance(info, dict):
        raise AuthFailed(f"the file that {where} names holds no credentials: {path!r}")
    return _from_info(info, where, options, scopes)


@client_imports()
def _from_info(info: dict[str, Any], where: str, options: Mapping[str, Any], scopes: list[str]) -> GoogleIdentity:
    """Credentials by the ``type`` of their file. User credentials are not given scopes: theirs are set at login."""
    from google.auth.credentials import with_scopes_if_required  # noqa: PLC0415

    kind = info.get("type") or ("authorized_user" if "refresh_token" in info else None)
    credentials, name = _of_kind(kind, info, where)
    credentials = with_scopes_if_required(credentials, scopes)
    if hasattr(credentials, "with_quota_project_from_environment"):
        credentials = credentials.with_quota_project_from_environment()
    return GoogleIdentity(f"{name} ({where})", credentials, _project(options, info))


def _of_kind(kind: Any, info: dict[str, Any], where: str) -> tuple[Any, str]:
    if kind == "service_account":
        from google.oauth2 import service_account  # noqa: PLC0415

        found = service_account.Credentials.from_service_account_info(info)
        return found, f"service account {found.service_account_email}"
    if kind == "authorized_user":
        from google.oauth2.credentials import Credentials  # noqa: PLC0415

        info = {"client_id": "", "client_secret": "", **info}
        return Credentials.from_authorized_user_info(info), f"user account {info.get('account') or ''}".rstrip()
    if kind == "external_account":
        found = _external(info)
        email = found.service_account_email
        return found, "workload identity" + (f" as service account {email}" if email else "")
    if kind == "external_account_authorized_user":
        from google.auth import external_account_authorized_user as users  # noqa: PLC0415

        return users.Credentials.from_info(info), "workforce identity"
    if kind == "impersonated_service_account":
        from google.auth import impersonated_credentials as others  # noqa: PLC0415

        found = others.Credentials.from_impersonated_service_account_info(info)
        return found, f"impersonated service account {found.service_account_email}"
    raise AuthFailed(f"{where}: credentials of a type that is not known here: {kind!r:.60}")


def _external(info: dict[str, Any]) -> Any:
    """Workload identity federation: AWS, a program (which Google's library runs only where it is allowed to by
    ``GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES=1``), a file or a URL."""
    if info.get("subject_token_type") == "urn:ietf:params:aws:token-type:aws4_request":
        from google.auth import aws  # noqa: PLC0415

        return aws.Credentials.from_info(info)
    if (info.get("credential_source") or {}).get("executable") is not None:
        from google.auth import pluggable  # noqa: PLC0415

        return pluggable.Credentials.from_info(info)
    from google.auth import identity_pool  # noqa: PLC0415

    return identity_pool.Credentials.from_info(info)


def _project(options: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    named = options.get("project") or variable("GOOGLE_CLOUD_PROJECT") or variable("GCLOUD_PROJECT")
    return str(named or info.get("project_id") or info.get("quota_project_id") or "")


@client_imports()
def _metadata(options: Mapping[str, Any], scopes: list[str]) -> GoogleIdentity:
    from google.auth import compute_engine  # noqa: PLC0415

    return GoogleIdentity("metadata server", compute_engine.Credentials(scopes=scopes), _project(options, {}))


def _metadata_address() -> str:
    named = (variable(name) for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"))
    return next((address for address in named if address), _METADATA_ADDRESS)


def _has_metadata() -> bool:
    """Return whether this machine has a metadata server. One that has ever answered is believed to be there, also when
    it is slow; one that has not is asked again only after ten minutes."""
    if variable("NO_GCE_CHECK") == "true":
        return False
    with contextlib.suppress(OSError), open(_MACHINE, encoding="utf-8") as file:
        if file.read().strip().startswith("Google"):
            return True
    address = _metadata_address()
    if address in _answering:
        return True
    if _silent_until.get(address, 0.0) > time.monotonic():
        return False
    _, flavor, _ = _ask_metadata("/")
    if flavor == "Google":
        _answering.add(address)
    else:
        _silent_until[address] = time.monotonic() + _ABSENT_FOR_S
    return address in _answering


def _ask_metadata(path: str) -> tuple[int, str, bytes]:
    """Return status, ``Metadata-Flavor`` and body of a quick GET; status 0 without an answer. Never by a proxy."""
    try:
        timeout_s = float(variable("GCE_METADATA_TIMEOUT") or _METADATA_TRY_S)
    except ValueError:
        timeout_s = _METADATA_TRY_S
    address, headers = f"http://{_metadata_address()}", {"Metadata-Flavor": "Google"}
    for _ in range(_METADATA_TRIES):
        try:
            answer = ask_service(address, "GET", path, timeout_s=timeout_s, limit_bytes=4096, headers=headers)
        except TimeoutError:
            continue
        except OSError:
            break
        return answer.status, answer.fields.get("metadata-flavor", ""), answer.body
    return 0, "", b""


def writer(url: str, options: Mapping[str, Any], filesystem: Any) -> Writer:
    """Return the identity and secrets that a gcsfs writes with. Blocks like `find_identity`."""
    used = getattr(getattr(filesystem, "credentials", None), "credentials", None)
    secrets = Secrets(getattr(used, "token", None), options.get("token"))
    return Writer(find_identity({"access": "full_control", **options}).who, secrets)
