"""Comparison of shards with their checksums, and ``verify="always"``: shards are held until they have matched."""

from __future__ import annotations

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
from typing import IO, Any, Protocol

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
from wds_async.storage.base import Checksum, Location, error_for
from wds_async.storage.checksums import FILES, MANIFESTS, Digest, digest_of, in_file, in_manifest
from wds_async.storage.filewriting import write_all
from wds_async.storage.registry import Backends
from wds_async.storage.stores import STORES
from wds_async.transfer.engine import Engine
from wds_async.transfer.options import Span
from wds_async.transfer.shard_state import ShardState
from wds_async.transfer.stats import Counters, Stats

__all__ = ["Comparison", "HeldShard", "Spool", "Verifier", "usable"]

logger = logging.getLogger("wds_async")

Receive = Callable[[], memoryview | None]

_READ_ATTEMPTS = 3
"""Readings of a held shard before it counts as damaged."""
_REQUESTS_AHEAD = 8
_ATTEMPTS_BEFORE_FALLBACK = 2
_FILE_BYTES, _MANIFEST_BYTES = 64 << 10, 16 << 20
_PIECE_BYTES = 1 << 20
_MEMORY_BYTES = 32 << 20
_CHECK_EVERY_S = 1.0
_COUNTED = ("requests", "wire_bytes", "retries")

_warned: weakref.WeakSet[Counters] = weakref.WeakSet()


class VerifiableShard(Protocol):
    """Protocol: one shard of a reader."""

    info: dict[str, Any]
    url: str
    span: Span
    located: Location | WdsError

    @property
    def kept(self) -> bool: ...

    def compare(self, comparison: Comparison) -> None: ...

    def read(self) -> memoryview | None: ...


class VerifyingReader(Protocol):
    """Protocol: the reader whose shards are verified."""

    config: TransferConfig
    counters: Counters
    closed: bool

    def engine(self) -> Engine: ...

    def reading(self, shards: Iterable[Any], counters: Counters, *, optional: bool = False) -> VerifyingReader: ...

    def close(self) -> None: ...

    def __iter__(self) -> Iterator[VerifiableShard]: ...


def usable(checksum: Checksum | None) -> bool:
    """Return whether ``checksum`` can be compared here; a missing package is logged once a process."""
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
    """Comparison of one shard's bytes with one checksum: the ``stated`` one, else that of ``expect(state)``, called at
    the first piece, when the first answer has come; None compares nothing."""

    def __init__(self, expect: Callable[[ShardState], Checksum | None], stated: Checksum | None = None) -> None:
        self.expected: Checksum | None = None
        self._stated = stated
        self._expect: Callable[[ShardState], Checksum | None] | None = expect
        self._digest: Digest | None = None
        self._computed = b""
        self._size = 0

    def add(self, state: ShardState, piece: memoryview) -> None:
        """Take the next bytes."""
        if self._expect is not None:
            self._begin(state)
        if self._digest is not None:
            self._digest.update(piece)
            self._size += len(piece)

    def matches(self, state: ShardState) -> bool | None:
        """Return whether all bytes were those expected; None where there was nothing to compare. The checksum of the
        last store counts: a shard may have been read on at another one."""
        if self._expect is not None:
            self._begin(state)
        latest, expected = state.checksum, self.expected
        if self._digest is None or expected is None:
            return None
        if self._stated is None and latest is not None and latest.algorithm == expected.algorithm:
            self.expected = expected = latest
        if not expected.digest:
            return None
        self._computed = self._digest.digest()
        return self._computed == expected.digest

    def error(self, url: str, *, readings: int = 0) -> ChecksumMismatch:
        """Return the error of a shard that did not match, after ``readings`` if it was held."""
        shown = redact(url)
        if readings:
            advice = (
                f"It was read {readings} times, and no sample of it was delivered. Copy the shard again: it is damaged "
                "where it lies or on the way, or its checksum is that of another."
            )
        else:
            advice = (
                'Samples of it were delivered. verify="always" (WDS_VERIFY=always) holds them back until their shard '
                "was compared, and reads it again; if that fails too, copy the shard again."
            )
        return ChecksumMismatch(f"{shown}: {self.difference}. {advice}").at(shown, 0)

    @property
    def difference(self) -> str:
        """Both checksums, in words."""
        assert self.expected is not None
        name, digest, source = self.expected.algorithm, self.expected.digest.hex(), self.expected.source
        source = source or "its store"
        return f"the {name} of its {self._size} bytes is {self._computed.hex()}, and {source} gives {digest}"

    def _begin(self, state: ShardState) -> None:
        expect, self._expect = self._expect, None
        assert expect is not None
        checksum = self._stated or expect(state)
        if checksum is not None and usable(checksum):
            self.expected, self._digest = checksum, digest_of(checksum.algorithm)


