"""Checksums of shards: what an answer or the store gives, the files beside a shard, and verification before use."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import math
import os
import tempfile
import urllib.parse
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import IO, Any, Protocol, Self

from wds_async.config import RetryPolicy, TransferConfig
from wds_async.errors import (
    AccessDenied,
    ChecksumMismatch,
    MissingExtra,
    ReaderClosed,
    ShardNotFound,
    StorageError,
    TransferError,
    WdsError,
)
from wds_async.logs import warn_once
from wds_async.redact import redact
from wds_async.storage import retry
from wds_async.storage.base import Checksum, error_for
from wds_async.storage.checksums import FILES, MANIFESTS, Digest, digest_of, in_file, in_manifest
from wds_async.storage.filewriting import write_all
from wds_async.storage.registry import Backends, Location
from wds_async.storage.stores import STORES
from wds_async.transfer.bridge import Engine
from wds_async.transfer.stats import Counters, Stats
from wds_async.transfer.window import Shard

__all__ = [
    "READ_ATTEMPTS",
    "ChecksumFuture",
    "Comparison",
    "HeldShard",
    "RemoteChecksums",
    "Spool",
    "VerifyBeforeUse",
    "answer_checksum",
    "cancel_requests",
    "request_checksum",
    "usable",
]

logger = logging.getLogger("wds_async")


ChecksumFuture = concurrent.futures.Future[Checksum | None]
Receive = Callable[[], memoryview | None]

READ_ATTEMPTS = 3
"""How often a held shard is read before it counts as damaged."""

_ASK_AHEAD = 8
_BEFORE_THE_FALLBACK = 2
_FILE_BYTES, _MANIFEST_BYTES = 64 << 10, 16 << 20
_PIECE_BYTES = 1 << 20
_MEMORY_BYTES = 32 << 20
_LOOK_EVERY_S = 1.0
_COUNTED = ("requests", "wire_bytes", "retries")
_NOT_YET = Checksum("crc32c", b"")

_running: dict[ChecksumFuture, asyncio.Task[None]] = {}
_reported: weakref.WeakSet[Counters] = weakref.WeakSet()


class VerifiableShard(Protocol):
    """Protocol: one shard of a reader."""

    info: dict[str, Any]
    url: str
    located: Location | WdsError

    @property
    def kept(self) -> bool: ...

    def compare(self, comparison: Comparison) -> None: ...

    def read(self) -> memoryview | None: ...


class VerifyingReader(Protocol):
    """Protocol: the reader whose shards are verified."""

    config: TransferConfig
    counters: Counters

    @property
    def closed(self) -> bool: ...

    @property
    def own(self) -> bool: ...

    def engine(self) -> Engine: ...

    def reading(self, shards: Iterable[Any], counters: Counters, *, optional: bool = False) -> VerifyingReader: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: Any) -> None: ...

    def __iter__(self) -> Iterator[VerifiableShard]: ...


# -- what a store says -------------------------------------------------------------------------------------------------


def request_checksum(backends: Backends, location: Location, policy: RetryPolicy, asked: ChecksumFuture) -> None:
    """Request a shard's checksum from the store of ``location``, and set it in ``asked``; on the loop."""
    task = asyncio.get_running_loop().create_task(_answer(backends, location, policy, asked))
    _running[asked] = task
    task.add_done_callback(lambda _: _running.pop(asked, None))


def cancel_requests(asked: Iterable[ChecksumFuture]) -> None:
    """Cancel these requests; on the loop. A request that went on would open sessions after the engine has ended."""
    for each in asked:
        if (task := _running.get(each)) is not None:
            task.cancel()


async def _answer(backends: Backends, location: Location, policy: RetryPolicy, asked: ChecksumFuture) -> None:
    try:
        found = await _remote_checksum(backends, location, policy)
    except WdsError as exn:
        asked.set_exception(exn)
    except Exception as exn:  # a fault of ours, or of a client's: it must not hang the consumer
        asked.set_exception(WdsError(f"{location.shown}: asking for its checksum failed: {exn!r}"))
    else:
        asked.set_result(found)
    finally:
        asked.cancel()  # if this was cancelled: no thread may wait for it


