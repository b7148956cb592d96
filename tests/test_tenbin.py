"""tenbin goes there and back, byte for byte as webdataset writes it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from wds_async import tenbin

DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


def same(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
        assert left.shape == right.shape


@given(st.lists(arrays, max_size=4))
def test_there_and_back_in_memory_and_in_files(data: list[Any]) -> None:
    buffer = tenbin.encode_buffer(data)
    assert len(buffer) % 8 == 0
    same(tenbin.decode_buffer(buffer), data)
    same(tenbin.decode_buffer(memoryview(bytes(buffer))), data)
    stream = io.BytesIO()
    tenbin.write(stream, data)
    assert stream.getvalue() == buffer
    stream.seek(0)
    same(tenbin.read(stream), data)
    stream.seek(0)
    same(tenbin.read(stream, 1), data[:1])


def test_arrays_in_any_memory_order_and_lists_of_numbers() -> None:
    turned = np.arange(6, dtype=">i4").reshape(2, 3).T[::-1]
    found = tenbin.decode_buffer(tenbin.encode_buffer([turned, [1.5, 2.5]]))
    np.testing.assert_array_equal(found[0], turned)
    np.testing.assert_array_equal(found[1], [1.5, 2.5])


def test_infos_come_back_and_are_checked() -> None:
    data = [np.zeros(2), np.ones(1)]
    buffer = tenbin.encode_buffer(data, infos=["x", "label"])
    found, infos = tenbin.decode_buffer(buffer, infos=True)
    same(found, data)
    assert infos == ["x", "label"]
    same(tenbin.decode_buffer(buffer, infos=["x", "label"]), data)
    with pytest.raises(ValueError, match="labelled"):
        tenbin.decode_buffer(buffer, infos=["x", "other"])
    for wrong in (["only one"], ["x", "nine chars"]):
        with pytest.raises(ValueError):
            tenbin.encode_buffer(data, infos=wrong)


def test_files(tmp_path: Path) -> None:
    data = [np.arange(3.0), np.arange(4, dtype="u4")]
    tenbin.save(tmp_path / "x.ten", *data, infos=["a", "b"])
    same(tenbin.load(tmp_path / "x.ten", infos=["a", "b"]), data)
    with pytest.raises(ValueError, match="nocheck"):
        tenbin.save(str(tmp_path / "x.bin"), *data)
    tenbin.save(str(tmp_path / "x.bin"), *data, nocheck=True)
    same(tenbin.load(str(tmp_path / "x.bin"), nocheck=True), data)


def test_only_lists_are_encoded() -> None:
    with pytest.raises(ValueError, match="list"):
        tenbin.encode_buffer(np.zeros(2))  # type: ignore[arg-type]


@given(data=st.data())
def test_damage_is_a_value_error_or_other_numbers(data: st.DataObject) -> None:
    good = bytes(tenbin.encode_buffer([np.arange(20.0), np.arange(5)]))
    bad = bytearray(good[: data.draw(st.integers(0, len(good)))])
    if bad:
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(0, 255))
    for decode in (tenbin.decode_buffer, lambda buffer: tenbin.read(io.BytesIO(buffer))):
        try:
            found = decode(bytes(bad))
        except ValueError:
            continue
        assert len(found) <= 2


def test_a_cut_buffer_is_an_error() -> None:
    good = bytes(tenbin.encode_buffer([np.arange(20.0)]))
    for size in (5, 16, 40, 80, 100, 140):
        with pytest.raises(ValueError, match="tenbin"):
            tenbin.decode_buffer(good[:size])
        with pytest.raises(ValueError, match="tenbin"):
            tenbin.read(io.BytesIO(good[:size]))
