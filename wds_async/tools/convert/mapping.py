"""Examples, and the columns of other formats, as samples; and samples as those."""

from __future__ import annotations

import io
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wds_async.errors import ConfigError
from wds_async.tools.convert.tfrecord import Values

__all__ = [
    "KEY",
    "NUMBERS",
    "check_field",
    "column_bytes",
    "columns_of",
    "features_of",
    "fields_of",
    "key_of",
    "npy",
    "of_bytes",
    "stored",
]

KEY = "__key__"
NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_MAGIC = (
    (b"\xff\xd8\xff", 0, "jpg"),
    (b"\x89PNG\r\n\x1a\n", 0, "png"),
    (b"WEBP", 8, "webp"),
)


def fields_of(features: Mapping[str, Values], chosen: Mapping[str, str]) -> dict[str, bytes]:
    """Return the fields of the sample that an Example is.

    ``chosen``: the feature of each field. If it is empty, every feature with values becomes a field: under its own name
    where the Example has a feature ``__key__``, as those of `features_of`, else with a suffix that tells what it is.
    ValueError for a feature that is missing, and where two become the same field.
    """
    if chosen:
        return {name: _data(feature, *_found(features, feature)) for name, feature in chosen.items()}
    fields: dict[str, bytes] = {}
    made_by_us = KEY in features
    for feature, (kind, values) in features.items():
        if feature == KEY or not values:
            continue
        named = [(feature, _data(feature, kind, values))] if made_by_us else _named(feature, kind, values)
        for name, data in named:
            check_field(name)
            if name in fields:
                raise ValueError(f"two features become the field {name!r}: name them, as in --field jpg={feature}")
            fields[name] = data
    return fields


def check_field(name: str) -> None:
    """Raise ConfigError for a name that is no field of a tar."""
    if not name or name != name.lower() or name.startswith((".", "_")) or re.search(r"[/\\\0\n]|\.$", name):
        raise ConfigError(f"the field {name!r}: a name in lower case, as in jpg or seg.png; name others by --field")


def _found(features: Mapping[str, Values], feature: str) -> Values:
    kind, values = features.get(feature, ("", []))
    if not values:
        there = ", ".join(map(repr, features)) or "none"
        raise ValueError(f"no value of the feature {feature!r}; there are {there}")
    return kind, values


def key_of(features: Mapping[str, Values], feature: str) -> str:
    """Return the key that ``feature`` holds. ValueError where it has no single value, or one that is not UTF-8."""
    kind, values = _found(features, feature)
    if len(values) > 1 or kind == "float":
        raise ValueError(f"the key, feature {feature!r}, has {len(values):,} values of {kind}; one text or integer")
    key = _data(feature, kind, values).decode("utf-8", "replace")
    if not key or "\ufffd" in key:
        raise ValueError(f"the key, feature {feature!r}, is {values[0]!r:.80}, no text")
    return key


def _data(feature: str, kind: str, values: list[Any]) -> bytes:
    """Return a feature as the bytes of one field."""
    if len(values) == 1 and kind != "float":
        return str(values[0]).encode("ascii") if kind == "int64" else values[0]
    try:
        plain = [value.decode("utf-8") for value in values] if kind == "bytes" else values
    except UnicodeDecodeError:
        raise ValueError(f"the feature {feature!r} has {len(values):,} values of bytes that are no text") from None
    return json.dumps(plain, ensure_ascii=False).encode("utf-8")


def _named(feature: str, kind: str, values: list[Any]) -> Iterator[tuple[str, bytes]]:
    """Yield the fields of a feature, with suffixes by its values."""
    name = re.sub(r"[^\w.-]", "_", feature.lower().replace("/", ".")).strip(".") or "feature"
    if kind.startswith("."):
        yield f"{name}{kind}", _data(feature, kind, values)
    elif kind == "bytes" and not (len(values) > 1 and all(map(_is_text, values))):
        for number, value in enumerate(values):
            part = f"{name}.{number}" if len(values) > 1 else name
            yield f"{part}.{_suffix(value)}", value
    else:
        single = kind == "int64" and len(values) == 1
        yield f"{name}.{'cls' if single else 'json'}", _data(feature, kind, values)


