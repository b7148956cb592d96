"""Fields to objects: the handlers that ``.decode()`` asks, and the `Decoder` that asks them.

A handler is ``f(key, data)``, called with the field's name after a dot (``".seg.png"``) and its bytes. It returns the
object, None for "not mine", or `Continue` to hand another name and other bytes to the handlers after it.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from wds_async import config, environment, packages, tenbin
from wds_async.decoding.images import IMAGE_EXTENSIONS, ImageHandler, imagehandler, imagespecs
from wds_async.decoding.media import torch_audio, torch_video
from wds_async.decoding.unpickle import TRUST_HINT, safe_loads
from wds_async.errors import DecodingError, FieldTooLarge, UnsafeContent
from wds_async.pipeline import DataPipeline
from wds_async.redact import redact
from wds_async.tar.decompress import gunzip
from wds_async.tar.group import empty_at_place_of

__all__ = [
    "IMAGE_EXTENSIONS", "Continue", "Decoder", "DecodingError", "ImageHandler", "basichandlers", "decoders",
    "default_post_handlers", "default_pre_handlers", "gzfilter", "handle_extension", "imagehandler", "imagespecs",
    "npy_loads", "pytorch_weights_only", "torch_audio", "torch_loads", "torch_video", "unpickle_loads",
]  # fmt: skip

DataHandler = Callable[[str, bytes], Any]

MAX_UNPACKED_BYTES = 2 << 30
"""The most that may come out of a compressed field: ``.gz``, ``.npz``, ``.pth``."""

pytorch_weights_only: bool | None = None
"""Assign False to let ``.pth`` fields hold any class, True to forbid it, here or as ``wds.pytorch_weights_only`` (which
goes first); None is what ``WDS_PYTORCH_WEIGHTS_ONLY`` says (1 unless set)."""


@functools.lru_cache(maxsize=8)
def _settings_for(*texts: str | bool | None) -> config.Settings:
    return config.settings()


def _settings() -> config.Settings:
    """Return the environment's rules for pickles, as they are now; parsed only when one of their texts has changed."""
    names = ("WDS_SECURE", "WDS_ALLOW_PICKLE", "WDS_PYTORCH_WEIGHTS_ONLY")
    return _settings_for(config.security_enforced(), *[environment.variable(name) for name in names])


def _weights_only() -> bool:
    # A package cannot notice that a name of its own is assigned to, so what the program put there is looked up.
    assigned = vars(packages.loaded("wds_async")).get("pytorch_weights_only")
    assigned = pytorch_weights_only if assigned is None else assigned
    return _settings().weights_only if assigned is None else bool(assigned)


def unpickle_loads(data: bytes, allow_pickle: bool = False) -> Any:
    """Return the object in a pickle. Only harmless classes are built, unless ``allow_pickle`` or
    ``WDS_ALLOW_PICKLE=1``.

    Raises `UnsafeContent` for another class, and for every pickle under ``WDS_SECURE=1``.
    """
    rules = _settings()
    if rules.secure:
        raise UnsafeContent("Unpickling is not allowed for security reasons when enforce_security is set.")
    return pickle.loads(data) if allow_pickle or rules.allow_pickle else safe_loads(data)


def torch_loads(data: bytes, allow_pickle: bool = False) -> Any:
    """Return what ``torch.save`` wrote, on the CPU. Only tensors and plain containers are loaded, unless
    ``allow_pickle``, ``WDS_ALLOW_PICKLE=1``, ``WDS_PYTORCH_WEIGHTS_ONLY=0`` or `pytorch_weights_only` allows more.

    Raises `UnsafeContent` for another class, and for everything under ``WDS_SECURE=1``; `FieldTooLarge` for a file that
    was compressed and holds more than `MAX_UNPACKED_BYTES`.
    """
    rules = _settings()
    if rules.secure:
        raise UnsafeContent("torch.loads is not allowed for security reasons when enforce_security is set.")
    if data[:4] == b"PK\3\4":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_unpacked(archive)
    restricted = _weights_only() and not (allow_pickle or rules.allow_pickle)
    torch = packages.optional("torch", "decoding this field", "torch")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=restricted)
    except pickle.UnpicklingError as exn:
        named = re.search(r"GLOBAL ([\w.]+)", str(exn))
        if not restricted or named is None:
            raise
        raise UnsafeContent(f"this file asks for {named[1]}, which could run code; {TRUST_HINT}") from exn


def _trusted(allow_pickle: bool) -> bool:
    rules = _settings()
    return (allow_pickle or rules.allow_pickle) and not rules.secure


