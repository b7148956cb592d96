"""Pickles that ask for gigabytes in ten bytes."""

from __future__ import annotations

import pickle
import resource

import numpy as np
import pytest

from wds_async.decoding.unpickle import check_memo, safe_loads

BOMBS = [
    b"\x80\x04Nr" + (50_000_000).to_bytes(4, "little") + b".",
    b"Np50000000\n.",
    b"\x80\x04Nr" + (50_000_000).to_bytes(4, "little"),  # and damaged behind it
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_before_it_goes_off(bomb: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(pickle.UnpicklingError, match="puts something at 50000000"):
        safe_loads(bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB; it would have been 800 MB


def test_a_bytearray_that_claims_gigabytes_is_refused() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(pickle.UnpicklingError, match="is damaged"):
        safe_loads(b"\x80\x05\x96" + (4 << 30).to_bytes(8, "little") + b"abc.")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB
    assert safe_loads(pickle.dumps([bytearray(b"\x96" + b"\xff" * 8), 1], 5)) == [bytearray(b"\x96" + b"\xff" * 8), 1]


@pytest.mark.parametrize("protocol", range(6))
def test_what_only_looks_like_one_passes(protocol: int) -> None:
    value = {
        "text": "red r\xff\xff\xff\xff p99999999 " * 9,
        "array": np.random.default_rng(0).random(999),
        "b": b"r" * 99,
    }
    data = pickle.dumps(value, protocol)
    check_memo(data)
    found = safe_loads(data)
    assert found["text"] == value["text"]
    assert (found["array"] == value["array"]).all()


def test_many_things_are_numbered() -> None:
    value = [f"string {i}" for i in range(70_000)]  # beyond what one byte counts
    assert safe_loads(pickle.dumps(value, 3)) == value


@pytest.mark.parametrize("name", ["bytearray", "bytes"])
def test_no_memory_by_the_number(name: str) -> None:
    with pytest.raises(ValueError, match="asks for 1000000000 bytes"):
        safe_loads(f"cbuiltins\n{name}\n(I1000000000\ntR.".encode())
