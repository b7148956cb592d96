"""Rules for what may be read: prefixes of URLs, compared part by part in one spelling, and addresses of connections."""

from __future__ import annotations

import ipaddress
import os
import posixpath
import re
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_async.errors import AccessDenied, ConfigError, UnsafeContent, UrlError
from wds_async.redact import redact
from wds_async.service.config import ServiceConfig
from wds_async.service.names import ObjectName
from wds_async.service.refusals import Refusal
from wds_async.storage.base import Call, Location
from wds_async.storage.generic import reads_local_files
from wds_async.storage.registry import locate
from wds_async.storage.spec import StoreSpec
from wds_async.storage.stores import BY_SCHEME, spec_of, usual_scheme
from wds_async.urls import links, local_path, scheme

__all__ = ["Allowed", "UrlPrefix", "dotted", "is_literal", "kind_of_address", "url_prefix", "why_not"]

_PORTS = {"http": 80, "https": 443}
_DECODINGS = 4
_ARCHIVES = frozenset({"zip", "tar", "gzip", "libarchive"})
_KNOWN_AT_MOST = 65536


@dataclass(frozen=True, slots=True)
class UrlPrefix:
    """A URL taken apart: ``kind`` (its scheme's usual name), ``host`` (a bucket, or ``host:port`` of a web server) and
    ``parts``, what stands between slashes; the last is "" where the URL ends with one."""

    kind: str
    host: str
    parts: tuple[str, ...]
    slashes: bool = False
    """True if a part of a web server's path holds an escaped slash, which a server may take for a real one."""

    def covers(self, other: UrlPrefix) -> bool:
        """Return whether ``other`` equals this prefix or lies below it. A prefix that ends with "/" covers only what is
        below."""
        if self.kind != other.kind or self.host != other.host:
            return False
        own, parts = self.parts, other.parts
        if own in ((), ("",)):
            return True
        if other.slashes:
            return False
        if own[-1] == "":
            return len(parts) >= len(own) and parts[: len(own) - 1] == own[:-1]
        if _spec(self.kind).repositories and len(own) == 2 and len(parts) >= 2 and "@" not in own[1]:
            parts = (parts[0], parts[1].partition("@")[0])  # a whole repository, whatever its revision
        return parts[: len(own)] == own


def _spec(kind: str) -> StoreSpec:
    return BY_SCHEME.get(kind) or spec_of("generic")


def url_prefix(url: str) -> UrlPrefix:
    """Return the prefix of ``url`` (rewritten, of one store). UrlError for a URL that cannot be parsed safely."""
    kind = usual_scheme(scheme(url))
    if kind in _PORTS:
        return _web(kind, url)
    if "://" not in url or len(links(url)) > 1:
        raise UrlError("no URL of one store")
    host, slash, path = url.partition("://")[2].partition("/")
    parts = tuple(path.split("/")) if slash else ()
    spec = _spec(kind)
    if spec.repositories:
        if host not in spec.repositories:
            host, parts = spec.repositories[0], (host, *parts)
        if len(parts) == 3 and parts[2] == "":  # hf://datasets/OWNER/NAME/ is the repository, whatever its revision
            parts = parts[:2]
    return UrlPrefix(kind, host.lower() if "@" in host and spec.account_hosts else host, parts)


def _web(kind: str, url: str) -> UrlPrefix:
    try:
        parsed = urllib.parse.urlsplit(url)
        host, port = parsed.hostname or "", parsed.port
    except ValueError as exn:
        raise UrlError(str(exn)) from None
    odd = "\\" in url or not host.isascii() or not re.fullmatch(r"[\w.:-]+", host) or port == 0
    if odd or re.search(r"[\x00-\x20\x7f]", parsed.netloc):
        raise UrlError("a host that could be read in two ways")
    host = host.rstrip(".")
    raw = parsed.path[1:].split("/") if parsed.path.startswith("/") else []
    parts = tuple(urllib.parse.unquote(part, errors="surrogateescape") for part in raw)
    slashes = any("/" in one or "\\" in one for part in parts for one in _spellings(part))
    return UrlPrefix(kind, f"{host}:{port or _PORTS[kind]}", parts, slashes)


