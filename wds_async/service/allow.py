"""What may be read: decided by the URL that rewriting gives, and by the address of each connection.

An entry of ``allow`` is a place, and covers itself and what lies below it, part by part. Where nothing is allowed by
name, everything is that this machine's credentials can read at the stores of clouds, because then only this machine
can ask; not its files, not its commands, and not the web.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from wds_async.errors import AccessDenied, ConfigError, UnsafeContent, UrlError
from wds_async.redact import redact
from wds_async.service.addresses import Addresses
from wds_async.service.config import ServiceConfig
from wds_async.service.names import Named
from wds_async.service.places import Place, dotted, place_of
from wds_async.service.refusals import Refusal
from wds_async.storage.base import Call
from wds_async.storage.generic import reads_local_files
from wds_async.storage.registry import Location, locate
from wds_async.urls import links, local_path, scheme

__all__ = ["Allowed"]

_CLOUDS = frozenset({"s3", "gcs", "azure", "hf", "ais"})
_EXACT = frozenset({"gcs"})
"""Whose keys are escaped whole on the wire, so that a ".." in one is a name to everybody on the way."""
_ARCHIVES = frozenset({"zip", "tar", "gzip", "libarchive"})
_KNOWN_AT_MOST = 65536


async def _here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Allowed:
    """The service's rules. A refusal is 403 with words that name no secret and no file that the client did not.
    ``call`` runs what looks at the disk on a thread."""

    def __init__(self, config: ServiceConfig, call: Call = _here) -> None:
        self._call = call
        self._open = not config.allow
        self._urls = config.urls and bool(config.allow)
        own = [url if url.endswith("/") else url + "/" for _, url in config.buckets]
        entries = [*config.allow, *own]
        self._folders = [_folder(entry) for entry in entries if scheme(entry) in ("", "file")]
        self._places = [_entry(entry) for entry in entries if scheme(entry) not in ("", "file")]
        hosts = [place.host.rpartition(":")[0] for place in self._places if place.kind in ("http", "https")]
        self.addresses = Addresses(hosts, private=config.private)
        self._known: dict[tuple[str, bool], None] = {}

    def take_over(self, new: Allowed) -> None:
        """Judge by the rules of ``new`` from now on."""
        self._open, self._urls = new._open, new._urls
        self._folders, self._places, self.addresses = new._folders, new._places, new.addresses
        self._known = {}

    def locate(self, named: Named) -> Location:
        """Where ``named`` is read, rewritten and judged. Refusal (403, or 400 for what is no URL). Looks at the disk
        where that is this machine's files (`local`)."""
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

    async def admit(self, named: Named) -> Location:
        """`locate`, with the looks at the disk on a thread: for who answers requests."""
        if scheme(named.url) in ("", "file"):
            found: Location = await self._call(self.locate, named)
            return found
        return self.locate(named)

    async def check(self, url: str) -> None:
        """Refusal unless all may be read whose URL (before rewriting) begins with ``url``: for listings, of a folder
        ("/" at the end) or by a prefix."""
        folder = url[: url.rindex("/") + 1] if "/" in url.partition("://")[2] or "://" not in url else url + "/"
        named = Named(folder, "", "", "", "short")
        await self._call(self.locate, named) if scheme(url) in ("", "file") else self.locate(named)

    def known(self, named: Named) -> bool:
        """Whether `locate` lets ``named`` pass, at once and without a look at the disk; False: it has to be asked."""
        return (named.url, named.api == "url") in self._known

    def why_not(self, host: str, address: str) -> str:
        """Why no connection may go to ``address``, one of ``host``'s; "" where it may."""
        return self.addresses.why_not(host, address)

    def leads(self, start: str, target: str) -> None:
        """Judge a redirect of a web server that clients may read: it is followed to what is allowed itself. A server
        that moves from http to https is still itself. AccessDenied otherwise."""
        try:
            there, here = place_of(target), place_of(start)
        except UrlError as exn:
            raise AccessDenied(f"{redact(start)} redirects to a URL that is refused: {exn}") from None
        secure = Place("http", re.sub(":443$", ":80", there.host), there.parts, there.slashes)
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
        if dotted(target) and kind not in _EXACT and (kind != "s3" or not self._open):
            raise _forbidden("a path with . or .. in it: not every server takes that for a name")
        try:
            place = place_of(target)
        except UrlError as exn:
            raise Refusal(400, f"{redact(target)}: {exn}", "url") from None
        if not (self._covered(place) or (self._open and (kind in _CLOUDS or rewritten or kind == "generic"))):
            raise _forbidden(f"{redact(target)[:300]}: the service's `allow` does not name it")

    def _judge_chain(self, target: str) -> None:
        """Each link: archives, and one store at the end."""
        *inner, last = links(target)
        names = [link.partition("://")[0].lower() for link in inner]
        if not set(names) <= _ARCHIVES:
            raise _forbidden("of chains of file systems only zip, tar, gzip and libarchive over a store")
        kind = locate(last, final=True).kind
        if kind not in _CLOUDS:  # a client that is not ours connects, and nobody judges where to
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

    def _covered(self, place: Place) -> bool:
        return any(entry.covers(place) for entry in self._places)


def _has_controls(url: str) -> bool:
    """Whether it holds characters that some parsers drop, and others do not."""
    return any(ord(c) < 32 or ord(c) == 127 for c in url)


def _forbidden(why: str) -> Refusal:
    return Refusal(403, f"not allowed: {why}", "forbidden")


def _folder(entry: str) -> tuple[str, bool]:
    """The path, and whether only what is below it is meant."""
    path = local_path(entry)
    if not path or not os.path.isabs(path) or dotted(path):
        raise ConfigError(f"allow: {entry!r} is no folder's whole path")
    return path, path.endswith("/")


def _entry(entry: str) -> Place:
    try:
        place = place_of(entry)
    except UrlError as exn:
        raise ConfigError(
            f"allow: {redact(entry)!r}: {exn}; write gs://bucket/, https://host/path/ or /folder/"
        ) from None
    if dotted(entry) or not place.host:
        raise ConfigError(f"allow: {redact(entry)!r} names no place; write gs://bucket/ or https://host/path/")
    if place.kind in ("http", "https") and ("?" in entry or "#" in entry):
        raise ConfigError(f"allow: {redact(entry)!r}: a place has no query")
    return place
