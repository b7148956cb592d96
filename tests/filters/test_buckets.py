"""Batches of like samples: buckets, tokens, the order that ranks have in common, and what is refused."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wds_async as wds
from tests.servers import make_shard
from wds_async.errors import ConfigError
from wds_async.filters import bucketed
from wds_async.handlers import ignore_and_continue, ignore_and_stop

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def itself(x: Any) -> Any:
    return x


def listed(items: Iterable[Any], *args: Any, **kw: Any) -> list[list[Any]]:
    """Return the lists of samples in the batches of ``bucketed(itself, …)``."""
    return list(bucketed(itself, *args, collation_fn=None, **kw)(iter(items)))


def test_a_bucket_is_a_batch_once_it_is_full_and_the_rest_comes_at_the_end() -> None:
    assert listed([1, 9, 2, 5, 3, 4, 9], [3, 5], 2) == [[1, 2], [9, 5], [3, 4], [9]]
    assert listed([1, 9, 2], [3, 5], 2, partial=False) == [[1, 2]]
    source = iter([1, 1, 1])
    assert next(bucketed(itself, [], 2, collation_fn=None)(source)) == [1, 1]
    assert list(source) == [1]


def test_edges_are_the_first_keys_of_their_buckets() -> None:
    assert listed([2.9, 3, 4, 5, 6, 2], [3, 5], 9) == [[2.9, 2], [3, 4], [5, 6]]
    assert listed([2.9, 3, 6], [], 9) == [[2.9, 3, 6]]
    assert listed([2.9, 3, 6], np.array([3, 5]), 9) == [[2.9], [3], [6]]


def test_without_edges_every_key_has_a_bucket() -> None:
    sizes = [("en", 1), ("de", 2), ("en", 3), ("fr", 4), ("de", 5)]
    batches = bucketed(0, batch_size=2, collation_fn=None)(sizes)
    assert list(batches) == [[("en", 1), ("en", 3)], [("de", 2), ("de", 5)], [("fr", 4)]]


def test_every_bucket_may_have_a_size_of_its_own() -> None:
    assert listed([1, 1, 1, 9, 1, 9], [5], [3, 1]) == [[1, 1, 1], [9], [9], [1]]


def test_tokens_are_the_longest_key_times_the_samples() -> None:
    assert listed([1, 1, 4, 2, 2, 2, 1], [], max_tokens=6) == [[1, 1], [4], [2, 2, 2], [1]]
    assert listed([0.5, 1.5, 0.25], [], max_tokens=2.0) == [[0.5], [1.5], [0.25]]
    assert listed([2, 2, 2, 2], [], 2, max_tokens=6) == [[2, 2], [2, 2]]


@given(
    st.lists(st.integers(1, 40)),
    st.none() | st.lists(st.integers(0, 50), unique=True).map(sorted),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(40, 120),
)
def test_nothing_is_lost_and_every_batch_keeps_its_bounds(
    keys: list[int], edges: list[int] | None, size: int | None, tokens: int | None
) -> None:
    if size is None and tokens is None:
        size = 3
    samples = list(enumerate(keys))
    stage = bucketed(1, edges, size, tokens, collation_fn=None)
    batches = list(stage(iter(samples)))
    assert sorted(itertools.chain.from_iterable(batches)) == samples
    for batch in batches:
        assert batch == sorted(batch)  # in the order in which they came
        lengths = [length for _, length in batch]
        assert size is None or len(batch) <= size
        assert tokens is None or len(batch) * max(lengths) <= tokens
        buckets = {length if edges is None else sum(edge <= length for edge in edges) for length in lengths}
        assert len(buckets) == 1
    whole = list(bucketed(1, edges, size, tokens, collation_fn=None, partial=False)(iter(samples)))
    assert whole == batches[: len(whole)]
    if tokens is None:
        assert all(len(batch) == size for batch in whole)


def rank(data_seed: int, n: int = 4000, **kw: Any) -> list[list[int]]:
    """Return the batches of a rank, whose keys are 1 (60 %), 4 (30 %) and 9 (10 %), drawn for itself."""
    keys = random.Random(data_seed).choices([1, 4, 9], [6, 3, 1], k=n)
    return listed(keys, [3, 5], same_shape=True, **kw)


def test_all_ranks_draw_their_buckets_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"batch_size": [8, 8, 4], "shares": [6, 3, 2], "partial": False}
    shapes = [[(batch[0], len(batch)) for batch in rank(seed, **options)] for seed in (1, 2, 3)]
    common = min(map(len, shapes))
    assert common > 400
    assert shapes[0][:common] == shapes[1][:common] == shapes[2][:common]
    assert set(shapes[0]) == {(1, 8), (4, 8), (9, 4)}
    assert [batch[0] for batch in rank(1, seed=1, **options)][:100] != [key for key, _ in shapes[0]][:100]
    monkeypatch.setenv("WORKER", "1")
    monkeypatch.setenv("NUM_WORKERS", "2")
    assert [batch[0] for batch in rank(1, **options)][:100] != [key for key, _ in shapes[0]][:100]


def test_what_is_left_of_a_common_order_is_flushed_or_dropped() -> None:
    options: Any = {"batch_size": 8, "shares": [6, 3, 1]}
    flushed, dropped = rank(1, **options), rank(1, partial=False, **options)
    assert flushed[: len(dropped)] == dropped
    assert sum(map(len, flushed)) == 4000
    assert all(len({key}) == 1 and len(batch) <= 8 for batch in flushed for key in [batch[0]])


def test_more_than_may_be_held_is_an_error_that_tells_the_shares() -> None:
    with pytest.raises(ConfigError, match=r"max_held=200.*whose turn it is.*shares=\[") as caught:
        rank(1, batch_size=8, max_held=200)
    text = str(caught.value)
    shares = [float(share) for share in text[text.index("shares=[") + 8 : text.index("],")].split(",")]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.08)
    assert len(rank(1, batch_size=8, max_held=2000, shares=shares)) > 400


BAD_KEYS: dict[str, tuple[Any, str]] = {
    "none": (None, "the key None is of type NoneType.*need a number"),
    "text": ("abc", r"of type str.*len\(sample\['txt'\]\)"),
    "nan": (float("nan"), "the key is NaN"),
    "array": (np.zeros(2), "need a number"),
    "too long": (11, "11 tokens does not fit max_tokens=10"),
    "zero": (0, "0 is not above 0"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_key_without_a_bucket_goes_to_the_handler(name: str) -> None:
    value, text = BAD_KEYS[name]
    samples = [{"__key__": "a", "n": 2}, {"__key__": "b", "n": value}, {"__key__": "c", "n": 2}]
    make: Callable[..., Any] = lambda **kw: bucketed("n", [5], max_tokens=10, collation_fn=None, **kw)  # noqa: E731
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        list(make()(samples))
    assert any("bucketed: sample 'b'" in note for note in caught.value.__notes__)
    assert list(make(handler=ignore_and_continue)(samples)) == [[samples[0], samples[2]]]
    assert list(make(handler=ignore_and_stop)(samples)) == [[samples[0]]]


def test_a_field_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"no field 'length' among \['__key__', 'txt'\]"):
        list(bucketed("length", [5], 3)([{"__key__": "a", "txt": "x"}]))
    with pytest.raises(TypeError, match="unhashable"):
        listed([[1]], None, 3)


REFUSED: dict[str, tuple[type[Exception], Callable[[], Any], str]] = {
    "key": (TypeError, lambda: bucketed(2.5, [1], 2), "key=2.5.*it must be a function"),
    "no bound": (ConfigError, lambda: bucketed("n", [1]), "give batch_size .* or max_tokens"),
    "unsorted": (ConfigError, lambda: bucketed("n", [3, 1], 2), r"edges=\[3.0, 1.0\] do not ascend"),
    "twice": (ConfigError, lambda: bucketed("n", [1, 1], 2), "do not ascend"),
    "nan": (ConfigError, lambda: bucketed("n", [float("nan")], 2), "do not ascend"),
    "text": (TypeError, lambda: bucketed("n", ["a"], 2), "edges='a'.*must be a number"),
    "one edge": (TypeError, lambda: bucketed("n", 3, 2), "edges=3.*must be a list of numbers"),
    "size": (ConfigError, lambda: bucketed("n", [3], 0), "batch_size=0: it must be at least 1"),
    "sizes": (ConfigError, lambda: bucketed("n", [3], [1, 2, 3]), "3 batch sizes for 2 buckets"),
    "sizes without edges": (ConfigError, lambda: bucketed("n", None, [1]), "1 batch sizes for as many as"),
    "tokens": (ConfigError, lambda: bucketed("n", [3], max_tokens=0), "max_tokens=0: it must be above 0"),
    "collation": (TypeError, lambda: bucketed("n", [3], 2, collation_fn=3), "collation_fn=3"),
    "same_shape": (ConfigError, lambda: bucketed("n", batch_size=2, same_shape=True), "takes edges and batch_size"),
    "shares": (ConfigError, lambda: bucketed("n", [3], 2, same_shape=True, shares=[1, 0]), "give 2 numbers above 0"),
    "no order": (ConfigError, lambda: bucketed("n", [3], 2, shares=[1, 1]), "shares are for same_shape=True"),
    "fluent": (ConfigError, lambda: wds.WebDataset("x.tar").bucketed("n", [2, 1], 2), "do not ascend"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_checked_where_the_stage_is_made(name: str) -> None:
    kind, make, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        make()


def test_an_error_of_the_collation_names_the_stage() -> None:
    samples = [{"__key__": str(n), "x": np.zeros(n)} for n in (2, 3)]
    with pytest.raises(AssertionError, match="field 'x'") as caught:
        list(bucketed(lambda s: len(s["x"]), [9], 2)(samples))
    assert any("bucketed, 2 samples" in note for note in caught.value.__notes__)


def length_of(sample: dict[str, Any]) -> int:
    return len(sample["txt"])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_in_workers_of_a_loader(tmp_path: Path, method: str) -> None:
    texts = {f"{n:03}": "x" * random.Random(n).randint(1, 60) for n in range(120)}
    for shard in range(4):
        fields = {key: {"txt": text.encode()} for key, text in texts.items() if int(key) % 4 == shard}
        (tmp_path / f"{shard}.tar").write_bytes(make_shard(fields))
    dataset = wds.WebDataset(str(tmp_path / "{0..3}.tar"), shardshuffle="epoch").decode()
    dataset = dataset.bucketed(length_of, edges=[16, 32, 48], max_tokens=128)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
    seen: Counter[str] = Counter()
    for batch in loader:
        lengths = [len(text) for text in batch["txt"]]
        assert max(lengths) * len(lengths) <= 128
        assert len({length // 16 for length in lengths}) == 1
        seen.update(batch["__key__"])
    assert seen == Counter(texts.keys())
    with pytest.raises(TypeError, match="no len"):
        len(loader)