class Spool:
    """Bytes of one shard, written and then read: up to ``memory_bytes`` in memory, the rest in a file without a name
    in ``folder`` (None: the system's for temporary files). OSError where that has no room. Used by one thread, for one
    shard after another."""

    def __init__(self, memory_bytes: int, folder: str | None = None) -> None:
        self.size = 0
        """Bytes written."""
        self._memory_bytes = memory_bytes
        self._folder = folder
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._buffer = memoryview(b"")
        self._position = 0

    def write(self, piece: memoryview) -> None:
        """Append a copy of the next bytes."""
        if not self._memory:
            self._memory = bytearray(self._memory_bytes)  # pages that are not written to cost nothing
        count = max(0, min(len(piece), self._memory_bytes - self.size))
        if count:
            self._memory[self.size : self.size + count] = piece[:count]
        if count < len(piece):
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115 (see `clear`)
            write_all(self._file.fileno(), piece[count:])
        self.size += len(piece)

    def read(self) -> memoryview | None:
        """Return the next piece in order, valid until the next call; None at the end."""
        in_memory, start = min(self.size, self._memory_bytes), self._position
        if start < in_memory:
            self._position = min(in_memory, start + _PIECE_BYTES)
            return memoryview(self._memory)[start : self._position]
        if start >= self.size or self._file is None:
            return None
        if start == in_memory:
            self._file.seek(0)
            self._buffer = self._buffer or memoryview(bytearray(_PIECE_BYTES))
        count = self._file.readinto(self._buffer)  # type: ignore[attr-defined]  # raw, for want of buffering
        if not count:
            raise OSError(f"the temporary file of a held shard ended {self.size - start} bytes early")
        self._position += count
        return self._buffer[:count]

    def clear(self) -> None:
        """Discard everything written; the memory stays. Idempotent."""
        self.size = self._position = 0
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


class HeldShard:
    """A shard that is read to its end and compared before its first byte is delivered, and read again if it does not
    match. One without a checksum is delivered as it comes.

    ``receive`` returns its pieces as they come and raises `ChecksumMismatch` at a bad end, by `comparison`.
    """

    def __init__(self, stream: VerifiableShard, receive: Receive, verifier: Verifier) -> None:
        self._stream, self._receive, self._verifier = stream, receive, verifier
        self.comparison = Comparison(functools.partial(verifier.expected, stream), stream.span.checksum)
        self._next: Receive | None = self._gather
        self._spool: Spool | None = None

    @property
    def over(self) -> bool:
        """True if nothing more comes."""
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
        """Discard the bytes that are held; idempotent."""
        if self._next is not None:
            self._next = None
            if self._spool is not None:
                self._verifier.take_back(self._spool)
                self._spool = None

    def _gather(self) -> memoryview | None:
        spool = self._spool = self._verifier.spool()
        try:
            piece = self._receive()  # of an empty shard it is the bad end already
            if self.comparison.expected is None:
                self._verifier.count(self._stream, matched=False)
                self._next = self._receive
                return piece
            while piece is not None:
                self._hold(spool, piece)
                piece = self._receive()
        except ChecksumMismatch:
            self._read_again(spool)
        self._verifier.count(self._stream, matched=True)
        self._next = spool.read
        return spool.read()

    def _read_again(self, spool: Spool) -> None:
        """Read the shard anew, and its checksum: both may have been replaced."""
        verifier, url = self._verifier, self._stream.url
        for _ in range(_READ_ATTEMPTS - 1):
            logger.warning("%s: %s; it is read again", redact(url), self.comparison.difference)
            former = self.comparison.expected
            self.comparison = Comparison(
                lambda state, former=former: verifier.expected(self._stream, state) or former,  # type: ignore[misc]
                self._stream.span.checksum,
            )
            spool.clear()
            try:
                for piece in verifier.reread(self._stream, self.comparison):
                    self._hold(spool, piece)
                return
            except ChecksumMismatch:
                continue
        raise self.comparison.error(url, readings=_READ_ATTEMPTS)

    def _hold(self, spool: Spool, piece: memoryview) -> None:
        try:
            spool.write(piece)
        except OSError as exn:
            raise StorageError(
                f'{redact(self._stream.url)}: verify="always" holds a shard back until it was compared, and there is '
                f"no room for it: {exn}. Set TMPDIR (or the folder of the shard cache) to where a whole shard fits."
            ) from exn


