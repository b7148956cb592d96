"""Bytes of one span of a shard that is cut (see `tar.cut`), and those behind it that its last sample takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wds_async.errors import ShardCutError
from wds_async.redact import redact
from wds_async.tar.cut import CutSpan
from wds_async.tar.decompress import compressed_by
from wds_async.transfer.reader import ShardReader, ShardStream

__all__ = ["SpanBytes", "entry_at", "entry_of", "span_in"]

BEHIND_BYTES = 1 << 20
"""Bytes behind a span that are requested with it: the sample that is cut ends within, nearly always."""
_LARGEST_BYTES = 64 << 20
"""Bytes that are requested at once if it does not."""


def entry_of(shard: Mapping[str, Any], span: CutSpan) -> dict[str, Any]:
    """Return the entry of ``span`` of a shard: the span as ``cut`` (its start and all cuts behind it) and ``at``, the
    bytes to fetch as ``start`` and ``stop``."""
    if span == CutSpan():
        return dict(shard)
    entry = {**shard, "cut": [span.start, *span.cuts], "start": span.first_byte}
    if span.stop is not None:
        entry["stop"] = max(span.stop, span.at or 0) + BEHIND_BYTES
    return entry if span.at is None else {**entry, "at": span.at}


def span_in(entry: Mapping[str, Any]) -> CutSpan | None:
    """Return the span that an entry of a shard is of; None for one that is not cut."""
    cut = entry.get("cut")
    return None if cut is None else CutSpan(cut[0], tuple(cut[1:]), entry.get("at"))


def entry_at(entry: Mapping[str, Any], offset: int) -> dict[str, Any]:
    """Return ``entry`` of a shard or of a span of it, to be read from the sample at ``offset`` on."""
    span = span_in(entry)
    return {**entry, "start": offset} if span is None else entry_of(entry, replace(span, at=offset))


class SpanBytes:
    """The bytes of a span, from ``stream``, and then as many behind it as are read."""

    def __init__(self, stream: ShardStream, span: CutSpan) -> None:
        self._first, self._stream, self._span = stream, stream, span
        self._position = span.first_byte
        self._until: int | None = stream.info.get("stop")
        self._behind: ShardReader | None = None
        self._step = BEHIND_BYTES

    def __call__(self) -> memoryview | None:
        piece = self._stream.read()
        while piece is None and self._goes_on():
            piece = self._stream.read()
        if piece is not None:
            if not self._position and (kind := compressed_by(bytes(piece[:10]))):
                shown = redact(self._first.url)
                raise ShardCutError(
                    f"{shown}: it is compressed ({kind}), and cannot be cut; end its name as those of compressed shards"
                    ' (.tar.gz), so that it is read whole, or leave out split="bytes"'
                ).at(shown, 0)
            self._position += len(piece)
        return piece

    def _goes_on(self) -> bool:
        """Request more bytes behind those that have come; False at the end of the shard."""
        if self._until is None or self._position < self._until:
            return False
        size = self._first.size
        if size is not None and self._position >= size:
            return False
        self.close()
        self._step = min(2 * self._step, _LARGEST_BYTES)
        self._until = self._position + self._step
        self._behind = self._first.others(self._position, self._until)
        self._stream = next(self._behind)
        return True

    def close(self) -> None:
        """Stop the requests behind the span; idempotent."""
        if self._behind is not None:
            self._behind.close()
            self._behind = None