def _suffix(value: bytes) -> str:
    return _image_suffix(value) or ("txt" if _is_text(value) else "bin")


def _image_suffix(value: bytes) -> str:
    for magic, at, suffix in _MAGIC:
        if value.startswith(magic, at) and (not at or value.startswith(b"RIFF")):
            return suffix
    return ""


def _is_text(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in value


def features_of(sample: Mapping[str, Any], fields: Iterable[str], typed: bool) -> dict[str, Values]:
    """Return the sample as features: its key, and the bytes of ``fields`` (all of them if there are none); with
    ``typed`` those that hold a class or an index as an integer. ValueError for a field that is missing or no integer.
    """
    features: dict[str, Values] = {KEY: ("bytes", [sample[KEY].encode("utf-8")])}
    for name in fields or [name for name in sample if not name.startswith("__")]:
        if name not in sample:
            raise ValueError(f"there is no field {name!r}; there are {[one for one in sample if one[:2] != '__']}")
        data = bytes(sample[name])
        is_number = typed and name.rpartition(".")[2] in NUMBERS
        features[name] = ("int64", [_integer(name, data)]) if is_number else ("bytes", [data])
    return features


def _integer(name: str, data: bytes) -> int:
    if not re.fullmatch(rb"\s*[+-]?[0-9]{1,19}\s*", data) or not -(1 << 63) <= (value := int(data)) < 1 << 63:
        raise ValueError(f"the field {name!r} holds {data[:40]!r}, no integer of 64 bits: leave --typed away")
    return value


def stored(suffix: str, data: bytes) -> Values:
    """Return the values of a column whose bytes are a field's."""
    return suffix, [data]


def of_bytes(data: bytes) -> Values:
    """Return the values of a column of bytes, of which nothing else is known."""
    return f".{_image_suffix(data) or 'bin'}", [data]


def npy(data: bytes, dtype: str, shape: Sequence[int] | None) -> bytes:
    """Return an array, of one axis where ``shape`` is None, as ``.npy``. ValueError where its bytes do not fit that."""
    if dtype == "bfloat16":
        raise ValueError("an array of bfloat16, which .npy does not have")
    kind = np.dtype(dtype).newbyteorder("<")
    axes = (len(data) // kind.itemsize,) if shape is None else tuple(shape)
    if math.prod(axes) * kind.itemsize != len(data):
        raise ValueError(f"{len(data):,} bytes for an array of {dtype} of the shape {axes}")
    made = io.BytesIO()
    np.save(made, np.frombuffer(data, kind).reshape(axes), allow_pickle=False)
    return made.getvalue()


def columns_of(
    features: Mapping[str, Values], fields: Mapping[str, str], encodings: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names and encodings of the columns for samples like ``features``, sorted.

    ``fields``: the name of a column, where it is not the field's. ``encodings``: by the extensions of fields.
    """
    made = {}
    for name, (kind, _) in features.items():
        by_name = "str" if name == KEY else encodings.get(name.rpartition(".")[2], "bytes")
        made[fields.get(name, name)] = "int" if kind == "int64" else by_name
    names = tuple(sorted(made))
    return names, tuple(made[name] for name in names)


def column_bytes(
    features: Mapping[str, Values], fields: Mapping[str, str], names: Sequence[str], encodings: Sequence[str]
) -> list[bytes]:
    """Return a sample as the bytes of the columns of `columns_of`. ValueError where it has other fields than these, and
    for text and JSON that are none."""
    there = {fields.get(name, name): values[0] for name, (_, values) in features.items()}
    if there.keys() != set(names):
        new, lacks = there.keys() - set(names), set(names) - there.keys()
        what = f"has the field {min(new)!r}, which" if new else f"lacks the field {min(lacks)!r}, which"
        raise ValueError(f"it {what} the first one {'lacks' if new else 'has'}: name those that all have (--field)")
    made = []
    for name, encoding in zip(names, encodings, strict=True):
        value = there[name]
        try:
            if encoding == "str":
                value.decode("utf-8")
            elif encoding == "json":
                json.loads(value)
        except (ValueError, RecursionError) as exn:
            raise ValueError(f"the column {name!r} is no {encoding}: {exn}") from exn
        made.append(struct.pack("<q", value) if encoding == "int" else value)
    return made
