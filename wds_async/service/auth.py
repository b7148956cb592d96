"""Authentication of clients (bearer tokens, TLS and client certificates, names of clients, requests of web pages), and
the audit log.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import socket
import ssl
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.service.cache.origin import Client
from wds_async.service.config import ServiceConfig
from wds_async.service.refusals import Refusal, shown_path
from wds_async.transfer.rate_limits import TokenBucket

__all__ = ["Access", "Audit", "BearerTokens"]

logger = logging.getLogger("wds_async")
audit_logger = logging.getLogger("wds_async.audit")
LINES_AT_ONCE, LINES_PER_S = 100, 10.0
"""More are counted, and the next line says how many were left out: 10 lines of 1 KB a second are 0.9 GB a day."""
_LOOK_EVERY_S = 1.0
_NAMES_OF_A_PEER, _NAME_LIVES_S, _PEERS = 512, 60.0, 4096
_NAME = re.compile(r"[\w.:@/+-]{1,128}", re.ASCII)
_OWN_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
_SIGNED = re.compile(r"(?:AWS4-HMAC-SHA256\s+Credential=([^/,\s]+)/|AWS ([^:\s]+):)")


class Audit:
    """Writes refusals to the logger ``wds_async.audit``, at a limited rate, so that a flood of them fills no disk.
    ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket = TokenBucket(LINES_PER_S, clock, burst=LINES_AT_ONCE - 1.0)
        self.left_out = 0
        """Refusals without a line since the last one."""

    def refused(self, refusal: Refusal, *, peer: str, client: str = "", method: str = "", path: str = "") -> None:
        """Log ``refusal`` in one line, up to the rate limit; secrets in ``path`` are hidden. The record has its fields
        as the mapping ``audit``, for logs in JSON."""
        if self._bucket.wait_s() > 0:
            self.left_out += 1
            return
        self._bucket.take(1)
        fields = {
            "peer": _plain(peer),
            "client": _plain(client),
            "method": _plain(method)[:16],
            "path": shown_path(path),
            "status": refusal.status,
            "reason": refusal.reason,
        }
        words = " ".join(f"{name}={value}" for name, value in fields.items() if value != "")
        more = f" ({self.left_out} refusals before it were left out)" if self.left_out else ""
        extra = {"audit": {**fields, "left_out": self.left_out}}
        self.left_out = 0
        audit_logger.warning("refused %s: %s%s", words, redact(refusal.message), more, extra=extra)

    def close(self) -> None:
        """Log how many refusals were left out since the last line."""
        if self.left_out:
            left_out = {"left_out": self.left_out}
            audit_logger.warning("refused: %d more that were left out", self.left_out, extra={"audit": left_out})
            self.left_out = 0


def _plain(text: str) -> str:
    """Return ``text`` as one word without secrets."""
    return redact(text).replace(" ", "%20")