async def _remote_checksum(backends: Backends, location: Location, policy: RetryPolicy) -> Checksum | None:
    """Return the checksum that the store keeps. None where it keeps none or refuses it; WdsError where it cannot be
    reached, after fewer attempts than a part has."""
    location = replace(location, entry=None)
    backend, target = backends.of(location), location.target
    attempts = min(policy.brief_attempts, _BEFORE_THE_FALLBACK if location.fallback is not None else math.inf)
    retries = retry.Retries(policy, exhausted=lambda failures: failures >= attempts)
    try:
        return await retry.ask(
            lambda: backend.remote_checksum(target), lambda exn: backend.classify(exn, target), policy, retries=retries
        )
    except Exception as exn:
        fault = None if isinstance(exn, WdsError) else retries.fault
        if fault is None or not retries.retryable:
            why = exn if fault is None else fault.reason
            logger.info("%s: its checksum could not be asked for: %s", location.shown, why)
            return None
        if location.fallback is not None:
            return await _remote_checksum(backends, location.fallback, policy)
        raise error_for(fault, location.shown, 0, retries.failures) from exn


class RemoteChecksums:
    """Checksums of one reader's shards: of the answer, of the store, of files beside the shard. Used on the consumer's
    thread."""

    def __init__(self, reader: VerifyingReader) -> None:
        self._reader: VerifyingReader = weakref.proxy(
            reader
        )  # a cycle would keep its connections until it is collected
        self._pending: set[ChecksumFuture] = set()
        self._readers: weakref.WeakSet[VerifyingReader] = weakref.WeakSet()
        self._asked: dict[str, ChecksumFuture] = {}
        self._in_every_answer = {spec.kind for spec in STORES if spec.sends_checksum}
        self._manifests: dict[str, list[dict[str, Checksum]]] = {}
        self._shards = 0
        self._unknown = 0
        self._first_unknown = ""

    def ahead(self, locations: Iterator[Location]) -> None:
        """Request the checksums of the first of these, which are read next, where that takes a request."""
        for location, _ in zip(locations, range(_ASK_AHEAD), strict=False):
            if location.kind not in self._in_every_answer and location.target not in self._asked:
                self._asked[location.target] = self._ask(location)

    def find(self, location: Location, answered: Checksum | None) -> Checksum | None:
        """Return the checksum of a shard: ``answered``, else the store's, else that of the files beside it. WdsError
        where the store cannot be reached."""
        asked = self._asked.pop(location.target, None)
        if usable(answered):
            self._in_every_answer.add(location.kind)
            return answered
        stored = self._wait(asked or self._ask(location))
        return stored if usable(stored) else self._beside(location)

    def count(self, url: str, *, verified: bool) -> None:
        """Count a shard: compared and good, or without a checksum to compare."""
        self._shards += 1
        if verified:
            self._reader.counters.add("verified_shards")
        else:
            self._unknown += 1
            self._first_unknown = self._first_unknown or redact(url)
            logger.info("%s: no checksum was found, so it was not compared", redact(url))

    def open(self, shards: Sequence[Any], counters: Counters, *, optional: bool = False) -> VerifyingReader:
        """Return another reader of ``shards``, closed with this one's."""
        opened = self._reader.reading(shards, counters, optional=optional)
        self._readers.add(opened)
        return opened

    def close(self) -> None:
        """Stop, and log, once a dataset and process, how many shards could not be compared."""
        for reader in list(self._readers):  # another thread waits there
            reader.close()
        counters = self._reader.counters
        if self._unknown and counters not in _reported:
            _reported.add(counters)
            logger.warning(
                'verify="always": %d of %d shards could not be verified, the first of them %s: its store gives no '
                "checksum that can be compared, and none lies beside it. Write one there, as NAME.sha256 or in one "
                "SHA256SUMS for the folder: sha256sum *.tar > SHA256SUMS (said once)",
                self._unknown,
                self._shards,
                self._first_unknown,
            )
        if (pending := list(self._pending)) and self._reader.own:  # else it is the parent's loop
            self._reader.engine().submit(cancel_requests, pending)

    def _ask(self, location: Location) -> ChecksumFuture:
        engine, asked = self._reader.engine(), ChecksumFuture()
        self._pending.add(asked)
        asked.add_done_callback(self._pending.discard)
        engine.submit(request_checksum, engine.backends, location, self._reader.config.retry, asked)
        return asked

    def _wait(self, asked: ChecksumFuture) -> Checksum | None:
        while True:
            try:
                return asked.result(_LOOK_EVERY_S)
            except concurrent.futures.CancelledError:  # the engine has ended
                raise ReaderClosed("this reader was closed; iterate over the dataset again") from None
            except TimeoutError:
                if asked.done():  # it is what asking raised, or the answer has come at this very moment
                    return asked.result()
                if self._reader.closed or not self._reader.engine().alive:
                    raise ReaderClosed("this reader was closed; iterate over the dataset again") from None

    def _beside(self, location: Location) -> Checksum | None:
        target = location.target
        if location.kind != "local" and ("?" in target or "#" in target or "::" in target):
            return None  # a signature, a version: it is for this object, and the place of another is not known
        folder, slash, last = target.rpartition("/")
        if location.path is None and not last:
            return None
        name = urllib.parse.unquote(last) if location.kind == "http" else last
        texts = self._small([target + ending for ending, _ in FILES], _FILE_BYTES)
        for (ending, algorithm), text in zip(FILES, texts, strict=True):
            checksum = in_file(text, algorithm, name, f"{name}{ending}") if text is not None else None
            if usable(checksum):
                return checksum
        listed = (manifest.get(name) for manifest in self._listed(folder + slash))
        return next((checksum for checksum in listed if usable(checksum)), None)

    def _listed(self, folder: str) -> list[dict[str, Checksum]]:
        """The manifests of a folder, read once."""
        if folder not in self._manifests:
            texts = self._small([folder + name for name, _ in MANIFESTS], _MANIFEST_BYTES)
            pairs = zip(MANIFESTS, texts, strict=True)
            self._manifests[folder] = [in_manifest(text, kind, name) for (name, kind), text in pairs if text]
        return self._manifests[folder]

    def _small(self, targets: Sequence[str], limit_bytes: int) -> list[str | None]:
        """Read small files; None for each that is missing, refused or larger. They are targets, not the user's URLs:
        read as the shard is, with the credentials for its place, and not rewritten again."""
        texts: list[str | None] = []
        with self.open(targets, Counters(traffic=self._reader.counters.traffic), optional=True) as reader:
            for stream in reader:
                data = bytearray()
                try:
                    while (piece := stream.read()) is not None and len(data) <= limit_bytes:
                        data += piece
                except (AccessDenied, ShardNotFound):
                    data.clear()  # S3 answers 403 for a missing object to clients that may not list the folder
                except (ReaderClosed, TransferError):  # it may be there: without it, nothing is known to be good
                    raise
                except WdsError as exn:
                    logger.warning("%s: the checksum there could not be read: %s", redact(stream.url), exn)
                    data.clear()
                texts.append(bytes(data).decode("utf-8", "replace") if 0 < len(data) <= limit_bytes else None)
        return texts


