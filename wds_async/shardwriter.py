"""Writing samples into as many tars as it takes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from wds_async.arguments import check_size
from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.storage.sink import publish_text
from wds_async.tar.compress import compression
from wds_async.tar.index import DaliIndex, dali_name, shard_list, shard_list_name
from wds_async.tar.names import NameRules
from wds_async.tarwriter import TarWriter

__all__ = ["ShardWriter"]

Sample = Mapping[str, Any]
Path = str | os.PathLike[str]

logger = logging.getLogger("wds_async")

_TOO_MUCH = 0.3
_ENOUGH_BYTES = 1 << 20  # a tar of a few samples says nothing about the share of headers


class ShardWriter:
    """Writes samples to numbered tars.

    ``pattern`` holds one ``%d`` (``"train-%06d.tar"``, ``"s3://bucket/train-%06d.tar"``), counted from ``start_shard``.
    Before a sample is written to a shard that holds ``maxcount`` samples or ``maxsize`` bytes of fields (as encoded,
    without headers and before compression), the next shard is begun. A shard appears under its name when it is
    complete; then ``post(fname)`` is called. Nothing is made for no samples.

    ``opener(fname)`` returns the open file to write to, which is closed at the shard's end. ``verbose=0`` silences
    the log record of each shard. ``index="dali"`` writes DALI's index beside each shard (``train-000000.idx``),
    ``"json"`` at the end WebDataset's list of the shards of this run with their samples (``train.json``), another name
    that ends in ``.json`` the same there, and True both. ``kw`` are `TarWriter`'s arguments. An exception in the
    ``with`` block discards the shard that was being written and the list; the shards before it stay.

    ``fname``, ``shard`` (the next number), ``count``, ``size`` (of this shard) and ``total`` (samples of all) tell the
    state; ``payload`` and ``container`` the bytes of fields and of tars in all. Where the tars are more than 30 %
    headers and padding, that is logged once. Raises ConfigError for a bad pattern or index.
    """

    def __init__(
        self,
        pattern: Path,
        maxcount: int = 100000,
        maxsize: float = 3e9,
        post: Callable[[str], Any] | None = None,
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], Any] | None = None,
        *,
        index: bool | str | None = None,
        **kw: Any,
    ) -> None:
        self.pattern = os.fspath(pattern)
        try:
            distinct = self.pattern % 0 != self.pattern % 1
        except (TypeError, ValueError):
            distinct = False
        if not distinct:
            raise ConfigError(f"pattern={self.pattern!r}: it needs one place for the number, as in 'train-%06d.tar'")
        self.maxcount = check_size("ShardWriter", "maxcount", maxcount)
        self.maxsize = check_size("ShardWriter", "maxsize", maxsize)
        self.post = post
        self.verbose, self.opener, self.kw = verbose, opener, kw
        self._dali, self._list = self._indexes(index)
        self._shards: list[dict[str, Any]] = []
        self.shard = check_size("ShardWriter", "start_shard", start_shard)
        self.tarstream: TarWriter | None = None
        self.fname: str | None = None
        self.total = self.count = self.size = 0
        self._done_payload = self._done_container = 0
        self._rules = NameRules()
        self._opened: Any = None
        self._closed = self._warned = False

    def _indexes(self, index: bool | str | None) -> tuple[bool, str | None]:
        """Whether DALI's is written, and where the list goes."""
        kind = compression(self.pattern, self.kw.get("compress"))
        named = isinstance(index, str) and index.endswith(".json")
        if index not in (None, False, True, "dali", "json") and not named:
            raise ConfigError(
                f'index={index!r}: it is "dali", "json", the name of a .json file, True for both, or None'
            )
        if index and self.pattern.startswith("pipe:") and not named:
            raise ConfigError(f"index={index!r}: an index is written beside the shards, and a command has no place")
        dali = index in (True, "dali")
        if dali and kind:
            raise ConfigError(
                f'index={index!r}: DALI seeks in plain tars only, and these are compressed ({kind}); index="json"'
                " lists them"
            )
        if index is True or index == "json":
            return dali, shard_list_name(self.pattern)[0]
        return dali, str(index) if named else None

    @property
    def payload(self) -> int:
        """Bytes of fields in all shards so far."""
        return self._done_payload + (self.tarstream.payload if self.tarstream is not None else 0)

    @property
    def container(self) -> int:
        """Bytes of all tars so far, headers and padding included, compressed where they are."""
        return self._done_container + (self.tarstream.container if self.tarstream is not None else 0)

    @property
    def overhead(self) -> float:
        """The share of the tars' bytes that are no fields, 0 to 1; 0 also where compression saves more than that."""
        return max(0.0, 1.0 - self.payload / self.container) if self.container else 0.0

    def next_stream(self) -> None:
        """End the current shard and begin the next."""
        self.finish()
        self.fname = self.pattern % self.shard
        if self.verbose:
            logger.info("writing %s after %d samples", redact(self.fname), self.total)
        self.count = self.size = 0
        self._opened = self.opener(self.fname) if self.opener is not None else None
        self.tarstream = TarWriter(self.fname if self._opened is None else self._opened, **self.kw)
        self.tarstream.rules = self._rules
        self._rules.new_shard()
        if self._dali:
            self.tarstream.entries = DaliIndex()
        self.shard += 1

    def write(self, obj: Sample, mtime: float | None = None) -> None:
        """Write a sample, beginning a new shard where the current one is full; see `TarWriter.write`."""
        if self._closed:
            raise ValueError("this ShardWriter is closed")
        if self.tarstream is None or self.count >= self.maxcount or self.size >= self.maxsize:
            self.next_stream()
        assert self.tarstream is not None
        size = self.tarstream.write(obj, mtime)
        self.count += 1
        self.total += 1
        self.size += size

    def finish(self) -> None:
        """End the current shard, if there is one: publish it and its index and call ``post``. An empty one is
        discarded."""
        stream, self.tarstream = self.tarstream, None
        if stream is None or self.fname is None:
            return
        try:
            if self.count or self._opened is not None:
                stream.close()
            else:
                stream.discard()
        finally:
            self._close_opened()
        if not self.count:
            return
        self._done_payload += stream.payload
        self._done_container += stream.container
        self._shards.append({"url": self.fname, "nsamples": self.count, "filesize": stream.container})
        if stream.entries is not None:
            self._write_text(dali_name(self.fname), stream.entries.text())
        self._judge()
        if self.post is not None:
            self.post(self.fname)

    def _judge(self) -> None:
        if self._warned or self.container < _ENOUGH_BYTES or self.overhead <= _TOO_MUCH:
            return
        self._warned = True
        logger.warning(
            "%s: %.0f %% of these shards are tar headers and padding (%d bytes of fields a sample, and 512 to 1023 for "
            "each field besides). Name them .tar.zst, or pack the small fields of a sample into one (.mp, .ten).",
            redact(self.pattern),
            100 * self.overhead,
            self.payload // max(1, self.total),
        )

    def close(self) -> None:
        """End the last shard, and write the list of shards. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self.finish()
        if self._list is not None and self._shards:
            folder = self._list.rpartition("/")[0]
            shards = [{**shard, "url": _relative(shard["url"], folder)} for shard in self._shards]
            self._write_text(self._list, shard_list(shards, shard_list_name(self.pattern)[1]))

    def _write_text(self, name: str, text: str) -> None:
        if self.opener is None:
            publish_text(name, text, self.kw.get("storage_options"))
            return
        file = self.opener(name)
        try:
            file.write(text.encode("utf-8"))
        finally:
            file.close()

    def _close_opened(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, exn: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        self._closed = True
        stream, self.tarstream = self.tarstream, None
        if stream is not None:
            stream.discard()
        self._close_opened()


def _relative(url: str, folder: str) -> str:
    """``url`` as an index in ``folder`` names it: its last component where it lies there, else whole; without a query,
    which may hold a signature."""
    url = url.partition("?")[0] if "://" in url else url
    own, _, name = url.rpartition("/")
    return name if own == folder else url
