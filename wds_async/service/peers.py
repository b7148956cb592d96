"""Chunks from other services of the cluster, before the store is asked (docs/service.md, "Clusters").

Each chunk belongs to one member by rendezvous hashing; there is no server that knows more. Members only ever speed a
read up: who does not answer at once is passed by, and the store answers. What a member requests, another one never
forwards, so requests cannot go round in circles.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import socket
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from crc32c import crc32c

from wds_async.background import BlockingThreads
from wds_async.config import transfer_config
from wds_async.errors import ConfigError
from wds_async.service.cache.index import CHUNK_BYTES
from wds_async.service.cache.origin import ChunkRequest, Client, Urgency
from wds_async.service.config import ServiceConfig
from wds_async.service.limits import FairScheduler
from wds_async.service.peer_members import Ring, address_of, find_own, members_of, read_token
from wds_async.storage.base import Checksum, Tls
from wds_async.transfer.connection import Connection, ConnectionBroken, Head, Origin, request_bytes
from wds_async.transfer.connection_pool import ConnectionPool
from wds_async.transfer.ranges import Facts
from wds_async.transfer.slabs import Slab, SlabBudget
from wds_async.urls import scheme

__all__ = ["PEER_NAME_FIELD", "PEER_PATH", "PeerPart", "PeerStats", "Peers", "pack_facts", "unpack_facts"]

logger = logging.getLogger("wds_async")
PEER_PATH = "/v1/peer/"
"""Path of a chunk's request to another member; the object's URL follows, escaped."""
PEER_NAME_FIELD = "Wds-Peer-Name"
"""Field of the answer at /readyz: the name of a member that stays when its address changes, escaped."""
MEMORY_SHARE = 4
"""The fraction of the service's memory that parts from other members may take."""
_REFRESH_EVERY_S, _TEND_EVERY_S = 10.0, 0.5
_PROBE_AFTER_S, _PROBE_AT_MOST_S = 1.0, 30.0
_PATIENCE = 10  # times the time without a sign, for all of a chunk
_LOOKS = 5  # at a running request, within the time without a sign
_REFUSAL_BYTES = 64 << 10
_LEAST_MEMORY = 4 * CHUNK_BYTES


class _Passed(Exception):
    """A member does not give a chunk. ``down``: it is left alone until it answers a probe."""

    def __init__(self, why: str, *, down: bool = True) -> None:
        super().__init__(why)
        self.down = down


@dataclass(slots=True)
class PeerStats:
    """Counters since the start."""

    received_bytes: int = 0
    sent_bytes: int = 0
    passed: int = 0
    """Chunks that a member did not give, so that another or the store was asked."""


@dataclass(slots=True)
class _Health:
    """State of a member that did not answer: ``failures`` in a row, and when it is probed next."""

    failures: int = 0
    probe_at: float = 0.0
    probing: bool = False


@dataclass(eq=False, slots=True)
class PeerPart:
    """A chunk from another member, in a slab that `release` gives back."""

    view: memoryview
    facts: Facts
    age_s: float
    _memory: SlabBudget
    _slab: Slab

    def release(self) -> None:
        """Give its memory back."""
        self._memory.give_back(self._slab, self.view)


@dataclass(slots=True)
class _Answer:
    """The answer to one request: judges the head and gives the body its memory."""

    slab: Slab
    wanted: ChunkRequest
    facts: Facts | None = None
    count: int = 0

    def accept(self, head: Head) -> memoryview:
        """Return the memory for the body; that of a refusal is not kept."""
        if head.status != 206:
            return _thrown_away(head)
        wanted, span, length = self.wanted, head.content_range(), head.length
        self.facts = unpack_facts(head.fields.get("wds-facts", ""))
        size = self.facts.size or 0
        if wanted.facts is not None and (self.facts.version, size) != (wanted.facts.version, wanted.facts.size):
            raise _Passed("it has another version of the object", down=False)
        if span is None or span != (wanted.start, min(wanted.stop, size), size) or length != span[1] - span[0]:
            raise _Passed(f"bytes {wanted.start} to {wanted.stop} were requested, and {span} came in {length}")
        self.count = length
        return self.slab.view[:length]


