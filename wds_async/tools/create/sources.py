"""Sources of `create_shards`: folders and recipes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import stat
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from wds_async.errors import ConfigError, ShardNotFound, UnsafeContent, UrlError, WdsError
from wds_async.reading.url_files import gopen
from wds_async.redact import redact
from wds_async.storage.base import Entry, error_for
from wds_async.storage.listing.expand import folder_entries
from wds_async.storage.local import explain_os_error, version_without_inode
from wds_async.storage.options import StorageOptions
from wds_async.storage.registry import locate
from wds_async.tar.group import base_plus_ext
from wds_async.tools.create.rows import META, FieldSource, RowCounts, SourceRow, packed_key, text_field

__all__ = ["FolderSource", "RecipeSource", "RowSource", "class_names", "opened", "source_of"]

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Suffixes of the files that torchvision's ImageFolder takes for images."""

_HIDDEN = "hidden (a name with a dot in front)"
_NO_FIELD = "without an extension"
_OF_SHARD = "below a folder like __x__"
_NO_IMAGE = "no image"
_NO_CLASS = "beside the folders of classes"
_FIRST = re.compile(rb"\s+")
_LONGEST_LINE = 64 << 20


class RowSource(Protocol):
    """Protocol: a source of rows."""

    @property
    def unique(self) -> bool:
        """True if its keys are different by the way they are made."""
        ...

    def rows(self, counts: RowCounts) -> Iterator[SourceRow]:
        """Yield the rows; ``counts`` is told of what is passed over."""
        ...

    def describe(self) -> str:
        """Return how the source is understood, in words."""
        ...


def source_of(value: str, field: str, where: str, options: StorageOptions) -> FieldSource:
    """Return the field that reads the file or URL ``value``; a file with its size and version. One that is not there
    is an error when it is read."""
    try:
        path = locate(value, options=options).path
    except UrlError as exn:
        raise ConfigError(f"{where}: {exn}") from exn
    if path is None:
        return FieldSource(field, "url", value)
    path = os.path.join(os.getcwd(), path)  # the job may be gone on with from another place
    with contextlib.suppress(OSError, ValueError):  # a NUL in the name
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            version = version_without_inode(status.st_size, status.st_mtime_ns)
            return FieldSource(field, "file", path, status.st_size, version)
    return FieldSource(field, "file", path, 0)


def opened(url: str, options: StorageOptions) -> contextlib.AbstractContextManager[BinaryIO]:
    """Open a source to be read in order; ``-`` is standard input, which stays open. StorageError where it cannot be."""
    if url == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        file: BinaryIO = gopen(url, storage_options=options)
    except OSError as exn:
        if isinstance(exn, WdsError):
            raise
        fault = explain_os_error(exn)
        raise type(error_for(fault, "", 0, 1))(f"{redact(url)}: {fault.reason}. {fault.advice}") from exn
    return file


def class_names(url: str, options: StorageOptions) -> list[str]:
    """Return the names of classes in a file: a JSON list, or one a line. ConfigError for what is neither."""
    with opened(url, options) as file:
        text = file.read().decode("utf-8")
    try:
        names: Any = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
    except ValueError as exn:
        raise ConfigError(f"{redact(url)}: not valid JSON ({exn})") from exn
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
        raise ConfigError(f"{redact(url)}: names of classes, each once: a JSON list, or one a line")
    return list(names)


