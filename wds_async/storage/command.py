"""WebDataset's ``Pipe``: a command as a file-like object, for openers that programs write."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from wds_async.config import settings
from wds_async.errors import FetchTimeout, PipeError
from wds_async.redact import redact
from wds_async.storage import pipe

__all__ = ["Pipe"]

logger = logging.getLogger("wds_async")


class Pipe:
    """The output (mode ``"rb"``) or input (``"wb"``) of a command as a file of bytes.

    Arguments are those of ``subprocess.Popen``; ``Pipe("zcat x.gz | tail -n 9", shell=True)`` needs its ``shell``. A
    status other than 0 and those in ``ignore_status`` is a `PipeError`, raised where the output ends or by `close`,
    unless ``ignore_errors``. `close` gives the command ``timeout`` seconds to end by itself once it was read to the end
    or written; one that is left in the middle of its output is killed at once, with everything that it started, and
    its status says nothing.

    Attributes: ``proc``, ``stream`` (the process's own file), ``status`` (None while it runs), ``args``.
    """

    proc: Any = None
    stream: Any = None
    status: int | None = None

    def __init__(
        self,
        *args: Any,
        mode: str | None = None,
        timeout: float = 7200.0,
        ignore_errors: bool = False,
        ignore_status: Sequence[int] = [],
        **kw: Any,
    ) -> None:
        self.ignore_errors = ignore_errors
        self.ignore_status = [0, *ignore_status]
        self.timeout = timeout
        self.args = (args, kw)
        self.handler: Any = None
        self._over = False
        if mode is None or mode[:1] not in ("r", "w"):
            raise ValueError(f"{mode}: unknown mode")
        self._writes = mode[:1] == "w"
        self.proc = pipe.start(*args, writes=self._writes, **kw)
        self.stream = self.proc.stdin if self._writes else self.proc.stdout

    def __str__(self) -> str:
        return redact(f"<Pipe {self.args}>")

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self.stream is None or bool(self.stream.closed)

    def readable(self) -> bool:
        """Return whether this reads."""
        return not self._writes

    def writable(self) -> bool:
        """Return whether this writes."""
        return self._writes

    def read(self, *args: Any, **kw: Any) -> bytes:
        """Read at most ``size`` bytes, all without ``size`` or for -1; fewer only at the end."""
        data: bytes = self.stream.read(*args, **kw)
        size = args[0] if args else kw.get("size", -1)
        if size is None or size < 0 or (size and not data):
            self._ends()
        return data

    def readinto(self, into: Any) -> int:
        """Fill ``into`` and return the number of bytes; 0 at the end."""
        count = int(self.stream.readinto(into))
        if count == 0 and len(into):
            self._ends()
        return count

    def readline(self, *args: Any, **kw: Any) -> bytes:
        """Read a line with its newline; empty at the end."""
        line: bytes = self.stream.readline(*args, **kw)
        if not line and args[:1] != (0,):
            self._ends()
        return line

    readLine = readline  # WebDataset's spelling

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def write(self, *args: Any, **kw: Any) -> int:
        """Write data to the command."""
        return int(self.stream.write(*args, **kw))

    def flush(self) -> None:
        """Flush what is buffered."""
        if self._writes:
            self.stream.flush()

    def check_status(self) -> None:
        """Raise `PipeError` if the command has already failed."""
        if self.proc.poll() is not None:
            self.wait_for_child()

    def wait_for_child(self) -> None:
        """Wait for the command to end, at most ``timeout`` seconds, and raise `PipeError` for a bad status."""
        try:
            self.status = self.proc.wait(self.timeout)
        except pipe.TimeoutExpired as exn:
            pipe.stop(self.proc)
            raise FetchTimeout(f"{self}: the command did not end within {self.timeout} s and was killed") from exn
        if settings().verbose:
            logger.warning("%s: %s", self, pipe.describe_status(self.proc.returncode))
        if self.status not in self.ignore_status and not self.ignore_errors:
            raise PipeError(f"{self}: {pipe.describe_status(self.proc.returncode)}")

    def close(self) -> None:
        """End the command (see above); idempotent. Raises `PipeError` for a bad status."""
        if self.closed:
            return
        if not self._writes and not self._over and self.proc.poll() is None:
            pipe.stop(self.proc)
            self.status = self.proc.returncode
            return
        with contextlib.suppress(BrokenPipeError):  # its status says whether it minds
            self.stream.close()
        if not self._over:
            self.wait_for_child()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a finalizer cannot raise
            if not self.closed:
                if not self._writes:
                    pipe.stop(self.proc)
                self.close()

    def _ends(self) -> None:
        self._over = True
        self.wait_for_child()