# -- comparing ---------------------------------------------------------------------------------------------------------


class Spool:
    """Bytes of one shard, written and then read: up to ``memory_bytes`` in memory, the rest in a file without a name
    in ``folder`` (None: the system's for temporary files). OSError where that has no room. One thread uses it, for one
    shard after another."""

    def __init__(self, memory_bytes: int, folder: str | None = None) -> None:
        self._memory_bytes = memory_bytes
        self._folder = folder
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._buffer = memoryview(b"")
        self.size = 0
        """Bytes written."""
        self._given = 0

    def write(self, piece: memoryview) -> None:
        """Append a copy of the next bytes."""
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
        """Return the next piece in order, valid until the next call; None at the end."""
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
        """Forget everything written; the memory stays. Idempotent."""
        self.size = self._given = 0
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def answer_checksum(shard: Shard, *, may_come: bool = False) -> Checksum | None:
    """Return what ``verify="auto"`` compares: the CRC-32C of an answer. ``may_come``: it may come later, because the
    shard is read behind the process that fetches it, and perhaps to its end from its store."""
    checksum = shard.checksum
    if checksum is None:
        return _NOT_YET if may_come else None
    return checksum if checksum.algorithm == "crc32c" else None


def usable(checksum: Checksum | None) -> bool:
    """Whether it can be compared here; a missing package is logged once a process."""
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
    """Comparison of one shard's bytes with one checksum, that of ``expect(shard)`` at the first piece, when the first
    answer has come; None compares nothing."""

    def __init__(self, expect: Callable[[Shard], Checksum | None]) -> None:
        self.expected: Checksum | None = None
        self._expect: Callable[[Shard], Checksum | None] | None = expect
        self._digest: Digest | None = None
        self._computed = b""
        self._size = 0

    def add(self, shard: Shard, piece: memoryview) -> None:
        """Take the next bytes."""
        if self._expect is not None:
            self._begin(shard)
        if self._digest is not None:
            self._digest.update(piece)
            self._size += len(piece)

    def judge(self, shard: Shard) -> bool | None:
        """Whether all bytes were those expected; None where there was nothing to compare. The checksum of the last
        store counts: a shard may have been read on at another one."""
        if self._expect is not None:
            self._begin(shard)
        latest, begun = shard.checksum, self.expected
        if self._digest is None or begun is None:
            return None
        self.expected = latest if latest is not None and latest.algorithm == begun.algorithm else begun
        if not self.expected.digest:
            return None
        self._computed = self._digest.digest()
        return self._computed == self.expected.digest

    def error(self, url: str, *, readings: int = 0) -> ChecksumMismatch:
        """Return the error of a shard that was judged bad, after ``readings`` if it was held."""
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
        name, digest, source = self.expected.algorithm, self.expected.digest.hex(), self.expected.source
        return (
            f"its {self._size} bytes are not those that were vouched for: their {name} is {self._computed.hex()}, and "
            f"{source or 'its store'} says {digest}"
        )

    def _begin(self, shard: Shard) -> None:
        expect, self._expect = self._expect, None
        assert expect is not None
        checksum = expect(shard)
        if checksum is not None and usable(checksum):
            self.expected, self._digest = checksum, digest_of(checksum.algorithm)


