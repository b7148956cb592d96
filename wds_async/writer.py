"""Writing samples to tars: the two writers, and the encoders that make bytes of values."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gzip
import io
import json
import logging
import os
import pickle
import tarfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import IO, Any

import numpy as np

from wds_async import packages, tenbin
from wds_async.arguments import check_size
from wds_async.errors import ConfigError, MissingExtra, WdsError
from wds_async.redact import redact
from wds_async.storage.options import StorageOptions
from wds_async.storage.sink import Sink, open_sink, publish_text
from wds_async.tar.index import DaliIndex, MemberEntry, dali_name, shard_list, shard_list_name
from wds_async.tar.write import NameRules, compressed, compression, member_header

__all__ = [
    "ShardWriter", "TarWriter", "add_handlers", "bytestr", "cbor_dumps", "default_handlers",
    "encode_based_on_extension", "encode_based_on_extension1", "imageencoder", "make_encoder", "make_handlers",
    "mp_dumps", "numpy_dumps", "numpy_npz_dumps", "tenbin_dumps", "torch_dumps",
]  # fmt: skip

Sample = Mapping[str, Any]
Encoders = dict[str, Callable[[Any], Any]]
Path = str | os.PathLike[str]

logger = logging.getLogger("wds_async")

_JOINED_BYTES = 4 << 10  # a part of at most so many is joined with its neighbours
_SMALL_BYTES = 64 << 10  # below this, joining a sample's parts costs less than handing them on one by one
_MOST_OVERHEAD = 0.3
_JUDGED_BYTES = 1 << 20  # a tar of a few samples says nothing about the share of headers
_FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)

_unfinished: weakref.WeakSet[TarWriter] = weakref.WeakSet()


def imageencoder(image: Any, format: str = "PNG", quality: int | None = None) -> bytes:
    """Return ``image`` as an image file of ``format`` (``jpg``, ``png``, ``webp``, ``ppm``, ``tiff``, …).

    ``image`` is a PIL image or an array of shape (H, W) or (H, W, 1, 3 or 4): uint8, or float in [0, 1]; one of shape
    (H, W) may have any type that Pillow and the format know (uint16 in PNG and TIFF). ``quality`` is for JPEG, WebP
    and TIFF with JPEG inside: 1 to 100. Unless given it is 100 for ``jpg``, ``JPEG`` and ``webp``, and Pillow's own
    for other spellings. Raises ValueError for other values, and MissingExtra where Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: PLC0415 (most shards are written from bytes)
    except ImportError as exn:
        raise MissingExtra('encoding images needs Pillow: pip install "wds-async[images]"') from exn
    if isinstance(image, np.ndarray):
        image = _pil_image(image)
    elif not isinstance(image, PIL.Image.Image):
        raise ValueError(f"an image is a PIL image or a numpy array, not {type(image).__name__}")
    name = {"JPG": "JPEG", "IMG": "PPM", "IMAGE": "PPM"}.get(format.upper(), format.upper())
    mode = {"PBM": "1", "PGM": "L"}.get(name)  # Pillow writes all three as PPM and tells them by the mode
    if mode is not None:
        name, image = "PPM", image.convert(mode)
    if quality is None and (name == "WEBP" or format.upper() == "JPG" or format in ("JPEG", "tiff")):
        quality = 100  # for these spellings, as in WebDataset, so that the files are the same
    stream = io.BytesIO()
    try:
        image.save(stream, format=name, **({} if quality is None else {"quality": quality}))
    except KeyError:
        raise ValueError(f"Pillow writes no images of the format {format!r}") from None
    except OSError as exn:  # the format does not hold such an image
        raise ValueError(f"an image of mode {image.mode} is not written as {format}: {exn}") from exn
    return stream.getvalue()


