"""An unpickler for harmless values only, whose memory is bounded by the size of the pickle.

A pickle that names numpy or torch is loaded twice: first with stand-ins that check every call and state (`_Trial`),
then with the real functions, which receive the same calls.
"""

from __future__ import annotations

import _compat_pickle
import collections
import datetime
import decimal
import functools
import io
import itertools
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from wds_async.errors import UnsafeContent

__all__ = ["TRUST_HINT", "check_memo", "of_content", "safe_loads"]

_PUT = re.compile(rb"p(\d{5,})")
# LONG_BINPUT with its index, BYTEARRAY8 with its length
_BINARY = (re.compile(rb"r(?=(.{4}))", re.DOTALL), re.compile(rb"\x96(?=(.{8}))", re.DOTALL))
TRUST_HINT = "if you trust the data: decode(..., allow_pickle=True) or WDS_ALLOW_PICKLE=1"


def check_memo(data: bytes) -> None:
    """Raise `pickle.UnpicklingError` where ``data`` puts something at an index beyond its own length, or claims a
    longer bytearray: ``PUT 1000000000`` takes ten bytes, and Python's unpickler a table of sixteen gigabytes.

    The same bytes may be part of a text or an array, so where some look like such an instruction, the instructions are
    read one by one. Frames within frames are refused: Python's unpickler reads them in another way.
    """
    size = len(data)
    matches = itertools.chain.from_iterable(sign.finditer(data) for sign in _BINARY)
    if not any(int.from_bytes(match[1], "little") > size for match in matches) and not any(
        int(match[1]) > size for match in _PUT.finditer(data)
    ):
        return
    frame_end = 0
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name in ("PUT", "LONG_BINPUT") and (argument or 0) > size:
                raise pickle.UnpicklingError(
                    f"byte {position} of this pickle of {size} bytes puts something at {argument}: it is damaged"
                )
            if opcode.name == "FRAME":
                if (position or 0) < frame_end:
                    raise ValueError(f"a frame within a frame at byte {position}")
                frame_end = (position or 0) + 9 + (argument or 0)
    except ValueError as exn:
        raise pickle.UnpicklingError(f"this pickle of {size} bytes is damaged: {exn}") from exn