def _spellings(part: str) -> Iterator[str]:
    """Yield ``part`` and its repeated decodings, as careless servers make them."""
    for _ in range(_DECODINGS + 1):
        yield part
        part = urllib.parse.unquote(part, errors="surrogateescape")


def dotted(url: str) -> bool:
    """Return whether a part of the path of ``url`` leads up (``..``) or nowhere (``.``), for any server: also if it is
    escaped, even more than once, behind a backslash, or followed by parameters that some servers cut off (``..;x``).
    """
    path = url.partition("://")[2] if scheme(url) else url
    if scheme(url) in _PORTS:  # elsewhere a "?" is a character like others
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    return any(
        step.partition(";")[0].strip() in (posixpath.curdir, posixpath.pardir)
        for spelling in _spellings(path)
        for step in re.split(r"[/\\]", spelling)
    )


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_METADATA = frozenset(
    ipaddress.ip_address(address)
    for address in (
        *("169.254.169.254", "fd00:ec2::254", "fe80::a9fe:a9fe"),  # Amazon, Google, Microsoft, Oracle and others
        *("169.254.169.253", "fd00:ec2::253", "169.254.169.123"),  # Amazon's name service and clock
        *("169.254.170.2", "169.254.170.23", "fd00:ec2::23"),  # credentials of Amazon's containers and Kubernetes pods
        *("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd20:ce::254"),  # Alibaba, Azure, Oracle, Google
    )
)
_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
_COMPATIBLE = ipaddress.ip_network("::/96")
_SHARED = ipaddress.ip_network("100.64.0.0/10")


def is_literal(host: str) -> bool:
    """Return whether ``host`` is an address or ``localhost``, and not a name to be resolved."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def kind_of_address(text: str) -> str:
    """Return ``"public"``, ``"private"`` (private, shared, loopback or link-local), or ``"never"``: a metadata server,
    or an address that no origin has (multicast, reserved). IPv6 that holds an IPv4 address is judged by it."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return "never"
    kinds = {_kind(one) for one in _led_to(address)}
    return next((kind for kind in ("never", "private") if kind in kinds), "public")


def _kind(address: _Address) -> str:
    if address in _METADATA or address.is_multicast:
        return "never"
    if address.is_unspecified or address.is_loopback or address.is_link_local:
        return "private"
    if address.version == 4 and address.is_reserved:  # broadcast among it
        return "never"
    own = address in _SHARED if address.version == 4 else address.is_site_local
    if address.is_private or own:
        return "private"
    return "never" if address.is_reserved else "public"


def _led_to(address: _Address) -> list[_Address]:
    """Return the addresses that ``address`` stands for: the IPv4 one of a mapped, compatible or translated (NAT64) IPv6
    address; itself and those inside for 6to4 and Teredo."""
    if isinstance(address, ipaddress.IPv4Address) or address in _METADATA:
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if any(address in net for net in _NAT64) or (address in _COMPATIBLE and int(address) > 0xFFFF):
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    held = [address.sixtofour, *(address.teredo or ())]
    return [address, *(one for one in held if one is not None)]


def why_not(host: str, address: str, named: frozenset[str], *, private: bool) -> str:
    """Return why no connection may go to ``address``, one of ``host``'s; "" if it may.

    What ``named``, the web servers that clients may read, resolve to must be public, unless the host says itself where
    it is, or ``private`` allows more. Any other host is one that the operator set (a store's endpoint, a proxy): only
    ``"never"`` is refused for it."""
    kind = kind_of_address(address)
    if kind == "never":
        return f"{address} is no address of a store (metadata servers are never read)"
    if kind == "public" or private or is_literal(host) or host.lower().rstrip(".") not in named:
        return ""
    return f"{host} is at {address}, a private address; the service's setting `private` would allow it"