class Access:
    """Authentication and access rules of clients. ``clock``: seconds, monotonic. ConfigError for files that cannot be
    used."""

    def __init__(self, config: ServiceConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._tokens = BearerTokens(config.tokens, clock) if config.tokens else None
        self._peers: OrderedDict[Client, OrderedDict[str, float]] = OrderedDict()
        self._context = self._made() if config.certificate else None
        self._files = self._stamp()
        self.audit = Audit(clock)

    def check_site(self, fields: Mapping[str, str], host: str, *, local: bool = False) -> None:
        """Raise Refusal (403) for a request that a browser sends for a page of another site: by its ``Origin`` or
        ``Sec-Fetch-Site``; and, where neither ``allow`` nor tokens protect the service, by a ``host`` that is no name
        of this machine (DNS rebinding). ``host`` is the authority that the request names, "" for none; ``local``:
        it came by the Unix socket, which no browser reaches."""
        origin = fields.get("origin")
        foreign = origin is not None and _host_and_port(origin.partition("://")[2]) != _host_and_port(host)
        if foreign or fields.get("sec-fetch-site", "") in ("cross-site", "same-site"):
            page = (origin or "unknown")[:100]
            words = f"a web page of another site ({page!r}) sent this request, and none is answered. Open the URL"
            raise Refusal(403, f"{words} itself, or use a client that is no browser", "cross-site")
        guarded = not (self._config.allow or self._config.tokens or local)
        if guarded and host and not _names_this_machine(host):
            words = f"{host[:100]!r} is no name of this machine. Without `allow` and `tokens` the service answers to "
            raise Refusal(403, f"{words}localhost, 127.0.0.1 and [::1] only; set one of the two for others", "host")

    def client(
        self,
        fields: Mapping[str, str],
        peer: str,
        *,
        local: bool = False,
        query: Mapping[str, str] | None = None,
        certificate: Mapping[str, Any] | None = None,
    ) -> Client:
        """Return the client that sends these header fields (lower case), from the address ``peer`` or on the Unix
        socket (``local``). Refusal (401) where a token is asked for and none that is known was given. ``certificate``
        is the client's, as ssl gives it (``getpeercert``); ``query`` is looked at for the signed URLs of S3 clients.

        Names are the client's own word: one peer may have 512 of them within a minute (each worker of each job on a
        host has one), and beyond that goes by its address.
        """
        tenant = common_name(certificate)
        if self._tokens is not None:
            named_tenant = self._tokens.tenant(token_of(fields, query or {}))
            if named_tenant is None:
                challenge = {"WWW-Authenticate": 'Bearer realm="wds-async"'}
                words = "this service asks for a token, and this is none that it knows (clients: AIS_AUTHN_TOKEN)"
                raise Refusal(401, words, "token", headers=challenge)
            tenant = named_tenant or tenant
        return self._named(fields.get("wds-client", ""), Client(tenant, "local" if local else peer))

    def sees(self, client: Client) -> str | None:
        """Return the tenant whose figures ``client`` may see; None for those of all, where there are no tenants."""
        named = self._tokens is not None and self._tokens.name_tenants
        return client.tenant if named or self._config.client_ca else None

    def _named(self, name: str, own: Client) -> Client:
        """Return ``own`` under ``name``; ``own`` itself for an invalid name, or one too many."""
        if not name or not _NAME.fullmatch(name):
            return own
        names, now = self._peers.setdefault(own, OrderedDict()), self._clock()
        self._peers.move_to_end(own)
        if len(self._peers) > _PEERS:
            self._peers.popitem(last=False)
        if name not in names and len(names) >= _NAMES_OF_A_PEER:
            if now - next(iter(names.values())) < _NAME_LIVES_S:
                return own
            names.popitem(last=False)
        names[name] = now
        names.move_to_end(name)
        return Client(own.tenant, name)

    def tls(self) -> ssl.SSLContext | None:
        """Return the SSLContext of connections, the same object each time; None without a certificate."""
        return self._context

    def take_over(self, new: Access) -> None:
        """Use the tokens and certificates of ``new`` from now on; connections that there are keep theirs."""
        self._config, self._tokens, self._context, self._files = new._config, new._tokens, new._context, new._files

    def renew(self) -> bool:
        """Read the certificate again if its files have changed, for new connections; return whether it was. A file that
        cannot be used is logged, and the old certificate stays."""
        stamp = self._stamp()
        if self._context is None or stamp in ("", self._files):
            return False
        self._files = stamp
        try:
            self._made()  # tried on another one first: half a pair must not be taken over
            self._context.load_cert_chain(self._config.certificate, self._config.key)
            if self._config.client_ca:
                self._context.load_verify_locations(self._config.client_ca)
        except ConfigError as exn:
            logger.error("the service goes on with the certificate that it has: %s", exn)
            return False
        logger.info("the service's certificate was read again")
        return True

    def _made(self) -> ssl.SSLContext:
        config = self._config
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(config.certificate, config.key)
            if config.client_ca:
                context.load_verify_locations(config.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as exn:
            named = ", ".join(filter(None, (config.certificate, config.key, config.client_ca)))
            raise ConfigError(f"TLS: cannot use {named}: {exn}. They are PEM files; the key has no password.") from exn
        return context

    def _stamp(self) -> str:
        names = (self._config.certificate, self._config.key, self._config.client_ca)
        try:
            return " ".join(_stamp_of(name) for name in names if name)
        except OSError:
            return ""  # being replaced: looked at again next time


class BearerTokens:
    """The file of tokens: a line each, then optionally the tenant's name; ``#`` begins a comment. It is looked at once
    a second at most, and read again when it has changed. Where it cannot be read any more, what was read last holds; to
    take every token away, empty it."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock, self._looked_at = path, clock, clock()
        self._tenants: dict[bytes, str] = {}
        try:
            self._read()
        except (OSError, ValueError) as exn:
            raise ConfigError(f"tokens: the file {path}: {exn}") from exn

    def tenant(self, token: str) -> str | None:
        """Return the tenant of ``token`` ("" if its line names none); None for an unknown token. Takes constant
        time."""
        self._look()
        token_digest, match = _digest(token), None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, token_digest):
                match = tenant
        return match if token else None

    @property
    def name_tenants(self) -> bool:
        """True if any line names a tenant."""
        return any(self._tenants.values())

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        try:
            if _stamp_of(self._path) != self._stamp:
                self._read()
                logger.info("the service's tokens were read again: %d of them", len(self._tenants))
        except (OSError, ValueError) as exn:
            logger.error("the service's tokens are those of before: %s: %s", self._path, exn)

    def _read(self) -> None:
        self._stamp = _stamp_of(self._path)
        with open(self._path, encoding="utf-8") as file:
            lines = [line.split("#", 1)[0].split() for line in file]
        if any(len(words) > 2 for words in lines):
            raise ValueError("a line is a token, and perhaps a tenant's name behind it")
        self._tenants = {_digest(words[0]): (words[1:] or [""])[0] for words in lines if words}


def _host_and_port(text: str) -> tuple[str, str]:
    """Return the host in lower case without a final dot, and the port; "" for the usual one."""
    end = text.rfind("]") + 1
    name, _, port = text[end:].partition(":")
    return (text[:end] + name).lower().rstrip("."), "" if port in ("80", "443") else port


def _names_this_machine(host: str) -> bool:
    """Return whether ``host`` (perhaps with a port) is a loopback address or a name of this machine."""
    name, _ = _host_and_port(host)
    if name in _OWN_NAMES or name.endswith(".localhost") or name == socket.gethostname().lower().rstrip("."):
        return True
    try:
        address = ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def _stamp_of(path: str) -> str:
    status = os.stat(path)
    return f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def token_of(fields: Mapping[str, str], query: Mapping[str, str]) -> str:
    """Return the token that a request brings: as a bearer's; as the password of ``https://user:TOKEN@host``, for
    clients that know no other way; as the access key's id of an S3 client, whose signature is not checked. "" for
    none."""
    header = fields.get("authorization", "").strip()
    kind, _, rest = header.partition(" ")
    if kind.lower() == "bearer":
        return rest.strip()
    if kind.lower() == "basic":
        try:
            user, _, password = base64.b64decode(rest.strip(), validate=True).decode("utf-8").partition(":")
        except (binascii.Error, ValueError):
            return ""
        return password or user
    if (signed := _SIGNED.match(header)) is not None:
        return urllib.parse.unquote(signed[1] or signed[2])
    if header:
        return ""
    return query.get("X-Amz-Credential", "").partition("/")[0] or query.get("AWSAccessKeyId", "")


def common_name(certificate: Mapping[str, Any] | None) -> str:
    """Return the common name of a client's certificate; "" if it is no valid name of a tenant."""
    for pairs in (certificate or {}).get("subject", ()):
        for name, value in pairs:
            if name == "commonName" and _NAME.fullmatch(value):
                return str(value)
    return ""