class Verifier:
    """``verify="always"`` of one reader: the checksums of its shards, of the answer, of the store or of files beside
    the shard, and spools for the ``shards`` that are held at once. Used on the consumer's thread.

    ``folder``: place for what does not fit into memory; None: the system's for temporary files.
    """

    def __init__(self, reader: VerifyingReader, folder: str | None, shards: int = 1) -> None:
        self._reader: VerifyingReader = weakref.proxy(
            reader
        )  # a cycle would keep its connections until it is collected
        self._memory_bytes = min(_MEMORY_BYTES, reader.config.budget_bytes // 4) // shards
        self._folder = folder
        self._spools: list[Spool] = []
        self._free_spools: list[Spool] = []
        self._others: weakref.WeakSet[VerifyingReader] = weakref.WeakSet()
        self._requests: dict[str, concurrent.futures.Future[Checksum | None]] = {}
        self._in_every_answer = {spec.kind for spec in STORES if spec.sends_checksum}
        self._manifests: dict[str, list[dict[str, Checksum]]] = {}
        self._shards = 0
        self._unverified: list[str] = []

    def spool(self) -> Spool:
        """Return a place to hold a shard, until `take_back`."""
        if self._free_spools:
            return self._free_spools.pop()
        self._spools.append(Spool(self._memory_bytes, self._folder))
        return self._spools[-1]

    def take_back(self, spool: Spool) -> None:
        """Take back a spool, whose memory the next shard uses."""
        spool.clear()
        self._free_spools.append(spool)

    def request_ahead(self, streams: Iterable[VerifiableShard | BaseException]) -> None:
        """Request the checksums of the shards that are read next, where that takes a request."""
        places = (place for stream in streams if (place := _comparable(stream)) is not None)
        for place, _ in zip(places, range(_REQUESTS_AHEAD), strict=False):
            if place.kind not in self._in_every_answer and place.target not in self._requests:
                self._request(place)

    def expected(self, stream: VerifiableShard, state: ShardState) -> Checksum | None:
        """Return the checksum of ``stream``: its answer's, else the store's, else that of the files beside it. WdsError
        where the store cannot be reached."""
        place = _comparable(stream)
        if place is None or stream.kept:
            return None
        if usable(state.checksum):
            self._in_every_answer.add(place.kind)
            if (request := self._requests.pop(place.target, None)) is not None:
                request.cancel()
            return state.checksum
        request = self._requests.get(place.target) or self._request(place)
        try:
            stored = self._wait(request)
        finally:
            self._requests.pop(place.target, None)
        return stored if usable(stored) else self._beside(place)

    def reread(self, stream: VerifiableShard, comparison: Comparison) -> Iterator[memoryview]:
        """Yield the pieces of another reading, past the shard cache. `ChecksumMismatch` at a bad end."""
        counters = Counters(traffic=self._reader.counters.traffic)
        try:
            with contextlib.closing(self._open([stream.info], counters)) as reader:
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

    def count(self, stream: VerifiableShard, *, matched: bool) -> None:
        """Count a shard: compared and good, or without a checksum to compare."""
        if matched:
            self._reader.counters.add("verified_shards")
        elif stream.kept:
            return
        else:
            self._unverified.append(redact(stream.url))
            logger.info("%s: no checksum was found, so it was not compared", redact(stream.url))
        self._shards += 1

    def close(self) -> None:
        """Stop, with the reader, and log, once a dataset and process, how many shards could not be compared."""
        for spool in self._spools:
            spool.clear()
        for reader in list(self._others):  # another thread waits there
            reader.close()
        counters = self._reader.counters
        if self._unverified and counters not in _warned:
            _warned.add(counters)
            logger.warning(
                'verify="always": %d of %d shards could not be verified, the first of them %s: its store gives no '
                "checksum that can be compared, and none lies beside it. Write one there, as NAME.sha256 or in one "
                "SHA256SUMS for the folder: sha256sum *.tar > SHA256SUMS (logged once)",
                len(self._unverified),
                self._shards,
                self._unverified[0],
            )
        for request in list(self._requests.values()):  # it would open sessions after the engine has ended
            request.cancel()

    def _request(self, place: Location) -> concurrent.futures.Future[Checksum | None]:
        engine = self._reader.engine()
        request = engine.run(_remote_checksum(engine.backends, place, self._reader.config.retry))
        self._requests[place.target] = request
        return request

    def _wait(self, request: concurrent.futures.Future[Checksum | None]) -> Checksum | None:
        closed = ReaderClosed("this reader was closed; iterate over the dataset again")
        while True:
            try:
                return request.result(_CHECK_EVERY_S)
            except concurrent.futures.CancelledError:  # the engine has ended
                raise closed from None
            except TimeoutError:
                if request.done():  # it is the request's own error, or the answer has come at this very moment
                    return request.result()
                if self._reader.closed or not self._reader.engine().alive:
                    raise closed from None

    def _beside(self, place: Location) -> Checksum | None:
        target = place.target
        if place.kind != "local" and ("?" in target or "#" in target or "::" in target):
            return None  # a signature, a version: it is for this object, and the place of another is not known
        folder, slash, last = target.rpartition("/")
        if place.path is None and not last:
            return None
        name = urllib.parse.unquote(last) if place.kind == "http" else last
        texts = self._read_small([target + ending for ending, _ in FILES], _FILE_BYTES)
        for (ending, algorithm), text in zip(FILES, texts, strict=True):
            checksum = in_file(text, algorithm, name, f"{name}{ending}") if text is not None else None
            if usable(checksum):
                return checksum
        listed = (manifest.get(name) for manifest in self._manifests_of(folder + slash))
        return next((checksum for checksum in listed if usable(checksum)), None)

    def _manifests_of(self, folder: str) -> list[dict[str, Checksum]]:
        """Return the manifests of a folder, read once."""
        if folder not in self._manifests:
            texts = self._read_small([folder + name for name, _ in MANIFESTS], _MANIFEST_BYTES)
            pairs = zip(MANIFESTS, texts, strict=True)
            self._manifests[folder] = [in_manifest(text, kind, name) for (name, kind), text in pairs if text]
        return self._manifests[folder]

    def _read_small(self, targets: Sequence[str], limit_bytes: int) -> list[str | None]:
        """Read small files; None for each that is missing, refused or larger. They are targets, not the user's URLs:
        read as the shard is, with the credentials for its place, and not rewritten again."""
        texts: list[str | None] = []
        counters = Counters(traffic=self._reader.counters.traffic)
        with contextlib.closing(self._open(targets, counters, optional=True)) as reader:
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

    def _open(self, shards: Sequence[Any], counters: Counters, *, optional: bool = False) -> VerifyingReader:
        """Return another reader of ``shards``, closed with this one's."""
        reader = self._reader.reading(shards, counters, optional=optional)
        self._others.add(reader)
        return reader


def _comparable(stream: VerifiableShard | BaseException) -> Location | None:
    """Return the place of a shard whose bytes can be read again; None for a pipe, a FIFO, a shard with an error, a
    span, and a shard whose checksum is stated."""
    if isinstance(stream, BaseException) or not stream.span.whole or stream.span.crc32c:
        return None
    place = stream.located
    if place is None or isinstance(place, WdsError) or place.spec.in_order:
        return None
    return place if place.path is None or os.path.isfile(place.path) else None


async def _remote_checksum(backends: Backends, location: Location, policy: RetryPolicy) -> Checksum | None:
    """Return the checksum that the store keeps. None where it keeps none or refuses it; WdsError where it cannot be
    reached, after fewer attempts than a part has."""
    location = replace(location, entry=None)
    backend = backends.of(location)
    attempts = min(policy.brief_attempts, _ATTEMPTS_BEFORE_FALLBACK if location.fallback is not None else math.inf)
    retries = retry.Retries(policy, exhausted=lambda failures: failures >= attempts)
    try:
        return await retry.ask(
            lambda: backend.remote_checksum(location),
            lambda exn: backend.classify(exn, location),
            policy,
            retries=retries,
        )
    except Exception as exn:
        fault = None if isinstance(exn, WdsError) else retries.fault
        if fault is None or not retries.retryable:
            reason = exn if fault is None else fault.reason
            logger.info("%s: its checksum could not be requested: %s", location.shown, reason)
            return None
        if location.fallback is not None:
            return await _remote_checksum(backends, location.fallback, policy)
        raise error_for(fault, location.shown, 0, retries.failures) from exn