class Peers:
    """The other members of the cluster, as the cache uses them (see `origin.Nodes`). On the loop only.

    ``memory_bytes``: the most that parts from them may take. ConfigError for settings that cannot be used.
    """

    def __init__(self, config: ServiceConfig, threads: BlockingThreads, memory_bytes: int) -> None:
        self._config, self._threads = config, threads
        self._loop = asyncio.get_running_loop()
        self.stats = PeerStats()
        self.ring = Ring()
        self._names: dict[str, str] = {}
        self._all_named = True
        self._down: dict[str, _Health] = {}
        self._memory = SlabBudget(max(_LEAST_MEMORY, memory_bytes))
        self._scheduler = FairScheduler(config.connections)
        connect_s, stall_s = config.peer_timeout_s, _PATIENCE * config.peer_timeout_s
        timeouts = transfer_config(connect_timeout_s=connect_s, stall_timeout_s=stall_s)
        self._pool = ConnectionPool(self._loop, threads, timeouts)
        self._scheme = "https" if config.certificate else "http"
        self._tls = Tls(ca_file=config.peer_ca, certificate=config.certificate, key=config.key)
        self._token = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refresh_failed = ""
        self._not_a_member = False
        self._refused_by: set[str] = set()

    # -- life

    async def start(self) -> None:
        """Find the members. ConfigError for a token or a member that cannot be used; a file or name that is not there
        yet is tried again later."""
        if path := self._config.peer_token or self._config.tokens:
            self._token = await self._threads.call(read_token, path)
        await self.refresh()
        self._spawn(self._tend())

    async def close(self) -> None:
        """End all requests and connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.close()
        await self._pool.gone()
        self._memory.close()

    async def refresh(self) -> None:
        """Find out who the members are now; those of before stay if that cannot be told."""
        config = self._config
        try:
            members = await self._threads.call(members_of, config.peers, config.port, self._scheme)
            own = config.peer_address and address_of(config.peer_address, config.port, self._scheme)
            own = own or await self._threads.call(find_own, members, config.port)
        except (OSError, ConfigError, UnicodeError) as exn:
            if str(exn) != self._refresh_failed:
                logger.warning("peers: who they are cannot be told: %s; it stays with %d", exn, len(self.ring.members))
            self._refresh_failed = str(exn)
            return
        self._refresh_failed = ""
        if config.peer_name:
            await self._learn_names(members, own)
            known = [member for member in members if member in self._names]
            self._all_named, members = len(known) == len(members), known
        ring = Ring(members, own, self._names)
        if (ring.members, ring.own, ring.names) == (self.ring.members, self.ring.own, self.ring.names):
            return
        for twin in sorted(set(members) - set(ring.members)):
            logger.warning("peers: %s is called %r as this one is, and is none until one of them has gone", twin,
                           config.peer_name)  # fmt: skip
        self.ring = ring
        self._down = {member: health for member, health in self._down.items() if member in ring.members}
        logger.info("peers: %d members, this one is %s", len(ring.members), ring.own or "none of them")
        if ring.members and not ring.own and not self._not_a_member:
            self._not_a_member = True
            logger.warning("peers: none of the members is this service; it asks them, and owns nothing (peer_address)")

    async def _learn_names(self, members: Sequence[str], own: str) -> None:
        """Ask new members what they are called. Those that do not answer are asked again with the next refresh, and are
        none until then: it is not known which chunks are theirs."""
        self._names = {member: name for member, name in self._names.items() if member in members}
        if own:
            self._names[own] = self._config.peer_name
        await asyncio.gather(*(self._ask_ready(member) for member in members if member not in self._names))

    async def _ask_ready(self, member: str) -> bool:
        """Ask a member whether it is ready, and learn its name."""
        try:
            head = await self._exchange(member, request_bytes(f"{member}/readyz", ()), _thrown_away)
        except (OSError, TimeoutError, ValueError, _Passed):
            return False
        if name := head.fields.get(PEER_NAME_FIELD.lower(), ""):
            self._names[member] = urllib.parse.unquote(name)
        return head.status == 200

    async def _tend(self) -> None:
        refresh_at = 0.0 if not self._all_named else self._loop.time() + _REFRESH_EVERY_S
        while True:
            await asyncio.sleep(min(_TEND_EVERY_S, self._config.peer_timeout_s))
            now = self._loop.time()
            self._pool.expire(now)
            self._memory.lend()
            for member, health in self._down.items():
                if now >= health.probe_at and not health.probing:
                    health.probing = True
                    self._spawn(self._probe(member, health))
            if now >= refresh_at:
                refresh_at = now + (_REFRESH_EVERY_S if self._all_named else min(_PROBE_AFTER_S, _REFRESH_EVERY_S))
                self._spawn(self.refresh())

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- whose a chunk is

    @property
    def crowded(self) -> bool:
        """True if parts wait for the memory of others."""
        return self._memory.crowded

    @property
    def down(self) -> int:
        """Number of members that do not answer."""
        return len(self._down)

    def owns(self, key: str, number: int) -> bool:
        """Return whether a chunk is this node's to keep."""
        return self.ring.owns(key, number)

    def owned(self, key: str, count: int) -> Sequence[int]:
        """Return the numbers of those of ``count`` chunks that are this node's to keep."""
        return self.ring.owned(key, count)

    def accepts(self, key: str, number: int) -> bool:
        """Return whether this node fetches a chunk for another one: it owns it, or stands in for who does."""
        return self.ring.own != "" and self.ring.own in self.ring.ranked(key, number)

    def candidates(self, key: str, number: int) -> list[str]:
        """Return the members to request a chunk from: its owner, then who stands in for that, except those that do not
        answer; none that come after this node itself. None for this machine's own files."""
        asked: list[str] = []
        if scheme(key) in ("", "file"):
            return asked
        for member in self.ring.ranked(key, number):
            if member == self.ring.own:
                break
            if member not in self._down:
                asked.append(member)
        return asked

    def slot(self, client: Client, urgency: Urgency, node: str) -> Any:
        """Return a context manager that is held while a chunk is requested from ``node``."""
        return self._scheduler.slot(client, urgency, node)

    # -- requests

    async def request(self, node: str, wanted: ChunkRequest) -> PeerPart | None:
        """Return a chunk from ``node``; None if it does not give it, at once, and then the next is asked or the
        store."""
        if node in self._down:  # since this request was queued
            return None
        slab = await self._memory.take(wanted.stop - wanted.start)
        answer = _Answer(slab, wanted)
        try:
            head = await self._exchange(node, self._encode(node, wanted), answer.accept)
            view = slab.view[: answer.count]
            self._check(node, head, view)
            assert answer.facts is not None
            self.stats.received_bytes += answer.count
            return PeerPart(view, answer.facts, _seconds(head.fields.get("age", "")), self._memory, slab)
        except (_Passed, OSError, TimeoutError, ValueError) as exn:
            self._memory.give_back(slab)
            self.stats.passed += 1
            if not isinstance(exn, _Passed) or exn.down:
                self._mark_down(node, exn)
            else:
                logger.debug("peers: %s is passed by: %s", node, exn)
            return None
        except BaseException:
            self._memory.give_back(slab)
            raise

    @property
    def _client(self) -> tuple[str, str]:
        return "Wds-Client", f"node:{self.ring.own.partition('://')[2] or socket.gethostname()}"

    def _encode(self, node: str, wanted: ChunkRequest) -> bytes:
        headers = [
            ("Range", f"bytes={wanted.start}-{wanted.stop - 1}"),
            self._client,
            ("Wds-Urgency", str(int(wanted.urgency))),
        ]
        if wanted.facts is not None:
            headers.append(("Wds-Version", urllib.parse.quote(wanted.facts.version, safe="")))
        if self._token:
            headers.append(("Authorization", f"Bearer {self._token}"))
        escaped = urllib.parse.quote(wanted.url.encode("utf-8", "surrogateescape"), safe="")
        return request_bytes(f"{node}{PEER_PATH}{escaped}", headers)

    async def _exchange(self, node: str, raw: bytes, accept: Callable[[Head], memoryview]) -> Head:
        """Send a request and return the answer's head, once its body has come."""
        origin = Origin.of(node, self._tls)
        for fresh in (False, True):
            async with self._pool.connection(origin, fresh=fresh) as connection:
                try:
                    head = await self._watched(connection, raw, accept)
                except ConnectionBroken:
                    if fresh or connection.exchanges == 1 or connection.received:
                        raise
                    continue  # a kept connection that was closed meanwhile
                if not head.keep_alive or (head.status != 206 and not _is_small(head)):
                    connection.abort()
                return head
        raise AssertionError("a fresh connection is not closed without a fault")

    async def _watched(self, connection: Connection, raw: bytes, accept: Callable[[Head], memoryview]) -> Head:
        """Run an exchange, which ends with TimeoutError after ``peer_timeout_s`` without a sign of the member: it sends
        one several times a second while it is fetching."""
        allowed_s = self._config.peer_timeout_s
        task, began = self._loop.create_task(connection.exchange(raw, accept)), self._loop.time()
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=allowed_s / _LOOKS)
                now = self._loop.time()
                if not task.done() and now - connection.moved_at > allowed_s:
                    connection.stall(f"no sign of it for {allowed_s:g} s")
                elif not task.done() and now - began > _PATIENCE * allowed_s:
                    connection.stall(f"no chunk within {_PATIENCE * allowed_s:g} s")
                elif not task.done():
                    connection.look_closely()
            return task.result()
        finally:
            if not task.done():
                connection.abort()
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task

    def _check(self, node: str, head: Head, view: memoryview) -> None:
        """Raise _Passed unless an answer is the chunk, undamaged."""
        if head.status in (401, 403) and node not in self._refused_by:
            self._refused_by.add(node)
            logger.warning("peers: %s refuses (%d): members need the same tokens and `allow`", node, head.status)
        if head.status != 206:
            raise _Passed(f"it answers {head.status}", down=head.status == 503)
        crc = head.fields.get("wds-crc32c", "")
        if crc and crc32c(view) != int(crc):
            raise _Passed("the checksum of a chunk is not that of its bytes")

    async def tell(self, path: str, message: Any, more: Any) -> None:
        """Send ``message`` to all other members that answer, and ``more`` to those that answer 404 to it. What becomes
        of it is of no consequence."""
        for member in self.ring.members:
            if member == self.ring.own:
                continue
            for one in (message, more):
                if member in self._down or await self._post(member, path, one) != 404:
                    break

    async def _post(self, member: str, path: str, message: Any) -> int:
        """Send a message and return the status of the answer; 0 without one."""
        body = json.dumps(message).encode()
        fields = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), self._client]
        fields += [("Authorization", f"Bearer {self._token}")] if self._token else []
        raw = b"POST" + request_bytes(f"{member}{path}", fields).removeprefix(b"GET") + body
        try:
            return (await self._exchange(member, raw, _thrown_away)).status
        except (OSError, TimeoutError, ValueError) as exn:
            logger.debug("peers: %s was not told: %r", member, exn)
            return 0

    # -- health

    def _mark_down(self, member: str, why: BaseException) -> None:
        now = self._loop.time()
        health = self._down.get(member)
        if health is None and member in self.ring.members:
            self._down[member] = _Health(1, now + _PROBE_AFTER_S)
            logger.warning("peers: %s does not answer: %s; others do in its place", member, str(why) or repr(why))

    async def _probe(self, member: str, health: _Health) -> None:
        """Ask a member whether it is ready; ask again later, ever more rarely, if it is not."""
        ready = await self._ask_ready(member)
        health.probing = False
        if ready:
            self._down.pop(member, None)
            logger.info("peers: %s answers again", member)
            return
        health.probe_at = self._loop.time() + min(_PROBE_AT_MOST_S, _PROBE_AFTER_S * 2**health.failures)
        health.failures += 1


