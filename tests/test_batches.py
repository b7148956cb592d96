"""Batches and their undoing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async import batches


@given(st.integers(0, 50), st.integers(1, 12), st.booleans())
def test_lists(n: int, size: int, partial: bool) -> None:
    lists = list(batches.batched(size, collation_fn=None, partial=partial)(range(n)))
    kept = n if partial else n - n % size
    assert [x for batch in lists for x in batch] == list(range(kept))
    assert all(len(batch) == size for batch in lists[:-1])
    assert list(batches.unlisted()(lists)) == list(range(kept))


def test_a_batch_is_given_out_as_soon_as_it_is_full() -> None:
    source = iter(range(100))
    next(iter(batches.batched(10, collation_fn=None)(source)))
    assert next(source) == 10


def test_columns_of_tuples() -> None:
    rows = [(1, 2.5, True, "a", np.zeros(3, "u1")), (2, 3.5, False, "b", np.ones(3, "u1"))]
    ints, floats, bools, texts, arrays = batches.default_collation_fn(rows)
    assert (ints.dtype, floats.dtype, bools.dtype) == (np.dtype("int64"), np.dtype("float64"), np.dtype("bool"))
    assert texts == ["a", "b"]
    assert arrays.shape == (2, 3)
    assert arrays.dtype == np.uint8
    plain = batches.default_collation_fn(rows, combine_tensors=False, combine_scalars=False)
    assert plain[0] == [1, 2]
    assert isinstance(plain[4], list)


def test_columns_of_dicts_and_tensors() -> None:
    import torch

    batch = batches.default_collation_fn(
        [{"x": torch.tensor([1]), "__key__": "a"}, {"__key__": "b", "x": torch.tensor([2])}]
    )
    assert batch["x"].tolist() == [[1], [2]]
    assert batch["__key__"] == ["a", "b"]


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
    with pytest.raises(ValueError, match="got a int"):
        list(batches.unbatched()([3]))
    with pytest.raises(ValueError, match="got a dict"):
        list(batches.unlisted()([{"a": 1}]))
