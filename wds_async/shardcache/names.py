"""The name of a shard in the cache, and the names under which a user may have copied it there.

Our own name is ``scheme@host/path`` as in ``s3@bucket/train/000001.tar``: readable, and different for different URLs.
No bucket and no host can be called ``s3@bucket``, so it never meets a folder that the user copied. If a part of the URL
cannot stand in a file name (a query, ``..``, a command), a hash of the whole URL keeps the names apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.shardcache.partial import PARTIAL
from wds_async.urls import local_path, scheme

__all__ = ["base_name", "cache_name", "claim", "copied_name", "elsewhere", "given_name", "is_own"]

_UNSAFE = re.compile(r"[^A-Za-z0-9._+=,@~-]")
_IN_COMMAND = re.compile(r"(?<![\w+.-])(?:https?|ftp|gs|gcs|s3|ais|az|abfss?|hf|hdfs)://[^\s'\"|;<>()]+")
# The parameters of signatures: they change from day to day, and the object does not.
_SIGNATURE = re.compile(
    r"(?:x-amz-.*|x-goog-.*|awsaccesskeyid|googleaccessid|key-pair-id|policy|expires|signature|si|sig|se|sp|spr|sr|st|sv"
    r"|ske|skoid|sks|skt|sktid|skv)",
    re.IGNORECASE,
)
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|$)", re.IGNORECASE)
_COMPONENT_BYTES = 150
_NAME_BYTES = 800
_HASH_DIGITS = 16
_IGNORES_CASE = sys.platform in ("win32", "darwin")


def cache_name(url: str) -> str:
    """Return the relative path, with ``/``, under which the shard of ``url`` is kept.

    Credentials (``user:password@``, the parameters of a signature) are no part of it. A ``pipe:`` command is named by
    the URL in it, if there is one, and by the hash of the whole command.
    """
    command = scheme(url) == "pipe"
    kind, host, path, query = _parts(_address(url))
    place = host.replace(":", "+")  # which no host has, and every file system
    folder = _UNSAFE.sub("_", place)[:_COMPONENT_BYTES]
    components = path.split("/")[1:] or [""]
    clean = [_clean(component) for component in components]
    name = "/".join([f"{'pipe' if command else kind}@{folder}", *clean])
    exact = (
        not (command or query)
        and folder == place
        and clean == components
        and not (_IGNORES_CASE and name != name.lower())
    )
    if len(name) > _NAME_BYTES:
        name, exact = f"{name.partition('/')[0]}/{clean[-1]}", False
    return name if exact else _with_hash(name, url if command else f"{kind}://{host}{path}?{query}")


def elsewhere(name: str, place: str) -> str:
    """Return the name of a shard of the same URL at another endpoint, with the digest ``place`` ("": the usual one)."""
    if not place:
        return name
    first, slash, rest = name.partition("/")
    return f"{first}@{place}{slash}{rest}" if slash else f"{name}@{place}"


def copied_name(url: str) -> str | None:
    """Return ``bucket/path``, as a tool that copies a bucket's folders writes it; None if the URL has no bucket."""
    kind, host, path, query = _parts(_address(url))
    if kind in ("", "file", "pipe") or query or not host:
        return None
    name = urllib.parse.unquote(f"{host}{path}")
    return name if _is_relative(name) else None


def base_name(url: str) -> str | None:
    """Return the last component of the path in ``url``; None without one."""
    _, _, path, _ = _parts(_address(url))
    name = urllib.parse.unquote(path.rpartition("/")[2])
    return name if name and _is_relative(name) else None


def given_name(url: str, url_to_name: Callable[[str], str]) -> str:
    """Return the name that the user's function gives; if that is itself a URL, the name of that URL.

    ConfigError if the function fails, or returns no relative path within the cache.
    """
    try:
        name = url_to_name(url)
    except Exception as exn:
        raise ConfigError(f"url_to_name failed for {redact(url)}: {type(exn).__name__}: {exn}") from exn
    if isinstance(name, str) and "://" in name:
        return cache_name(name)
    if not isinstance(name, str) or not _is_relative(name):
        raise ConfigError(
            f"url_to_name gave {name!r:.100} for {redact(url)}: it must return a relative path within the cache folder"
        )
    return name


def is_own(name: str) -> bool:
    """Return whether ``name`` (relative, with ``/``) is of the kind that `cache_name` makes."""
    return "@" in name.partition("/")[0] and "/" in name


def _address(url: str) -> str:
    """Return ``url``, or the URL within a command."""
    if scheme(url) != "pipe":
        return url
    match = _IN_COMMAND.search(url)
    return match[0] if match else url


def _parts(address: str) -> tuple[str, str, str, str]:
    """Return scheme, host or bucket, path (from its ``/`` on) and query, without the parameters of a signature."""
    kind = scheme(address)
    if kind == "pipe":
        words = [word for word in re.split(r"[^\w.+-]+", address.removeprefix("pipe:")) if word]
        return kind, "", "/" + "_".join(words), ""
    if kind in ("", "file"):
        path = os.path.abspath(local_path(address) or "")
        return "file", "", "/" + path.replace(os.sep, "/").lstrip("/"), ""
    _, _, rest = address.partition("://")
    place, _, query = rest.partition("?")
    host, slash, path = place.partition("/")
    host = re.sub(r":[^@]*@", "@", host)
    if kind in ("http", "https"):
        host = host.rpartition("@")[2].lower()
        query = query.partition("#")[0]
    kept = [item for item in query.split("&") if item and not _SIGNATURE.fullmatch(item.partition("=")[0])]
    return kind, host, slash + path, "&".join(kept)


def _clean(component: str) -> str:
    name = _UNSAFE.sub("_", component)[:_COMPONENT_BYTES]
    if name.strip(".") == "" or name.endswith(".") or _RESERVED.match(name):
        name = "_" + name.rstrip(".")
    return name


def _with_hash(name: str, text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    folder, _, last = name.rpartition("/")
    stem, dot, suffix = last.partition(".")
    return f"{folder}/{stem}-{digest}{dot}{suffix}"


def _is_relative(name: str) -> bool:
    parts = re.split(r"[/\\]", name)
    return bool(name) and "\0" not in name and ":" not in parts[0][1:2] and all(p not in ("", ".", "..") for p in parts)


def claim(folder: Path, name: str, owner: str) -> bool:
    """Return whether ``name`` in the cache at ``folder`` belongs to ``owner``: the first that claims it has it, for as
    long as the folder exists. True if nothing can be written: nothing will be kept under the name either."""
    key = hashlib.sha256(os.fsencode(name)).hexdigest()[:24]
    path = folder / PARTIAL / f"{key}.claim"
    text = owner.encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:  # the first wins
            file.write(text)
    try:
        return path.read_bytes() == text
    except OSError:
        return True
