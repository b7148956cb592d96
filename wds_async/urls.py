"""URLs as strings: expansion of what a user writes, schemes, and paths of local files.

Only the local file system is touched, for ``~``, globs and directories. Rewriting is imported from here too.
"""

from __future__ import annotations

import glob
import os
import posixpath
import re
import shlex
import urllib.parse
from collections.abc import Callable, Iterable, Iterator

from braceexpand import braceexpand

from wds_async import environment
from wds_async.errors import UrlError
from wds_async.redact import redact
from wds_async.rewrite import Rule, native_pipe, parse_rules, rewrite, rules_from_env
from wds_async.storage.stores import BY_SCHEME

__all__ = [
    "SHARD_SUFFIXES",
    "Rule",
    "expand_urls",
    "links",
    "local_path",
    "merge_url",
    "native_pipe",
    "parse_rules",
    "recognise",
    "rewrite",
    "rules_from_env",
    "scheme",
    "split_web_url",
]

SHARD_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""Suffixes of shards, by which a folder stands for the shards in it."""

_CONTROLS = re.compile(r"[\x00-\x1f]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-_]+)(?:://|::)|(pipe|file):", re.IGNORECASE)
_ANY_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-_]+):")  # two letters at least: one is a drive
_SINGLE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/[^/]")
_ONE_SLASH = re.compile(f"(?:{'|'.join(BY_SCHEME)}):/")
_ONE_PLACE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-_]+://[^/{}\\]+/")  # with nothing in it that expands
_DRIVE = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_MAGIC = re.compile(r"[*?\[]")
_registries: list[Callable[[str], bool]] = []
_NESTING = 10  # ${X} whose value holds ${Y}: as deep as webdataset follows

# '::' and what only looks like it: an IPv6 address in brackets.
_DOUBLE_COLON = re.compile(r"\[[0-9A-Fa-f:.]+\]|::")
# fsspec's file systems that lie inside or over another one: 'zip://dir/x.tar::s3://b/y.zip' is one source.
_WRAPPERS = frozenset(
    ["blockcache", "cached", "dir", "filecache", "gzip", "libarchive", "reference", "simplecache", "tar", "zip"]
)


def expand_urls(urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, files: bool = True) -> list[str]:
    """Return every shard that ``urls`` names, in order.

    ``urls`` is a string, a path, or any number of them. In a string that is given alone, ``::`` separates sources
    (where its left side contains a path, so that ``simplecache::s3://b/x.tar`` stays whole); elements of a list are not
    split, as in webdataset, because a key may hold ``::``. In each, ``${X}`` is the environment's ``WDS_X``, and braces
    expand as in a shell (``x-{000..999}.tar``). For local files also ``~``, globs (sorted; a file
    of exactly that name is taken literally) and directories: all their shards (``.tar``, ``.tgz``, ``.tar.gz``,
    ``.tar.bz2``, ``.tar.xz``, ``.tar.zst``), sorted. URLs of other schemes keep their ``*``
    (`storage.listing.expand` lists their stores). A path object is always a local file, whatever it looks like. With
    ``files=False`` this machine's files are not looked at: for names from elsewhere, which are refused after that.

    Raises `UrlError` for nothing at all, an unset ``${X}``, unbalanced braces, a malformed ``http`` URL, and a glob
    or directory without a single match. Whether the files exist is found out when they are opened.
    """
    sources = [urls] if isinstance(urls, str | os.PathLike) else _sources(urls)
    if not sources:
        raise UrlError("an empty list of URLs: name at least one shard")
    return [url for source in sources for url in _expand(source, files, splits=isinstance(urls, str))]


def _sources(spec: object) -> list[object]:
    if not isinstance(spec, Iterable) or isinstance(spec, bytes):
        raise UrlError(f"URLs are a str, a path or a list of them, not {type(spec).__name__}: {spec!r:.80}")
    return list(spec)


def _expand(source: object, files: bool, *, splits: bool) -> Iterator[str]:
    if isinstance(source, os.PathLike):
        for name in _braces(_plain_path(source)):
            yield from _local(name)
        return
    if not isinstance(source, str):
        raise UrlError(f"a URL is a str or a path, not {type(source).__name__}: {source!r:.80}")
    whole = _substitute(source)
    for text in _split(whole) if splits else [whole]:
        if not text.strip():
            raise UrlError(f"an empty URL in {redact(source)!r}: name at least one shard")
        if _alike(text, files):
            yield from _braces(_checked(text))
            continue
        for url in _braces(text):
            if not url.strip():
                raise UrlError(f"{redact(source)!r}: its braces give an empty URL; name a shard in each case")
            if files and scheme(url) in ("", "file"):
                yield from _local(url)
            else:
                yield _checked(url)


def _alike(text: str, files: bool) -> bool:
    """Return whether the URLs that ``text`` expands to differ in their names only, so that a look at ``text`` is one at
    each of them: a hundred thousand shards are looked at once. They are on one server or in one bucket, or are local
    files that are no patterns and no folders by their names."""
    if "{" not in text:
        return False
    if _ONE_PLACE.match(text):
        return scheme(text) not in ("", "file", "pipe")
    local = ":" not in text and not text.startswith("~")
    return local and files and text.lower().endswith(SHARD_SUFFIXES) and _MAGIC.search(text) is None


def _plain_path(source: os.PathLike[str]) -> str:
    text = os.fspath(source)
    if not isinstance(text, str):
        raise UrlError(f"a path is made of str, not bytes: {text!r:.80}")
    mangled = _SINGLE_SLASH.match(text)
    if mangled and not os.path.isdir(mangled[1] + ":"):
        raise UrlError(
            f"{redact(text)!r}: a path object made one '/' of the two in {mangled[1]}://; pass the URL as a str"
        )
    # What reads as another kind of URL ('-', 'pipe:x') must stay a file for everyone who sees the string.
    return os.path.join(".", text) if scheme(text) else text


def _substitute(text: str) -> str:
    def value(reference: re.Match[str]) -> str:
        name = f"WDS_{reference[1]}"
        setting = environment.variable(name)
        if setting is None:
            raise UrlError(
                f"{redact(text)!r}: ${{{reference[1]}}} reads the environment variable {name}, which is not set; "
                f"set it (a pipe: command that means the shell's own variable writes ${reference[1]} without braces)"
            )
        return setting

    result = text
    for _ in range(_NESTING):
        before, result = result, _VARIABLE.sub(value, result)
        if before == result:
            return result
    raise UrlError(f"{redact(text)!r}: its ${{…}} variables refer to each other in a circle")


def _split(text: str) -> list[str]:
    """Split ``text`` at every ``::`` that separates two sources."""
    sources, start, link = [], 0, 0
    for colons in _DOUBLE_COLON.finditer(text):
        if colons.group() != "::":
            continue
        if _names_a_file(text[link : colons.start()]):
            sources.append(text[start : colons.start()])
            start = colons.end()
        link = colons.end()
    return [*sources, text[start:]]


def links(url: str) -> list[str]:
    """Return the links of an fsspec chain, ``["zip://x.tar", "s3://b/y.zip"]``; of anything else ``[url]``.

    Only a file system over another one begins a chain: in ``gs://bucket/a::b.tar`` the colons are part of a name.
    """
    first = url.partition("::")[0]
    bare = "://" not in first and re.fullmatch(r"[A-Za-z_][\w+]*", first) is not None
    return url.split("::") if "::" in url and (bare or scheme(first) in _WRAPPERS) else [url]


def _names_a_file(left: str) -> bool:
    """Return whether ``left`` of a ``::`` is a source by itself, and not a link of an fsspec chain."""
    kind = scheme(left)
    if kind == "pipe":
        try:
            shlex.split(left)
        except ValueError:  # within quotes
            return False
        return True
    if kind in ("", "-", "file"):
        return re.fullmatch(r"[A-Za-z_][\w+]*", left) is None
    _, _, where = left.partition("://")
    return kind not in _WRAPPERS and "/" in where


def _braces(text: str) -> list[str]:
    if "{" not in text:  # and so a lone backslash or '}' is left as it is
        return [text]
    try:
        return list(braceexpand(text, escape=_DRIVE.match(text) is None))
    except ValueError as exn:
        raise UrlError(
            f"{redact(text)!r}: unbalanced braces; braces are written x-{{000..999}}.tar or {{a,b}}.tar"
        ) from exn


def _local(url: str) -> Iterable[str]:
    """Expand one local name: to itself, its matches, or the shards of a directory."""
    path = local_path(url)
    if path is None:
        return [url]
    if path.startswith("~"):
        path = url = os.path.expanduser(path)
    # Names of shards are never checked for being directories: a thousand of them on a network file system
    # would be a thousand round trips.
    if _MAGIC.search(path) and not os.path.lexists(path):
        names, what = sorted(glob.glob(path, recursive=True)), "no file matches this pattern"
        names = [name for name in names if os.path.basename(name) != "_wds"]  # records of jobs
    elif not path.lower().endswith(SHARD_SUFFIXES) and os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if name.lower().endswith(SHARD_SUFFIXES))
        names = [os.path.join(path, name) for name in names]
        what = f"this directory holds no shard ({' '.join('*' + suffix for suffix in SHARD_SUFFIXES)})"
    else:
        return [url]
    if not names:
        raise UrlError(f"{url!r}: {what}; the current directory is {os.getcwd()!r}")
    return [os.path.join(".", name) if scheme(name) else name for name in names]


def _checked(url: str) -> str:
    """Return ``url``, or raise `UrlError` for a malformed ``http(s)`` URL."""
    if scheme(url) in ("http", "https"):
        split_web_url(url)
    return url


def split_web_url(url: str) -> urllib.parse.SplitResult:
    """Return the parts of an ``http(s)`` URL. Raise `UrlError` for one without a host, with a port that is none, or
    with control characters."""
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.hostname and parts.port != 0 and not _CONTROLS.search(url):
            return parts
    except ValueError:
        pass
    kind = "https" if url[:6].lower() == "https:" else "http"
    raise UrlError(f"{redact(url)!r}: a malformed URL; write {kind}://host[:port]/path")


def scheme(url: str) -> str:
    """Return the scheme of ``url`` in lower case: ``"http"``, ``"s3"``, ``"pipe"``, ``"file"``, …

    ``"-"`` is standard input, and ``""`` a local path. A scheme is followed by ``://`` (or by ``::``, an fsspec
    chain), but for ``pipe:``, ``file:`` and what the program has registered openers for (`recognise`); so
    ``C:/x.tar`` and ``a:b.tar`` are local paths.
    """
    if url == "-":
        return "-"
    if match := _SCHEME.match(url):
        return (match[1] or match[2]).lower()
    match = _ANY_SCHEME.match(url)
    name = match[1].lower() if match else ""
    return name if name and any(is_scheme(name) for is_scheme in _registries) else ""


def recognise(is_scheme: Callable[[str], bool]) -> None:
    """Let ``scheme`` take ``name:rest`` for a URL where ``is_scheme(name)`` is true, for the life of the process."""
    _registries.append(is_scheme)


def local_path(url: str) -> str | None:
    """Return the path of a local file: ``url`` itself, or the decoded path of a ``file:`` URL.

    None for every other scheme. Raises `UrlError` for a ``file:`` URL with a host other than localhost.
    """
    kind = scheme(url)
    if kind == "":
        if _ONE_SLASH.match(url):
            raise UrlError(f"{redact(url)!r}: a malformed URL; write two slashes after its first colon")
        return url
    if kind != "file":
        return None
    path = url[5:]
    if path.startswith("//"):
        host, slash, path = path[2:].partition("/")
        if host.lower() not in ("", "localhost", "127.0.0.1"):
            raise UrlError(f"{url!r}: a file: URL reads this machine's files; write file:///path, not file://{host}")
        path = slash + path
    path = urllib.parse.unquote(path)
    if not path:
        raise UrlError(f"{url!r}: a file: URL without a path")
    return path[1:] if re.match(r"/[A-Za-z]:[\\/]", path) else path


def merge_url(base: str, url: str) -> str:
    """Resolve ``url`` against the folder ``base``, both paths or URLs.

    One with a scheme stands for itself; an absolute path keeps the scheme and host of ``base``.
    """
    if not base or scheme(url):
        return url
    if scheme(base) == "":
        return os.path.normpath(os.path.join(base, url))
    parts, own = urllib.parse.urlsplit(base), urllib.parse.urlsplit(url)
    path = posixpath.normpath(posixpath.join(parts.path or "/", own.path))
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, own.query, own.fragment))
