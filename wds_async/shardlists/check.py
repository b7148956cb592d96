"""A look at shards before a training: are they there, may they be read, do they begin like shards?"""

from __future__ import annotations

import logging
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


def looks_like(shard: Probed) -> tuple[str, ShardFormatError | None]:
    """Return ``tar``, or what a shard is compressed with, by its first bytes; and, where it is no shard, the error that
    reading it would begin with. The former is "" where it was not read."""
    if not shard.checked or shard.error is not None:
        return "", None
    kind = decompress.compressed_by(shard.head) or "tar"
    pieces = iter([memoryview(shard.head)] if shard.head else [])
    try:
        source = ByteSource(decompress.plain(lambda: next(pieces, None), shard.url), shard.url)
        for _ in parse.members_of(source, admit=lambda _: None):
            pass
        if source.empty:
            return f"{kind}, empty: no members", None
    except TruncatedShard as exn:  # of course: only its beginning was read
        return kind, exn if shard.size == len(shard.head) else None
    except ShardFormatError as exn:
        return "", exn
    return kind, None


def lists_of(shards: Any) -> list[Sequence[str]]:
    """Return the URLs of each source of a shard list or a mix. ConfigError for what does not list its shards, such as a
    directory that is watched."""
    sources = getattr(shards, "sources", None)
    lists: list[Any] = [getattr(shards, "urls", None)] if sources is None else [source.urls for source in sources]
    if not all(isinstance(urls, Sequence) for urls in lists):
        raise ConfigError(f"check= looks at shards that are listed, and {type(shards).__name__} does not list them")
    return lists


def shards_to_check(lists: Iterable[Sequence[str]], which: str) -> list[str]:
    """Return the first and last of each source's shards (``which="ends"``) or ``"all"``, each once. ConfigError for any
    other ``which``."""
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
    logged where all is well. What can be read only once, or runs a command, is not looked at, which is logged too; nor
    is what ``cache`` has.
    ``timeout_s`` bounds the look at each; by default attempts end as they do in a training.
    """
    urls = [url for url in shards_to_check(lists, which) if cache is None or cache.find(url) is None]
    read, seen, bad = 0, 0, []
    for shard in probe(urls, options, config=config, timeout_s=timeout_s):
        error = shard.error or looks_like(shard)[1]
        seen += 1
        read += shard.checked
        if error is not None:
            bad.append((shard.url, error))
    if bad:
        raise _combined(bad, seen)
    unread = f"; {seen - read} can be read only once and were not" if read < seen else ""
    logger.info("check=%r: %d shards are there and can be read%s", which, read, unread)


def _combined(bad: list[tuple[str, WdsError]], checked: int) -> WdsError:
    lines = []
    for url, error in bad[:_NAMED_AT_MOST]:
        shown, text = redact(url), str(error)  # the text may name only where the shard is read
        lines.append(f"  {text}" if shown in text else f"  {shown}: {text}")
    if len(bad) > _NAMED_AT_MOST:
        lines.append(f"  … and {len(bad) - _NAMED_AT_MOST} more")
    kinds: Any = {ShardNotFound: "are missing", AccessDenied: "may not be read", NotATar: "are no shards"}
    kind = next((kind for kind in kinds if all(isinstance(error, kind) for _, error in bad)), StorageError)
    head = f"{len(bad)} of {checked} shards that were looked at {kinds.get(kind, 'cannot be read')}:"
    combined: WdsError = kind("\n".join([head, *lines]))
    combined.__cause__ = bad[0][1]
    return combined
