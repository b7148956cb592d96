"""Batches and their undoing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import webdataset.filters as reference

from wds_async.errors import ConfigError
from wds_async.filters import batch as batches


def test_a_batch_is_given_out_as_soon_as_it_is_full() -> None:
    source = iter(range(100))
    next(iter(batches.batched(10, collation_fn=None)(source)))
    assert next(source) == 10


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_nothing_is_an_error_and_not_an_empty_epoch(size: int) -> None:
    with pytest.raises(ConfigError, match=f"batchsize={size}: it must be at least 1"):
        list(batches.batched(size)([1, 2, 3]))


def test_what_does_not_fit_names_the_field() -> None:
    with pytest.raises(AssertionError, match=r"field 1: all shapes must be equal.*\(2,\), \(3,\)"):
        batches.default_collation_fn([(1, np.zeros(2)), (1, np.zeros(3))])
    with pytest.raises(AssertionError, match="fields differ"):
        batches.default_collation_fn([{"a": 1}, {"b": 1}])
    with pytest.raises(AssertionError, match="length"):
        batches.default_collation_fn([(1,), (1, 2)])


def test_unbatched_undoes_batched() -> None:
    rows = [(i, str(i), np.full(2, i)) for i in range(7)]
    back = list(batches.unbatched()(batches.batched(3)(rows)))
    assert [(int(a), b, c.tolist()) for a, b, c in back] == [(i, str(i), [i, i]) for i in range(7)]
    dicts = [{"x": i, "k": str(i)} for i in range(7)]
    assert list(batches.unbatched()(batches.batched(3)(dicts))) == dicts
    assert list(batches.unbatched()([[[1, 2], [3, 4]]])) == [(1, 3), (2, 4)]


def test_unbatched_of_what_is_no_batch() -> None:
    with pytest.raises(ValueError, match=r"\{'a': 2, 'b': 1\}"):
        list(batches.unbatched()([{"a": [1, 2], "b": [1]}]))
    with pytest.raises(ValueError, match=r"\{0: 2, 1: 1\}"):
        list(batches.unbatched()([([1, 2], [1])]))
    with pytest.raises(ValueError, match=r"no length: \{'a': 'list', 'b': 'int'\}"):
        list(batches.unbatched()([{"a": [1], "b": 1}]))
    with pytest.raises(ValueError, match=r"\{'x': 2, 'y': 1\}"):
        list(batches.unbatched()([{"a": [1, 2], "b": {"x": [1, 2], "y": [1]}}]))
    with pytest.raises(ValueError, match="got a int"):
        list(batches.unbatched()([3]))
    with pytest.raises(ValueError, match="got a dict"):
        list(batches.unlisted()([{"a": 1}]))


# ---------------------------------------------------------------- beside webdataset


def _tensor(n: int) -> Any:
    import torch

    return torch.full((2,), float(n))


COLUMNS: dict[str, Callable[[int], Any]] = {
    "int": lambda n: n,
    "bool": lambda n: n % 2 == 0,
    "float": lambda n: n / 3,
    "int and float": lambda n: n if n % 2 else n / 3,
    "float64": np.float64,
    "float32": np.float32,
    "int64": np.int64,
    "array": lambda n: np.full((2, 3), n, "u1"),
    "array of none": lambda n: np.array(n, "f2"),
    "arrays of two types": lambda n: np.full(2, n, "f4" if n % 2 else "f8"),
    "tensor": _tensor,
    "text": str,
    "bytes": lambda n: b"%d" % n,
    "None": lambda n: None,
    "list": lambda n: [n, n],
    "ragged list": lambda n: [n] * n,
    "dict": lambda n: {"a": n},
    "dicts of other fields": lambda n: {str(n): n},
    "tuple": lambda n: (n, "x"),
}


def _described(value: Any) -> Any:
    """Type, dtype, shape and content."""
    if hasattr(value, "tolist"):
        return type(value), getattr(value, "dtype", None), getattr(value, "shape", None), value.tolist()
    if isinstance(value, dict):
        return {k: _described(v) for k, v in value.items()}
    return (type(value), [_described(v) for v in value]) if isinstance(value, (list, tuple)) else (type(value), value)


@pytest.mark.parametrize("combine", [{}, {"combine_tensors": False}, {"combine_scalars": False}])
@pytest.mark.parametrize("column", COLUMNS)
def test_batches_and_their_samples_are_webdatasets(column: str, combine: dict[str, bool]) -> None:
    make = COLUMNS[column]
    for samples in ([(make(n), n) for n in range(3)], [{"x": make(n), "n": n} for n in range(3)], [[make(1), 1]]):
        batch = batches.default_collation_fn(samples, **combine)
        theirs = reference.default_collation_fn(samples, **combine)
        assert _described(batch) == _described(theirs)
        ours = list(batches.unbatched()([batch]))
        assert _described(ours) == _described(list(reference.unbatched()([theirs])))


def test_torchs_collation() -> None:
    import torch

    samples = [{"__key__": str(n), "x": np.full(2, n), "y": {"z": n}} for n in range(5)]
    full, rest = batches.batched(3, collation_fn=torch.utils.data.default_collate)(samples)
    assert (full["x"].shape, full["y"]["z"].tolist(), rest["__key__"]) == ((3, 2), [0, 1, 2], ["3", "4"])
    back = list(batches.unbatched()([full, rest]))
    assert [(s["__key__"], s["x"].tolist(), int(s["y"]["z"])) for s in back] == [(str(n), [n, n], n) for n in range(5)]


# ---------------------------------------------------------------- trees


def _nested(n: int) -> dict[str, Any]:
    return {
        "__key__": str(n),
        "meta": {"id": n, "box": {"corner": np.full(2, n)}},
        "pair": (n, _tensor(n)),
        "tags": [n] * n,
    }


def test_trees() -> None:
    batch = batches.tree_collation_fn([_nested(n) for n in range(3)])
    assert batch["meta"]["id"].tolist() == [0, 1, 2]
    assert batch["meta"]["box"]["corner"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["pair"][0].tolist() == [0, 1, 2]
    assert batch["pair"][1].shape == (3, 2)
    assert batch["tags"] == [[], [1], [2, 2]]
    assert batches.tree_collation_fn([(1, {"a": 2}), (3, {"a": 4})])[1]["a"].tolist() == [2, 4]
    plain = batches.tree_collation_fn([{"a": {"b": 1}}] * 2, combine_scalars=False)
    assert plain == {"a": {"b": [1, 1]}}
    mixed = [{"a": {"b": 1}}, {"a": None}]
    assert batches.tree_collation_fn(mixed) == {"a": [{"b": 1}, None]}


def test_unbatched_undoes_dicts_in_dicts() -> None:
    samples = [{k: v for k, v in _nested(n).items() if k != "pair"} for n in range(5)]
    back = list(batches.unbatched()(batches.batched(2, collation_fn=batches.tree_collation_fn)(samples)))
    assert [s["meta"]["box"]["corner"].tolist() for s in back] == [[n, n] for n in range(5)]
    assert [(s["__key__"], s["meta"]["id"], s["tags"]) for s in back] == [(str(n), n, [n] * n) for n in range(5)]
    (row,) = batches.unbatched()([([1], {"a": [2]})])
    assert row == (1, {"a": 2})


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": {"b": np.zeros(2)}}, {"a": {"b": np.zeros(3)}}, r"field 'a\.b': all shapes.*\(2,\), \(3,\).*pad"),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, r"field 'a': fields differ.*\('b',\), \('c',\)"),
        ({"a": (1, 2)}, {"a": (1,)}, r"field 'a': samples of a batch differ in length: \[1, 2\]"),
        ({"a": (1, np.zeros(1))}, {"a": (1, np.zeros(2))}, r"field 'a\.1': all shapes"),
        ({"a": np.zeros(1)}, {"a": None}, r"field 'a': all shapes.*\(1,\).*NoneType"),
    ],
)
def test_what_does_not_fit_into_a_tree_names_its_path(first: Any, second: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        batches.tree_collation_fn([first, second])