def pack_facts(facts: Facts) -> str:
    """Return facts as a header field's value."""
    checksum = facts.checksum
    packed = None if checksum is None else [checksum.algorithm, checksum.digest.hex(), checksum.source]
    text = json.dumps([facts.size, facts.version, dict(facts.fields), packed], separators=(",", ":"))
    return base64.b64encode(text.encode()).decode("ascii")


def unpack_facts(field: str) -> Facts:
    """Return the facts of `pack_facts`. ValueError for any other text, and for facts of no ranged object."""
    try:
        size, version, fields, packed = json.loads(base64.b64decode(field, validate=True))
        checksum = None if packed is None else Checksum(str(packed[0]), bytes.fromhex(packed[1]), str(packed[2]))
        texts: Mapping[str, str] = {str(name): str(value) for name, value in fields.items()}
    except (TypeError, AttributeError, IndexError, KeyError, RecursionError) as exn:
        raise ValueError(f"the facts of a member's object are malformed: {exn!r}") from exn
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or not isinstance(version, str) or not version:
        raise ValueError("the facts of a member's object have no size or version")
    return Facts(size, version, MappingProxyType(dict(texts)), checksum)


def _is_small(head: Head) -> bool:
    return head.length is not None and head.length <= _REFUSAL_BYTES


def _thrown_away(head: Head) -> memoryview:
    """Return memory for a short body that is not looked at; none for another one."""
    return memoryview(bytearray(head.length or 0)) if _is_small(head) else memoryview(b"")


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() else 0.0
