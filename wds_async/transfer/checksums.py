"""Where the checksum of a shard is found: its store is asked for it, then the files beside it are looked at."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import urllib.parse
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from wds_async.config import RetryPolicy
from wds_async.errors import WdsError
from wds_async.redact import redact
from wds_async.storage import retry
from wds_async.storage.base import Checksum, error_for
from wds_async.storage.checksums import FILES, MANIFESTS, in_file, in_manifest
from wds_async.storage.registry import Backends, Location
from wds_async.storage.stores import STORES
from wds_async.transfer.stats import Counters
from wds_async.transfer.verify import usable

__all__ = ["ChecksumFuture", "RemoteChecksums", "cancel_requests", "request_checksum"]

logger = logging.getLogger("wds_async")

ChecksumFuture = concurrent.futures.Future[Checksum | None]

_ASK_AHEAD = 8
_BEFORE_THE_FALLBACK = 2
_FILE_BYTES, _MANIFEST_BYTES = 64 << 10, 16 << 20
_running: dict[ChecksumFuture, asyncio.Task[None]] = {}
_told: weakref.WeakSet[Counters] = weakref.WeakSet()

Small = Callable[[Sequence[str], int], Sequence[str | None]]
"""``small(targets, limit_bytes)``: what is in these files, None for each that is not there, not to be had or larger."""


def request_checksum(backends: Backends, location: Location, policy: RetryPolicy, asked: ChecksumFuture) -> None:
    """Have the store of ``location`` asked for a shard's checksum, and put into ``asked`` what it says; on the loop."""
    task = asyncio.get_running_loop().create_task(_answer(backends, location, policy, asked))
    _running[asked] = task
    task.add_done_callback(lambda _: _running.pop(asked, None))


def cancel_requests(asked: Iterable[ChecksumFuture]) -> None:
    """Nobody waits for these any more; on the loop. One that went on would open sessions behind the engine's end."""
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
        asked.cancel()  # where this was cancelled: nobody is to wait for it


async def _remote_checksum(backends: Backends, location: Location, policy: RetryPolicy) -> Checksum | None:
    """What the store says. None where it keeps no checksum or does not give it to us; `WdsError` where it cannot be
    reached, for a while that is shorter than a part's."""
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
    """Checksums of one reader's shards, used on the consumer's thread. ``ask(location)`` requests one from the store,
    ``wait`` returns the answer, ``small`` reads the files beside a shard with the shard's own access."""

    def __init__(
        self,
        counters: Counters,
        *,
        ask: Callable[[Location], ChecksumFuture],
        wait: Callable[[ChecksumFuture], Checksum | None],
        small: Small,
    ) -> None:
        self._counters, self._ask, self._wait, self._small = counters, ask, wait, small
        self._asked: dict[str, ChecksumFuture] = {}
        self._tell_by_themselves = {spec.kind for spec in STORES if spec.sends_checksum}
        self._manifests: dict[str, list[dict[str, Checksum]]] = {}
        self._shards = 0
        self._unknown = 0
        self._first_unknown = ""

    def ahead(self, locations: Iterator[Location]) -> None:
        """These shards come next: ask for the first of them now, where that takes a request."""
        for location, _ in zip(locations, range(_ASK_AHEAD), strict=False):
            if location.kind not in self._tell_by_themselves and location.target not in self._asked:
                self._asked[location.target] = self._ask(location)

    def find(self, location: Location, brought: Checksum | None) -> Checksum | None:
        """The checksum of a shard: what its answer ``brought``, else what its store says, else what is in the files
        beside it. WdsError where the store cannot be reached."""
        asked = self._asked.pop(location.target, None)
        if usable(brought):
            self._tell_by_themselves.add(location.kind)
            return brought
        said = self._wait(asked or self._ask(location))
        return said if usable(said) else self._beside(location)

    def told(self, url: str, good: bool) -> None:
        """Count a shard: compared and found good, or with nothing to compare."""
        self._shards += 1
        if good:
            self._counters.add("verified_shards")
        else:
            self._unknown += 1
            self._first_unknown = self._first_unknown or redact(url)
            logger.info("%s: no checksum was found, so it was not compared", redact(url))

    def close(self) -> None:
        """Say, once a dataset and process, how many shards could not be compared."""
        if self._unknown and self._counters not in _told:
            _told.add(self._counters)
            logger.warning(
                'verify="always": %d of %d shards could not be verified, the first of them %s: its store gives no '
                "checksum that can be compared, and none lies beside it. Write one there, as NAME.sha256 or in one "
                "SHA256SUMS for the folder: sha256sum *.tar > SHA256SUMS (said once)",
                self._unknown,
                self._shards,
                self._first_unknown,
            )

    def _beside(self, location: Location) -> Checksum | None:
        target = location.target
        if location.kind != "local" and ("?" in target or "#" in target or "::" in target):
            return None  # a signature, a version: it is for this object, and nothing says where another would lie
        folder, slash, last = target.rpartition("/")
        if location.path is None and not last:
            return None
        name = urllib.parse.unquote(last) if location.kind == "http" else last
        texts = self._small([target + ending for ending, _ in FILES], _FILE_BYTES)
        for (ending, algorithm), text in zip(FILES, texts, strict=True):
            found = in_file(text, algorithm, name, f"{name}{ending}") if text is not None else None
            if usable(found):
                return found
        listed = (said.get(name) for said in self._listed(folder + slash))
        return next((found for found in listed if usable(found)), None)

    def _listed(self, folder: str) -> list[dict[str, Checksum]]:
        """The manifests of a folder, read once."""
        if folder not in self._manifests:
            texts = self._small([folder + name for name, _ in MANIFESTS], _MANIFEST_BYTES)
            found = zip(MANIFESTS, texts, strict=True)
            self._manifests[folder] = [in_manifest(text, kind, name) for (name, kind), text in found if text]
        return self._manifests[folder]