@dataclass
class FolderSource:
    """The files below the folder ``url``, which ends with ``/``: those that share a name up to the first dot are one
    sample. With ``imagefolder`` each image is one, and the first folder of its name is its class, of the ``classes``
    (None: all folders, sorted). ``numbered``: the key is the number of the sample."""

    url: str
    imagefolder: bool = False
    classes: Sequence[str] | None = None
    numbered: bool = False
    options: StorageOptions = StorageOptions()  # noqa: RUF009 (it never changes)
    unique = True

    def __post_init__(self) -> None:
        self._folders: list[str] = []
        self._indexes: dict[str, int] = {}

    def describe(self) -> str:
        if self.imagefolder:
            return f"{redact(self.url)} as an image folder: each image is a sample, its class is its first folder"
        return f"{redact(self.url)} as loose files: those of one name up to the first dot are a sample"

    def rows(self, counts: RowCounts) -> Iterator[SourceRow]:
        """Yield the rows, sorted by the names of files. ConfigError for two files that give one field."""
        location = locate(self.url, options=self.options)
        kind, decoded = "url" if location.path is None else "file", location.spec.percent_encoded
        folder = self.url if location.path is None else os.path.join(os.getcwd(), location.path, "")
        # Sorted on the disk: a folder of ten million files needs no more memory than one of a hundred.
        with contextlib.closing(sqlite3.connect("", isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=OFF")
            db.execute("CREATE TABLE files (key BLOB, field BLOB, name BLOB, size INTEGER, version TEXT)")
            db.execute("BEGIN")
            db.executemany("INSERT INTO files VALUES (?, ?, ?, ?, ?)", self._files(counts, decoded))
            if self.imagefolder:
                self._check_classes(db)
            for number, (key, files) in enumerate(_samples(db, redact(self.url))):
                shown = f"{self.url}{files[0][1]}"
                fields = [
                    FieldSource(field, kind, f"{folder}{name}", size, version) for field, name, size, version in files
                ]
                if self.imagefolder:
                    fields.append(text_field("cls", str(self._indexes[key.partition("/")[0]])))
                yield SourceRow(f"{number:09d}" if self.numbered else key, tuple(fields), redact(shown))

    def _files(self, counts: RowCounts, decoded: bool) -> Iterator[tuple[bytes, bytes, bytes, int | None, str]]:
        start = len(self.url)
        for entry in self._entries(counts, decoded):
            name = entry.url[start:]
            plain = urllib.parse.unquote(name) if decoded else name
            found = self._split(plain, counts)
            if found is not None:
                key, field = found
                # Of an image folder, files of one name with two extensions are two samples.
                group = f"{key}.{field}" if self.imagefolder and self.numbered else key
                yield _bytes(group), _bytes(field), _bytes(name), entry.size, entry.version

    def _entries(self, counts: RowCounts, decoded: bool) -> Iterator[Entry]:
        try:
            for entry in folder_entries(self.url, options=self.options):
                if not entry.url.endswith("/"):
                    yield entry
                elif (name := entry.url[len(self.url) : -1]).startswith("."):
                    counts.pass_over(_HIDDEN, f"{name}/")
                elif name != "_wds":
                    self._folders.append(urllib.parse.unquote(name) if decoded else name)
                    yield from folder_entries(entry.url, recursive=True, options=self.options)
        except ShardNotFound as exn:
            raise ConfigError(f"{redact(self.url)}: there is no such folder ({exn})") from exn

    def _split(self, name: str, counts: RowCounts) -> tuple[str, str] | None:
        """Return key and field of a file; None for one that is passed over."""
        parts = name.split("/")
        stem, _, extension = name.rpartition(".")
        key, field = (packed_key(stem), extension) if self.imagefolder else base_plus_ext(name)
        if any(part.startswith(".") for part in parts):
            reason = _HIDDEN
        elif META.match(name):
            reason = _OF_SHARD
        elif self.imagefolder and len(parts) == 1:
            reason = _NO_CLASS
        elif self.imagefolder and not name.lower().endswith(IMAGES):
            reason = _NO_IMAGE
        elif not key or not field:
            reason = _NO_FIELD
        else:
            return key, field.lower()
        counts.pass_over(reason, name)
        return None

    def _check_classes(self, db: sqlite3.Connection) -> None:
        """Number the classes. ConfigError for one without an image, and for a folder that is not among ``classes``."""
        held = {_text(key).partition("/")[0] for (key,) in db.execute("SELECT DISTINCT key FROM files")}
        if self.classes is None:
            if empty := sorted(set(self._folders) - held):
                raise ConfigError(
                    f"{redact(self.url)}: the folder {empty[0]!r} holds no image ({' '.join(IMAGES)}): is it a class?"
                    " Remove it, or name the classes in a file (--classes)"
                )
            self.classes = sorted(held)
        elif unknown := sorted(held - set(self.classes)):
            raise ConfigError(f"{redact(self.url)}: the folder {unknown[0]!r} is not among the names of classes")
        if not held:
            raise ConfigError(f"{redact(self.url)}: no folder holds an image; an image folder has class/name.jpg")
        self._indexes = {name: index for index, name in enumerate(self.classes)}


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


_File = tuple[str, str, "int | None", str]


def _samples(db: sqlite3.Connection, folder: str) -> Iterator[tuple[str, list[_File]]]:
    """Yield each key, in order, with field, name, size and version of its files."""
    last, files = None, list[_File]()
    for key, field, name, size, version in db.execute("SELECT * FROM files ORDER BY key, field, name"):
        file = _text(field), _text(name), size, version
        if key == last and files[-1][0] == file[0]:
            raise ConfigError(
                f"{folder}: {files[-1][1]!r} and {file[1]!r} both give the field {file[0]!r} of the sample"
                f" {_text(key)!r}: rename one"
            )
        if key != last and last is not None:
            yield _text(last), files
            files = []
        files.append(file)
        last = key
    if last is not None:
        yield _text(last), files


@dataclass
class RecipeSource:
    """A recipe: each line has the name of a member, blanks, and where its bytes come from: a path, a URL,
    ``file:PATH``, ``text:TEXT`` or, with ``allow_pipe``, ``pipe:COMMAND``. Adjacent members of one key are a sample."""

    url: str
    allow_pipe: bool = False
    options: StorageOptions = StorageOptions()  # noqa: RUF009 (it never changes)
    unique = False

    def describe(self) -> str:
        commands = ", with its commands" if self.allow_pipe else ""
        return f"{'standard input' if self.url == '-' else redact(self.url)} as a recipe{commands}"

    def rows(self, counts: RowCounts) -> Iterator[SourceRow]:
        name = "standard input" if self.url == "-" else redact(self.url)
        self._is_remote = self.url != "-" and locate(self.url, options=self.options).path is None
        key, fields, where = None, list[FieldSource](), ""
        with opened(self.url, self.options) as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
                if not line.strip():
                    continue
                here = f"{name}, line {number}"
                if len(line) >= _LONGEST_LINE:
                    raise ConfigError(f"{here}: longer than {_LONGEST_LINE:,} bytes; is this a recipe?")
                new, field = self._member(line, here)
                if new != key and key is not None:
                    yield SourceRow(key, tuple(fields), where)
                    fields = []
                where = where if new == key else here
                key = new
                fields.append(field)
        if key is not None:
            yield SourceRow(key, tuple(fields), where)

    def _member(self, line: bytes, where: str) -> tuple[str, FieldSource]:
        words = _FIRST.split(line.rstrip(b"\r\n"), maxsplit=1)
        if len(words) < 2 or not words[0]:
            raise ConfigError(
                f"{where}: {_text(line)!r:.100} is no name of a member and its source, with a tab between"
            )
        member, source = map(_text, words)
        key, field = base_plus_ext(member.removeprefix("./"))
        if not key or not field:
            raise ConfigError(f"{where}: the name {member!r} has no extension, so no reader gives it as a field")
        return key, self._source(source, field.lower(), where)

    def _source(self, source: str, field: str, where: str) -> FieldSource:
        if source.startswith("text:"):
            return text_field(field, source.removeprefix("text:"))
        if source.startswith("pipe:"):
            if not self.allow_pipe:
                raise UnsafeContent(
                    f"{where}: a command ({redact(source)}) runs only from a recipe that is a file of this machine, or"
                    " with --allow-pipe; never from a recipe that was fetched, nor with WDS_SECURE=1"
                )
            return FieldSource(field, "url", source)
        made = source_of(source.removeprefix("file:"), field, where, self.options)
        if made.kind == "file" and self._is_remote:
            raise UnsafeContent(f"{where}: a recipe that was fetched may not read a file of this machine ({source!r})")
        return made
