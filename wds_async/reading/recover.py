"""Corruption policy: what follows when a shard is damaged or cannot be read to its end."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from wds_async.errors import (
    ChecksumMismatch,
    CorruptShard,
    CostLimitReached,
    NotATar,
    ShardCutError,
    ShardFormatError,
    TooMuchLost,
    TruncatedShard,
    WdsError,
)
from wds_async.handlers import Handler
from wds_async.observe.ledger import EpochLog
from wds_async.reading.parts import Ended, ShardOutcome
from wds_async.reading.spans import SpanBytes, span_in
from wds_async.redact import redact
from wds_async.tar.cut import SpanMembers
from wds_async.tar.decompress import plain, plain_span
from wds_async.tar.group import Keys, base_plus_ext, key_of
from wds_async.tar.parse import Member
from wds_async.tar.resync import resync
from wds_async.tar.source import ByteSource, Read
from wds_async.transfer.reader import ShardStream

if TYPE_CHECKING:
    from wds_async.indexed.learnt import IndexRecorder

__all__ = ["CorruptionPolicy", "ShardRecovery"]

logger = logging.getLogger("wds_async")


class ShardRecovery:
    """One shard while it is read, and where to resume behind damage. ``on_cut`` and ``on_first_behind`` are callbacks
    of `group.samples`."""

    def __init__(self, stream: ShardStream, ledger: EpochLog, key_of: Callable[[str], str | None]) -> None:
        self.stream = stream
        span = span_in(stream.info)
        self._cut_span = None if span is None else SpanMembers(span, key_of)
        self._span_bytes = None if span is None else SpanBytes(stream, span)
        self.broke: Exception | None = None
        """Error of its stream: nothing can be read behind it."""
        self.failed = False
        self.bad = False
        self._ledger = ledger
        self._stored_bytes = stream.start  # offset of the next stored byte
        self._source: ByteSource | None = None
        self._cut: str | None = None
        self._gap_at: int | None = None
        self._cut_by_gap: str | None = None
        self._drained = False

    def source(self) -> ByteSource:
        """Return the bytes of its tar, from where they were read last. Those of a span stand where they do in the whole
        tar."""
        if self._source is None:
            unpack: Read | None = None

            def read() -> memoryview | None:
                nonlocal unpack
                try:
                    unpack = unpack or self._unpacked()
                    return unpack()
                except Exception as exn:
                    self.broke = exn
                    raise

            self._source = ByteSource(read, self.stream.url, self.stream.is_open_ended, self.stream.start)
        return self._source

    def members(self, parse: Callable[[ByteSource], Iterator[Member]]) -> Iterator[Member]:
        """Return the members that ``parse`` reads, from where they were read last; of a shard that is cut, those of the
        samples that belong to this reader."""
        return parse(self.source()) if self._cut_span is None else self._cut_span.members(self.source(), parse)

    def _unpacked(self) -> Read:
        if self._cut_span is not None:
            return self._cut_span.watched(self._stored)
        url, span = self.stream.url, self.stream.span
        return plain(self._stored, url) if span.whole else plain_span(self._stored, url, span.start)

    def _stored(self) -> memoryview | None:
        piece = self.stream.read() if self._span_bytes is None else self._span_bytes()
        self._stored_bytes += 0 if piece is None else len(piece)
        return piece

    @property
    def offset(self) -> int:
        """Position of the next byte in the tar."""
        return self.stream.start if self._source is None else self._source.offset

    @property
    def in_hand(self) -> int:
        """Bytes of the tar that have come and are not parsed yet."""
        return 0 if self._source is None else self._source.arrived - self._source.offset

    @property
    def compressed(self) -> bool:
        """True if the bytes of its tar are not those that are stored, as far as it was read."""
        return self._source is not None and self._stored_bytes != self._source.arrived

    def on_cut(self, key: str, exn: Exception) -> bool:
        """Remember that ``exn`` cut the sample ``key``, once a gap. Return True where the sample is to be yielded: a
        handler ended the stream, nothing is damaged."""
        self._cut = None if key == self._cut_by_gap else key
        return isinstance(exn, Ended)

    def cut(self) -> str | None:
        """Return, once, the key of the sample that the latest error cut; None where it came between two."""
        key, self._cut = self._cut, None
        return key

    def resync_after(self, exn: Exception) -> int | None:
        """Move to the next header behind damage. Return the bytes skipped, None where no header follows."""
        if self._source is None or exn is self.broke or not isinstance(exn, CorruptShard | NotATar):
            return None
        self._gap_at, self._cut_by_gap = exn.offset, self._cut
        skipped = resync(self._source, exn.offset)
        self._drained = skipped is None
        return skipped

    def on_first_behind(self, key: str, offset: int) -> None:
        """Drop the sample that comes first behind the gap: its first members may lie in the gap."""
        if key != self._cut_by_gap:
            why = CorruptShard(f"the first sample behind the gap at byte {self._gap_at}: it may begin in it")
            self._ledger.note(why, "tar", shard=self.stream.url, offset=offset, key=key)

    def rest(self, offset: int) -> int | None:
        """Return how many bytes of it were not read (of a compressed shard, stored ones); None is unknown."""
        if self._drained:
            return max(0, self.offset - offset)
        if self._cut_span is not None and self._cut_span.span.stop is not None:
            return max(0, self._cut_span.span.stop - offset)
        size = self.stream.size
        if size is None and getattr(self.stream.located, "kind", "") == "local" and self.stream.local_path:
            with contextlib.suppress(OSError):
                size = os.stat(self.stream.local_path).st_size
        if self.stream.stop is not None and size is not None:
            size = min(size, self.stream.stop)
        if size is None or self._source is None:
            return None if size is None else max(0, size - self.stream.start)
        return max(0, size - (self._stored_bytes if self.compressed else offset))

    @property
    def cut_at(self) -> int | None:
        """Offset behind the last sample of a span of a shard that is cut; None where it is the end of the shard."""
        return None if self._cut_span is None else self._cut_span.end

    def learn(self, recorder: IndexRecorder) -> None:
        """Have ``recorder`` keep where its samples are, if it was read to its end and nothing of it may be missing."""
        stream, source = self.stream, self._source
        if source is None or self.failed or self.bad or source.doubt or stream.is_open_ended():
            return
        if self._span_bytes is not None or not stream.span.whole:
            return
        recorder.over(stream.url, stream.size, stream.version, source.offset, plain=not self.compressed)

    def drop(self) -> None:
        """Release the engine's memory."""
        if self._source is not None:
            self._source.drop()
        if self._span_bytes is not None:
            self._span_bytes.close()
        self._source = self.broke = None

    def over(self, delivered: int) -> None:
        """End the shard after ``delivered`` samples; reject copies of a bad one."""
        source, url, stop = self._source, self.stream.url, self.stream.stop
        cut = source is not None and stop is not None and source.offset >= stop  # where it is to end
        if source is not None and source.doubt and not self.failed and not cut:
            # Its rest may have been lost between two members, which nothing in a tar shows.
            why = TruncatedShard(f"{redact(url)}: {source.doubt}: what stood behind it may be lost")
            self._ledger.note(why, "tar", shard=url, offset=source.offset, size=0, samples=0)
            if self._ledger.once("doubt"):
                logger.warning("%s, the last sample incomplete. The ledger has all such shards.", why)
        if source is not None and source.empty:
            self._ledger.empty_shard(url)
        self.drop()
        if self.bad:
            self.stream.reject()
        self._ledger.shard_over(url, delivered)


