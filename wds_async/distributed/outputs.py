"""Outputs of a task: tars under deterministic names, each whole or not there, with size and CRC-32C."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from wds_async.arguments import check_size
from wds_async.distributed.folder import output_folder
from wds_async.distributed.tasks import Output
from wds_async.errors import ConfigError
from wds_async.redact import redact
from wds_async.storage.checksums import digest_of
from wds_async.storage.options import StorageOptions
from wds_async.storage.sink import Sink, open_sink
from wds_async.tar.index import DaliIndex, dali_name
from wds_async.tar.write import compression
from wds_async.writer import TarWriter

__all__ = [
    "ANY_NUMBER",
    "ANY_TEXT",
    "Shards",
    "SummedSink",
    "bytes_of",
    "check_inputs_stay",
    "check_names",
    "check_template",
    "shard_name",
    "write_object",
]

Data = bytes | bytearray | memoryview
_SUFFIXES = re.compile(r"(\.tar)?(\.(gz|bz2|xz|zst))?$|\.(tgz|tbz2|txz)$", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def bytes_of(size: float | str, argument: str = "maxsize") -> int:
    """Return a number of bytes, also of text such as ``"500M"``, ``"1.5G"`` (powers of ten) or ``"16MiB"`` (of two).
    ConfigError for other text and below 1."""
    if not isinstance(size, str):
        return check_size("a job", argument, size, at_least=1)
    text = size.strip().lower().removesuffix("b")
    number = text.rstrip("kmgti")
    try:
        value = int(float(number) * _UNITS[text[len(number) :]])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{argument}={size!r}: bytes, or text such as '500M' or '16MiB'") from None
    return check_size("a job", argument, value, at_least=1)


def check_template(template: str, tasks: int, *, parts: bool = False) -> None:
    """Raise ConfigError for a template of names that cannot tell the outputs of ``tasks`` tasks apart, nor the
    ``parts`` of one, or has other fields than ``task``, ``part`` and ``name``."""
    output_folder(template)
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        names = [template.format(task=task, part=0, name=str(task)) for task in (0, 1)]
    except (KeyError, IndexError, ValueError) as exn:
        raise ConfigError(
            f"output={redact(template)!r}: it has the fields {{task}}, {{name}} and {{part}}, as in"
            f" 's3://bucket/train-{{task:06d}}-{{part:03d}}.tar' ({type(exn).__name__}: {exn})"
        ) from None
    if unknown := fields - {"task", "part", "name"}:
        known = "task, part and name (of the input)"
        raise ConfigError(f"output={redact(template)!r}: unknown fields {sorted(unknown)}; there are {known}")
    if tasks > 1 and names[0] == names[1]:
        raise ConfigError(
            f"output={redact(template)!r}: all {tasks:,} tasks would write the same file;"
            " add {task}, as in 'out/{task:06d}.tar'"
        )
    if parts and "part" not in fields:
        raise ConfigError(
            f"output={redact(template)!r}: a task may fill more than one tar; add {{part:03d}} to the name"
        )


def shard_name(url: str) -> str:
    """Return the name of a shard without folder and suffixes: ``train-000`` for ``s3://bucket/a/train-000.tar.gz``."""
    name = url.partition("?")[0].rstrip("/").rpartition("/")[2]
    return _SUFFIXES.sub("", name) or name


def check_names(template: str, urls: Iterable[str]) -> None:
    """Raise ConfigError where ``template`` has ``{name}`` and no ``{task}``, and two of ``urls`` have one name."""
    if "{name" not in template or "{task" in template:
        return
    seen: dict[str, str] = {}
    for url in urls:
        if (other := seen.setdefault(shard_name(url), url)) != url:
            raise ConfigError(
                f"{redact(other)} and {redact(url)} have the same name, so their outputs would be the same file: add "
                f"{{task}} to output={redact(template)!r}"
            )


class _Unknown(str):
    """Value of a field in a name that is not known before the job runs; it stays the same in any format."""

    def __format__(self, spec: str) -> str:
        return str(self)


ANY_NUMBER, ANY_TEXT = _Unknown("\1"), _Unknown("\2")
"""Values for `check_inputs_stay`: they stand for any number, and for any text."""
_ANY = re.compile("[\1\2]")


def check_inputs_stay(names: Iterable[str], urls: Iterable[str]) -> None:
    """Raise ConfigError where an output of ``names`` (with `ANY_NUMBER` and `ANY_TEXT`) would replace one of the inputs
    ``urls``: samples that it drops would be lost, and a job that was interrupted could not go on."""
    folders: dict[str, str] = {}
    whole: set[str] = set()
    begins: dict[str, list[tuple[str, bool]]] = {}
    for name in names:
        place = _place(name, folders)
        parts = _ANY.split(place)
        if len(parts) == 1:
            whole.add(place)
        else:
            begins.setdefault(parts[0], []).append((parts[-1], ANY_TEXT not in place))
    shortest = min(map(len, begins), default=0)
    for url in urls:
        place = _place(url, folders)
        if place in whole or any(
            place.endswith(tail) and (not number or place[cut : len(place) - len(tail)].isdigit())
            for cut in (range(shortest, len(place)) if begins else ())
            for tail, number in begins.get(place[:cut], ())
        ):
            raise ConfigError(
                f"{redact(url)} is an input, and an output would replace it: write to another folder, or to other names"
            )