def npy_loads(data: bytes, allow_pickle: bool = False) -> Any:
    """Return the array in a ``.npy``. Arrays of objects hold a pickle: ValueError, unless ``allow_pickle`` or
    ``WDS_ALLOW_PICKLE=1``.
    """
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=_trusted(allow_pickle))


def _npz_loads(data: bytes, allow_pickle: bool = False) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=_trusted(allow_pickle)) as arrays:
        if isinstance(arrays.zip, zipfile.ZipFile):
            _check_unpacked(arrays.zip)
        return dict(arrays)


def _check_unpacked(archive: zipfile.ZipFile) -> None:
    """Raise FieldTooLarge where ``archive`` holds more than may come out. Unpacking takes no more than its directory
    says."""
    size = sum(info.file_size for info in archive.infolist())
    if size > MAX_UNPACKED_BYTES:
        raise FieldTooLarge(f"{size} bytes are packed in this field, more than the {MAX_UNPACKED_BYTES} that may be")


def _packed_loads(package: str, function: str, data: bytes) -> Any:
    return getattr(packages.optional(package, "decoding this field", "formats"), function)(data)


decoders: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "id", "index", "inx"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("pkl", "pickle", "pyd"), unpickle_loads),
    **dict.fromkeys(("ten", "tb"), tenbin.decode_buffer),
    **dict.fromkeys(("mp", "msg"), functools.partial(_packed_loads, "msgpack", "unpackb")),
    "cbor": functools.partial(_packed_loads, "cbor2", "loads"),
    "npy": npy_loads,
    "npz": _npz_loads,
    "pth": torch_loads,
}
"""Decoders by last extension (case counts), which `basichandlers` looks up at each field: edit it to change them."""

_TAKES_TRUST: tuple[Callable[..., Any], ...] = (unpickle_loads, torch_loads, npy_loads, _npz_loads)


@dataclass
class Continue:
    """A handler's "not finished": go on with ``data`` under the name ``key``, as `gzfilter` does."""

    key: str
    data: Any


def gzfilter(key: str, data: bytes) -> Continue | None:
    """Decompress ``x.gz``, for the other handlers to decode as ``x``."""
    return Continue(key[:-3], gunzip(data, MAX_UNPACKED_BYTES)) if key.endswith(".gz") else None


def basichandlers(key: str, data: bytes) -> Any:
    """Decode by last extension, with the function that `decoders` holds for it; None without one."""
    decode = decoders.get(key.rpartition(".")[2])
    return None if decode is None else decode(data)


def _trusting_basichandlers(key: str, data: bytes) -> Any:
    """Return `basichandlers` for data that may hold any class."""
    decode = decoders.get(key.rpartition(".")[2])
    if decode in _TAKES_TRUST:
        return decode(data, allow_pickle=True)  # type: ignore[call-arg]
    return None if decode is None else decode(data)


def _by_extension(suffixes: tuple[str, ...], f: Callable[[bytes], Any], key: str, data: bytes) -> Any:
    return f(data) if f".{key.lower()}".endswith(suffixes) else None


def handle_extension(extensions: str, f: Callable[[bytes], Any]) -> DataHandler:
    """Return a handler that applies ``f(data)`` to fields ending in one of ``extensions``, separated by blanks.

    An extension may have several parts (``"seg.jpg"``); whole parts are compared, and case does not count.
    """
    return functools.partial(_by_extension, tuple(f".{extension}" for extension in extensions.lower().split()), f)


default_pre_handlers: list[DataHandler] = [gzfilter]
default_post_handlers: list[DataHandler] = [basichandlers]


