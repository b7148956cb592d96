"""``gopen``: any URL as a file, read by the engine like a shard, and the openers of WebDataset's ``gopen_schemes``."""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

from wds_async.config import settings
from wds_async.errors import UrlError
from wds_async.redact import redact
from wds_async.storage.base import Location
from wds_async.storage.command import Pipe
from wds_async.storage.options import NOTHING_GIVEN, StorageOptions
from wds_async.storage.registry import locate
from wds_async.storage.sink import Sink, open_sink
from wds_async.storage.user_openers import DEFAULT, GOPEN_BUFSIZE, Opener, gopen_schemes, install, named_opener
from wds_async.transfer.reader import ShardReader, ShardStream, open_shards
from wds_async.urls import rewrite, rules_from_env

__all__ = [
    "Pipe",
    "ShardFile",
    "SinkFile",
    "gopen",
    "gopen_ais",
    "gopen_curl",
    "gopen_error",
    "gopen_file",
    "gopen_gsutil",
    "gopen_hf",
    "gopen_htgs",
    "gopen_pipe",
    "gopen_schemes",
    "reader",
    "rewrite_url",
    "set_options",
]

logger = logging.getLogger("wds_async")


class ShardFile(io.RawIOBase):
    """One URL as a raw file to read, in order; wrapped in ``io.BufferedReader`` by `gopen`.

    Nothing is opened before the first byte is asked for. ``stream`` is its place in a reader of many shards; after
    `leave` the reader goes on, and what is read is fetched anew. ``final``: see `registry.locate`.
    """

    mode = "rb"

    def __init__(
        self,
        url: str,
        stream: ShardStream | None = None,
        *,
        final: bool = False,
        options: StorageOptions = NOTHING_GIVEN,
    ) -> None:
        super().__init__()
        self.name = redact(url)
        shard = url if stream is None else stream.info
        self._open = functools.partial(open_shards, [shard], final=final, options=options)
        self._stream = stream
        self._reader: ShardReader | None = None
        self._piece: memoryview | None = None
        self._used = 0  # of the piece
        self._position = 0
        self._behind = 0  # what was read before, and is passed over when it is fetched anew
        self._over = False
        self._error: Exception | None = None

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        if not len(into) or not self._fill():
            return 0
        assert self._piece is not None
        count = min(len(into), len(self._piece) - self._used)
        into[:count] = self._piece[self._used : self._used + count]
        self._used += count
        self._position += count
        return count

    def readall(self) -> bytes:
        whole = io.BytesIO()
        while self._fill():
            assert self._piece is not None
            self._position += whole.write(self._piece[self._used :])
            self._used = len(self._piece)
        return whole.getvalue()

    def is_open_ended(self) -> bool:
        """See `ShardStream.is_open_ended`."""
        return self._stream is not None and self._stream.is_open_ended()

    def leave(self) -> None:
        """Leave this shard: the reader of many shards goes on to its next one."""
        self._drop()
        self._stream = None

    def close(self) -> None:
        """Stop reading, at once; idempotent."""
        if self.closed:
            return
        self._drop()
        if self._reader is not None:
            self._reader.close()
        elif self._stream is not None:
            self._stream.close()
        super().close()

    def _drop(self) -> None:
        self._piece, self._used = None, 0

    def _fill(self) -> bool:
        """Get the next piece where the last is used up; False at the end."""
        if self.closed:
            raise ValueError(f"{self.name}: read of a closed file")
        if self._error is not None:  # an end after an error would look like a whole file
            raise self._error
        try:
            while not self._over and (self._piece is None or self._used == len(self._piece)):
                self._drop()
                self._piece = self._source().read()
                self._over = self._piece is None
                if self._behind and self._piece is not None:
                    self._used = min(self._behind, len(self._piece))
                    self._behind -= self._used
        except Exception as exn:
            self._error = exn
            raise
        return not self._over

    def _source(self) -> ShardStream:
        if self._stream is None:
            self._reader = self._open()
            self._stream = next(self._reader)
            self._behind = self._position
        return self._stream