def of_content(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``kind`` (bytes, bytearray), refusing to make it of a number of bytes."""

    def made(*args: Any) -> Any:
        if args and isinstance(args[0], int):
            raise UnsafeContent(f"this pickle asks for {args[0]} bytes without saying which")
        return kind(*args)

    return made


def safe_loads(data: bytes) -> Any:
    """Return the object in the pickle ``data``, built without running code from it.

    Known are None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, slice, range,
    ``collections``' OrderedDict, defaultdict, deque and Counter, ``datetime``'s classes, Decimal, numpy arrays,
    scalars and dtypes, and torch tensors (brought to the CPU), sizes, devices and dtypes.

    Raises `UnsafeContent`, which names it, for anything else; `pickle.UnpicklingError` and others for damaged data.
    """
    check_memo(data)
    try:
        return _Plain(io.BytesIO(data)).load()
    except _NeedsTrial:
        _Trial(io.BytesIO(data)).load()
        return _Final(io.BytesIO(data)).load()


class _NeedsTrial(Exception):
    """The pickle names numpy or torch."""


def _refuse(what: str) -> UnsafeContent:
    return UnsafeContent(f"this pickle {what}, which could run code or corrupt memory; {TRUST_HINT}")


class _Function:
    """A function that a pickle can call but not change: its instruction BUILD sets attributes of any object, such as
    the defaults of a function or the methods of a class."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setstate__(self, state: object) -> None:
        raise _refuse("changes a function")


def _encode(text: str, encoding: str) -> bytes:
    """Encode as pickles of protocols 0 to 2 hold bytes. Other codecs would import modules by name."""
    if encoding != "latin1":
        raise _refuse(f"uses the codec {encoding!r}")
    return text.encode("latin1")


# Types of this table are immutable ones (written in C), so that BUILD cannot change them for everybody.
_PLAIN: dict[tuple[str, str], Any] = {
    **{
        ("builtins", kind.__name__): kind
        for kind in (
            bool, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple,
        )
    },
    ("builtins", "bytearray"): _Function(of_content(bytearray)),
    ("builtins", "bytes"): _Function(of_content(bytes)),
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("collections", "Counter"): _Function(collections.Counter),
    ("datetime", "date"): datetime.date,
    ("datetime", "datetime"): datetime.datetime,
    ("datetime", "time"): datetime.time,
    ("datetime", "timedelta"): datetime.timedelta,
    ("datetime", "timezone"): datetime.timezone,
    ("decimal", "Decimal"): decimal.Decimal,
    ("_codecs", "encode"): _Function(_encode),
}  # fmt: skip


class _Plain(pickle.Unpickler):
    """Unpickler of the types in `_PLAIN`; raises `_NeedsTrial` for numpy and torch."""

    def find_class(self, module: str, name: str) -> Any:
        # Python 2's names, which protocols 0 to 2 still use.
        if (module, name) in _compat_pickle.NAME_MAPPING:
            module, name = _compat_pickle.NAME_MAPPING[module, name]
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        plain = _PLAIN.get((module, name))
        return self.other(module, name) if plain is None else plain

    def other(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("numpy", "torch"):
            raise _NeedsTrial
        raise _refuse(f"asks for {module}.{name}")

    def persistent_load(self, pid: object) -> Any:
        raise _refuse("refers to objects outside of itself")


# ------------------------------------------------------------------ the trial


class _Blank:
    """Stand-in for a value of numpy or torch: it can be stored, and nothing can be done with it."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise _refuse("changes an object of numpy or torch")


class _Storage(_Blank):
    __slots__ = ()


class _Tensor(_Blank):
    __slots__ = ()


class _Type(_Blank):
    __slots__ = ()

    def __call__(self, *args: object) -> Any:
        raise _refuse("makes an object of a numpy type as numpy does not write them")


_NDARRAY = _Type()
_CODE = re.compile(r"[|<>=]?[biufcmMOSUV]\d{0,10}|\?")


class _DType:
    """Stand-in for a dtype; ``real`` is the one that is meant."""

    __slots__ = ("_code", "_used", "real")

    def __init__(self, code: object, align: object = False, copy: object = False) -> None:
        # Without copy it would be numpy's own object for this dtype, and the state would change that.
        if type(code) is not str or not _CODE.fullmatch(code) or align not in (False, 0) or copy not in (True, 1):
            raise _refuse("makes a dtype as numpy does not write them")
        self._code = code
        self._used = False
        self.real: np.dtype[Any] = np.dtype(code)

    def take(self) -> np.dtype[Any]:
        """Return the dtype, which can change no more: an array would be read as something else."""
        self._used = True
        return self.real

    def __setstate__(self, state: object) -> None:
        real = None if self._used or type(state) is not tuple or len(state) not in (8, 9) else self._meant(state)
        if real is None:
            raise _refuse("gives a dtype a state that numpy does not write")
        self.real, self._used = real, True

    def _meant(self, state: tuple[Any, ...]) -> np.dtype[Any] | None:
        """Return the dtype that numpy itself describes by ``state``, None where there is none."""
        _, order, base, names, fields, size, _, _, *metadata = state
        # Exact types: an attribute of a subclass could show us something else than numpy's C code sees.
        if order not in ("<", ">", "|") or any(
            type(part) not in (kind, type(None)) for part, kind in ((base, tuple), (names, tuple), (fields, dict))
        ):
            return None
        try:
            if base is not None:
                base = (base[0].take(), base[1])
                candidates: list[np.dtype[Any]] = [np.dtype(base)]
            elif names is not None:
                fields = {name: (field[0].take(), *field[1:]) for name, field in fields.items()}
                candidates = _records(list(names), fields, size)
            else:
                unit = _unit(metadata) if self._code[0] in "mM" else ""
                candidates = [np.dtype(order.strip("|") + self._code.lstrip("<>|=") + unit)]
        except (ValueError, TypeError, AttributeError, LookupError):
            return None
        claimed = (state[0], order, base, names, fields, *state[5:])
        return next((d for d in candidates if d.__reduce__()[2] == claimed), None)


def _records(names: list[str], fields: dict[str, Any], size: int) -> list[np.dtype[Any]]:
    """Return the record dtypes of this layout: without and, where the offsets allow it, with C's alignment."""
    formats, offsets = [fields[name][0] for name in names], [fields[name][1] for name in names]
    layout: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
    try:
        return [np.dtype(layout), np.dtype(layout, align=True)]
    except ValueError:
        return [np.dtype(layout)]


def _unit(metadata: list[Any]) -> str:
    """Return ``"[25ns]"`` of a datetime's metadata ``({}, (b"ns", 25, 1, 1))``."""
    unit, number, divisor, _ = metadata[0][1]
    if not (type(number) is type(divisor) is int) or not re.fullmatch(rb"[A-Za-z]{1,7}", unit):
        raise ValueError("not a unit of time")
    return "" if unit == b"generic" else f"[{number}{unit.decode()}]"


def _is_shape(shape: object) -> bool:
    return type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape)


class _Array:
    """Stand-in for an array between its creation and its state, and afterwards."""

    __slots__ = ("_done",)

    def __init__(self, kind: object, shape: object, code: object) -> None:
        if kind is not _NDARRAY or shape != (0,) or code not in (b"b", "b"):
            raise _refuse("makes an array as numpy does not write them")
        self._done = False

    def __setstate__(self, state: object) -> None:
        if self._done or type(state) is not tuple or len(state) != 5:
            raise _refuse("changes an array")
        self._done = True
        _, shape, dtype, fortran, raw = state
        if type(dtype) is not _DType or not _is_shape(shape) or fortran not in (False, True):
            raise _refuse("gives an array a state that numpy does not write")
        real = dtype.take()
        expected = (list, math.prod(shape)) if real.hasobject else (bytes, math.prod(shape) * real.itemsize)
        if (type(raw), len(raw) if isinstance(raw, bytes | list) else 0) != expected:
            raise _refuse(f"gives an array of {shape} {real} the wrong number of bytes")


def _bytes_of(dtype: object) -> bool:
    return type(dtype) is _DType and not dtype.take().hasobject


def _is_buffer(buffer: object, dtype: object, shape: object, order: object, axes: object = None) -> bool:
    described = type(buffer) in (bytes, bytearray) and _bytes_of(dtype) and _is_shape(shape)
    return described and order in ("C", "F", "A", "K") and (axes is None or _is_shape(axes))


def _is_tensor(storage: object, offset: int, size: object, stride: object, *rest: Any) -> bool:
    grad, hooks, *metadata = rest
    described = type(storage) is _Storage and _is_shape((offset,)) and _is_shape(size) and _is_shape(stride)
    return described and type(grad) is bool and hooks == collections.OrderedDict() and not any(metadata)


def _is_parameter(tensor: object, grad: object, hooks: object) -> bool:
    return type(tensor) is _Tensor and type(grad) is bool and hooks == collections.OrderedDict()


def _trial(what: str, as_written: Callable[..., bool], stand_in: type[_Blank] = _Blank) -> _Function:
    def call(*args: Any) -> _Blank:
        if not as_written(*args):
            raise _refuse(f"makes {what} as numpy and torch do not write them")
        return stand_in()

    return _Function(call)


_TRIAL: dict[str, Any] = {
    "numpy.ndarray": _NDARRAY,
    "numpy.dtype": _Function(_DType),
    "numpy.multiarray._reconstruct": _Function(_Array),
    "numpy.multiarray.scalar": _trial("a scalar", lambda dtype, raw=b"": _bytes_of(dtype) and type(raw) is bytes),
    "numpy.numeric._frombuffer": _trial("an array", _is_buffer),
    "torch._utils._rebuild_tensor_v2": _trial("a tensor", _is_tensor, _Tensor),
    "torch._utils._rebuild_parameter": _trial("a parameter", _is_parameter, _Tensor),
    "torch.storage._load_from_bytes": _trial("a storage", lambda raw: type(raw) is bytes, _Storage),
    "torch.Size": _trial("a size", _is_shape),
    "torch.device": _trial("a device", lambda kind, index=0: type(kind) is str and type(index) is int),
}


def _key(module: str, name: str) -> str:
    """Return one name for what numpy 1 (``numpy.core``) and numpy 2 (``numpy._core``) name differently."""
    return f"{re.sub(r'^numpy[.]_?core[.]', 'numpy.', module)}.{name}"


class _Trial(_Plain):
    def other(self, module: str, name: str) -> Any:
        stand_in = _TRIAL.get(_key(module, name))
        if stand_in is None and _constant(module, name) is None:
            raise _refuse(f"asks for {module}.{name}")
        return _Type() if stand_in is None else stand_in


# ------------------------------------------------------------------ the real things


def _constant(module: str, name: str) -> Any:
    """Return a scalar type of numpy (``numpy.float32``) or a dtype of torch, which pickles hold by name."""
    if module == "numpy":
        return _numpy_types().get(name)
    if module == "torch":
        import torch  # noqa: PLC0415 (the data asks for it)

        value = getattr(torch, name, None)
        return value if isinstance(value, torch.dtype) else None
    return None


@functools.cache
def _numpy_types() -> dict[str, type]:
    types = {kind.__name__: kind for kind in set(np.sctypeDict.values())}
    return {**types, "bool_": np.bool_, "str_": np.str_, "bytes_": np.bytes_}


def _storage_from_bytes(raw: bytes) -> Any:
    """Load a storage, which torch's own function would unpickle without any restriction."""
    import torch  # noqa: PLC0415 (the data asks for it)

    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)


