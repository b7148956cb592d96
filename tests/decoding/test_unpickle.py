"""wds_async.decoding.unpickle: what is harmless is read back exactly, and nothing else runs."""

from __future__ import annotations

import builtins
import collections
import copyreg
import ctypes
import datetime
import decimal
import fractions
import functools
import io
import operator
import os
import pickle
import struct
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wds_async.decoding.unpickle import safe_loads
from wds_async.errors import UnsafeContent

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray | np.generic | np.dtype):
        assert repr(found) == repr(expected)
        assert pickle.dumps(found) == pickle.dumps(expected)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


PLAIN = [
    None,
    True,
    2**70,
    1.5,
    "é\0\n",
    b"\xff\0",
    b"",
    bytearray(b"ab"),
    [1, [2]],
    (1, (2, 3, 4, 5)),
    {"a": {1: 2}},
    {1, 2},
    frozenset([3]),
    slice(1, None),
    range(3, 9, 2),
    1j,
    collections.OrderedDict(b=1, a=2),
    collections.defaultdict(list, {"a": [1]}),
    collections.deque([1, 2], 3),
    collections.Counter("aab"),
    datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.UTC),
    datetime.date(2020, 1, 1),
    datetime.time(3),
    datetime.timedelta(1, 2, 3),
    decimal.Decimal("1.50"),
]
ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.arange(6.0).reshape(2, 3).T,
    np.asfortranarray(np.ones((3, 4), np.float16)),
    np.array(3.0),
    np.zeros((2, 0, 3)),
    np.array(["a", "bcd"]),
    np.array([b"a"]),
    np.array([True]),
    np.zeros(2, ">i4"),
    np.zeros(2, np.complex64),
    np.array([1, "a", None, [2]], object),
    np.array(["2020-01-01"], "M8[D]"),
    np.array([3], "m8[25us]"),
    np.array([3], "m8"),
    np.zeros(3, [("a", "f4"), ("b", "i8", (2,)), ("c", "U3")]),
    np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    np.zeros(2, np.dtype({"names": ["x"], "formats": ["<i2"], "offsets": [6], "itemsize": 16})),
    np.array([(1, [2])], [("a", "i4"), ("o", "O")]),
    np.zeros(2, [("inner", [("a", "f4"), ("b", ">u2")])]),
    np.zeros(2, "V5"),
    np.float32(1.5),
    np.int64(-3),
    np.bool_(True),
    np.str_("ab"),
    np.bytes_(b"ab"),
    np.void(b"abc"),
    np.datetime64("2020-01-01", "ns"),
    np.zeros(3, [("a", "f4")])[0],
    np.dtype("f4"),
    np.dtype([("a", "O")]),
    np.float32,
    np.bool_,
]
TENSORS = [
    torch.arange(3.0),
    torch.ones(2, 3, dtype=torch.bfloat16).t(),
    torch.arange(10)[2:5],
    torch.ones(()),
    torch.zeros(0, 4),
    torch.nn.Parameter(torch.ones(2)),
    torch.Size([1, 2]),
    torch.float32,
    torch.device("cpu"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [*PLAIN, *ARRAYS, *TENSORS], ids=lambda value: repr(value)[:40])
def test_harmless_values_come_back(value: Any, protocol: int) -> None:
    for whole in (value, {"x": [value, {"y": (value, np.arange(3), "z")}]}):
        data = pickle.dumps(whole, protocol)
        assert_same(safe_loads(data), pickle.loads(data))


_KEYS = st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.binary(max_size=3))
_VALUES = st.recursive(
    st.one_of(_KEYS, st.none(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3), st.tuples(inner)),
    max_leaves=8,
)


@given(_VALUES, st.sampled_from(PROTOCOLS))
def test_any_plain_structure_comes_back(value: Any, protocol: int) -> None:
    assert safe_loads(pickle.dumps(value, protocol)) == value


def test_one_object_stays_one_object() -> None:
    shared = np.arange(3)
    first, second = safe_loads(pickle.dumps([shared, shared]))
    assert first is second


# ---------------------------------------------------------------- attacks