async def _here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Allowed:
    """The service's rules. A refusal is 403 with words that name no secret and no file that the client did not.
    ``call`` runs what looks at the disk on a thread."""

    def __init__(self, config: ServiceConfig, call: Call = _here) -> None:
        self._call = call
        self._open, self._urls = not config.allow, config.urls and bool(config.allow)
        own = [url if url.endswith("/") else url + "/" for _, url in config.buckets]
        entries = [*config.allow, *own]
        self._folders = [_folder(entry) for entry in entries if scheme(entry) in ("", "file")]
        self._places = [_entry(entry) for entry in entries if scheme(entry) not in ("", "file")]
        hosts = [place.host.rpartition(":")[0] for place in self._places if place.kind in ("http", "https")]
        self._hosts, self._private = frozenset(hosts), config.private
        self._known: dict[tuple[str, bool], None] = {}

    def take_over(self, new: Allowed) -> None:
        """Use the rules of ``new`` from now on."""
        vars(self).update(vars(new), _call=self._call)

    def locate(self, named: ObjectName) -> Location:
        """Return the location that ``named`` is read from, rewritten and authorized. Refusal (403, or 400 for a
        malformed URL). Reads the disk for this machine's files."""
        by_url = named.api == "url"
        if by_url and not self._urls:
            raise Refusal(403, "/url is off: it needs the service's `allow`, and `urls: true`", "forbidden")
        try:
            place = locate(named.url)
        except UnsafeContent as exn:
            raise Refusal(403, redact(str(exn)), "forbidden") from None
        except UrlError as exn:
            raise Refusal(400, redact(str(exn)), "url") from None
        self._judge(place.kind, place.target, by_url, rewritten=place.target != place.url)
        if place.kind != "local":
            if len(self._known) >= _KNOWN_AT_MOST:
                del self._known[next(iter(self._known))]
            self._known[named.url, by_url] = None
        return place

    async def admit(self, named: ObjectName) -> Location:
        """Run `locate`, on a thread where it reads the disk."""
        if scheme(named.url) not in ("", "file"):
            return self.locate(named)
        location: Location = await self._call(self.locate, named)
        return location

    async def check(self, url: str) -> None:
        """Raise Refusal unless every URL (before rewriting) that begins with ``url`` may be read: a folder ("/" at the
        end) or a prefix of a listing."""
        folder = url[: url.rindex("/") + 1] if "/" in url.partition("://")[2] or "://" not in url else url + "/"
        await self.admit(ObjectName(folder, "", "", "", "short"))

    def known(self, named: ObjectName) -> bool:
        """Return whether `locate` has admitted ``named`` before, so that it need not be called again."""
        return (named.url, named.api == "url") in self._known

    def why_not(self, host: str, address: str) -> str:
        """Return why no connection may go to ``address``, one of ``host``'s; "" if it may."""
        return why_not(host, address, self._hosts, private=self._private)

    def leads(self, start: str, target: str) -> None:
        """Judge a redirect of a web server that clients may read: it is followed to what is allowed itself. A server
        that moves from http to https is still itself. AccessDenied otherwise."""
        try:
            there, here = url_prefix(target), url_prefix(start)
        except UrlError as exn:
            raise AccessDenied(f"{redact(start)} redirects to a URL that is refused: {exn}") from None
        secure = UrlPrefix("http", re.sub(":443$", ":80", there.host), there.parts, there.slashes)
        same = there.host == here.host or (secure.host == here.host and there.kind == "https" and here.kind == "http")
        covered = self._covered(there) or (there.kind == "https" and self._covered(secure))
        if dotted(target) or _has_controls(target) or not (covered or (self._open and same)):
            raise AccessDenied(
                f"{redact(start)} redirects to {there.kind}://{there.host}, which is not allowed; "
                "add that host to the service's `allow`, if it is meant"
            )

    def _judge(self, kind: str, target: str, by_url: bool, rewritten: bool) -> None:
        if _has_controls(target):
            raise _forbidden("a URL with control characters")
        if kind in ("local", "pipe", "stdin", "opener") and by_url:
            raise _forbidden("/url reads stores, not this machine")
        if kind == "local":
            self._judge_local(target)
        elif kind in ("pipe", "stdin"):
            raise _forbidden("a command, or standard input: this service reads stores and files")
        elif len(links(target)) > 1:
            self._judge_chain(target)
        else:
            self._judge_place(kind, target, rewritten)

    def _judge_place(self, kind: str, target: str, rewritten: bool) -> None:
        if kind == "generic" and reads_local_files(target):
            raise _forbidden("what reads this machine's files in a round-about way")
        if dotted(target) and spec_of(kind).dotted_keys not in ("always", "open" if self._open else "always"):
            raise _forbidden("a path with . or .. in it: not every server takes that for a name")
        try:
            place = url_prefix(target)
        except UrlError as exn:
            raise Refusal(400, f"{redact(target)}: {exn}", "url") from None
        if not (self._covered(place) or (self._open and (spec_of(kind).buckets or rewritten or kind == "generic"))):
            raise _forbidden(f"{redact(target)[:300]}: the service's `allow` does not name it")

    def _judge_chain(self, target: str) -> None:
        """Admit archives over one cloud store only."""
        *inner, last = links(target)
        names = [link.partition("://")[0].lower() for link in inner]
        if not set(names) <= _ARCHIVES:
            raise _forbidden("of chains of file systems only zip, tar, gzip and libarchive over a store")
        kind = locate(last, final=True).kind
        if not spec_of(kind).buckets:  # a client that is not ours connects, without a check of the address
            raise _forbidden("an archive that is not in a cloud's store")
        if any(dotted(link) for link in inner):
            raise _forbidden("a path with . or .. in it")
        self._judge_place(kind, last, rewritten=True)

    def _judge_local(self, target: str) -> None:
        path = local_path(target)
        if path is None or not os.path.isabs(path) or "\x00" in path or dotted(path):
            raise _forbidden("a file that is not named by its whole path")
        real = os.path.realpath(path)
        for folder, below in self._folders:
            base = os.path.realpath(folder)
            inside = real.startswith(base.rstrip("/") + "/")
            if inside or (real == base and (not below or path.endswith("/"))):
                return
        raise _forbidden("this machine's files: the service's `allow` names no folder that it lies in")

    def _covered(self, place: UrlPrefix) -> bool:
        return any(entry.covers(place) for entry in self._places)


def _has_controls(url: str) -> bool:
    """Return whether ``url`` holds characters that some parsers drop and others keep."""
    return any(ord(c) < 32 or ord(c) == 127 for c in url)


def _forbidden(why: str) -> Refusal:
    return Refusal(403, f"not allowed: {why}", "forbidden")


def _folder(entry: str) -> tuple[str, bool]:
    """Return the path, and whether the entry covers only what is below it."""
    path = local_path(entry)
    if not path or not os.path.isabs(path) or dotted(path):
        raise ConfigError(f"allow: {entry!r} is no folder's whole path")
    return path, path.endswith("/")


def _entry(entry: str) -> UrlPrefix:
    try:
        place = url_prefix(entry)
    except UrlError as exn:
        raise ConfigError(
            f"allow: {redact(entry)!r}: {exn}; write gs://bucket/, https://host/path/ or /folder/"
        ) from None
    if dotted(entry) or not place.host:
        raise ConfigError(f"allow: {redact(entry)!r} names no place; write gs://bucket/ or https://host/path/")
    if place.kind in ("http", "https") and ("?" in entry or "#" in entry):
        raise ConfigError(f"allow: {redact(entry)!r}: a place has no query")
    return place