class HeldShard:
    """A shard that is read into ``spool`` to its end, and compared before its first byte is delivered.

    ``receive`` gives its pieces as they come and raises `ChecksumMismatch` at a bad end, by ``comparison``; ``again``
    gives those of another reading, likewise, by a comparison with ``expect``; ``count(verified)`` takes the outcome:
    compared and good, or without a checksum. A shard without one is delivered as it comes.
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
        count: Callable[[bool], None],
    ) -> None:
        self._url, self._spool, self._comparison = url, spool, comparison
        self._receive, self._again, self._expect, self._count = receive, again, expect, count
        self._next: Receive | None = self._gather

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self._next is None

    def read(self) -> memoryview | None:
        """Return the next piece, valid until the next call; None at the end, again and again. `ChecksumMismatch`, the
        errors of reading, or StorageError where there is no room to hold the shard: never after a piece."""
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
        """Forget the bytes that are held; idempotent."""
        if self._next is not None:
            self._next = None
            self._spool.clear()

    def _gather(self) -> memoryview | None:
        try:
            piece = self._receive()  # of an empty shard it is the bad end already
            if self._comparison.expected is None:
                self._count(False)
                self._next = self._receive
                return piece
            while piece is not None:
                self._keep(piece)
                piece = self._receive()
        except ChecksumMismatch:
            self._heal()
        self._count(True)
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


class VerifyBeforeUse:
    """``verify="always"`` of one reader: shards are held, compared with their checksums, and read again if need be.
    ``folder``: place for what does not fit into memory; None: the system's for temporary files."""

    def __init__(self, reader: VerifyingReader, folder: str | None) -> None:
        self._reader: VerifyingReader = weakref.proxy(reader)
        self._spool = Spool(min(_MEMORY_BYTES, reader.config.budget_bytes // 4), folder)
        self._checksums = RemoteChecksums(reader)

    def held(self, stream: VerifiableShard, receive: Receive) -> tuple[Comparison, HeldShard]:
        """Return the comparison of ``stream`` and its held form; ``receive`` gives its bytes as they come."""
        expect = functools.partial(self._expect, stream)
        comparison = Comparison(expect)
        again, count = functools.partial(self._again, stream), functools.partial(self._count, stream)
        held = HeldShard(stream.url, self._spool, comparison, receive=receive, again=again, expect=expect, count=count)
        return comparison, held

    def ahead(self, streams: Iterable[VerifiableShard | BaseException]) -> None:
        """Request checksums of the shards that come next."""
        located = (stream.located for stream in streams if not isinstance(stream, BaseException))
        self._checksums.ahead(place for place in located if not isinstance(place, WdsError) and _can_be_compared(place))

    def close(self) -> None:
        """Stop, with the reader."""
        self._spool.clear()
        self._checksums.close()

    def _expect(self, stream: VerifiableShard, shard: Shard) -> Checksum | None:
        place = stream.located
        if isinstance(place, WdsError) or stream.kept or not _can_be_compared(place):
            return None
        return self._checksums.find(place, shard.checksum)

    def _count(self, stream: VerifiableShard, verified: bool) -> None:
        if verified or not stream.kept:
            self._checksums.count(stream.url, verified=verified)

    def _again(self, stream: VerifiableShard, comparison: Comparison) -> Iterator[memoryview]:
        """The pieces of another reading, past the shard cache. `ChecksumMismatch` at a bad end."""
        counters = Counters(traffic=self._reader.counters.traffic)
        try:
            with self._checksums.open([stream.info], counters) as reader:
                for other in reader:
                    other.compare(comparison)
                    while (piece := other.read()) is not None:
                        yield piece
        finally:
            counters.add("retries")
            spent = Stats(*counters.values()).as_dict()
            engine = self._reader.engine()
            for name in _COUNTED:  # those cells are the loop's
                engine.submit(self._reader.counters.add, name, spent[name])


def _can_be_compared(place: Location) -> bool:
    return not place.spec.in_order and (place.path is None or os.path.isfile(place.path))
