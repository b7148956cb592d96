"""A YAML or JSON document from a file, a URL or a program, which names the line of each of its values in errors."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_async.config import transfer_config
from wds_async.errors import ConfigError, UnsafeContent, WdsError
from wds_async.redact import redact
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.urls import local_path, scheme

__all__ = ["MAX_BYTES", "Document", "ValuePath", "read", "read_all"]

logger = logging.getLogger("wds_async")

MAX_BYTES = 256 << 20
"""The largest document that is read, in bytes: a list of two million shards."""

ValuePath = tuple[str | int, ...]
"""From the top of a document to a value: keys, and numbers in lists."""


@dataclass(frozen=True)
class Document:
    """Data, where it is from, and where in its text each piece of it stands.

    ``name``: for messages, without secrets.
    ``text``: what ``data`` was parsed from; None for a program's own dict.
    ``base``: what relative names in it are relative to, with a slash at its end; empty for the working directory.
    ``trusted``: false where it came from elsewhere than this machine.
    ``options``: for the clients of the stores that it names.
    """

    name: str
    data: Any
    text: str | None = None
    base: str = ""
    trusted: bool = True
    options: StorageOptions = NOTHING_GIVEN

    def error(self, path: ValuePath, message: str, kind: type[WdsError] = ConfigError) -> WdsError:
        """Return an error about the value at ``path``, naming its line and column."""
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
        return kind(f"{self.name}{self._place(path)}{f' ({steps})' if steps else ''}: {message}")

    def refuse_local(self, path: ValuePath, url: str) -> None:
        """Raise UnsafeContent where a document from elsewhere names a command or a file of this machine."""
        from wds_async.storage.generic import reads_local_files  # noqa: PLC0415 (the engine)

        if not self.trusted and (scheme(url) in ("", "file", "-", "pipe") or reads_local_files(url)):
            raise self.unsafe(path, url)

    def unsafe(self, path: ValuePath, url: str) -> WdsError:
        """Return the error of `refuse_local`."""
        why = "what was fetched may not name commands or files of this machine"
        return self.error(path, f"{redact(url)!r}: {why}; if you trust it, save it to a file", UnsafeContent)

    def warn_of_misspelt(self, path: ValuePath, keys: Iterable[Any], valid: Collection[str]) -> None:
        """Warn of ``keys`` at ``path`` that are nearly ``valid``: ``wieght`` would silently be a metadata key."""
        for key in keys:
            near = [] if key in valid else difflib.get_close_matches(str(key), valid, 1, 0.8)
            if near:
                logger.warning("%s", self.error((*path, key), f"{key!r} means nothing; did you mean {near[0]!r}?"))

    def _place(self, path: ValuePath) -> str:
        if self.text is None:
            return ""
        # JSON is YAML; composing is slow, but only an error asks for it.
        import yaml  # noqa: PLC0415

        try:
            node: Any = _loader(self.text).get_single_node()
        except yaml.YAMLError:  # but YAML forbids some of JSON's characters
            node = None
        if node is None:
            return ""
        mark = node.start_mark
        for step in path:
            parts: dict[str, tuple[Any, Any]] = {}
            if isinstance(node, yaml.SequenceNode):
                parts = {str(i): (part.start_mark, part) for i, part in enumerate(node.value)}
            elif isinstance(node, yaml.MappingNode):
                parts = {str(key.value): (key.start_mark, part) for key, part in reversed(node.value)}
            if str(step) not in parts:  # merged in from elsewhere ('<<'), or not there at all
                break
            mark, node = parts[str(step)]
        return f", line {mark.line + 1}, column {mark.column + 1}"


def read(url: str, options: StorageOptions = NOTHING_GIVEN, *, may_be_missing: bool = False) -> Document:
    """Return the YAML or JSON document at ``url`` or in the file of that name, read by the engine.
    ``may_be_missing``: its absence is believed at once, and not a fault that may pass.

    Raises ConfigError, with line and column, for what is none, and a StorageError where it cannot be read.
    """
    return next(read_all([url], options, may_be_missing=may_be_missing))


def read_all(
    urls: Iterable[str], options: StorageOptions = NOTHING_GIVEN, *, may_be_missing: bool = False
) -> Iterator[Document]:
    """Yield the documents at ``urls``, in order, as `read` does; many are read at once."""
    from wds_async.transfer.reader import open_shards  # noqa: PLC0415 (the engine)

    config = transfer_config()
    with open_shards(urls, config=config.taking_refusals() if may_be_missing else config, options=options) as opened:
        for stream in opened:
            pieces, size = [], 0
            while (piece := stream.read()) is not None:
                size += len(piece)
                if size > MAX_BYTES:
                    raise ConfigError(
                        f"{redact(stream.url)}: a document of more than {MAX_BYTES >> 20} MiB is not read"
                    )
                pieces.append(bytes(piece))
            yield _document(stream.url, b"".join(pieces), options)


def _document(url: str, data: bytes, options: StorageOptions) -> Document:
    from wds_async.storage.registry import locate  # noqa: PLC0415 (the engine)

    name = redact(url)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exn:
        raise ConfigError(f"{name}: not UTF-8 text (byte {exn.start})") from exn
    local = local_path(url) if scheme(url) in ("", "file") else None
    if local is not None:
        base = os.path.join(os.path.dirname(local), "") if os.path.dirname(local) else ""
        trusted = locate(url).kind == "local"  # a rewritten name may lead anywhere
    else:
        base, trusted = re.split(r"[?#]", url, maxsplit=1)[0].rpartition("/")[0] + "/", False
    return Document(name, _parsed(text, name), text, base, trusted, options)


def _parsed(text: str, name: str) -> Any:
    # A JSON list of 100,000 shards takes json a blink and yaml half a minute.
    if name.lower().endswith(".json") or text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except json.JSONDecodeError as exn:
            if name.lower().endswith(".json"):
                raise ConfigError(f"{name}, line {exn.lineno}, column {exn.colno}: not valid JSON: {exn.msg}") from exn
        except RecursionError as exn:
            raise ConfigError(f"{name}: nested too deeply") from exn
    import yaml  # noqa: PLC0415

    try:
        loader = _loader(text)
        root = loader.get_single_node()
        _refuse_doubled_keys(root, name)
        return None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as exn:
        mark = exn.problem_mark or exn.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{name}{where}: not valid YAML: {exn.problem or exn}") from exn
    except (yaml.YAMLError, RecursionError, ValueError) as exn:
        if isinstance(exn, WdsError):
            raise
        raise ConfigError(f"{name}: not valid YAML: {exn}") from exn


def _loader(text: str) -> Any:
    """Return a safe loader of YAML: plain values only, no objects."""
    import yaml  # noqa: PLC0415 (most datasets have no specification)

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)


def _refuse_doubled_keys(root: Any, name: str) -> None:
    """Refuse two equal keys, of which the last would win silently."""
    left, seen_nodes = [root], set()
    while left:
        node = left.pop()
        if node is None or id(node) in seen_nodes or isinstance(node.value, str):
            continue
        seen_nodes.add(id(node))  # an alias may point at what holds it
        keys: set[str] = set()
        for child in node.value:
            key, value = child if isinstance(child, tuple) else (None, child)
            left.append(value)
            if key is None or not isinstance(key.value, str):
                continue
            if key.value in keys:
                mark = key.start_mark
                raise ConfigError(f"{name}, line {mark.line + 1}, column {mark.column + 1}: a second {key.value!r}")
            keys.add(key.value)