class CorruptionPolicy(ShardOutcome):
    """Decide by the user's handler and ``on_corrupt`` what follows an error of a shard, and record what is skipped."""

    def __init__(self, handler: Handler, on_corrupt: str, ledger: EpochLog, keys: Keys = base_plus_ext) -> None:
        super().__init__(handler)
        self._key_of = functools.partial(key_of, keys=keys)
        self.on_corrupt = on_corrupt
        # An error of the engine keeps the frames that it came through, and so what these have, until garbage is
        # collected. The pass must end before that: with its reader.
        self.ledger: EpochLog = weakref.proxy(ledger)
        self.shard: ShardRecovery | None = None

    def begin(self, stream: ShardStream) -> ShardRecovery:
        """Start the next shard."""
        self.shard = ShardRecovery(stream, self.ledger, self._key_of)
        return self.shard

    def drop(self) -> None:
        """Release the engine's memory."""
        if self.shard is not None:
            self.shard.drop()

    def of_member(self, exn: Exception) -> bool:
        """Pass an error that costs one member to the handler: a duplicate field, or a function of the user's."""
        if not isinstance(exn, WdsError):
            exn.add_note(f"select_files, rename_files or keys raised this, for a member of {redact(str(self._url))}")
        answer = self(exn)
        self.ledger.note(exn, "tar", shard=self._url)
        return answer

    def resumes_after(self, exn: Exception, delivered: int) -> bool:
        """Return whether the same shard is read on behind ``exn``, which ended the reading of its members after
        ``delivered`` samples. Otherwise skip its rest, or end everything (``stop``), or raise ``exn``."""
        shard = self.shard
        assert shard is not None
        if isinstance(exn, TooMuchLost | CostLimitReached | ShardCutError):
            raise exn
        if isinstance(exn, Ended):  # the handler has decided already
            return False
        if self.stop:  # what the handler itself raised, between two members
            raise exn
        shard.bad = shard.bad or isinstance(exn, NotATar | CorruptShard | TruncatedShard)
        if self.on_corrupt == "resync":
            try:
                skipped = shard.resync_after(exn)
            except Exception as worse:  # the rest cannot be read at all
                return self.resumes_after(worse, delivered)
            if skipped is not None:
                self._note(exn, skipped, rest=False)
                self._warn(exn, f"{skipped:,} bytes are passed over, and the sample on each side of them")
                return True
        shard.failed = True
        offset = getattr(exn, "offset", None)
        at = shard.offset if offset is None or exn is shard.broke else offset
        size = None if isinstance(exn, TruncatedShard) else shard.rest(at)
        if isinstance(exn, ChecksumMismatch) and delivered:
            # Whatever the handler answers: what was delivered is not what the store holds.
            cut = shard.cut() is not None
            self.ledger.note(exn, "checksum", shard=self._url, samples=delivered + cut, rest=True, size=0)
            self(exn)
        elif self.on_corrupt != "raise" and isinstance(exn, CorruptShard | TruncatedShard):
            self._note(exn, size, offset=at, rest=True)
            self._warn(exn, "the rest of the shard is passed over")
        else:
            self(exn)
            self._note(exn, size, offset=at, rest=True)
        return False

    def _note(self, exn: Exception, size: int | None, *, rest: bool, offset: int | None = None) -> None:
        assert self.shard is not None
        key = self.shard.cut()
        stage = "tar" if isinstance(exn, ShardFormatError) else "read"
        stage = "checksum" if isinstance(exn, ChecksumMismatch) else stage
        samples = None if key is None else 1
        self.ledger.note(exn, stage, shard=self._url, offset=offset, size=size, samples=samples, key=key, rest=rest)

    def _warn(self, exn: Exception, what: str) -> None:
        if self.ledger.once("corrupt"):
            text = "on_corrupt=%s: %s (%s). Further damage is only noted in dataset.ledger"
            logger.warning(text, self.on_corrupt, exn, what)

    @property
    def _url(self) -> Any:
        return None if self.shard is None else self.shard.stream.url
