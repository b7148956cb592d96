"""Access tokens of Google: fetched and renewed on a thread, before they expire.

What google-auth raises may hold what a token endpoint answered, so only its words leave this room (`AuthFailed`).
"""

# google-auth says that it is typed, and is in parts.
# mypy: allow-untyped-calls

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import math
import re
import time
from collections.abc import Iterator
from typing import Any

from wds_async.redact import redact
from wds_async.storage.base import Call
from wds_async.storage.preload import client_imports
from wds_async.storage.secrets import Secrets, hide_in_logs

__all__ = ["AuthFailed", "Tokens", "in_words"]

_TOKEN_REQUEST_S = 10.0
_RENEW_BEFORE_S = 240.0
_RENEW_NO_SOONER_S = 0.5  # a metadata server hands out the same token almost to its end
_KEEP_OLD_S = 5.0
_TOKEN_SAID = re.compile(r"(_token['\"]?\s*[:=]\s*['\"]?)[\w.~+/\-]+=*")


class AuthFailed(Exception):
    """There are no credentials where some were asked for, or no token could be had for them."""

    def __init__(self, words: str, *, retryable: bool = False) -> None:
        super().__init__(words)
        self.retryable = retryable


@contextlib.contextmanager
def in_words(what: str) -> Iterator[None]:
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


class Tokens:
    """The headers that prove an identity (google-auth's ``credentials``, None for nobody), kept fresh: asked for again
    four minutes before the token expires, or after three quarters of what it has left where that is less. ``call``
    refreshes on a thread, once for all who wait for it. ``former``: what these replace; gcsfs may hold its bearer."""

    def __init__(self, call: Call, credentials: Any, former: Tokens | None = None) -> None:
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
        """Whether another token can be asked for."""
        credentials = self._credentials
        if credentials is None:
            return False
        # A bare access token is all there is of some (google.oauth2's, without a refresh token).
        return getattr(credentials, "refresh_token", "") is not None

    def refuse(self) -> None:
        """The store said that the token is none: ask for another before anything else is sent."""
        self._refused_at = time.monotonic()

    async def headers(self) -> tuple[tuple[tuple[str, str], ...], float]:
        """The headers to send, and when to ask again (time.monotonic). `AuthFailed` where there is no token."""
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
        """A thread's work: refresh where that is needed, and the headers."""
        with client_imports():
            import requests  # noqa: PLC0415
            from google.auth.transport.requests import Request  # noqa: PLC0415
            from google.oauth2.credentials import Credentials  # noqa: PLC0415

        credentials = self._credentials
        with in_words("no token could be had"), requests.Session() as session:
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
    """Seconds until the token expires; google-auth's ``expiry`` is UTC without saying so."""
    expiry = credentials.expiry
    if expiry is None:
        return math.inf
    utc = expiry if expiry.tzinfo is not None else expiry.replace(tzinfo=datetime.UTC)
    return float((utc - datetime.datetime.now(datetime.UTC)).total_seconds())
