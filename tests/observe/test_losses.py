"""Entries and their sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wds_async.errors import DecodingError
from wds_async.observe.ledger import SHOWN, SkipCounts, Skipped, append_skipped, read_skipped, reason_of


def counted(*entries: Skipped) -> SkipCounts:
    counts = SkipCounts()
    for entry in entries:
        counts.add(entry)
    return counts


SAMPLE = Skipped(stage="decode", reason="DecodingError: bad", shard="a.tar", offset=512, samples=1, key="k")
REST = Skipped(
    stage="tar", reason="CorruptShard: a.tar: bad", shard="a.tar", offset=1000, bytes=4000, samples=1, rest=True
)
GONE = Skipped(stage="read", reason="ShardNotFound: b.tar", shard="b.tar", offset=0, rest=True)


def test_sums_and_differences() -> None:
    both = counted(SAMPLE, REST)
    assert (both.entries, both.samples, both.shards, both.bytes, both.unread) == (2, 2, 1, 4000, 1)
    assert both + counted(GONE) - both == counted(GONE)
    assert SkipCounts.of(json.loads(json.dumps(both.state()))) == both
    assert SkipCounts.of({}) == SkipCounts()


CUT = Skipped(stage="tar", reason="TruncatedShard", samples=1)  # was never among those that came
SIZED = Skipped(stage="tar", reason="CorruptShard", offset=600, bytes=100, rest=True)
LATE = Skipped(stage="tar", reason="TruncatedShard", offset=90, rest=True)


@pytest.mark.parametrize(
    ("entries", "samples", "size", "shards", "share"),
    [
        ([SAMPLE] * 3, 300, 1e9, 7, 0.01),  # by samples, where they are known
        ([CUT], 99, 1e9, 7, 0.01),
        ([SIZED], 10, 900, 3, 0.1),  # by bytes else
        ([GONE], 10, 900, 9, 0.1),  # a rest of unknown size counts as a mean shard
        ([LATE], 10, 990, 9.9, 0.01),
        ([GONE], 0, 0, 0, 1.0),
    ],
)
def test_the_share_of_what_was_read(
    entries: list[Skipped], samples: float, size: float, shards: float, share: float
) -> None:
    assert counted(*entries).share(samples, size, shards) == pytest.approx(share)


def test_texts() -> None:
    assert counted(SAMPLE, SAMPLE, REST).text(0.5) == (
        "passed over 3 samples and 1 shard (4,000 bytes, 50.00%): 2 DecodingError, 1 CorruptShard"
    )
    assert str(SAMPLE) == "a.tar, byte 512, key 'k': DecodingError: bad"
    assert str(REST) == "CorruptShard: a.tar: bad"  # it names the place itself


def test_reasons_are_short_lines_without_secrets() -> None:
    assert reason_of(KeyError()) == "KeyError"
    assert (
        reason_of(DecodingError("http://x/?token=abc is bad\nand more")) == "DecodingError: http://x/?token=*** is bad"
    )
    assert len(reason_of(ValueError("x" * 1000))) == SHOWN


def test_a_line_that_was_cut_short_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.lines"
    for entry in (SAMPLE, GONE):
        append_skipped(path, entry)
    assert read_skipped(path) == [SAMPLE, GONE]
    path.write_bytes(path.read_bytes()[:-5])
    assert read_skipped(path) == [SAMPLE]
    append_skipped(path, SAMPLE)  # behind the piece, as on a disk that was full
    assert read_skipped(path) == [SAMPLE, SAMPLE]