class Decoder:
    """Decodes every field of a sample with the first handler that knows it; others stay bytes.

    The handlers of ``pre`` (decompression unless given) come first, then ``handlers``, then ``post``
    (`basichandlers` unless given). ``only`` names the fields to decode, as a list or separated by blanks; the rest is
    passed on. A field that is not bytes is an error, unless ``partial`` passes it on; one that is None always is.
    Fields ``__x`` become str.
    ``allow_pickle`` decodes pickles of any class, which runs code from the data: for data that you trust.

    As in WebDataset of 2020, the handlers may be arguments of their own, ``Decoder(f, g, torch_video)``, and the
    decoder may be called with a dataset; today that is ``dataset.decode(f, g, torch_video)``.

    Raises `DecodingError` with ``url``, ``key``, ``field`` and the cause for a field that fails.
    """

    def __init__(
        self,
        handlers: Iterable[DataHandler] | DataHandler,
        pre: Iterable[DataHandler] | DataHandler | None = None,
        post: Iterable[DataHandler] | DataHandler | None = None,
        only: str | Iterable[str] | DataHandler | None = None,
        partial: bool | DataHandler = False,
        *more: DataHandler,
        allow_pickle: bool = False,
    ) -> None:
        options: list[Any] = [pre, post, only, partial]
        if callable(handlers):
            handlers = [f for f in (handlers, *options, *more) if callable(f)]
            options = [None if callable(option) else option for option in options]
        elif more:
            raise TypeError(f"a Decoder with a list of handlers takes no further ones: {more!r}")
        before, after, names, partly = options
        chosen = [
            *(default_pre_handlers if before is None else before),
            *handlers,
            *(default_post_handlers if after is None else after),
        ]
        for handler in chosen:
            if not callable(handler):
                raise TypeError(f"a decoding handler is a function f(key, data), not {handler!r}")
        if allow_pickle:
            chosen = [_trusting_basichandlers if handler is basichandlers else handler for handler in chosen]
        self.handlers: list[DataHandler] = chosen
        self.only = None if names is None else frozenset(names.split() if isinstance(names, str) else names)
        self.partial = bool(partly)

    @property
    def draws(self) -> bool:
        """True if a handler cuts images at random: `decode` takes a number then, from which its result follows."""
        return any(isinstance(handler, ImageHandler) and handler.draws for handler in self.handlers)

    def decode1(self, key: str, data: Any, number: int | None = None) -> Any:
        """Return the object in one field called ``key``, or ``data`` itself if no handler knows it.

        ``number`` decides on random crops; None draws one from the global ``random``.
        """
        key = f".{key}"
        for handler in self.handlers:
            if number is not None and isinstance(handler, ImageHandler):
                result = handler(key, data, number)
            else:
                result = handler(key, data)
            if result is None:
                continue
            if not isinstance(result, Continue):
                return result
            key, data = result.key, result.data
        return data

    def decode(self, sample: dict[str, Any], number: int | None = None) -> dict[str, Any]:
        """Return a new sample with the fields decoded; ``number`` as in `decode1`. TypeError for what is not a dict."""
        if not isinstance(sample, dict):
            kind = type(sample).__name__
            raise TypeError(f"decode takes samples that are dicts, not a {kind}: put it before to_tuple and batched")
        result = empty_at_place_of(sample)
        only, partial = self.only, self.partial
        for field, value in sample.items():
            if field.startswith("__"):
                result[field] = _str_if_utf8(value) if isinstance(value, bytes) else value
            elif only is not None and field not in only:
                result[field] = value
            elif isinstance(value, bytes):
                try:
                    result[field] = self.decode1(field, value, number)
                except Exception as exn:
                    raise _failure(sample, field, f"{type(exn).__name__}: {exn}") from exn
            elif partial and value is not None:
                result[field] = value
            else:
                kind = "None" if value is None else type(value).__name__
                raise _failure(sample, field, f"it is {kind} and not bytes (partial=True passes decoded fields on)")
        return result

    def __call__(self, sample: Any) -> Any:
        """Return what `decode` makes of a sample. For anything else that can be iterated, return the dataset of its
        decoded samples (deprecated): a dataset with ``compose`` keeps its class.
        """
        if isinstance(sample, dict):
            return self.decode(sample)
        if not hasattr(sample, "__iter__"):
            raise TypeError(f"a Decoder takes a sample (dict) or a dataset, not {sample!r:.80}")
        warnings.warn(
            "Decoder(...)(dataset) is deprecated and removed in 1.0; use dataset.decode(...)",
            DeprecationWarning,
            stacklevel=2,
        )
        stage = functools.partial(map, self.decode)
        return sample.compose(stage) if isinstance(sample, DataPipeline) else DataPipeline([sample], stage)


def _str_if_utf8(value: bytes) -> str | bytes:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value


def _failure(sample: dict[str, Any], field: str, why: str) -> DecodingError:
    """Return the error of one field. It holds names only: an error that is kept must not keep a sample in memory."""
    value = sample[field]
    url, key = redact(str(sample.get("__url__", "?"))), sample.get("__key__", "?")
    what = f"{len(value)} bytes, {value[:16]!r}…" if isinstance(value, bytes) else type(value).__name__
    error = DecodingError(f"{url}: field {field!r} ({what}) of sample {key!r} cannot be decoded: {why}")
    error.__dict__.update(url=url, key=key, field=field, k=field)  # k is WebDataset's name for the field
    return error.at(url, getattr(sample, "offset", None))
