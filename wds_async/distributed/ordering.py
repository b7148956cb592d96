"""Order of the samples of a job that reshards: a key for each sample, by whose bytes all of them are sorted.

A key is the name of the split, then the value (a number drawn from the seed, a sort value, or nothing), then the side
of a join, the number of the input and the number of the sample in it. So keys are unique, none is the beginning of
another one, and the order depends on inputs and seed alone.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wds_async.errors import ConfigError

__all__ = ["TAIL_BYTES", "Ordering", "sort_bytes"]

Sample = Mapping[str, Any]
KeyFunction = Callable[[Sample, int, int], tuple[bytes, str] | None]
"""Gives the key and the split of a sample, by the numbers of its input and of the sample in it; None: it is dropped."""

_TAIL = struct.Struct(">BII")
TAIL_BYTES = _TAIL.size
"""Bytes behind the value: side, input and sample."""

_LONGEST_BYTES = 4096
_END = b"\0\0"
_COMPLEMENT = bytes(range(255, -1, -1))
_LARGEST = 1 << 63
_SPLIT = re.compile(r"[\w-][\w.-]{0,199}", re.ASCII)


def _text(value: bytes) -> bytes:
    """Return bytes that sort like ``value`` and are the beginning of no other text."""
    return value.replace(b"\0", b"\0\xff") + _END


def sort_bytes(value: Any) -> bytes:
    """Return bytes that sort as the values do: numbers before texts, texts by their UTF-8, tuples by their items.

    Raises ConfigError for NaN, for an int beyond 64 bits, for what is longer than 4,096 bytes and for other types.
    """
    if isinstance(value, str):
        result = b"\2" + _text(value.encode("utf-8", "surrogateescape"))
    elif isinstance(value, bytes):
        result = b"\2" + _text(value)
    elif isinstance(value, int | np.integer):
        result = _number(int(value))
    elif isinstance(value, float | np.floating):
        result = _number(float(value))
    elif isinstance(value, tuple | list):
        result = b"\3" + b"".join(map(sort_bytes, value)) + b"\0"
    else:
        raise ConfigError(f"a sort value is a number, a str, bytes or a tuple of these, not {value!r:.80}")
    if len(result) > _LONGEST_BYTES:
        raise ConfigError(f"a sort value takes at most {_LONGEST_BYTES:,} bytes, and {value!r:.80} {len(result):,}")
    return result


def _number(value: float) -> bytes:
    """Return a number as its nearest double, in an order of bytes, and the rest that an int leaves beside it."""
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError("a sort value is NaN, which has no order")
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise ConfigError(f"the sort value {value} has more than 64 bits")
    nearest = float(value) + 0.0  # without the sign of a zero
    rest = value - int(nearest) if isinstance(value, int) else 0
    (bits,) = struct.unpack(">Q", struct.pack(">d", nearest))
    bits = bits ^ 0xFFFFFFFFFFFFFFFF if bits >> 63 else bits | 1 << 63
    return b"\1" + struct.pack(">QH", bits, rest + (1 << 15))


@dataclass(frozen=True)
class Ordering:
    """Order of the samples: ``shuffle`` is a seed; ``sort`` is ``__key__`` or a function; without both they
    stay in the order of the inputs. ``split`` is a function that names the split of a sample. With ``join`` the samples
    of one key stand together."""

    shuffle: int | None = None
    sort: str = ""
    split: str = ""
    join: bool = False
    version: str = ""
    """Version of the functions."""
    reverse: bool = False
    """True for the largest sort value first; those that are equal stay in their order."""

    def key_function(self, resolve: Callable[[str], Callable[[Any], Any]], side: int) -> KeyFunction:
        """Return the function that gives keys; ``resolve`` imports a function by its name. ``side`` is 1, and 0 for the
        data set that is joined."""
        value_of = self._value_function(resolve)
        if self.reverse:
            value_of = _reversed(value_of)
        split_of = resolve(self.split) if self.split else None
        tail = _TAIL.pack

        def key_of(sample: Sample, number: int, index: int) -> tuple[bytes, str] | None:
            split, prefix = "", b""
            if split_of is not None:
                chosen = split_of(sample)
                if chosen is None:
                    return None
                if not isinstance(chosen, str) or _SPLIT.fullmatch(chosen) is None:
                    raise ConfigError(
                        "split gives None, or the name of a split (a str of letters, digits, '_', '-', '.', that does"
                        f" not begin with a dot), not {chosen!r:.80}"
                    )
                split, prefix = chosen, _text(chosen.encode("utf-8", "surrogateescape"))
            return prefix + value_of(sample, number, index) + tail(side, number, index), split

        return key_of

    def _value_function(self, resolve: Callable[[str], Callable[[Any], Any]]) -> Callable[[Sample, int, int], bytes]:
        if self.shuffle is not None:
            return _drawn(self.shuffle, by_key=self.join)
        if self.sort and self.sort != "__key__":
            function = resolve(self.sort)
            return lambda sample, number, index: sort_bytes(function(sample))
        if self.sort or self.join:
            return lambda sample, number, index: sort_bytes(sample["__key__"])
        return lambda sample, number, index: b""


def _reversed(value_of: Callable[[Sample, int, int], bytes]) -> Callable[[Sample, int, int], bytes]:
    """Return the function whose bytes sort the other way round."""
    return lambda sample, number, index: value_of(sample, number, index).translate(_COMPLEMENT)


def _drawn(seed: int, *, by_key: bool) -> Callable[[Sample, int, int], bytes]:
    """Return the function that draws 64 bits for each sample: by its number, or by its key, which then follows."""
    drawn = hashlib.blake2b(key=hashlib.sha256(f"reshard {seed}".encode()).digest(), digest_size=8)

    def by_number(sample: Sample, number: int, index: int) -> bytes:
        one = drawn.copy()
        one.update(b"%d %d" % (number, index))
        return one.digest()

    def by_name(sample: Sample, number: int, index: int) -> bytes:
        name, one = sample["__key__"].encode("utf-8", "surrogateescape"), drawn.copy()
        one.update(name)
        return one.digest() + _text(name)

    return by_name if by_key else by_number