def _place(url: str, folders: dict[str, str]) -> str:
    """Return a URL without its query, or an absolute path; ``folders``: links of folders that were followed before."""
    path = url.removeprefix("file://").removeprefix("file:")
    if "://" in path or path.startswith("pipe:"):
        return url.partition("?")[0]
    folder, name = os.path.split(path)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder or ".")
    return os.path.join(folders[folder], name)


class SummedSink:
    """An output that is being written: ``bytes`` and ``crc32c`` of what went through. See `sink.Sink`."""

    def __init__(self, url: str, options: StorageOptions) -> None:
        self.url = url
        self._sink: Sink = open_sink(url, options=options)
        self._digest = digest_of("crc32c")
        self._pass_on = self._sink.write
        self.bytes = 0

    def write(self, data: Data) -> int:
        """Take all of ``data``; returns its bytes."""
        self._digest.update(data)
        self.bytes += len(data)
        return self._pass_on(data)

    def commit(self, out: str, samples: int | None) -> Output:
        """Publish the object. ``out``: the folder that its name in the record is relative to."""
        self._sink.commit()
        name = self.url.removeprefix(out) if out and self.url.startswith(out) else self.url
        return Output(redact(name), self.bytes, self._digest.digest().hex(), samples)

    def abort(self) -> None:
        """Give up: nothing appears."""
        self._sink.abort()


def write_object(url: str, data: Data, out: str, options: StorageOptions, samples: int | None = None) -> Output:
    """Write a whole object and return its entry in the record."""
    sink = SummedSink(url, options)
    try:
        sink.write(data)
        return sink.commit(out, samples)
    except BaseException:
        sink.abort()
        raise


@dataclass
class Shards:
    """The tars that one task writes, one after another. The next one begins before a sample if the open one holds
    ``maxcount`` samples or ``maxsize`` bytes of fields. ``encoder``: see `writer.make_encoder`; ``index``: write DALI's
    index beside each.

    A context manager: an exception discards the open tar. Nothing is written for no samples. The same samples give the
    same bytes: every header has the time 0.
    """

    template: str
    task: int
    out: str
    maxsize: float = float("inf")
    maxcount: float = float("inf")
    encoder: Any = True
    index: bool = False
    options: StorageOptions = field(default_factory=StorageOptions)
    name: str = ""
    """Text for ``{name}``: see `shard_name`."""
    outputs: list[Output] = field(default_factory=list)
    samples: int = 0

    def __post_init__(self) -> None:
        self._tar: TarWriter | None = None
        self._sink: SummedSink | None = None
        self._index: DaliIndex | None = None
        self._part = 0

    @property
    def bytes(self) -> int:
        """Bytes of the outputs so far, those of the open one left out."""
        return sum(one.bytes for one in self.outputs)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write a sample; see `TarWriter.write` for what it raises."""
        tar = self._tar
        if tar is None or tar.count >= self.maxcount or tar.payload >= self.maxsize:
            tar = self._next()
        tar.write(sample)
        self.samples += 1

    def close(self) -> tuple[Output, ...]:
        """End the open tar, and return all outputs."""
        self._finish()
        return tuple(self.outputs)

    def discard(self) -> None:
        """Give up the open tar: it does not appear."""
        tar, self._tar = self._tar, None
        if tar is not None:
            tar.discard()
        if self._sink is not None:
            self._sink.abort()

    def _next(self) -> TarWriter:
        self._finish()
        if self._part:
            check_template(self.template, 1, parts=True)
        url = self.template.format(task=self.task, part=self._part, name=self.name)
        kind = compression(url.partition("?")[0], None)
        if kind and self.index:
            raise ConfigError(f"output={redact(self.template)!r}: an index is for plain tars, not for {kind}")
        self._part += 1
        self._sink = SummedSink(url, self.options)
        tar: Any = TarWriter(self._sink, mtime=0, compress=kind or False, encoder=self.encoder)  # type: ignore[arg-type]
        self._index = tar.gather_index() if self.index else None
        self._tar = tar
        return self._tar

    def _finish(self) -> None:
        tar, self._tar = self._tar, None
        if tar is None or self._sink is None:
            return
        try:
            tar.close()
            self.outputs.append(self._sink.commit(self.out, tar.count))
        except BaseException:
            tar.discard()
            self._sink.abort()
            raise
        if self._index is not None:
            data = self._index.text().encode("utf-8")
            self.outputs.append(write_object(dali_name(self._sink.url), data, self.out, self.options))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        (self.close if kind is None else self.discard)()