def _tensor_of(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any) -> Any:
    """Make a tensor within its storage, which torch's own function would let grow over memory that was never set."""
    import torch  # noqa: PLC0415 (the data asks for it)

    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    room = storage._untyped_storage.nbytes() // storage.dtype.itemsize
    if 0 not in size and last >= room:
        raise _refuse(f"makes a torch tensor of size {size} and stride {stride} in a storage of {room}")
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, *rest)  # type: ignore[no-untyped-call]


@functools.cache
def _real_numpy() -> dict[str, Any]:
    """Return numpy's functions as its own objects name them, wherever this version keeps them."""
    array = np.empty(0)
    return {
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
        "numpy.multiarray._reconstruct": array.__reduce__()[0],
        "numpy.multiarray.scalar": np.float32(0).__reduce__()[0],
        "numpy.numeric._frombuffer": array.__reduce_ex__(5)[0],
    }


@functools.cache
def _real_torch() -> dict[str, Any]:
    import torch  # noqa: PLC0415 (the data asks for it)

    return {
        "torch._utils._rebuild_tensor_v2": _tensor_of,
        "torch._utils._rebuild_parameter": torch._utils._rebuild_parameter,
        "torch.storage._load_from_bytes": _storage_from_bytes,
        "torch.Size": torch.Size,
        "torch.device": torch.device,
    }


class _Final(_Plain):
    """Unpickler of what the trial has passed: the same bytes make the same calls."""

    def other(self, module: str, name: str) -> Any:
        key = _key(module, name)
        if key in _TRIAL:
            return (_real_torch() if key.startswith("torch") else _real_numpy())[key]
        return _constant(module, name)
