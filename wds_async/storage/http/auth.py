"""Credentials for HTTP(S): ``storage_options``, fsspec's configuration, the URL's userinfo and netrc files.

Options go before the URL, and the URL before netrc. What comes out is an `Identity`: the headers that prove it, and a
name for people that holds no secret.
"""

from __future__ import annotations

import base64
import logging
import netrc
import os
import ssl
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_async.environment import variable
from wds_async.errors import ConfigError
from wds_async.logs import warn_once
from wds_async.storage.base import Tls

__all__ = [
    "ANONYMOUS",
    "HttpSettings",
    "Identity",
    "Netrc",
    "checked_header",
    "identity_of_url",
    "tls_context",
]

logger = logging.getLogger("wds_async")

Headers = tuple[tuple[str, str], ...]

_ACCEPTED = ("headers", "token", "username", "password", "auth", "ca_file", "verify", "certificate", "key")
_OF_A_SESSION = ("headers", "auth", "trust_env")
# What fsspec's HTTP filesystem takes besides, and has no meaning here.
_MEANINGLESS = frozenset({
    "asynchronous", "block_size", "cache_options", "cache_type", "encoded", "listings_expiry_time", "loop",
    "max_paths", "same_scheme", "simple_links", "size_policy", "skip_instance_cache", "use_listings_cache",
})  # fmt: skip
_CREDENTIALS = frozenset(("token", "username", "password", "auth"))
_OURS = frozenset(("connection", "content-length", "host", "if-match", "range", "transfer-encoding"))
_SYSTEM_TLS = Tls()


@dataclass(frozen=True, slots=True)
class Identity:
    """Credentials of a request. ``name`` is for people; ``headers`` are secret: never log them."""

    name: str
    headers: Headers = field(default=(), repr=False)

    @property
    def described(self) -> str:
        """The identity as `Description` shows it."""
        return self.name if self.headers else "anonymous"

    def hidden(self, text: str) -> str:
        """Return ``text`` without the secrets of this identity: some servers repeat what they were sent."""
        for _, proof in self.headers:
            for secret in {proof, proof.rpartition(" ")[2]}:
                if len(secret) > 3:
                    text = text.replace(secret, "***")
        return text


ANONYMOUS = Identity("no credentials")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of ``storage_options`` for HTTP(S): further ``headers``, the ``identity`` (None: from the URL and
    netrc), how TLS is verified, and whether proxies and netrc of the ``environment`` are used.
    """

    headers: Headers = field(default=(), repr=False)
    identity: Identity | None = None
    tls: Tls = _SYSTEM_TLS
    environment: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any], configured: Mapping[str, Any] | None = None) -> HttpSettings:
        """Return the settings of ``options``, which win over what is ``configured`` for fsspec. ConfigError for a name
        or value that is not known here; what is configured for other programs and unknown here is ignored.
        """
        given = {**_usable(configured or {}, options), **options}
        session = given.pop("client_kwargs", None) or {}
        _refuse_unknown(given, (*_ACCEPTED, "client_kwargs"), "storage_options for http(s)")
        if not isinstance(session, Mapping):
            raise ConfigError("storage_options for http(s): client_kwargs is a dict")
        _refuse_unknown(session, _OF_A_SESSION, "client_kwargs for http(s)")
        headers = _headers(session.get("headers")) | _headers(given.get("headers"))
        auth = given.get("auth") or session.get("auth")
        identity = _identity({**given, "auth": auth}, headers)
        return cls(tuple(headers.items()), identity, _tls(given), _truth("trust_env", session.get("trust_env", True)))


def _refuse_unknown(given: Mapping[str, Any], accepted: Iterable[str], what: str) -> None:
    unknown = sorted(str(name) for name in given if name not in accepted and name not in _MEANINGLESS)
    if unknown:
        raise ConfigError(
            f"{what}: {', '.join(unknown)} means nothing here; accepted are {', '.join(accepted)}. Options of one store"
            ' only are written by scheme: {"https": {…}, "s3": {…}}.'
        )


def _usable(configured: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of fsspec's configuration that means something here, and that ``options`` do not replace."""
    known = {name: value for name, value in configured.items() if name in (*_ACCEPTED, "client_kwargs")}
    if isinstance(session := known.get("client_kwargs"), Mapping):
        known["client_kwargs"] = {name: value for name, value in session.items() if name in _OF_A_SESSION}
    if _CREDENTIALS & options.keys():  # one identity is given whole
        known = {name: value for name, value in known.items() if name not in _CREDENTIALS}
    return known


def checked_header(name: str, value: Any) -> str:
    """Return ``value`` where it can be sent as a header; ConfigError, without the value, where not."""
    if not isinstance(value, str):
        raise ConfigError(f"header {name!r}: its value is a str, not {type(value).__name__}")
    if not value.isprintable() or not name.strip() or max(name + value) > "\xff" or ":" in name or " " in name:
        raise ConfigError(f"header {name!r}: a header is one line of Latin-1 text; look for a stray line break")
    return value


