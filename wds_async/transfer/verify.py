"""Bytes of one shard that are held back: in memory up to a bound, the rest in a file without a name."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from typing import IO

from wds_async.errors import ChecksumMismatch, MissingExtra, StorageError
from wds_async.logs import warn_once
from wds_async.redact import redact
from wds_async.storage.base import Checksum
from wds_async.storage.checksums import Digest, digest_of
from wds_async.storage.filewriting import write_all
from wds_async.transfer.window import Shard

__all__ = ["READ_ATTEMPTS", "Comparison", "HeldShard", "Spool", "answer_checksum", "usable"]

_PIECE_BYTES = 1 << 20


class Spool:
    """Takes pieces by `write`, and gives them back by `read` once all are there; `clear` makes it empty again.

    ``memory_bytes`` bounds what it holds in memory, which is kept for the next shard; ``folder`` is where the rest goes
    (None: the system's for temporary files). OSError where that has no room. One thread uses it.
    """

    def __init__(self, memory_bytes: int, folder: str | None = None) -> None:
        self._memory_bytes = memory_bytes
        self._folder = folder
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._buffer = memoryview(b"")
        self.size = 0
        """Bytes that were written."""
        self._given = 0

    def write(self, piece: memoryview) -> None:
        """The next bytes; copied."""
        if not self._memory:
            self._memory = bytearray(self._memory_bytes)  # pages that nobody writes to cost nothing
        kept = max(0, min(len(piece), self._memory_bytes - self.size))
        if kept:
            self._memory[self.size : self.size + kept] = piece[:kept]
        if kept < len(piece):
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115 (see `clear`)
            write_all(self._file.fileno(), piece[kept:])
        self.size += len(piece)

    def read(self) -> memoryview | None:
        """The next piece of what was written, in order; None at the end. Valid until the next call."""
        in_memory = min(self.size, self._memory_bytes)
        start = self._given
        if start < in_memory:
            self._given = min(in_memory, start + _PIECE_BYTES)
            return memoryview(self._memory)[start : self._given]
        if start >= self.size or self._file is None:
            return None
        if start == in_memory:
            self._file.seek(0)
            self._buffer = self._buffer or memoryview(bytearray(_PIECE_BYTES))
        count = self._file.readinto(self._buffer)  # type: ignore[attr-defined]  # raw, for want of buffering
        if not count:
            raise OSError(f"the file of what was held back ended {self.size - start} bytes early")
        self._given += count
        return self._buffer[:count]

    def clear(self) -> None:
        """Forget what was written; the memory stays. Idempotent."""
        self.size = self._given = 0
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


logger = logging.getLogger("wds_async")


READ_ATTEMPTS = 3


"""How often a shard that is held back is read before it counts as damaged."""


_NOT_YET = Checksum("crc32c", b"")


Receive = Callable[[], memoryview | None]


def answer_checksum(shard: Shard, *, may_come: bool = False) -> Checksum | None:
    """What ``verify="auto"`` compares: the CRC-32C that an answer brought. ``may_come``: it may do so later on, because
    the shard is read behind the process that fetches it, and perhaps to its end from its store."""
    said = shard.checksum
    if said is None:
        return _NOT_YET if may_come else None
    return said if said.algorithm == "crc32c" else None


def usable(checksum: Checksum | None) -> bool:
    """Return whether it can be compared here. A missing package is logged once a process."""
    if checksum is None:
        return False
    try:
        digest_of(checksum.algorithm)
    except MissingExtra as exn:
        message = "%s; until then these shards are not compared by it"
        warn_once(logger, ("package", checksum.algorithm), message, exn)
        return False
    except ValueError:
        return False
    return True


class Comparison:
    """The bytes of one shard against one checksum. ``expect(shard)`` is asked for it at the first piece, when the first
    answer has come; None compares nothing."""

    def __init__(self, expect: Callable[[Shard], Checksum | None]) -> None:
        self.expected: Checksum | None = None
        self._expect: Callable[[Shard], Checksum | None] | None = expect
        self._digest: Digest | None = None
        self._found = b""
        self._size = 0

    def add(self, shard: Shard, piece: memoryview) -> None:
        """The next bytes."""
        if self._expect is not None:
            self._begin(shard)
        if self._digest is not None:
            self._digest.update(piece)
            self._size += len(piece)

    def judge(self, shard: Shard) -> bool | None:
        """Whether all bytes were those expected; None where there was nothing to compare. What the last store said
        counts: a shard may have been read on at another one."""
        if self._expect is not None:
            self._begin(shard)
        said, begun = shard.checksum, self.expected
        if self._digest is None or begun is None:
            return None
        self.expected = said if said is not None and said.algorithm == begun.algorithm else begun
        if not self.expected.digest:
            return None
        self._found = self._digest.digest()
        return self._found == self.expected.digest

    def error(self, url: str, *, readings: int = 0) -> ChecksumMismatch:
        """What a shard that was judged bad means; ``readings`` of one that was held back."""
        shown = redact(url)
        if readings:
            became = (
                f"It was read {readings} times, and no sample of it was delivered. Copy the shard again: it is damaged "
                "where it lies or on the way, or its checksum is that of another."
            )
        else:
            became = (
                'Samples of it were delivered. verify="always" (WDS_VERIFY=always) holds them back until their shard '
                "was compared, and reads it again; if that fails too, copy the shard again."
            )
        return ChecksumMismatch(f"{shown}: {self.difference}. {became}").at(shown, 0)

    @property
    def difference(self) -> str:
        """Both sums, in words."""
        assert self.expected is not None
        name, said, source = self.expected.algorithm, self.expected.digest.hex(), self.expected.source
        return (
            f"its {self._size} bytes are not those that were vouched for: their {name} is {self._found.hex()}, and "
            f"{source or 'its store'} says {said}"
        )

    def _begin(self, shard: Shard) -> None:
        expect, self._expect = self._expect, None
        assert expect is not None
        found = expect(shard)
        if found is not None and usable(found):
            self.expected, self._digest = found, digest_of(found.algorithm)


class HeldShard:
    """A shard that is read to its end, into ``spool``, and compared before its first byte is handed on.

    ``receive`` gives its pieces as they come and raises `ChecksumMismatch` at a bad end, by ``comparison``; ``again``
    gives those of another reading, likewise, by a comparison of ``expect``; ``told(good)`` is told how it ended:
    compared and found good, or nothing found to compare. A shard of the latter kind is handed on as it comes.
    """

    def __init__(
        self,
        url: str,
        spool: Spool,
        comparison: Comparison,
        *,
        receive: Receive,
        again: Callable[[Comparison], Iterator[memoryview]],
        expect: Callable[[Shard], Checksum | None],
        told: Callable[[bool], None],
    ) -> None:
        self._url, self._spool, self._comparison = url, spool, comparison
        self._receive, self._again, self._expect, self._told = receive, again, expect, told
        self._next: Receive | None = self._gather

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self._next is None

    def read(self) -> memoryview | None:
        """The next piece, valid until the next call; None at the end, again and again. `ChecksumMismatch`, the errors
        of reading, or StorageError where there is no room for what is held back: never after a piece."""
        if self._next is None:
            return None
        try:
            piece = self._next()
        except BaseException:
            self.close()
            raise
        if piece is None:
            self.close()
        return piece

    def close(self) -> None:
        """Forget what is held back; idempotent."""
        if self._next is not None:
            self._next = None
            self._spool.clear()

    def _gather(self) -> memoryview | None:
        try:
            piece = self._receive()  # of an empty shard it is the bad end already
            if self._comparison.expected is None:
                self._told(False)
                self._next = self._receive
                return piece
            while piece is not None:
                self._keep(piece)
                piece = self._receive()
        except ChecksumMismatch:
            self._heal()
        self._told(True)
        self._next = self._spool.read
        return self._spool.read()

    def _heal(self) -> None:
        """Read the shard again, and its checksum: both may have been replaced."""
        for _ in range(READ_ATTEMPTS - 1):
            logger.warning("%s: %s; it is read again", redact(self._url), self._comparison.difference)
            former = self._comparison.expected
            self._comparison = Comparison(lambda shard, former=former: self._expect(shard) or former)  # type: ignore[misc]
            self._spool.clear()
            try:
                for piece in self._again(self._comparison):
                    self._keep(piece)
                return
            except ChecksumMismatch:
                continue
        raise self._comparison.error(self._url, readings=READ_ATTEMPTS)

    def _keep(self, piece: memoryview) -> None:
        try:
            self._spool.write(piece)
        except OSError as exn:
            raise StorageError(
                f'{redact(self._url)}: verify="always" holds a shard back until it was compared, and there is no room '
                f"for it: {exn}. Set TMPDIR (or the folder of the shard cache) to where a whole shard fits."
            ) from exn
