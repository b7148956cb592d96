"""Expressions over the fields of a sample, such as ``json.width > 256``: a small language without side effects.

simpleeval walks the syntax tree. Only plain values can be reached from an expression: text, numbers, bytes, None, lists
and dicts. A dot is an entry of a dict and never an attribute of an object, so there is no way to Python's classes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import operator
import re
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import simpleeval

from wds_async import packages
from wds_async.errors import ConfigError, DecodingError, MissingField
from wds_async.redact import redact

__all__ = ["Expression", "fraction", "image_size", "value"]

Sample = Mapping[str, Any]

_LONGEST = 4000
_LONGEST_VALUE = 100_000
_MOST_BITS = 4096
_TEXTS = ("txt", "text", "transcript", "html", "htm")
_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
_DOCUMENTS = ("json", "jsn")


class Expression:
    """A condition or value over samples, which are dicts of bytes: ``Expression("json.width > 256")(sample)``.

    A field is named by its name, also with dots (``seg.png``). ``json`` and ``jsn`` are documents, whose entries
    follow behind a dot or in brackets, ``txt`` and its like are text, ``cls`` and its like whole numbers, all others
    are bytes.
    ``key``, ``shard`` and ``fields`` are the sample's key, the URL of its shard and the names of its fields. Functions
    are those of `FUNCTIONS`, and ``field``, ``has``, ``get``, ``width`` and ``height``, which take a field or its name.

    ConfigError for text that is no expression. A call raises MissingField for a field that the sample lacks,
    DecodingError for one that does not decode, and ConfigError where the expression does not fit the values.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tree = _parsed(text)
        self._local = threading.local()

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def __call__(self, sample: Sample) -> Any:
        evaluator = getattr(self._local, "evaluator", None)
        if evaluator is None:
            evaluator = self._local.evaluator = _Evaluator()
        fields = _Fields(sample, self.text)
        evaluator.begin(fields)
        try:
            return evaluator.eval(self.text, self._tree)
        except (MissingField, DecodingError):
            raise
        except Exception as exn:
            why = f"there is no {exn}" if isinstance(exn, KeyError) else f"{type(exn).__name__}: {exn}"
            raise ConfigError(f"{fields.where()}: the expression {self.text!r} fails: {why}") from exn


@functools.lru_cache(maxsize=256)
def _expression(text: str) -> Expression:
    return Expression(text)


def value(sample: Sample, expression: str) -> Any:
    """Return the value of ``expression`` for ``sample``: a function that jobs can name, as
    ``functools.partial(value, expression="json.width")``."""
    return _expression(expression)(sample)