def _headers(given: Any) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"storage_options for http(s): headers is a dict, not {type(given).__name__}")
    for name in given:
        if str(name).lower() in _OURS:
            raise ConfigError(f"storage_options for http(s): the header {name} is set by the transfer itself")
    return {str(name): checked_header(str(name), value) for name, value in given.items()}


def _identity(given: Mapping[str, Any], headers: Mapping[str, str]) -> Identity | None:
    """Return the one way in which the options say who asks; ConfigError where there are two."""
    header = next((name for name in headers if name.lower() == "authorization"), None)
    ways = [name for name in ("token", "username", "auth") if given.get(name) is not None]
    ways += [f"the header {header}"] if header else []
    if len(ways) > 1:
        raise ConfigError(f"storage_options for http(s): {' and '.join(ways)} contradict each other; give one")
    if given.get("password") is not None and given.get("username") is None:
        raise ConfigError("storage_options for http(s): a password needs a username")
    if not ways:
        return None
    if header:
        name, proof = f"the {header} header", headers[header]
    elif ways == ["token"]:
        name, proof = "the token", f"Bearer {checked_header('Authorization', given['token'])}"
        if proof == "Bearer ":
            raise ConfigError("storage_options for http(s): the token is empty")
    else:
        user, proof = _pair(given)
        name = f"user {user!r}"
    return Identity(f"{name} of storage_options", (("Authorization", proof),))


def _pair(given: Mapping[str, Any]) -> tuple[str, str]:
    auth: Any = given.get("auth")
    if auth is None:
        auth = given["username"], given.get("password") or ""
    if hasattr(auth, "login"):  # aiohttp's BasicAuth, with an encoding of its own
        return str(auth.login), str(auth.encode())
    if not isinstance(auth, tuple | list) or len(auth) != 2:
        raise ConfigError("storage_options for http(s): auth is an aiohttp.BasicAuth, or a user and a password")
    user, password = auth
    if not isinstance(user, str) or not isinstance(password, str):
        raise ConfigError("storage_options for http(s): username and password are str")
    return user, _basic(user, password)


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode("ascii")


def _tls(given: Mapping[str, Any]) -> Tls:
    files = {name: given.get(name) or "" for name in ("ca_file", "certificate", "key")}
    for name, path in files.items():
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"storage_options for http(s): {name} is the path of a PEM file")
    if files["key"] and not files["certificate"]:
        raise ConfigError("storage_options for http(s): a key needs its certificate")
    verify = _truth("verify", given.get("verify", True))
    return Tls(verify=verify, **{name: os.fspath(path) for name, path in files.items()})


def _truth(name: str, value: Any) -> bool:
    if isinstance(value, str):  # from a configuration file
        value = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}.get(value.lower())
    if not isinstance(value, bool | int):
        raise ConfigError(f"storage_options for http(s): {name} is True or False")
    return bool(value)


def identity_of_url(parts: urllib.parse.SplitResult) -> Identity | None:
    """Return the userinfo of a URL as basic authorisation (RFC 7617)."""
    if parts.username is None:
        return None
    user, password = urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")
    # A lone user is a token by the habit of code hosts, and nothing to show.
    name = f"user {user!r} of the URL" if parts.password else "the user of the URL"
    return Identity(name, (("Authorization", _basic(user, password)),))


class Netrc:
    """Names and passwords by host, of the file that ``NETRC`` names, or ``~/.netrc``. Only an entry that names the host
    counts: a ``default`` one would tell every server that a URL or a redirect names."""

    def __init__(self, entries: Mapping[str, tuple[str, str]]) -> None:
        self._entries = entries

    @classmethod
    def read(cls) -> Netrc:
        """Read the file; one that cannot be read or parsed gives one warning and counts as empty. Blocks."""
        named = variable("NETRC")
        path = os.path.expanduser(named or "~/.netrc")
        try:
            hosts = netrc.netrc(path).hosts
            return cls({host.lower(): (e[0] or "", e[2] or "") for host, e in hosts.items() if host != "default"})
        except netrc.NetrcParseError as exn:  # its own text may quote a password
            why = f", line {exn.lineno or '?'}: cannot be understood; nothing of this file is used"
        except UnicodeDecodeError:
            why = ": is not text; nothing of this file is used"
        except OSError as exn:
            why = f": {exn.strerror or exn}; it is not used"
            if not named and isinstance(exn, FileNotFoundError):
                return cls({})
        warn_once(logger, path + why, "netrc file %s%s", path, why)
        return cls({})

    def identity(self, host: str) -> Identity | None:
        """Return the identity of the entry for ``host``, None without one."""
        entry = self._entries.get(host.lower())
        return entry and Identity(f"the netrc entry for {host}", (("Authorization", _basic(*entry)),))


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return a client's context. ConfigError where a file that ``tls`` names cannot be used. Blocks: it reads files."""
    try:
        context = ssl.create_default_context(cafile=tls.ca_file or None)
        if tls.certificate:
            context.load_cert_chain(tls.certificate, tls.key or None)
    except (OSError, ssl.SSLError) as exn:
        named = ", ".join(name for name in (tls.ca_file, tls.certificate, tls.key) if name)
        raise ConfigError(f"TLS: cannot use {named}: {exn}. They are PEM files of certificates and keys.") from exn
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
