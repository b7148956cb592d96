"""Where URLs lie, in a form in which one place has one spelling, so that prefixes can be compared part by part."""

from __future__ import annotations

import posixpath
import re
import urllib.parse
from dataclasses import dataclass

from wds_async.environment import SCHEME_ALIASES
from wds_async.errors import UrlError
from wds_async.urls import links, scheme

__all__ = ["Place", "dotted", "place_of"]

_PORTS = {"http": 80, "https": 443}
_HUB = frozenset({"datasets", "models", "spaces", "kernels", "buckets"})
_DECODINGS = 4


@dataclass(frozen=True, slots=True)
class Place:
    """A URL taken apart: ``kind`` (its scheme's usual name), ``host`` (a bucket, or ``host:port`` of a web server) and
    ``parts``, what stands between slashes; the last is "" where the URL ends with one."""

    kind: str
    host: str
    parts: tuple[str, ...]
    slashes: bool = False
    """Whether a part of a web server's path holds an escaped slash, which a server may take for a real one."""

    def covers(self, other: Place) -> bool:
        """Whether ``other`` is this place, or lies below it. One that ends with "/" covers only what is below."""
        if self.kind != other.kind or self.host != other.host:
            return False
        if not self.parts or self.parts == ("",):
            return True
        if other.slashes:
            return False
        if self.parts[-1] == "":
            return len(other.parts) >= len(self.parts) and other.parts[: len(self.parts) - 1] == self.parts[:-1]
        return _unrevised(self, other)[: len(self.parts)] == self.parts


def _unrevised(entry: Place, other: Place) -> tuple[str, ...]:
    """The parts of ``other``; without the hub's revision, where ``entry`` names a whole repository."""
    if entry.kind == "hf" and len(entry.parts) == 2 and len(other.parts) >= 2 and "@" not in entry.parts[1]:
        return (other.parts[0], other.parts[1].partition("@")[0], *other.parts[2:])
    return other.parts


def place_of(url: str) -> Place:
    """Where ``url`` (rewritten, of one store) lies. UrlError for one that cannot be taken apart safely."""
    kind = scheme(url)
    kind = SCHEME_ALIASES.get(kind, kind)
    if kind in _PORTS:
        return _web(kind, url)
    if "://" not in url or len(links(url)) > 1:
        raise UrlError("no URL of one store")
    host, slash, path = url.partition("://")[2].partition("/")
    parts = tuple(path.split("/")) if slash else ()
    if kind == "hf":
        if host not in _HUB:
            host, parts = "models", (host, *parts)
        if len(parts) == 3 and parts[2] == "":  # hf://datasets/OWNER/NAME/ is the repository, whatever its revision
            parts = parts[:2]
    return Place(kind, host.lower() if "@" in host and kind == "az" else host, parts)


def _web(kind: str, url: str) -> Place:
    try:
        found = urllib.parse.urlsplit(url)
        host, port = found.hostname or "", found.port
    except ValueError as exn:
        raise UrlError(str(exn)) from None
    odd = "\\" in url or not host.isascii() or not re.fullmatch(r"[\w.:-]+", host) or port == 0
    if odd or re.search(r"[\x00-\x20\x7f]", found.netloc):
        raise UrlError("a host that could be read in two ways")
    host = host.rstrip(".")
    raw = found.path[1:].split("/") if found.path.startswith("/") else []
    parts = tuple(urllib.parse.unquote(part, errors="surrogateescape") for part in raw)
    return Place(kind, f"{host}:{port or _PORTS[kind]}", parts, any(_holds_slash(part) for part in parts))


def _holds_slash(part: str) -> bool:
    return any(slash in spelling for spelling in _spellings(part) for slash in "/\\")


def _spellings(part: str) -> list[str]:
    """``part`` and what becomes of it where it is decoded again, as careless servers do."""
    found = [part]
    while (
        len(found) <= _DECODINGS and (after := urllib.parse.unquote(found[-1], errors="surrogateescape")) != found[-1]
    ):
        found.append(after)
    return found


def dotted(url: str) -> bool:
    """Whether a part of the path of ``url`` leads up (``..``) or nowhere (``.``), to whoever takes it so: also escaped,
    more than once, behind backslashes, and with the parameters that some servers cut off (``..;x``)."""
    path = url.partition("://")[2] if scheme(url) else url
    if scheme(url) in _PORTS:  # elsewhere a "?" is a character like others
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    return any(
        step.partition(";")[0].strip() in (posixpath.curdir, posixpath.pardir)
        for spelling in _spellings(path)
        for step in re.split(r"[/\\]", spelling)
    )
