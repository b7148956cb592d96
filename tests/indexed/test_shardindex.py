"""The index of one shard: its arrays, and the file that they are kept in."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_async.errors import ConfigError
from wds_async.indexed.shardindex import HEAD_BYTES, PackedKeys, ShardFacts, ShardIndex, facts_in

KEYS = st.lists(st.text(max_size=8) | st.sampled_from(["a/\udcff", '"crc32": "00000000"', ""]), max_size=8)


def index(count: int = 3, *, first: int = 0, version: str = 'etag "a"', keys: bool = True) -> ShardIndex:
    starts = [first + 1536 * n for n in range(count)]
    names = [f"k{n}" for n in range(count)] if keys else None
    return ShardIndex.of("s3://b/x.tar", 99_999, version, starts, [at + 1024 for at in starts], keys=names)


@given(
    st.lists(st.integers(0, 1 << 40), max_size=8, unique=True),
    st.integers(1, 1 << 34),
    KEYS,
    st.text(max_size=20),
    st.booleans(),
)
def test_a_file_gives_back_the_index(
    offsets: list[int], length: int, keys: list[str], version: str, plain: bool
) -> None:
    starts = sorted(offsets)
    known = (keys * len(starts))[: len(starts)] if keys else None
    made = ShardIndex.of(
        "https://h/x.tar", 1 << 41, version, starts, [at + length for at in starts], keys=known, plain=plain
    )
    data = made.to_bytes()
    read = ShardIndex.from_bytes(data)
    assert read.facts == made.facts == facts_in(data[:HEAD_BYTES])
    assert (read.starts.tolist(), [read.stop(i) for i in range(len(read))]) == (starts, [at + length for at in starts])
    assert (None if read.keys is None else [read.keys[i] for i in range(len(read))]) == known
    assert (read.starts.dtype, read.lengths.itemsize) == (np.int64, 8 if starts and length >= 1 << 32 else 4)
    assert read.to_bytes() == data


def test_every_damaged_byte_and_every_cut_is_noticed() -> None:
    data = index().to_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x04
        with pytest.raises(ConfigError, match=r"x\.index: no index of a shard"):
            ShardIndex.from_bytes(bytes(damaged), "x.index")
        with pytest.raises(ConfigError):
            ShardIndex.from_bytes(data[:at], "x.index")


def test_the_file_is_a_safetensors_file() -> None:
    """Eight bytes of length, a head in JSON whose ``data_offsets`` leave no gap, the arrays, aligned."""
    data = index().to_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + size])
    metadata = head.pop("__metadata__")
    assert all(isinstance(text, str) for text in metadata.values())
    assert (metadata["samples"], metadata["size"], metadata["url"]) == ("3", "99999", "s3://b/x.tar")
    places = [array["data_offsets"] for array in head.values()]
    assert [start for start, _ in places] == [0, *(stop for _, stop in places[:-1])]
    assert places[-1][1] == len(data) - 8 - size
    assert {name: array["dtype"] for name, array in head.items()} == {
        "starts": "I64", "lengths": "U32", "key_stops": "U32", "keys": "U8"
    }  # fmt: skip
    assert size % 8 == 0
    starts = head["starts"]["data_offsets"]
    assert struct.unpack("<3q", data[8 + size + starts[0] : 8 + size + starts[1]]) == (0, 1536, 3072)


def test_another_version_of_the_format_is_refused() -> None:
    data = index().to_bytes().replace(b'"wds_index": "1"', b'"wds_index": "2"')
    with pytest.raises(ConfigError, match="version '2' of the format"):
        ShardIndex.from_bytes(data)


def test_secrets_of_a_url_are_not_kept() -> None:
    made = ShardIndex.of("https://user:word@h/x.tar?X-Amz-Signature=abc", 1, "v", [0], [512])
    assert b"word" not in made.to_bytes()
    assert b"abc" not in made.to_bytes()


def test_only_what_is_certain_fits() -> None:
    facts = ShardFacts("u", 10, 'etag "a"', 1)
    assert facts.fits(10, 'etag "a"')
    assert not facts.fits(10, 'etag "b"')
    assert not facts.fits(11, 'etag "a"')
    assert not facts.fits(None, 'etag "a"')
    assert not ShardFacts("u", 10, "", 1).fits(10, "")
    file = ShardFacts("u", 10, "inode 1, 10 bytes, modified 7", 1)
    assert file.fits(10, "inode 2, 10 bytes, modified 7")  # a copy with its time of change
    assert not file.fits(10, "inode 1, 10 bytes, modified 8")


def test_keys_are_packed() -> None:
    keys = PackedKeys.of(["a", "", "ü/\udcff"])
    assert [keys[i] for i in range(len(keys))] == ["a", "", "ü/\udcff"]
    assert (len(keys.data), keys.stops.tolist()) == (5, [1, 1, 5])