class SinkFile(io.RawIOBase):
    """One URL as a file to write. It appears when the file is closed, whole; it does not if the ``with`` block raises,
    or the file is dropped without `close`."""

    mode = "wb"

    def __init__(self, url: str, sink: Sink) -> None:
        super().__init__()
        self.name = redact(url)
        self._sink: Sink | None = sink
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        if self._sink is None:
            raise ValueError(f"{self.name}: write to a closed file")
        count = self._sink.write(memoryview(data).cast("B"))
        self._position += count
        return count

    def flush(self) -> None:
        if self._sink is not None:
            self._sink.flush()

    def close(self) -> None:
        """Publish what was written; idempotent. Raises the store's errors."""
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.commit()
        finally:
            super().close()

    def abort(self) -> None:
        """Give up what was written; idempotent."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abort()
        super().close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        if getattr(self, "_sink", None) is not None:
            logger.warning("%s was never closed, so it was not written; close the file, or use `with`", self.name)
            self.abort()


def gopen(
    url: str,
    mode: str = "rb",
    bufsize: int = GOPEN_BUFSIZE,
    *,
    storage_options: Mapping[str, Any] | StorageOptions | None = None,
    **kw: Any,
) -> Any:
    """Open ``url`` as a file of bytes: to read (``mode="rb"``) or to write (``"wb"``).

    ``-`` is standard input or output, a path or ``file:`` URL what ``open`` gives (buffered by ``GOPEN_BUFFER``), and
    ``pipe:command`` a command's output or input. A scheme for which the program put a function into `gopen_schemes` is
    opened by it, which also gets ``bufsize`` and ``kw``. Everything else is read through the engine, or written so
    that it appears when the file is closed. URLs are rewritten first (``WDS_REWRITE``); ``bufsize`` is in bytes, and
    ``storage_options`` go to the store's client (see `storage.options.StorageOptions`).

    Remote files begin to be read with their first byte, so that is where one that is missing shows. Raises ValueError
    for another mode, UrlError for a scheme that nothing knows, UnsafeContent for what secure mode forbids.
    """
    _check(mode)
    url = os.fspath(url)
    if url == "-":
        return _standard(mode)
    options = StorageOptions(storage_options)
    location = locate(url, options=options)
    if settings().verbose:
        logger.warning("gopen %s %s", redact(url), mode)
    if location.kind == "opener":
        return named_opener(location)(location.target, mode, bufsize, **kw)
    if kw:
        raise TypeError(f"gopen of {redact(url)} takes no {', '.join(sorted(kw))}: only openers of gopen_schemes do")
    return _open(location, mode, bufsize, options=options)


def reader(url: str, **kw: Any) -> Any:
    """Return ``gopen(url, "rb", **kw)``."""
    return gopen(url, "rb", **kw)


def rewrite_url(url: str) -> str:
    """Return ``url`` rewritten by ``WDS_REWRITE`` (or ``GOPEN_REWRITE``). UnsafeContent if secure mode forbids it."""
    target = rewrite(url, rules_from_env())
    if target != url and settings().verbose:
        logger.warning("rewrite %s -> %s", redact(url), redact(target))
    return target


def set_options(
    obj: Any,
    timeout: float | None = None,
    ignore_errors: bool | None = None,
    ignore_status: Sequence[int] | None = None,
    handler: Any = None,
) -> bool:
    """Set those options of a `Pipe` that are not None; False, and nothing happens, for any other object."""
    if not isinstance(obj, Pipe):
        return False
    options = {"timeout": timeout, "ignore_errors": ignore_errors, "ignore_status": ignore_status, "handler": handler}
    vars(obj).update({name: value for name, value in options.items() if value is not None})
    return True


def _check(mode: str) -> None:
    if mode not in ("rb", "wb"):
        raise ValueError(f"{mode}: unknown mode; write rb or wb")


def _standard(mode: str) -> BinaryIO:
    return sys.stdin.buffer if mode == "rb" else sys.stdout.buffer


def _open(
    location: Location,
    mode: str,
    bufsize: int,
    *,
    final: bool = False,
    options: StorageOptions = NOTHING_GIVEN,
) -> Any:
    if location.kind == "stdin":
        return _standard(mode)
    if location.path is not None:
        return open(location.path, mode, buffering=settings().gopen_buffer)
    if mode == "wb":
        return SinkFile(location.url, open_sink(location.url, final=final, options=options))
    file = ShardFile(location.url, final=final, options=options)
    return io.BufferedReader(file, bufsize if bufsize > 0 else GOPEN_BUFSIZE)


def _opener(name: str, what: str, *, writes: bool = True) -> Opener:
    def opener(url: str, mode: str = "rb", bufsize: int = GOPEN_BUFSIZE) -> Any:
        _check(mode)
        if mode == "wb" and not writes:
            raise ValueError(f"{mode}: cannot write")
        return _open(locate(url, final=True), mode, bufsize, final=True)

    opener.__name__ = opener.__qualname__ = name
    opener.__doc__ = f"Open {what}, whatever ``gopen_schemes`` has."
    return opener


gopen_file = _opener("gopen_file", "a path or ``file:`` URL")
gopen_pipe = _opener("gopen_pipe", "``pipe:command``, given to the shell as it stands")
gopen_curl = _opener("gopen_curl", "``http:``, ``https:`` and what else curl reads in WebDataset (written by PUT)")
gopen_gsutil = _opener("gopen_gsutil", "``gs:``, Google Cloud Storage")
gopen_ais = _opener("gopen_ais", "``ais:``, AIStore")
gopen_htgs = _opener("gopen_htgs", "``htgs:``, an older name of ``gs:``, to read", writes=False)
gopen_hf = _opener("gopen_hf", "``hf:``, Hugging Face, to read", writes=False)


def gopen_error(url: str, *args: Any, **kw: Any) -> NoReturn:
    """Raise UrlError (a ValueError): nothing opens this scheme."""
    raise UrlError(f"{redact(url)}: no gopen handler defined")


install(
    {
        DEFAULT: gopen_error,
        "ais": gopen_ais,
        "ftps": gopen_curl,
        "gs": gopen_gsutil,
        "hf": gopen_hf,
        "htgs": gopen_htgs,
        "http": gopen_curl,
        "https": gopen_curl,
        "pipe": gopen_pipe,
        "scp": gopen_curl,
        "sftp": gopen_curl,
    }
)
