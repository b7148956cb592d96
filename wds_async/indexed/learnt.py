"""Indexes learnt while shards are read (``WDS_LEARN_INDEX``), and the counts that follow from them.

An index is kept only of a shard that was read whole, without an error, with the default grouping of members into
samples, and whose store gave something that pins its version.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wds_async.environment import value
from wds_async.errors import WdsError
from wds_async.indexed.places import cached_facts, keep
from wds_async.indexed.shardindex import ShardIndex
from wds_async.logs import warn_once
from wds_async.storage.http.messages import pins_version
from wds_async.storage.local import file_version
from wds_async.storage.registry import locate
from wds_async.tar.group import base_plus_ext

__all__ = ["IndexRecorder", "learns", "learnt_counts"]

logger = logging.getLogger("wds_async")

_REGROUPING = ("select_files", "rename_files", "expect")
"""Arguments of reading by which a shard has other samples than its index says."""


def learns(arguments: Mapping[str, Any]) -> bool:
    """Return whether a reading stage with these ``arguments`` learns indexes."""
    own = any(arguments.get(name) for name in _REGROUPING) or arguments.get("keys") not in (None, base_plus_ext)
    return bool(value("WDS_LEARN_INDEX")) and not own


class IndexRecorder:
    """Recorder of the index of each shard that was read whole. Each reader has one."""

    def __init__(self) -> None:
        self._starts: list[int] = []

    def begin(self) -> Callable[[int], None]:
        """Begin the next shard. Return a function that takes the offset of each of its samples, in order: an append to
        a list, some 12 ns a sample (an array takes three times that)."""
        self._starts = []
        return self._starts.append

    def over(self, url: str, size: int | None, version: str, stop: int, *, plain: bool) -> None:
        """Store the index of the shard at ``url``, which was read whole and without an error. ``size``: its bytes as
        stored; ``stop``: those of its tar; ``plain``: it is not compressed. Warn, once, if the folder cannot be
        written.
        """
        if size is None or not version or not pins_version(version):
            return
        try:
            known = cached_facts(url)
            if known is None or not known.fits(size, version) or known.samples != len(self._starts):
                stops = [*self._starts[1:], stop] if self._starts else []
                keep(ShardIndex.of(url, size, version, self._starts, stops, plain=plain), url)
        except (OSError, WdsError) as exn:
            warn_once(logger, ("learnt", type(exn)), "WDS_LEARN_INDEX: no index is kept: %s", exn)


def learnt_counts(urls: Iterable[str]) -> dict[str, int]:
    """Return the number of samples of each of ``urls`` if all have an index in the cache folder; otherwise nothing.

    A file must be the one that the index is of. A shard in a store is not requested for this: where it was replaced,
    the count is that of the former one until it is read again.
    """
    counts: dict[str, int] = {}
    for url in urls:
        facts = cached_facts(url)
        path = locate(url).path
        if facts is None:
            return {}
        if path is not None:
            try:
                status = os.stat(path)
            except OSError:
                return {}
            if not facts.fits(status.st_size, file_version(status)):
                return {}
        counts[url] = facts.samples
    return counts
