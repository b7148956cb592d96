"""Samples of spans of shards: those that begin there, with their places in the whole shard."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import wds_async as wds
from tests.servers import Origin, make_shard
from wds_async.errors import ConfigError, CorruptShard, ShardFormatError, TruncatedShard
from wds_async.tariterators import tarfile_samples

COUNT = 60
FIELDS = {f"{i:03}": {"cls": b"%d" % i, "bin": bytes([i]) * (977 * i % 5000)} for i in range(COUNT)}
GOOD = make_shard(FIELDS)


def places(samples: Any) -> list[tuple[str, int, int | None]]:
    return [(sample["__key__"], sample.offset, sample.stop) for sample in samples]


@pytest.fixture
def whole(put: Any) -> tuple[str, list[tuple[str, int, int | None]]]:
    """A shard's URL, and the places of its samples."""
    (url,) = put(GOOD)
    return url, places(tarfile_samples([url]))


def test_samples_of_spans_are_those_of_the_whole(whole: Any) -> None:
    url, all_places = whole
    starts = [offset for _, offset, _ in all_places]
    assert len(starts) == COUNT
    assert [stop for _, _, stop in all_places] == [*starts[1:], None]

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cuts=st.sets(st.integers(1, COUNT - 1), max_size=6))
    @example(cuts=set(range(1, COUNT)))
    def examples(cuts: set[int]) -> None:
        bounds = [0, *sorted(cuts), COUNT]
        shards = [
            {"url": url, "start": starts[first], "stop": starts[last] if last < COUNT else None}
            for first, last in itertools.pairwise(bounds)
        ]
        data = wds.DataPipeline(lambda: iter(shards), wds.tarfile_to_samples())
        found = list(data)
        assert [(sample["__key__"], sample.offset) for sample in found] == [place[:2] for place in all_places]
        ends = {last - 1 for last in bounds[1:]}
        assert [sample.stop is None for sample in found] == [number in ends for number in range(COUNT)]
        assert all(sample["bin"] == FIELDS[sample["__key__"]]["bin"] for sample in found)
        assert list(data.ledger) == []  # an end between two samples is no doubt where it was asked for

    examples()


def test_reading_goes_on_behind_any_sample(whole: Any) -> None:
    url, all_places = whole
    for number, (_, _, stop) in enumerate(all_places):
        rest = [] if stop is None else places(tarfile_samples([{"url": url, "start": stop}]))
        assert rest == all_places[number + 1 :]


def test_a_span_at_the_end_of_the_archive_or_of_nothing_gives_no_sample(whole: Any) -> None:
    url, _ = whole
    zeros = (len(GOOD.rstrip(b"\0")) + 511) & -512
    shards = [{"url": url, "start": start, "stop": stop} for start, stop in
              ((zeros, None), (len(GOOD), None), (zeros, zeros + 512), (512, 512))]  # fmt: skip
    data = wds.DataPipeline(lambda: iter(shards), wds.tarfile_to_samples())
    assert (list(data), list(data.ledger)) == ([], [])


def test_damage_is_told_by_its_place_in_the_shard(put: Any) -> None:
    (url,) = put(GOOD)
    all_places = places(tarfile_samples([url]))
    start, at = all_places[10][1], all_places[20][1]
    (url,) = put(GOOD[:at] + b"\xff" * 512 + GOOD[at + 512 :])
    shard = {"url": url, "start": start, "stop": all_places[40][1]}
    with pytest.raises(CorruptShard, match=f"the block at byte {at} is no tar header") as caught:
        list(tarfile_samples([shard]))
    assert caught.value.offset == at
    data = wds.DataPipeline(lambda: iter([shard]), wds.tarfile_to_samples(on_corrupt="resync"))
    found = [(key, offset) for key, offset, _ in places(data)]
    assert found == [all_places[number][:2] for number in range(10, 40) if number not in (19, 20)]
    assert next(iter(data.ledger)).offset == at
    data = wds.DataPipeline(lambda: iter([shard]), wds.tarfile_to_samples(on_corrupt="skip_shard"))
    assert len(places(data)) == 9
    (entry,) = data.ledger
    assert (entry.offset, entry.bytes) == (at, all_places[40][1] - at)  # what lies behind the span is not lost


def test_a_span_that_ends_or_begins_inside_of_a_member_is_an_error(whole: Any) -> None:
    url, all_places = whole
    end = all_places[3][2] - 512
    with pytest.raises(TruncatedShard, match=f"the shard ends at byte {end}"):
        list(tarfile_samples([{"url": url, "start": all_places[3][1], "stop": end}]))
    with pytest.raises(CorruptShard, match=f"the block at byte {end} is no tar header"):
        list(tarfile_samples([{"url": url, "start": end}]))


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar"])
def test_compressed_shards_have_no_spans(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(GOOD))
    for span in ({"start": 0, "stop": 500}, {"start": 100}):
        kind = CorruptShard if "stop" not in span and suffix == ".tar" else ShardFormatError
        with pytest.raises(kind) as caught:
            list(tarfile_samples([{"url": str(path), **span}]))
        if kind is ShardFormatError:
            assert "compressed shards have no spans" in str(caught.value)
    assert len(list(tarfile_samples([{"url": str(path), "start": 0, "stop": None}]))) == COUNT


def test_a_span_is_the_same_where_it_is_opened_as_a_file(origin: Origin) -> None:
    """Also where its file is read after the reader has gone on, and is fetched anew."""
    url = origin.add("x.tar", GOOD)
    starts = [offset for _, offset, _ in places(tarfile_samples([url]))]
    shards = [{"url": url, "start": starts[n], "stop": starts[n + 5]} for n in (0, 5, 10)]
    opened = [sample["stream"] for sample in wds.tariterators.url_opener(iter(shards))]
    for shard, file in zip(shards, opened, strict=True):
        assert file.read() == GOOD[shard["start"] : shard["stop"]]
        file.close()
    keys = [sample["__key__"] for sample in wds.tariterators.group_by_keys(
        wds.tariterators.tar_file_expander(wds.tariterators.url_opener(iter(shards))))]  # fmt: skip
    assert keys == [f"{n:03}" for n in range(15)]


def test_what_is_no_span_is_an_error_that_no_handler_passes_over(put: Any) -> None:
    (url,) = put(GOOD)
    with pytest.raises(ConfigError, match="start=-1"):
        list(tarfile_samples([{"url": url, "start": -1}], wds.ignore_and_continue))