def _pil_image(array: Any) -> Any:
    import PIL.Image  # noqa: PLC0415 (`imageencoder` has seen that it is there)

    if array.dtype.kind == "f":
        low, high = (float(np.amin(array)), float(np.amax(array))) if array.size else (0.0, 0.0)
        if not (low > -0.001 and high < 1.001):
            raise ValueError(f"a float image has values in [0, 1], this one in [{low}, {high}]")
        array = (np.clip(array, 0.0, 1.0) * 255.0).astype(np.uint8)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4)):
        try:
            return PIL.Image.fromarray(array)
        except TypeError:
            pass
    raise ValueError(f"no image has the dtype {array.dtype} and the shape {array.shape}")


def bytestr(data: Any) -> bytes:
    """Return bytes as they are, anything else as the ASCII of its ``str``."""
    return data if isinstance(data, bytes) else str(data).encode("ascii")


def torch_dumps(data: Any) -> bytes:
    """Return what ``torch.save`` writes. Raises MissingExtra if torch, which is not imported before, is missing."""
    stream = io.BytesIO()
    packages.optional("torch", "encoding this field", "torch").save(data, stream)
    return stream.getvalue()


def numpy_dumps(data: Any) -> bytes:
    """Return the array as an ``.npy`` file. Raises ValueError for arrays of objects, which no decoder would read."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asanyarray(data), allow_pickle=False)
    return stream.getvalue()


def numpy_npz_dumps(data: dict[str, Any]) -> bytes:
    """Return a dict of arrays as a compressed ``.npz`` file. Raises ValueError for anything else."""
    if not isinstance(data, dict) or not all(isinstance(array, np.ndarray) for array in data.values()):
        raise ValueError("an npz field is a dict of numpy arrays")
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **data)
    return stream.getvalue()


def tenbin_dumps(x: Any) -> memoryview:
    """Return a list of arrays, or one array, encoded as tenbin."""
    return memoryview(tenbin.encode_buffer(x if isinstance(x, list) else [x]))


def mp_dumps(x: Any) -> bytes:
    """Return the value as MessagePack. Raises MissingExtra if ``msgpack`` is not installed."""
    return bytes(packages.optional("msgpack", "encoding this field", "formats").packb(x))


def cbor_dumps(x: Any) -> bytes:
    """Return the value as CBOR. Raises MissingExtra if ``cbor2`` is not installed."""
    return bytes(packages.optional("cbor2", "encoding this field", "formats").dumps(x))


def add_handlers(d: Encoders, keys: str | list[str], value: Callable[[Any], Any]) -> None:
    """Set the encoder ``value`` for each of ``keys`` (extensions; a list, or a string with blanks) in ``d``."""
    for key in keys.split() if isinstance(keys, str) else keys:
        d[key] = value


def make_handlers(quality: int | None = None) -> Encoders:
    """Return a new dict of the encoders by extension; ``quality`` is that of JPEG and WebP, see `imageencoder`."""
    handlers: Encoders = {}
    encoders: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("cls cls2 class count index inx id", lambda x: str(x).encode("ascii")),
        ("txt text transcript html htm", lambda x: x.encode("utf-8")),
        ("pyd pickle pkl", pickle.dumps),
        ("pth", torch_dumps),
        ("npy", numpy_dumps),
        ("npz", numpy_npz_dumps),
        ("ten tenbin tb", tenbin_dumps),
        ("json jsn", lambda x: json.dumps(x).encode("utf-8")),
        ("mp msgpack msg", mp_dumps),
        ("cbor", cbor_dumps),
        ("jpg jpeg img image", functools.partial(imageencoder, format="jpg", quality=quality)),
        ("webp", functools.partial(imageencoder, format="webp", quality=quality)),
        *((name, functools.partial(imageencoder, format=name)) for name in ("png", "pbm", "pgm", "ppm")),
        ("tiff tif", functools.partial(imageencoder, format="tiff")),
    )
    for keys, value in encoders:
        add_handlers(handlers, keys, value)
    return handlers


default_handlers: Encoders = make_handlers()
"""Encoders by extension, for ``encoder=True``. May be changed in place."""

_OURS = dict(default_handlers)


def encode_based_on_extension1(data: Any, tname: str, handlers: Encoders) -> Any:
    """Return one value, encoded by the last extension of the field's name ``tname`` with ``handlers``.

    bytes and str are stored as they are, a name that ends in ``.gz`` is compressed, and metadata (``_…``) is left to
    the writer. Raises ValueError where there is no encoder.
    """
    if tname.startswith("_"):
        return data
    extension = _extension(tname)
    if isinstance(data, str):
        data = data.encode("utf-8")
    elif not isinstance(data, bytes):
        handler = handlers.get(extension)
        if handler is None:
            raise ValueError(
                f"field {tname!r}: no encoder for {extension!r} and a {type(data).__name__}; give bytes or str, or"
                f" an encoder by TarWriter(encoder={{{extension!r}: f, …}}) or writer.add_handlers"
            )
        data = handler(data)
    return gzip.compress(data, mtime=0) if tname.endswith(".gz") else data


def encode_based_on_extension(sample: Sample, handlers: Encoders) -> dict[str, Any]:
    """Return a whole sample, each field encoded by `encode_based_on_extension1`.

    What an encoder of ours raises becomes a ValueError that names the sample and the field; what an encoder of the
    program's raises keeps its type, and a note says the same.
    """
    return {name: _encode_field(sample, name, value, handlers) for name, value in sample.items()}


def make_encoder(spec: Any, quality: int | None = None) -> Callable[[Sample], Sample]:
    """Return the function from sample to sample of bytes of the ``encoder`` argument of `TarWriter`.

    ``True`` encodes by the last extension with `default_handlers`, a dict with the encoders in it, ``False`` and
    ``None`` leave the sample as it is, and a callable is the encoder. bytes and str are stored as they are; fields
    named ``*.gz`` are compressed. ``quality`` (1 to 100) is for ``True``: our encoders of JPEG and WebP then use it.
    Raises ConfigError for anything else.
    """
    if quality is not None and (spec is not True or isinstance(quality, bool) or quality not in range(1, 101)):
        raise ConfigError(f"quality={quality!r} is from 1 to 100, and for encoder=True, not {spec!r}")
    if spec is False or spec is None:
        return lambda sample: sample
    if callable(spec):
        return spec  # type: ignore[no-any-return]
    if spec is not True and not isinstance(spec, dict):
        raise ConfigError(f"encoder={spec!r}: it is True, False, a function or a dict of functions by extension")
    handlers: Encoders = default_handlers if spec is True else spec
    if quality is not None:
        kept = {name: f for name, f in default_handlers.items() if f is not _OURS.get(name)}
        handlers = make_handlers(quality) | kept
    return lambda sample: encode_based_on_extension(sample, handlers)


def _extension(name: str) -> str:
    return name.removesuffix(".gz").rpartition(".")[2].lower()


def _encode_field(sample: Sample, name: str, value: Any, handlers: Encoders) -> Any:
    if not isinstance(name, str):
        return value  # the writer refuses it
    try:
        return encode_based_on_extension1(value, name, handlers)
    except Exception as exn:
        where = f"field {name!r} of sample {sample.get('__key__')!r}"
        used = handlers.get(_extension(name))
        if isinstance(exn, WdsError) or (used is not None and used is not _OURS.get(_extension(name))):
            exn.add_note(f"while encoding {where}")
            raise
        kind = "" if isinstance(exn, ValueError) else f"{type(exn).__name__}: "
        raise ValueError(f"{where} (a {type(value).__name__}): {kind}{exn}") from exn


class TarWriter:
    """Writes samples to one tar.

    ``fileobj`` is a path (``.gz .tgz .bz2 .xz .zst`` compress), any URL that `open_sink` writes (``pipe:command``,
    ``http://…``, ``s3://…``, ``gs://…``), ``"-"`` for standard output, or an open binary file, which stays open. A file
    or object appears under its name, complete, when the writer is closed, and not at all when the ``with`` block ends
    in an exception or the interpreter exits before `close`.

    ``user``, ``group``, ``mode`` and ``mtime`` (seconds since 1970; the time of writing unless given) stand in
    each header; with ``mtime`` the same samples give the same bytes. ``compress`` is True (gz), ``"gz"``,
    ``"bz2"``, ``"xz"``, ``"zst"``, False, or None: by suffix. ``encoder``: see `make_encoder`; ``quality`` (1 to 100;
    100 unless given) is that of the JPEG and WebP fields it encodes. With ``keep_meta`` the fields that begin with
    ``_`` are written too; they must be str. ``format`` is a format of ``tarfile`` or its name; None is
    ``USTAR_FORMAT``, with a PAX header before what that cannot hold (names of more than 100 bytes, or 255 with folders;
    fields of 8 GiB).

    ``index``: ``"dali"`` or True writes DALI's index beside the tar (``x.tar``: ``x.idx``), ``"json"`` a list of
    this one shard (``x.json``). ``storage_options`` go to `open_sink`. ``payload`` is the bytes of fields written
    so far, ``container`` those of the tar (compressed where it is), ``count`` the samples.

    Raises ConfigError for bad arguments, and what `open_sink` raises.
    """

    def __init__(
        self,
        fileobj: Path | IO[bytes],
        user: str = "bigdata",
        group: str = "bigdata",
        mode: int = 0o0444,
        compress: bool | str | None = None,
        encoder: Any = True,
        keep_meta: bool = False,
        mtime: float | None = None,
        format: int | str | None = None,
        *,
        index: bool | str | None = None,
        quality: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._sink: Sink | None = None
        self.tarstream: Any = None
        self._pid = os.getpid()
        self.user, self.group, self.mode, self.mtime = user, group, mode, mtime
        self.keep_meta = keep_meta
        self.encoder = make_encoder(encoder, quality)
        self.format: Any = getattr(tarfile, format, -1) if isinstance(format, str) else format
        if self.format is not None and self.format not in _FORMATS:
            raise ConfigError(f"format={format!r}: it is USTAR_FORMAT, GNU_FORMAT or PAX_FORMAT of tarfile")
        self.name = os.fspath(fileobj) if isinstance(fileobj, str | os.PathLike) else ""
        self.compress = compression(self.name, compress)
        self._options = StorageOptions(storage_options)
        self._dali, self._list = _index_files(index, self.name, self.compress)
        self._entries = DaliIndex() if self._dali else None
        if self.name:
            self._sink = open_sink(self.name, options=self._options)
            _unfinished.add(self)
        self.stream: Any = fileobj if self._sink is None else self._sink
        self._out = _CountedOutput(self.stream)
        self.tarstream = compressed(self._out, self.compress, mtime)
        self.rules = NameRules()
        self.count = self.payload = 0
        self._written = 0  # bytes of tar so far

    @property
    def container(self) -> int:
        """Bytes handed to the file so far, headers and padding included, compressed where the tar is."""
        return self._out.count

    def write(self, obj: Sample, mtime: float | None = None) -> int:
        """Write a sample, fields in sorted order; returns the bytes of its fields.

        ``mtime`` is this sample's own. Raises ValueError, with nothing of the sample written, where ``__key__`` is
        missing, a value does not encode to bytes, or no reader would give the sample back (see `NameRules`). After
        any other error, such as a full disk, the writer is closed and nothing appears.
        """
        if self.tarstream is None:
            raise ValueError("this TarWriter is closed")
        sample = self.encoder(obj)
        key: Any = sample.get("__key__")
        fields = [f for f in sample if f != "__key__" and (self.keep_meta or not str(f).startswith("_"))]
        names = self.rules.check(key, fields)
        if mtime is None:
            mtime = self.mtime if self.mtime is not None else time.time()
        total, parts, entries, at = 0, list[Any](), list[MemberEntry](), self._written
        for field in sorted(fields):
            data = self._bytes(key, field, sample[field])
            header, size = self._header(key, field, len(data), mtime), len(data)
            parts += (header, data, bytes(-size % tarfile.BLOCKSIZE))
            if self._entries is not None:
                entries.append(MemberEntry(f"{key}.{field}", at + len(header), size))
            at += len(header) + size + -size % tarfile.BLOCKSIZE
            total += size
        for entry in entries:
            self._entries.add(entry)  # type: ignore[union-attr]
        try:
            for part in [b"".join(parts)] if total <= _SMALL_BYTES else _joined(parts):
                self.tarstream.write(part)
        except BaseException:  # part of it may be written: what followed would be no tar
            self.discard()
            raise
        self._written = at
        self.rules.wrote(key, names)
        self.payload += total
        self.count += 1
        return total

    def gather_index(self) -> DaliIndex:
        """Return an index that the members written from here on are added to; it is not written by `close`."""
        self._entries = DaliIndex()
        return self._entries

    def _bytes(self, key: str, field: str, value: Any) -> Any:
        if field.startswith("_"):
            if not isinstance(value, str):
                raise ValueError(f"sample {key!r}: metadata is str, but {field!r} is {type(value).__name__}")
            return value.encode("utf-8")
        if isinstance(value, memoryview):
            return value.cast("B") if value.c_contiguous else value.tobytes()
        if not isinstance(value, bytes | bytearray):
            raise ValueError(f"sample {key!r}: {field!r} is {type(value).__name__} after encoding, not bytes")
        return value

    def _header(self, key: str, field: str, size: int, mtime: float) -> bytes:
        owner: dict[str, Any] = {"mode": self.mode, "user": self.user, "group": self.group}
        try:
            return member_header(f"{key}.{field}", size, mtime, **owner, format=self.format)
        except ValueError as exn:
            raise ConfigError(
                f"sample {key!r}: the header of field {field!r} cannot be written ({exn}); USTAR holds names of 100"
                " bytes, or 255 with folders, and sizes below 8 GiB: shorten the key, or leave format= away"
            ) from None

    def close(self) -> None:
        """End the tar, let it appear, and write its index. Closing twice does nothing."""
        if self.tarstream is None:
            return
        try:
            self.tarstream.write(bytes(1024 + -(self._written + 1024) % tarfile.RECORDSIZE))
            if self.tarstream is not self._out:
                self.tarstream.close()
            if self._sink is not None:
                self._sink.commit()
            elif hasattr(self.stream, "flush"):
                self.stream.flush()
        except BaseException:
            self.discard()
            raise
        self.tarstream = None
        _unfinished.discard(self)
        if self._dali and self._entries is not None:
            publish_text(dali_name(self.name), self._entries.text(), self._options)
        if self._list is not None:
            shard = {"url": self.name.rpartition("/")[2], "nsamples": self.count, "filesize": self.container}
            text = shard_list([shard], shard_list_name(self.name.replace("%", "%%"))[1])
            publish_text(self._list, text, self._options)

    def discard(self) -> None:
        """Give up: nothing appears. In an open file that was passed in, the tar just breaks off."""
        if self.tarstream is not None and self.tarstream is not self._out:
            self._out.shut = True
            with contextlib.suppress(Exception):  # what is left in the compressor is of no use
                self.tarstream.close()
        self.tarstream = None
        _unfinished.discard(self)
        if self._sink is not None:
            self._sink.abort()

    def __enter__(self) -> TarWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, exn: BaseException | None, tb: TracebackType | None) -> None:
        (self.close if kind is None else self.discard)()

    def __del__(self) -> None:
        if getattr(self, "tarstream", None) is not None and self._pid == os.getpid():
            self.close()
            warnings.warn("a TarWriter was never closed; it is now, use `with`", ResourceWarning, stacklevel=1)


def _joined(parts: Iterable[Any]) -> Iterator[Any]:
    """Yield the same bytes with all that is between large parts joined: each write costs several calls."""
    small: list[Any] = []
    for part in parts:
        if len(part) <= _JOINED_BYTES:
            small.append(part)
        else:
            yield b"".join(small)
            yield part
            small.clear()
    yield b"".join(small)


class _CountedOutput:
    """A file that counts the bytes written to it; ``shut`` lets none through any more."""

    def __init__(self, stream: Any) -> None:
        self._write = stream.write
        self.count = 0
        self.shut = False

    def write(self, data: Any) -> int:
        if not self.shut:
            self._write(data)
            self.count += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: compressors call it, and the file is flushed at the end."""


def _index_files(
    index: bool | str | None, name: str, compress: str, of_shards: bool = False
) -> tuple[bool, str | None]:
    """Return whether DALI's index is written beside ``name``, a tar or a pattern ``of_shards``, and the name of the
    JSON list of shards. ConfigError for an ``index`` that cannot be written."""
    named = of_shards and isinstance(index, str) and index.endswith(".json")
    if index not in (None, False, True, "dali", "json") and not named:
        others = "the name of a .json file, True for both" if of_shards else 'True for "dali"'
        raise ConfigError(f'index={index!r}: it is "dali", "json", {others}, or None')
    if index and not named and (name in ("", "-") or name.startswith("pipe:")):
        raise ConfigError(f"index={index!r}: an index is written beside a tar, so the tar needs a name")
    dali = index in (True, "dali")
    if dali and compress:
        raise ConfigError(f'index={index!r}: DALI seeks in plain tars only; index="json" takes {compress} too')
    if index == "json" or (index is True and of_shards):
        return dali, shard_list_name(name if of_shards else name.replace("%", "%%"))[0]
    return dali, str(index) if named else None


def _abandon() -> None:
    """Discard the tars that are open at exit: whether they are complete is not known."""
    for writer in list(_unfinished):
        if writer._pid == os.getpid():
            logger.error("%s was never closed, so it was not written; use `with` or close()", redact(writer.name))
            writer.discard()


atexit.register(_abandon)


class ShardWriter:
    """Writes samples to numbered tars.

    ``pattern`` holds one ``%d`` (``"train-%06d.tar"``, ``"s3://bucket/train-%06d.tar"``), counted from ``start_shard``.
    Before a sample is written to a shard that holds ``maxcount`` samples or ``maxsize`` bytes of fields (as encoded,
    without headers and before compression), the next shard is begun. A shard appears under its name when it is
    complete; then ``post(fname)`` is called. Nothing is made for no samples.

    ``opener(fname)`` returns the open file to write to, which is closed at the shard's end. ``verbose=0`` silences
    the log record of each shard. ``index="dali"`` writes DALI's index beside each shard (``train-000000.idx``),
    ``"json"`` at the end WebDataset's list of the shards of this run with their samples (``train.json``), another name
    that ends in ``.json`` the same there, and True both. ``kw`` are `TarWriter`'s arguments. An exception in the
    ``with`` block discards the shard that was being written and the list; the shards before it stay.

    ``fname``, ``shard`` (the next number), ``count``, ``size`` (of this shard) and ``total`` (samples of all) tell the
    state; ``payload`` and ``container`` the bytes of fields and of tars in all. Where the tars are more than 30 %
    headers and padding, that is logged once. Raises ConfigError for a bad pattern or index.
    """

    def __init__(
        self,
        pattern: Path,
        maxcount: int = 100000,
        maxsize: float = 3e9,
        post: Callable[[str], Any] | None = None,
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], Any] | None = None,
        *,
        index: bool | str | None = None,
        **kw: Any,
    ) -> None:
        self.pattern = os.fspath(pattern)
        try:
            distinct = self.pattern % 0 != self.pattern % 1
        except (TypeError, ValueError):
            distinct = False
        if not distinct:
            raise ConfigError(f"pattern={self.pattern!r}: it needs one place for the number, as in 'train-%06d.tar'")
        self.maxcount = check_size("ShardWriter", "maxcount", maxcount)
        self.maxsize = check_size("ShardWriter", "maxsize", maxsize)
        self.post, self.verbose, self.opener, self.kw = post, verbose, opener, kw
        compress = compression(self.pattern, kw.get("compress"))
        self._dali, self._list = _index_files(index, self.pattern, compress, of_shards=True)
        self._shards: list[dict[str, Any]] = []
        self.shard = check_size("ShardWriter", "start_shard", start_shard)
        self.tarstream: TarWriter | None = None
        self.fname: str | None = None
        self.total = self.count = self.size = 0
        self._done_payload = self._done_container = 0
        self._rules = NameRules()
        self._opened: Any = None
        self._closed = False
        self._warned = False

    @property
    def payload(self) -> int:
        """Bytes of fields in all shards so far."""
        return self._done_payload + (self.tarstream.payload if self.tarstream is not None else 0)

    @property
    def container(self) -> int:
        """Bytes of all tars so far, headers and padding included, compressed where they are."""
        return self._done_container + (self.tarstream.container if self.tarstream is not None else 0)

    @property
    def overhead(self) -> float:
        """The share of the tars' bytes that are no fields, 0 to 1; 0 also where compression saves more than that."""
        return max(0.0, 1.0 - self.payload / self.container) if self.container else 0.0

    def next_stream(self) -> None:
        """End the current shard and begin the next."""
        self.finish()
        self.fname = self.pattern % self.shard
        if self.verbose:
            logger.info("writing %s after %d samples", redact(self.fname), self.total)
        self.count = self.size = 0
        self._opened = self.opener(self.fname) if self.opener is not None else None
        self.tarstream = TarWriter(self.fname if self._opened is None else self._opened, **self.kw)
        self.tarstream.rules = self._rules
        self._rules.new_shard()
        if self._dali:
            self.tarstream.gather_index()
        self.shard += 1

    def write(self, obj: Sample, mtime: float | None = None) -> None:
        """Write a sample, beginning a new shard where the current one is full; see `TarWriter.write`."""
        if self._closed:
            raise ValueError("this ShardWriter is closed")
        if self.tarstream is None or self.count >= self.maxcount or self.size >= self.maxsize:
            self.next_stream()
        assert self.tarstream is not None
        size = self.tarstream.write(obj, mtime)
        self.count += 1
        self.total += 1
        self.size += size

    def finish(self) -> None:
        """End the current shard, if there is one: publish it and its index and call ``post``. An empty one is
        discarded."""
        stream, self.tarstream = self.tarstream, None
        if stream is None or self.fname is None:
            return
        try:
            if self.count or self._opened is not None:
                stream.close()
            else:
                stream.discard()
        finally:
            self._close_opened()
        if not self.count:
            return
        self._done_payload += stream.payload
        self._done_container += stream.container
        self._shards.append({"url": self.fname, "nsamples": self.count, "filesize": stream.container})
        if stream._entries is not None:
            self._write_text(dali_name(self.fname), stream._entries.text())
        if self.container >= _JUDGED_BYTES and self.overhead > _MOST_OVERHEAD and not self._warned:
            self._warned = True
            logger.warning(
                "%s: %.0f %% of these shards are tar headers and padding (%d bytes of fields a sample, and 512 to 1023"
                " for each field besides). Name them .tar.zst, or pack small fields of a sample into one (.mp, .ten).",
                redact(self.pattern),
                100 * self.overhead,
                self.payload // max(1, self.total),
            )
        if self.post is not None:
            self.post(self.fname)

    def close(self) -> None:
        """End the last shard, and write the list of shards. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self.finish()
        if self._list is not None and self._shards:
            folder = self._list.rpartition("/")[0]
            shards = [{**shard, "url": _relative(shard["url"], folder)} for shard in self._shards]
            self._write_text(self._list, shard_list(shards, shard_list_name(self.pattern)[1]))

    def _write_text(self, name: str, text: str) -> None:
        if self.opener is None:
            publish_text(name, text, self.kw.get("storage_options"))
            return
        with contextlib.closing(self.opener(name)) as file:
            file.write(text.encode("utf-8"))

    def _close_opened(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, exn: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        self._closed = True
        stream, self.tarstream = self.tarstream, None
        if stream is not None:
            stream.discard()
        self._close_opened()


def _relative(url: str, folder: str) -> str:
    """Return ``url`` as an index in ``folder`` names it: its last component where it lies there, else whole; without a
    query, which may hold a signature.
    """
    url = url.partition("?")[0] if "://" in url else url
    return url.rpartition("/")[2] if url.rpartition("/")[0] == folder else url
