"""The state of a pipeline: another one that loads it goes on with the same items, in this epoch and in later ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cbor2
import msgpack
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

import wds_async as wds
from tests.checkpoint.pipelines import (
    PIPELINES,
    UNSEEDED_LATER,
    as_records,
    augmented,
    dataset,
    doubled,
    packed,
    shown,
    taken,
    urls_in,
)
from tests.servers import Origin, make_shards
from wds_async.errors import StateError


def state_of(pipeline: Any) -> dict[str, Any]:
    """Return the state as another process reads it."""
    state: dict[str, Any] = json.loads(json.dumps(pipeline.state_dict()))
    return state


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return urls_in(tmp_path / "shards")


@pytest.mark.parametrize("name", PIPELINES)
def test_goes_on_exactly_at_every_point(name: str, urls: list[str]) -> None:
    pipeline = PIPELINES[name](urls)
    shown(pipeline)  # the second epoch is looked at
    states, items = [], []
    iterator = iter(pipeline)
    for item in iterator:
        items += shown([item])
        states.append(state_of(pipeline))
    later = shown(pipeline)
    for count in sorted({1, 2, len(items) // 3, len(items) // 2, len(items) - 1, len(items)}):
        resumed = PIPELINES[name](urls)
        resumed.load_state_dict(states[count - 1])
        assert shown(resumed) == items[count:], count
        assert name in UNSEEDED_LATER or shown(resumed) == later


@pytest.mark.parametrize("name", PIPELINES)
def test_goes_on_from_a_state_that_was_taken_after_going_on(name: str, urls: list[str]) -> None:
    pipeline = PIPELINES[name](urls)
    iterator = iter(pipeline)
    taken(iterator, 4)
    state = state_of(pipeline)
    rest = shown(iterator)
    for step in (0, 0, 1, 3):
        pipeline = PIPELINES[name](urls)
        pipeline.load_state_dict(state)
        if step:
            iterator = iter(pipeline)
            assert taken(iterator, step) == rest[:step]
            rest = rest[step:]
        state = state_of(pipeline)
    pipeline = PIPELINES[name](urls)
    pipeline.load_state_dict(state)
    assert shown(pipeline) == rest


@pytest.mark.parametrize("name", ["shards shuffled", "random mix", "specification", "a pipeline in a pipeline"])
def test_between_epochs_the_next_one_comes(name: str, urls: list[str]) -> None:
    pipeline, again, resumed = (PIPELINES[name](urls) for _ in range(3))
    epochs = [shown(pipeline) for _ in range(3)]
    shown(again)
    resumed.load_state_dict(state_of(again))
    assert [shown(resumed), shown(resumed)] == epochs[1:]


def test_a_shuffle_of_10000_samples_has_a_small_state(tmp_path: Path) -> None:
    urls = [str(path) for path in make_shards(tmp_path, shards=4, samples=3000)]
    pipeline = dataset(urls).shuffle(10_000, initial=10_000, seed=1)
    next(iter(pipeline))
    assert len(json.dumps(pipeline.state_dict())) < 300_000


def test_a_shuffle_behind_a_mix_has_a_small_state_and_goes_on_by_ranges(tmp_path: Path) -> None:
    urls = [str(path) for path in make_shards(tmp_path, shards=8, samples=2500)]

    def make() -> Any:
        sources = [dataset(urls[::2]).shuffle(50, seed=3), dataset(urls[1::2]).map(doubled)]
        return wds.DataPipeline(wds.RandomMix(sources, seed=1), wds.shuffle(10_000, initial=10_000, seed=1))

    pipeline = make()
    iterator = iter(pipeline)
    taken(iterator, 500)
    text = json.dumps(pipeline.state_dict())
    assert len(text) < 300_000
    resumed = make()
    resumed.load_state_dict(json.loads(text))
    assert shown(resumed) == shown(iterator)
    assert resumed.statistics().bytes < 1.5 * sum(Path(url).stat().st_size for url in urls)


_SOURCES = st.recursive(
    st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), st.sampled_from(["", "det", "own"])),
    lambda inner: st.lists(inner, min_size=1, max_size=3),
    max_leaves=4,
)
"""A mix: of sources, each with its shards and what is done with their samples, and of mixes."""


def mix_of(sources: Any, urls: list[str], seed: int) -> Any:
    if isinstance(sources, list):
        return wds.DataPipeline(
            wds.RandomMix([mix_of(one, urls, seed + 1) for one in sources], longest=True, seed=seed),
            wds.shuffle(4, seed=seed),
        )
    shards, kind = sources
    source = dataset([urls[shard] for shard in shards])
    return source.map(doubled) if kind == "det" else source.map(augmented) if kind == "own" else source


@given(sources=st.lists(_SOURCES, min_size=1, max_size=3), kills=st.lists(st.integers(0, 99), max_size=3))
@example(sources=[([0], ""), [([0], ""), ([0, 1], "det")]], kills=[1, 2])
@settings(max_examples=15, deadline=None)
def test_any_mix_goes_on_anywhere(sources: Any, kills: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    urls = [str(path) for path in make_shards(tmp_path_factory.mktemp("shards"), shards=5, samples=4)]

    def make(state: Any = None) -> Any:
        pipeline = wds.DataPipeline(mix_of(sources, urls, 1), wds.shuffle(9, seed=2))
        if state is not None:
            pipeline.load_state_dict(state)
        return pipeline

    count, done = len(list(make())), 0
    pipeline = make()
    iterator = iter(pipeline)
    for kill in sorted(min(kill, count) for kill in kills):
        taken(iterator, kill - done)
        done, state = kill, state_of(pipeline)
        rest = shown(iterator)
        assert len(rest) == count - done
        assert shown(make(state)) == rest
        pipeline = make(state)
        iterator = iter(pipeline)


def test_an_open_shard_is_read_from_where_it_was_left(tmp_path: Path) -> None:
    urls = [str(path) for path in make_shards(tmp_path, shards=1, samples=200, payload=100_000)]
    pipeline = dataset(urls)
    taken(iter(pipeline), 150)
    resumed = dataset(urls)
    resumed.load_state_dict(state_of(pipeline))
    assert len(shown(resumed)) == 50
    assert resumed.statistics().bytes < 6e6


def test_records_go_on_from_their_byte_and_those_that_are_held_are_read_by_ranges(origin: Origin) -> None:
    records = [{"number": number, "data": bytes(20_000)} for number in range(500)]
    origin.add("/a.msgpack", b"".join(map(msgpack.packb, records)))

    def make() -> Any:
        return wds.DataPipeline(
            wds.SimpleShardList([origin.url("/a.msgpack")]),
            wds.msgpacks_to_samples(transfer={"part_bytes": 1 << 16}),
            wds.shuffle(20, initial=20, seed=1),
        )

    pipeline = make()
    iterator = iter(pipeline)
    taken(iterator, 380)
    state, rest = state_of(pipeline), shown(iterator)
    assert len(json.dumps(state)) < 50_000  # of 400 kB that are held
    resumed = make()
    resumed.load_state_dict(state)
    assert shown(resumed) == rest
    assert resumed.statistics().bytes < 4e6


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
@given(sizes=st.lists(st.lists(st.integers(0, 3000), max_size=6), min_size=1, max_size=4), data=st.data())
@settings(max_examples=25, deadline=None)
def test_records_of_any_sizes_go_on_anywhere(
    compress: Callable[[bytes], bytes],
    sizes: list[list[int]],
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, urls = tmp_path_factory.mktemp("records"), []
    for number, of_file in enumerate(sizes):
        path = folder / f"{number}.cbor"
        objects = [
            {"at": [number, place], "x": bytes(size)} if size % 5 else size for place, size in enumerate(of_file)
        ]
        path.write_bytes(compress(b"".join(map(cbor2.dumps, objects))))
        urls.append(str(path))

    def make() -> Any:
        return wds.DataPipeline(wds.SimpleShardList(urls), wds.cbors_to_samples(), wds.shuffle(5, initial=3, seed=1))

    pipeline = make()
    states, items = [state_of(pipeline)], []
    for item in pipeline:
        items += shown([item])
        states.append(state_of(pipeline))
    count = data.draw(st.integers(0, len(items)))
    for state in states[count : count + 1]:
        resumed, merged = make(), make()
        resumed.load_state_dict(state)
        assert shown(resumed) == items[count:]
        merged.load_state_dict(wds.merge_states([state]))
        assert sorted(shown(merged)) == sorted(items[count:])


def test_a_file_of_records_that_was_replaced_is_an_error(urls: list[str]) -> None:
    pipeline = packed(urls, wds.shuffle(5, seed=1))
    taken(iter(pipeline), 9)
    state, path = state_of(pipeline), Path(as_records(urls)[1])
    path.write_bytes(path.read_bytes() * 2)
    resumed = packed(urls, wds.shuffle(5, seed=1))
    resumed.load_state_dict(state)
    with pytest.raises(wds.WdsError, match=r"replaced|changed"):
        shown(resumed)


def test_a_shard_that_was_replaced_is_an_error(tmp_path: Path) -> None:
    urls = [str(path) for path in make_shards(tmp_path, shards=1, samples=50)]
    pipeline = dataset(urls)
    taken(iter(pipeline), 20)
    state = state_of(pipeline)
    make_shards(tmp_path, shards=1, samples=49, payload=10)
    resumed = dataset(urls)
    resumed.load_state_dict(state)
    with pytest.raises(wds.WdsError, match=r"replaced|changed"):
        shown(resumed)


def test_another_list_of_shards_is_an_error(urls: list[str]) -> None:
    pipeline = dataset(urls)
    taken(iter(pipeline), 10)
    resumed = dataset(urls[::-1])
    resumed.load_state_dict(state_of(pipeline))
    with pytest.raises(StateError, match="list of shards"):
        shown(resumed)


def test_a_state_of_other_stages_or_of_another_version_is_refused(urls: list[str]) -> None:
    state = dataset(urls).state_dict()
    with pytest.raises(StateError, match="stages"):
        dataset(urls).shuffle(5).load_state_dict(state)
    with pytest.raises(StateError, match="version"):
        dataset(urls).load_state_dict({**state, "version": 0})


@pytest.mark.parametrize("threads", [0, 2])
def test_decoded_and_renamed_samples_are_saved_as_places(threads: int, urls: list[str]) -> None:
    def make() -> Any:
        decoded = dataset(urls).decode(threads=threads).rename(number="cls").rename_keys(value="number")
        return decoded.shuffle(9, initial=9, seed=1)

    pipeline = make()
    items = iter(pipeline)
    taken(items, 5)
    state = state_of(pipeline)
    buffer = next(saved["buffer"] for saved in state["run"]["states"].values() if "buffer" in saved)
    assert buffer["count"]
    assert "references" in buffer
    resumed = make()
    resumed.load_state_dict(state)
    assert shown(resumed) == shown(items)


def test_items_that_cannot_be_saved_say_so(urls: list[str]) -> None:
    pipeline = dataset(urls).map(lambda sample: (sample["__key__"], object())).shuffle(5)
    next(iter(pipeline))
    with pytest.raises(StateError, match=r"shuffle.*deterministic"):
        pipeline.state_dict()


def test_the_stage_of_the_page_goes_on() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "exact.md").read_text()
    block = next(block for block in page.split("```python\n") if block.startswith("from wds_async.checkpoint"))
    names: dict[str, Any] = {}
    exec(block.partition("```")[0], names)

    def make() -> wds.DataPipeline:
        return wds.DataPipeline((1, 4, 9, 16, 25), names["differences"])

    pipeline = make()
    assert taken(iter(pipeline), 2) == ["3", "5"]
    resumed = make()
    resumed.load_state_dict(state_of(pipeline))
    assert list(resumed) == [7, 9]


@pytest.mark.parametrize("interleave", [None, 3])
@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_compressed_shards_go_on_too(
    compress: Callable[[bytes], bytes], interleave: int | None, tmp_path: Path
) -> None:
    urls = urls_in(tmp_path)
    for url in urls[1::2]:
        Path(url).write_bytes(compress(Path(url).read_bytes()))

    def make() -> Any:
        return dataset(urls, interleave=interleave, seed=2).shuffle(9, initial=9, seed=1)

    pipeline = make()
    items, states = [], []
    for item in pipeline:
        items += shown([item])
        states.append(state_of(pipeline))
    for count in range(1, len(items)):
        resumed, merged = make(), make()
        resumed.load_state_dict(states[count - 1])
        assert shown(resumed) == items[count:]
        merged.load_state_dict({**wds.merge_states([states[count - 1]]), "alike": False})
        assert sorted(shown(merged)) == sorted(items[count:])


def test_a_shard_whose_samples_are_held_must_not_change(tmp_path: Path) -> None:
    urls = [str(path) for path in make_shards(tmp_path, shards=3, samples=20)]
    pipeline = dataset(urls).shuffle(30, initial=30, seed=1)
    taken(iter(pipeline), 5)
    resumed = dataset(urls).shuffle(30, initial=30, seed=1)
    resumed.load_state_dict(state_of(pipeline))
    taken(iter(resumed), 2)
    state = state_of(resumed)
    make_shards(tmp_path, shards=1, samples=20, payload=512)
    again = dataset(urls).shuffle(30, initial=30, seed=1)
    again.load_state_dict(state)
    with pytest.raises(wds.WdsError, match="replaced"):
        shown(again)
