"""Patterns over the names in a store: which folder is listed first, and which names match. Strings only.

``*``, ``?`` and ``[…]`` match within one name and no name that begins with a dot, ``**`` any number of folders (also
those that are named "", "." and ".." in stores of objects, but no other that begins with a dot), and a
URL that ends with "/" stands for the shards in that folder. A name that is there literally is taken literally.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass

from wds_async.errors import UrlError
from wds_async.redact import redact
from wds_async.storage.stores import BY_SCHEME
from wds_async.urls import SHARD_SUFFIXES, scheme

__all__ = ["ANY_DEPTH", "SHARDS", "Pattern", "is_pattern", "matcher", "parse"]

ANY_DEPTH = "**"
SHARDS = ""
"""The last step of a URL that ends with "/"."""

_ROOT = re.compile(r"((?:[A-Za-z][\w+.\-]*::)*)[A-Za-z][\w+.\-]*://(?:[^/]*/)?")
_ADDRESS = re.compile(r"\[[0-9A-Fa-f:.]+\]")  # an IPv6 host
_MAGIC = re.compile(r"[*?]|\[!?\]?[^\]]*\]")
_MAY_BE_MAGIC = re.compile(r"[*?\[]|/$")
_QUERY = re.compile(r"\?[A-Za-z][\w.\-]*=")  # '?versionId=', '?generation='


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern: ``url`` as the user wrote it; ``folder``, the first one that is listed, with "/" at its end;
    ``steps`` from there to the shards, name by name; ``query``, which follows each URL that matches."""

    url: str
    folder: str
    steps: tuple[str, ...]
    query: str = ""

    @property
    def encoded(self) -> bool:
        """True if names are percent-encoded in URLs of this kind."""
        return _is_encoded(scheme(self.url))


def _is_encoded(kind: str) -> bool:
    return kind in BY_SCHEME and BY_SCHEME[kind].percent_encoded


def is_pattern(step: str) -> bool:
    """Return whether a step may match other names than itself."""
    return step == SHARDS or _MAGIC.search(step) is not None


def parse(url: str) -> Pattern | None:
    """Return the pattern of ``url`` (braces expanded); None where it stands for itself.

    ``?`` begins the query of ``http(s)``, ``hf`` and ``ais`` URLs; an ``http(s)`` URL with a query or fragment, and one
    of any other scheme with ``?name=``, stand for themselves. So do commands, local files and archives within chains.
    `UrlError` for a pattern in the name of a bucket or host.
    """
    if _MAY_BE_MAGIC.search(url) is None:  # nearly all URLs, of which there may be a hundred thousand
        return None
    kind = scheme(url)
    root = _ROOT.match(url)
    if root is None or kind in ("", "-", "file", "pipe"):
        return None
    path, query = url, ""
    if kind in BY_SCHEME and BY_SCHEME[kind].has_query:
        path, mark, query = url.partition("?")
        query = mark + query
    if ((query or "#" in path) and _is_encoded(kind)) or _QUERY.search(path):
        return None
    rest = path[root.end() :]
    if "::" in _ADDRESS.sub("", path[root.end(1) :]) or not (rest or root[0].count("/") > 2):
        return None
    steps = rest.split("/")
    _refuse_bucket(url, kind, root[0], steps)
    first = next((i for i, step in enumerate(steps[:-1]) if step and is_pattern(step)), len(steps) - 1)
    if not is_pattern(steps[first]):
        return None
    folder = root[0] + "".join(step + "/" for step in steps[:first])
    return Pattern(url, folder, tuple(steps[first:]), query)


def _refuse_bucket(url: str, kind: str, root: str, steps: list[str]) -> None:
    bucket = root.rpartition("://")[2].rpartition("@")[2]
    if "*" in bucket or (not bucket and kind in BY_SCHEME and is_pattern(steps[0])):
        raise UrlError(f"{redact(url)!r}: a bucket or host cannot be a pattern; write its name out, or use braces")


@functools.lru_cache(maxsize=256)
def matcher(step: str, encoded: bool = False) -> Callable[[str], bool]:
    """Return a test for names that match ``step`` (not `ANY_DEPTH`). ``encoded``: names may be percent-encoded."""
    if step == SHARDS:
        return lambda name: name.lower().endswith(SHARD_SUFFIXES)
    match = re.compile(fnmatch.translate(step)).match
    hidden = step.startswith(".")

    def matches(name: str) -> bool:
        if name.startswith(".") and not hidden:
            return False
        return match(name) is not None or (encoded and "%" in name and match(urllib.parse.unquote(name)) is not None)

    return matches
