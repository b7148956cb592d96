"""A look at shards before a training: are they there, may they be read, do they begin like shards?"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from wds_async.config import TransferConfig
from wds_async.errors import (
    AccessDenied,
    ConfigError,
    NotATar,
    ShardFormatError,
    ShardNotFound,
    StorageError,
    TruncatedShard,
    WdsError,
)
from wds_async.redact import redact
from wds_async.shardcache.cache import DiskCache
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.tar import decompress, parse
from wds_async.tar.source import ByteSource
from wds_async.transfer.probe import Probed, probe

__all__ = ["check_shards", "lists_of", "looks_like", "shards_to_check"]

logger = logging.getLogger("wds_async")

_NAMED_AT_MOST = 20
_COMPRESSED = (
    (re.compile(rb"\x1f\x8b\x08"), "gzip"),
    (re.compile(rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)"), "bzip2"),
    (re.compile(rb"\xfd7zXZ\0|\x5d\0\0\x80\0"), "xz"),
    (re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), "zstd"),
)
"""By which words `decompress.plain` goes, and what to call it."""


def looks_like(found: Probed) -> tuple[str, ShardFormatError | None]:
    """What the first bytes of a shard say: ``tar``, or what it is compressed with; and, where it is no shard, the
    error that reading it would begin with. Nothing ("") is said where it was not read."""
    if not found.checked or found.error is not None:
        return "", None
    kind = next((name for magic, name in _COMPRESSED if magic.match(found.head)), "tar")
    pieces = iter([memoryview(found.head)] if found.head else [])
    try:
        plain = decompress.plain(lambda: next(pieces, None), found.url)
        source = ByteSource(plain, found.url)
        for _ in parse.members_of(source, admit=lambda _: None):
            pass
        if source.empty:
            return f"{kind}, empty: no members", None
    except TruncatedShard as exn:  # of course: only its beginning was read
        return kind, exn if found.size == len(found.head) else None
    except ShardFormatError as exn:
        return "", exn
    return kind, None


def lists_of(shards: Any) -> list[Sequence[str]]:
    """The URLs of each source of what a dataset begins with: a shard list, or a mix of several.

    ConfigError for what does not list its shards, a directory that is watched, say."""
    sources = getattr(shards, "sources", None)
    lists: list[Any] = [getattr(shards, "urls", None)] if sources is None else [source.urls for source in sources]
    if not all(isinstance(urls, Sequence) for urls in lists):
        raise ConfigError(f"check= looks at shards that are listed, and {type(shards).__name__} does not list them")
    return lists


def shards_to_check(lists: Iterable[Sequence[str]], which: str) -> list[str]:
    """Of each source's shards the first and the last (``which="ends"``) or ``"all"``, each named once.

    ConfigError for any other ``which``."""
    if which not in ("ends", "all"):
        raise ConfigError(f"check={which!r}: known are 'ends' (the first and last shard of each source) and 'all'")
    chosen = [url for urls in lists for url in (urls if which == "all" else [*urls[:1], *urls[-1:]])]
    return list(dict.fromkeys(chosen))


def check_shards(
    lists: Iterable[Sequence[str]],
    which: str,
    options: StorageOptions = NOTHING_GIVEN,
    *,
    config: TransferConfig | None = None,
    cache: DiskCache | None = None,
    timeout_s: float | None = None,
) -> None:
    """Look at shards by one small ranged GET each, many at once; blocks, and leaves nothing running.

    ``lists`` are the URLs (expanded) of each source, ``which`` is ``"ends"`` or ``"all"`` (`shards_to_check`).
    All that is wrong is in one error, which lists the first 20: ShardNotFound where every bad shard is missing,
    AccessDenied where every one is denied, NotATar where every one is no shard, StorageError otherwise. A line is
    logged where all is well. What can be read only once, or runs a command, is not looked at, which is said too; nor
    is what ``cache`` has.
    ``timeout_s`` bounds the look at each; by default attempts end as they do in a training.
    """
    urls = [url for url in shards_to_check(lists, which) if cache is None or cache.find(url) is None]
    looked, seen, bad = 0, 0, []
    for found in probe(urls, options, config=config, timeout_s=timeout_s):
        error = found.error or looks_like(found)[1]
        seen += 1
        looked += found.checked
        if error is not None:
            bad.append((found.url, error))
    if bad:
        raise _one_of(bad, seen)
    unread = f"; {seen - looked} can be read only once and were not" if looked < seen else ""
    logger.info("check=%r: %d shards are there and can be read%s", which, looked, unread)


def _one_of(bad: list[tuple[str, WdsError]], seen: int) -> WdsError:
    """One error for all of them."""
    lines = [f"  {_line(url, error)}" for url, error in bad[:_NAMED_AT_MOST]]
    if len(bad) > _NAMED_AT_MOST:
        lines.append(f"  … and {len(bad) - _NAMED_AT_MOST} more")
    classes: Any = (ShardNotFound, AccessDenied, NotATar)
    cls = next((cls for cls in classes if all(isinstance(error, cls) for _, error in bad)), StorageError)
    what = {ShardNotFound: "are missing", AccessDenied: "may not be read", NotATar: "are no shards"}
    head = f"{len(bad)} of {seen} shards that were looked at {what.get(cls, 'cannot be read')}:"
    made: WdsError = cls("\n".join([head, *lines]))
    made.__cause__ = bad[0][1]
    return made


def _line(url: str, error: WdsError) -> str:
    """The error's own words, which name the shard: by where it is read, so that the URL given is put before it."""
    shown, text = redact(url), str(error)
    return text if shown in text else f"{shown}: {text}"