class Call:
    """Pickles as a call of ``function`` with ``args``."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


def _forbidden(*args: Any, **kwargs: Any) -> None:
    raise AssertionError(f"ran with {args}")


HOSTILE: dict[str, tuple[Any, str]] = {
    "system": (Call(os.system, "touch owned"), "system"),
    "eval": (Call(eval, "open('owned', 'w')"), r"builtins\.eval"),
    "exec": (Call(exec, "open('owned', 'w')"), r"builtins\.exec"),
    "open": (Call(open, "owned", "w"), r"\.open"),
    "getattr": (Call(getattr, "", "join"), r"builtins\.getattr"),
    "import": (Call(builtins.__import__, "os"), "__import__"),
    "partial": (Call(functools.partial, len, "x"), r"functools\.partial"),
    "attrgetter": (Call(operator.attrgetter, "x"), r"operator\.attrgetter"),
    "ctypes": (Call(ctypes.CDLL, None), "ctypes"),
    "reconstructor": (Call(copyreg._reconstructor, object, object, None), "copyreg"),  # type: ignore[attr-defined]
    "namespace": (types.SimpleNamespace(a=1), r"types\.SimpleNamespace"),
    "fraction": (fractions.Fraction(1, 2), r"fractions\.Fraction"),
    "path": (Path("owned"), "pathlib"),
    "mkdir": (Call(os.mkdir, "owned"), "mkdir"),
    "numpy.load": (Call(np.load, "owned"), r"numpy.*load"),
    "numpy.memmap": (Call(np.memmap, "owned"), "memmap"),
    "numpy.fromfile": (Call(np.fromfile, "owned"), "fromfile"),
    "numpy ufunc": (Call(np.add, 1, 2), "numpy"),
    "numpy generator": (np.random.default_rng(0), "numpy"),
    "torch.load": (Call(torch.load, "owned"), "torch.*load"),
    "torch.hub": (Call(torch.hub.load, "owned", "x"), "torch.hub"),
    "torch.jit": (Call(torch.jit.load, "owned"), "torch.jit"),
    "torch module": (torch.nn.Linear(1, 1), r"torch\.nn|copyreg"),
    "class of ours": (Call(_forbidden), "_forbidden"),
    "inside an array": (np.array([Call(os.system, "touch owned")], object), "system"),
    "inside a dict": ({"a": [{"b": Call(os.system, "touch owned")}]}, "system"),
    "beside an array": ([np.arange(3), Call(os.system, "touch owned")], "system"),
    "beside a tensor": ([torch.ones(1), Call(os.system, "touch owned")], "system"),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", HOSTILE)
def test_other_classes_are_refused_by_name(
    name: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value, named = HOSTILE[name]
    with pytest.raises(UnsafeContent, match=named) as caught:
        safe_loads(pickle.dumps(value, protocol))
    assert "allow_pickle=True" in str(caught.value)
    assert "WDS_ALLOW_PICKLE=1" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def _text(value: str) -> bytes:
    raw = value.encode()
    return pickle.SHORT_BINUNICODE + bytes([len(raw)]) + raw


def _named(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + pickle.STACK_GLOBAL


def _program(*parts: bytes) -> bytes:
    return pickle.PROTO + b"\4" + b"".join(parts) + pickle.STOP


def _of(value: Any) -> bytes:
    """The instructions that push a plain value."""
    return pickle.dumps(value, 2)[2:-1]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy", "core.multiarray._reconstruct.__globals__"),
        ("numpy", "os.system"),
        ("numpy.x", "y"),
        ("numpy", "ctypeslib.load_library"),
        ("collections", "OrderedDict.fromkeys"),
        ("builtins", "str.format"),
        ("builtins", "object.__subclasses__"),
        ("torch", "os.system"),
        ("torch", "float32.__class__"),
        ("torch._utils", "sys.modules"),
        ("__builtin__", "eval"),
        ("__main__", "x"),
        ("", ""),
    ],
)
def test_dotted_names_lead_nowhere(module: str, name: str) -> None:
    with pytest.raises(UnsafeContent, match="asks for"):
        safe_loads(_program(_named(module, name)))


def test_codecs_are_latin1_only() -> None:
    good = _program(_named("_codecs", "encode"), _text("é"), _text("latin1"), pickle.TUPLE2, pickle.REDUCE)
    assert safe_loads(good) == b"\xe9"
    bad = _program(_named("_codecs", "encode"), _text("x"), _text("idna"), pickle.TUPLE2, pickle.REDUCE)
    with pytest.raises(UnsafeContent, match="idna"):
        safe_loads(bad)


@pytest.mark.parametrize(
    ("module", "name"),
    [("collections", "Counter"), ("_codecs", "encode"), ("numpy", "dtype"), ("torch._utils", "_rebuild_tensor_v2")],
)
def test_functions_cannot_be_changed(module: str, name: str) -> None:
    slots = _program(_named(module, name), _of((None, {"__defaults__": (1,)})), pickle.BUILD)
    with pytest.raises(UnsafeContent, match="changes a function"):
        safe_loads(slots)


@pytest.mark.parametrize(
    "key", [("collections", "OrderedDict"), ("datetime", "date"), ("builtins", "list"), ("decimal", "Decimal")]
)
def test_classes_cannot_be_changed(key: tuple[str, str]) -> None:
    with pytest.raises((TypeError, AttributeError, UnsafeContent)):
        safe_loads(_program(_named(*key), _of((None, {"fromkeys": 1})), pickle.BUILD))


def test_persistent_ids_are_refused() -> None:
    with pytest.raises(UnsafeContent, match="outside"):
        safe_loads(b"Px\n.")


# ---------------------------------------------------------------- numpy's and torch's own weak places


def _dtype(code: str, state: bytes | None = None) -> bytes:
    made = _named("numpy", "dtype") + _of((code, False, True)) + pickle.REDUCE
    return made if state is None else made + state + pickle.BUILD


def _tuple(*parts: bytes) -> bytes:
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


def _record(field: bytes, size: int, flags: int, offset: int = 0) -> bytes:
    fields = pickle.EMPTY_DICT + _text("a") + _tuple(field, _of(offset)) + pickle.SETITEM
    return _dtype(f"V{size}", _tuple(_of(3), _text("|"), _of(None), _of(("a",)), fields, _of(size), _of(1), _of(flags)))


def _from_buffer(dtype: bytes, raw: bytes, shape: tuple[int, ...]) -> bytes:
    arguments = _tuple(pickle.SHORT_BINBYTES + bytes([len(raw)]) + raw, dtype, _of(shape), _text("C"))
    return _named("numpy._core.numeric", "_frombuffer") + arguments + pickle.REDUCE


def _array(dtype: bytes, shape: tuple[int, ...], raw: bytes, start: bytes = b"") -> bytes:
    made = (
        _named("numpy._core.multiarray", "_reconstruct")
        + _tuple(_named("numpy", "ndarray"), start or _of((0,)), pickle.SHORT_BINBYTES + b"\1b")
        + pickle.REDUCE
    )
    return made + _tuple(_of(1), _of(shape), dtype, pickle.NEWFALSE, raw) + pickle.BUILD


def _raw(data: bytes) -> bytes:
    return pickle.SHORT_BINBYTES + bytes([len(data)]) + data


def test_the_hand_written_programs_are_right() -> None:
    """So that the refusals below are refusals of the lie, and not of a mistake in the program."""
    record = safe_loads(_program(_from_buffer(_record(_dtype("<f8"), 8, 16), struct.pack("<d", 2.5), (1,))))
    assert record["a"].tolist() == [2.5]
    assert safe_loads(_program(_array(_dtype("<f8"), (1,), _raw(struct.pack("<d", 2.5))))).tolist() == [2.5]


POINTER = b"\x41" * 8
LIES: dict[str, bytes] = {
    "objects that the flags deny": _from_buffer(_record(_dtype("O8"), 8, 0), POINTER, (1,)),
    "objects in a record's usual flags": _from_buffer(_record(_dtype("O8"), 8, 16), POINTER, (1,)),
    "objects from bytes": _from_buffer(_dtype("O8"), POINTER, (1,)),
    "objects in an honest record from bytes": _from_buffer(_record(_dtype("O8"), 8, 27), POINTER, (1,)),
    "an object array of bytes": _array(_dtype("O8"), (1,), _raw(POINTER)),
    "a field beyond the record": _from_buffer(_record(_dtype("<f8"), 8, 16, offset=4096), POINTER, (1,)),
    "a field before the record": _from_buffer(_record(_dtype("<f8"), 8, 16, offset=-8), POINTER, (1,)),
    "too few bytes": _array(_dtype("<f8"), (1000,), _raw(POINTER)),
    "a negative shape": _array(_dtype("<f8"), (-1,), _raw(POINTER)),
    "another first shape": _array(_dtype("<f8"), (1,), _raw(POINTER), start=_of((9,))),
    "a dtype made larger": _dtype("<f8", _of((3, "<", None, None, None, 4096, -1, 0))),
    "a dtype with object flags": _dtype("<f8", _of((3, "<", None, None, None, -1, -1, 63))),
    "numpy's own dtype": _named("numpy", "dtype") + _of(("f8", False, False)) + pickle.REDUCE,
    "ndarray called": _named("numpy", "ndarray") + _tuple(_of((1,)), _dtype("O8"), _raw(POINTER)) + pickle.REDUCE,
    "a scalar that is an object": _named("numpy._core.multiarray", "scalar")
    + _tuple(_dtype("O8"), _raw(POINTER))
    + pickle.REDUCE,
    "a string type of a foreign name": _dtype("object"),
    "an array that changes twice": _array(_dtype("<f8"), (1,), _raw(POINTER))
    + _tuple(_of(1), _of((0,)), _dtype("<f8"), pickle.NEWFALSE, _raw(b""))
    + pickle.BUILD,
    "a dtype that changes after its use": pickle.MARK
    + _dtype("V8")
    + pickle.MEMOIZE
    + _array(pickle.BINGET + b"\0", (1,), _raw(POINTER))
    + pickle.BINGET
    + b"\0"
    + _tuple(_of(3), _text("|"), _of(None), _of(("a",)), _of({}), _of(8), _of(1), _of(27))
    + pickle.BUILD
    + pickle.TUPLE,
    "a tensor of no storage": _named("torch._utils", "_rebuild_tensor_v2")
    + _tuple(_of(1), _of(0), _of((1,)), _of((1,)), pickle.NEWFALSE, _of({}))
    + pickle.REDUCE,
}


@pytest.mark.parametrize("name", LIES)
def test_what_numpy_would_believe_is_refused(name: str) -> None:
    with pytest.raises(UnsafeContent):
        safe_loads(_program(LIES[name]))
    assert np.dtype("f8").itemsize == 8


def test_dicts_that_show_python_something_else_are_refused() -> None:
    fields = _named("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    state = _tuple(_of(3), _text("|"), _of(None), _of(("a",)), fields, _of(8), _of(1), _of(16))
    with pytest.raises(UnsafeContent):
        safe_loads(_program(_dtype("V8", state)))


def test_a_storage_cannot_hold_a_pickle_of_its_own(tmp_path: Path) -> None:
    evil = pickle.dumps(Call(os.system, f"touch {tmp_path}/owned"), 2)
    stream = io.BytesIO()
    torch.save(Call(os.system, f"touch {tmp_path}/owned"), stream)
    for raw in (evil, stream.getvalue()):
        size = struct.pack("<I", len(raw))
        load = _named("torch.storage", "_load_from_bytes") + _tuple(pickle.BINBYTES + size + raw) + pickle.REDUCE
        with pytest.raises(pickle.UnpicklingError):
            safe_loads(_program(load))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (1000,), (1,)), (4096, (1,), (1,)), (0, (2, 2), (1, 1000)), (0, (3,), (2**60,))],
)
def test_a_tensor_stays_within_its_storage(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    tensor = torch.arange(3.0)
    _, (whole, *_) = tensor.__reduce_ex__(2)
    _, (raw,) = whole.__reduce__()
    storage = (
        _named("torch.storage", "_load_from_bytes")
        + _tuple(pickle.BINBYTES + struct.pack("<I", len(raw)) + raw)
        + pickle.REDUCE
    )
    hooks = _named("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    made = _tuple(storage, _of(offset), _of(size), _of(stride), pickle.NEWFALSE, hooks)
    with pytest.raises(UnsafeContent, match="storage of 3"):
        safe_loads(_program(_named("torch._utils", "_rebuild_tensor_v2"), made, pickle.REDUCE))


@given(st.binary(max_size=60), st.integers(0, 400), st.sampled_from([*PLAIN[10:], *ARRAYS[:6]]))
def test_damaged_pickles_only_raise(noise: bytes, position: int, value: Any) -> None:
    whole = pickle.dumps(value)
    for data in (noise, whole[:position], whole[: position % len(whole)] + noise + whole[position % len(whole) :]):
        try:
            safe_loads(data)
        except Exception as exn:
            assert not isinstance(exn, AssertionError)  # noqa: PT017
