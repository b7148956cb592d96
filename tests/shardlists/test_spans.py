"""Equal byte spans: all bytes of all shards once, whatever the number of parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.shardlists.spans import ByteSplit, ShardSizes, spans_of
from wds_async.tar.cut import LOOKBACK_BYTES, CutSpan

SIZES = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 1 << 14), st.just(1 << 30)), min_size=1, max_size=12)


@given(SIZES, st.integers(1, 40), st.sets(st.integers(0, 11)))
def test_every_byte_is_in_one_part(sizes: list[int], count: int, whole: set[int]) -> None:
    taken: dict[int, list[CutSpan]] = {}
    for number in range(count):
        for shard, span in spans_of(sizes, number, count, whole.__contains__):
            taken.setdefault(shard, []).append(span)
    assert sorted(taken) == list(range(len(sizes)))  # an empty shard too: it is an error that is raised once
    for shard, spans in taken.items():
        edges = [span.start for span in spans]
        assert edges[0] == 0
        assert edges == sorted(set(edges))
        for n, span in enumerate(spans):
            assert span.cuts == tuple(edges[n + 1 :])  # each knows all cuts behind it
        assert edges[-1] < sizes[shard] or sizes[shard] == 0
        assert len(spans) == 1 or shard not in whole


@given(SIZES, st.integers(1, 40))
def test_parts_are_equal(sizes: list[int], count: int) -> None:
    total = sum(sizes)
    slack = 1 + 2 * (total // count // 64)
    for number in range(count):
        bytes_ = sum((span.stop or sizes[shard]) - span.start for shard, span in spans_of(sizes, number, count))
        assert abs(bytes_ - total / count) <= slack


def test_shards_in_many_parts() -> None:
    assert list(spans_of([900], 1, 3)) == [(0, CutSpan(300, (600,)))]
    assert list(spans_of([100] * 4, 0, 2)) == [(0, CutSpan()), (1, CutSpan())]
    assert list(spans_of([100, 300], 1, 2)) == [(1, CutSpan(100))]
    assert list(spans_of([], 0, 2)) == []


@pytest.mark.parametrize(("sizes", "shares"), [([120, 100, 100], (1, 2)), ([100, 100, 120], (2, 1))])
def test_a_compressed_shard_is_in_the_part_of_its_middle(sizes: list[int], shares: tuple[int, int]) -> None:
    parts = [list(spans_of(sizes, number, 2, {1}.__contains__)) for number in range(2)]
    assert tuple(map(len, parts)) == shares
    assert [part for both in parts for part in both] == [(0, CutSpan()), (1, CutSpan()), (2, CutSpan())]


def test_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker gets: the bytes to fetch, and the span."""
    mega = 1 << 20
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("WORKER", "1")
    monkeypatch.setenv("NUM_WORKERS", "2")
    split = ByteSplit(ShardSizes({"a.tar": 8 * mega, "b.tar": 0}))
    assert list(split.run(["a.tar", {"url": "b.tar", "more": 1}])) == [
        {
            "url": "a.tar",
            "start": 2 * mega - LOOKBACK_BYTES,
            "stop": 5 * mega,
            "cut": [2 * mega, 4 * mega, 6 * mega],
        }
    ]
    monkeypatch.setenv("WORKER", "0")
    assert next(iter(split.run([{"url": "a.tar"}])))["start"] == 0