def fraction(text: str | bytes, seed: int = 0) -> float:
    """Return a number in [0, 1) that depends on ``text`` and ``seed`` alone: the same on every machine."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(text)
    digest = hashlib.blake2b(data, digest_size=8, salt=seed.to_bytes(8, "big", signed=True)).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def image_size(data: bytes) -> tuple[int, int]:
    """Return width and height of an image, which its first bytes tell. ValueError for what is no image."""
    import io  # noqa: PLC0415

    image = packages.optional("PIL.Image", "the size of an image", "images")
    try:
        with image.open(io.BytesIO(data)) as opened:
            size: tuple[int, int] = opened.size
            return size
    except Exception as exn:  # Pillow raises all kinds of errors for damaged files
        raise ValueError(f"it is no image that Pillow reads ({exn})") from exn


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def _text(data: bytes | str) -> str:
    return data if isinstance(data, str) else data.decode("utf-8")


FUNCTIONS: Mapping[str, Callable[..., Any]] = types.MappingProxyType(
    {
        "len": len,
        "size": len,
        "min": min,
        "max": max,
        "abs": abs,
        "round": round,
        "int": int,
        "float": float,
        "str": str,
        "bool": bool,
        "text": _text,
        "lower": lambda text: text.lower(),
        "upper": lambda text: text.upper(),
        "matches": _matches,
        "fraction": fraction,
        "startswith": lambda text, start: text.startswith(start),
        "endswith": lambda text, end: text.endswith(end),
    }
)
"""Functions of expressions. ``matches(pattern, text)`` searches a regular expression; ``size`` is the bytes of a field;
``fraction(key)`` is in [0, 1) and always the same for a key."""


_OF_FIELDS = ("field", "has", "get", "width", "height")


class _Fields:
    """The names of an expression, looked up in one sample. Each field is decoded once."""

    def __init__(self, sample: Sample, text: str) -> None:
        self.sample, self.text = sample, text
        self._decoded: dict[str, Any] = {}

    def names(self) -> list[str]:
        return sorted(name for name in self.sample if not name.startswith("_"))

    def where(self) -> str:
        url = getattr(self.sample, "shard", None) or self.sample.get("__url__", "?")
        return f"sample {self.sample.get('__key__')!r} of {redact(str(url))}"

    def has(self, name: str) -> bool:
        return name in self.sample

    def get(self, name: str, default: Any = None) -> Any:
        return self.field(name) if name in self.sample else default

    def field(self, name: str) -> Any:
        if name in self._decoded:
            return self._decoded[name]
        if name not in self.sample:
            there = ", ".join(self.names()) or "none"
            raise MissingField(
                f"{self.where()}: no field {name!r} for the expression {self.text!r}; there are: {there}. "
                f'has("{name}") asks for it, and get("{name}", default) goes without'
            )
        self._decoded[name] = result = self._decode(name, self.sample[name])
        return result

    def _decode(self, name: str, data: Any) -> Any:
        extension = name.rpartition(".")[2].lower()
        if not isinstance(data, bytes):
            return data
        try:
            if extension in _DOCUMENTS:
                return json.loads(data)
            if extension in _TEXTS:
                return data.decode("utf-8")
            return int(data) if extension in _NUMBERS else data
        except ValueError as exn:
            raise DecodingError(f"{self.where()}: field {name!r}, {data[:40]!r}, cannot be decoded: {exn}") from exn

    def width(self, image: Any) -> int:
        return self._size(image)[0]

    def height(self, image: Any) -> int:
        return self._size(image)[1]

    def _size(self, image: Any) -> tuple[int, int]:
        return image_size(self.field(image) if isinstance(image, str) else image)

    def name(self, name: str) -> Any:
        """Return the value of a name that stands alone."""
        if name in self.sample and not name.startswith("_"):
            return self.field(name)
        if name in ("key", "__key__"):
            return self.sample.get("__key__")
        if name in ("shard", "__url__"):
            return getattr(self.sample, "shard", None) or self.sample.get("__url__")
        return self.names() if name == "fields" else self.field(name)


def _parsed(text: str) -> ast.expr:
    """Return the syntax tree of ``text``. ConfigError, with the place, for what is no expression."""
    if len(text) > _LONGEST:
        raise ConfigError(f"an expression has at most {_LONGEST:,} characters, and this one {len(text):,}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exn:
        at = f" at character {exn.offset}" if isinstance(exn, SyntaxError) and exn.offset else ""
        raise ConfigError(
            f"{text!r} is no expression{at}: {getattr(exn, 'msg', exn)}; write for example 'json.width > 256'"
        ) from None
    names = {*FUNCTIONS, *_OF_FIELDS}
    for node in ast.walk(tree):
        if not isinstance(node, _KINDS):
            raise ConfigError(
                f"{text!r}: an expression has no {type(node).__name__} (character {getattr(node, 'col_offset', 0) + 1})"
            )
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in names):
            called = ast.unparse(node.func)
            raise ConfigError(f"{text!r}: there is no function {called!r}; there are {', '.join(sorted(names))}")
    return tree


def _numbers_only(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def checked(a: Any, b: Any) -> Any:
        if not isinstance(a, int | float) or not isinstance(b, int | float):
            raise TypeError(f"not for {type(a).__name__} and {type(b).__name__}, only for numbers")
        return function(a, b)

    return checked


def _power(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and abs(b) * max(1, abs(a).bit_length()) > _MOST_BITS:
        raise ValueError(f"{a} ** {b} is too large")
    return a**b


_OPERATORS = {
    kind: function
    for kind, function in simpleeval.DEFAULT_OPERATORS.items()
    if kind not in (ast.LShift, ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor, ast.Invert)
} | {ast.Mod: _numbers_only(operator.mod), ast.Pow: _numbers_only(_power), ast.Mult: _numbers_only(operator.mul)}
_KINDS = (
    ast.Constant, ast.Name, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Subscript,
    ast.Slice, ast.Attribute, ast.List, ast.Tuple, ast.keyword, ast.boolop, ast.cmpop, ast.expr_context,
    *_OPERATORS,
)  # fmt: skip


class _Evaluator(simpleeval.EvalWithCompoundTypes):  # type: ignore[misc]
    """simpleeval's evaluator for one sample after another, with dicts' entries in place of attributes."""

    fields: _Fields

    def __init__(self) -> None:
        super().__init__(operators=_OPERATORS, functions=dict(FUNCTIONS), names={})

    def begin(self, fields: _Fields) -> None:
        """Let names be those of ``fields``."""
        self.fields = fields
        self.functions |= {name: getattr(fields, name) for name in _OF_FIELDS}

    def _eval_attribute(self, node: ast.Attribute) -> Any:
        name = ast.unparse(node)
        if isinstance(node.value, ast.Name) and self.fields.has(name):
            return self.fields.field(name)
        entries = self._eval(node.value)
        if not isinstance(entries, dict):
            raise TypeError(f"{ast.unparse(node.value)} is a {type(entries).__name__}, which has no entries")
        return entries[node.attr]

    def _eval_name(self, node: ast.Name) -> Any:
        return self.fields.name(node.id)

    def _eval_tuple(self, node: ast.Tuple) -> Any:
        return tuple(self._eval(one) for one in node.elts)
