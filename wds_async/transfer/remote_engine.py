"""The engine in a process of its own, beside the process that reads: both ends of it.

The reader's end, `RemotePump`, stands in the place of `Pump`. The other process, one for each process that reads, runs
the loop, the connections and the window of each reader. Slabs are shared memory, of which only the places are sent; all
else is pickled, each message behind its length.

Whatever the other process cannot read (local files, pipes, a program's own openers, copies in a disk cache) is read by
this process's own thread, and so is the rest of every shard if the other process ends: from the byte where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.handlers
import os
import pickle
import queue
import select
import socket
import struct
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wds_async.environment import snapshot, value
from wds_async.errors import WdsError
from wds_async.storage.base import Location
from wds_async.storage.fsspec_config import configure, set_by_program
from wds_async.storage.stores import STORES
from wds_async.transfer.engine import Engine, EventQueue, Pump, QueuedShard, crowded, end_with_worker
from wds_async.transfer.options import ReadOptions, Span
from wds_async.transfer.shard_state import ShardState
from wds_async.transfer.slabs import SharedSlabPool, Slab, SlabView
from wds_async.transfer.stats import Counters, Stats
from wds_async.transfer.traffic import Traffic
from wds_async.transfer.window import End, Event, Finished, Piece, Shard

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from wds_async.child_process import ChildProcess

__all__ = ["RemoteEngine", "RemoteEvents", "RemotePump", "acquire", "event_queue", "main", "start"]

logger = logging.getLogger("wds_async")

_LENGTH = struct.Struct("=I")
_BLOCK_BYTES = struct.Struct("=Q")
_READ_BYTES = 1 << 18
_END_WITHIN_S = 2.0
_GAUGES = frozenset({
    "connections", "connections_peak", "connections_limit", "connections_most", "slowdown", "window_bytes",
    "window_peak_bytes", "budget_bytes",
})  # fmt: skip
"""Counters that are set, not added to."""
_FACTS = ("version", "etag", "checksum", "modified", "open_ended", "end_in_doubt")
"""Attributes of a `ShardState` that are sent to the reader's end."""


def event_queue(options: ReadOptions) -> EventQueue:
    """Return the queue of a reader's events: `RemoteEvents` where another process may read for it."""
    here = value("WDS_ENGINE") == "thread" or options.config.verify == "always"  # which asks the stores itself
    return EventQueue(options.counters) if here or not _possible() else RemoteEvents(options.counters)


def acquire(options: ReadOptions, events: EventQueue) -> tuple[Engine | RemoteEngine, Pump | RemotePump]:
    """Return an engine for a reader with these ``events``, and its pump. Give that back by ``engine.release(pump)``."""
    if isinstance(events, RemoteEvents):
        end_with_worker()
        return RemoteEngine(), RemotePump(options, events)
    return Engine.acquire(options, events)


def start() -> None:
    """Start the process now, so that the first reader need not wait for it."""
    if _possible():
        with contextlib.suppress(OSError, WdsError):  # the reader tries again, and warns
            _EngineProcess.running()


def _possible() -> bool:
    return hasattr(os, "memfd_create") and bool(sys.executable) and not getattr(sys, "frozen", False)


class _Frames:
    """Messages out of the bytes of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> list[Any]:
        """Return the messages that are complete with these bytes."""
        self._data += data
        messages, at = [], 0
        while len(self._data) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(self._data, at)[0]
            if end > len(self._data):
                break
            messages.append(pickle.loads(self._data[at + _LENGTH.size : end]))
            at = end
        del self._data[:at]
        return messages


def _frame(message: Any) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


# ------------------------------------------------------------------ in the process that reads


class _EngineProcess:
    """The process with the engine. It ends when this object is collected, or this process ends."""

    current: _EngineProcess | None = None

    def __init__(self) -> None:
        from wds_async.child_process import ChildProcess  # noqa: PLC0415 (subprocess, multiprocessing)

        self.environment = snapshot()
        self._child: ChildProcess = ChildProcess("transfer.remote_engine", b"")
        self.pid = self._child.popen.pid
        self.socket = socket.socket(fileno=os.dup(self._child.connection.fileno()))
        self._child.connection.close()
        self._end = weakref.finalize(self, _end, self.socket, self._child)

    @classmethod
    def running(cls) -> _EngineProcess:
        """Return this process's, started if it does not run, or runs with another environment. WdsError where it cannot
        be started."""
        process = cls.current
        if process is None or process._child.popen.poll() is not None or process.environment != snapshot():
            process = cls.current = cls()
        return process

    @property
    def started(self) -> bool:
        """True once it reads, or has ended: its first byte stays here unread."""
        if self.socket.fileno() < 0:  # this process ends, and has ended it
            return True
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def forget(self) -> None:
        """Leave the process to the parent of this fork."""
        self._end.detach()
        self.socket.close()


def _end(control: socket.socket, child: ChildProcess) -> None:
    control.close()
    child.end(_END_WITHIN_S)


class RemoteEvents(EventQueue):
    """Events of a reader that another process reads for. `pump` receives them on the consumer's thread."""

    pump: RemotePump | None = None

    def poll(self) -> Event | None:
        if self.pump is not None and self._events.empty():
            self.pump.receive(0)
        return super().poll()

    def _wait(self, within_s: float) -> Event:
        if self.pump is not None and self._events.empty():
            self.pump.receive(within_s)
        return self._events.get_nowait()


class _LocalEvents:
    """Events of the shards that this process's own thread reads: among the others, whose consumer is woken."""

    def __init__(self, events: RemoteEvents) -> None:
        self._events = events
        self.flying = 0
        self.woken, self._wake = socket.socketpair()
        self.woken.setblocking(False)
        self._wake.setblocking(False)

    @property
    def waiting(self) -> bool:
        return self._events.waiting

    def put(self, event: Event) -> None:
        self._events.flying = 1  # it is asked for only where nothing comes any more
        self._events.put(event)
        if self._events.waiting:
            with contextlib.suppress(OSError):  # full, or the reader is closed
                self._wake.send(b"\0")

    def close(self) -> None:
        """Wake no more."""
        self.woken.close()
        self._wake.close()


class RemoteEngine:
    """The engine of one reader as `ShardReader` uses it: calls to `RemotePump` need no other thread."""

    alive = True

    def submit(self, function: Any, *args: Any, **kwargs: Any) -> None:
        """Call ``function`` at once."""
        function(*args, **kwargs)

    def release(self, pump: RemotePump) -> None:
        """End a pump."""
        pump.close()


class RemotePump:
    """One reader's end of the connection to the process with the engine. Used on the consumer's thread."""

    def __init__(self, options: ReadOptions, events: RemoteEvents) -> None:
        self._options = options
        self._events = events
        events.pump = self
        self._pid = os.getpid()
        self._process: _EngineProcess | None = None
        self._socket: socket.socket | None = None
        self._frames = _Frames()
        self._memory: SlabView | None = None
        self._queued: dict[int, tuple[QueuedShard, Shard]] = {}
        """Shards of the other process that are not over, by number."""
        self._delivered: dict[int, int] = {}
        self._skipped: set[int] = set()
        self._handed: set[Slab] = set()
        self._local: list[tuple[Engine, Pump]] = []
        self._local_events: _LocalEvents | None = None
        self._opened = -1
        self._ended = self._lost = self._closed = False
        _pumps.add(self)

    def add(self, shards: Sequence[QueuedShard], *, ended: bool) -> None:
        """Append shards to the stream; ``ended``: no more will come."""
        self._ended = ended
        remote = [one for one in shards if self._crosses(one[2])] if self._connect() else []
        for one in remote:
            number, url, place, span = one
            assert isinstance(place, Location)
            self._queued[number] = one, Shard(number, url, state=ShardState(place, expected=span.version))
            self._delivered[number] = span.start
        local = [one for one in shards if one[0] not in self._queued]
        if local or (ended and self._local):
            engine, pump = self._local[-1] if self._local else self._start_local()
            engine.submit(pump.add, local, ended=ended)
        if remote or ended:
            self._send("add", remote, ended)

    def release(self, slabs: Sequence[Slab]) -> None:
        """Take back slabs that the consumer has read."""
        remote = [slab for slab in slabs if slab in self._handed]
        for slab in remote:
            self._handed.discard(slab)
            slab.view.release()
        for engine, pump in self._local:
            engine.submit(pump.release, slabs)
        if self._local and self._socket is None:
            self._connect()  # starts the process for the shards that are added later, and the next reader
        if remote:
            self._send("release", [slab.address for slab in remote])

    def opened(self, number: int) -> None:
        """Note that the consumer reads shard ``number`` from now on, beside the others that it has open."""
        self._opened = number
        for engine, pump in self._local:
            engine.submit(pump.opened, number)
        self._send("opened", number)

    def skip(self, number: int) -> None:
        """Drop the rest of shard ``number``."""
        for engine, pump in self._local:
            engine.submit(pump.skip, number)
        if number in self._queued:
            self._skipped.add(number)
            self._send("skip", number)

    def close(self) -> None:
        """End all transfers, and let go of the memory. Idempotent; harmless in a forked child."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._events.pump = None  # a cycle would keep the memory until it is collected
        _pumps.discard(self)
        try:
            self._take_rest()
        finally:  # Ctrl-C ends the wait
            self._hang_up()
            if self._local_events is not None:
                self._local_events.close()
            for slab in self._handed:
                slab.view.release()
            if self._memory is not None:
                self._memory.close()
            for engine, pump in self._local:  # may take long
                engine.release(pump)

    def _take_rest(self) -> None:
        """End the connection, and take what was counted until the other process has stopped reading."""
        if self._socket is None or self._process is None or not self._process.started:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(_END_WITHIN_S)
            while (data := self._read()) != b"":
                self._take(data)

    def receive(self, within_s: float) -> None:
        """Take what the other process has sent; wait for it ``within_s`` if there is nothing, and no event of this
        process's thread."""
        poll = select.poll()
        for end in (self._socket, self._local_events.woken if self._local_events is not None else None):
            if end is not None and end.fileno() >= 0:
                poll.register(end, select.POLLIN)
        for ready, _ in poll.poll(within_s * 1000):
            if self._socket is not None and ready == self._socket.fileno():
                self._receive()
            elif self._local_events is not None:
                with contextlib.suppress(OSError):
                    self._local_events.woken.recv(_READ_BYTES)

    def _receive(self) -> None:
        try:
            data = self._read()
        except OSError:
            data = b""
        if data != b"":
            self._take(data)
        elif not self._closed:
            self._read_on_here()

    def _read(self) -> bytes | None:
        """Return what has come; b"" where the other process has ended, None for its memory, which comes first."""
        assert self._socket is not None
        if self._memory is not None:
            return self._socket.recv(_READ_BYTES)
        data, files, *_ = socket.recv_fds(self._socket, _BLOCK_BYTES.size, 1)
        if not files:
            return b""
        self._memory = SlabView(files[0], _BLOCK_BYTES.unpack(data)[0])
        return None

    def _take(self, data: bytes | None) -> None:
        for kind, *values in self._frames.add(data or b""):
            if kind == "counts":
                self._count(*values)
            elif kind == "log":
                logging.getLogger(values[0].name).handle(values[0])
            elif self._closed:
                continue
            elif kind == "events":
                for event in values[0]:
                    self._events.put(self._event(*event))
            elif kind == "idle":
                self._events.flying = 0

    def _event(self, number: int, facts: Any, piece: tuple[int, int, int] | None) -> Event:
        if number < 0:
            return Finished(facts)
        shard = self._queued[number][1]
        if facts is not None:
            shard.size, shard.streamed, shard.error, values = facts
            for name, known in zip(_FACTS, values, strict=True):
                setattr(shard.state, name, known)
        if piece is None:
            del self._queued[number], self._delivered[number]
            return End(shard)
        assert self._memory is not None
        address, size, length = piece
        slab = self._memory.slab(address, size)
        self._handed.add(slab)
        self._delivered[number] += length
        return Piece(shard, slab, length)

    def _count(self, counts: dict[str, float], traffic: Traffic) -> None:
        """Add what the other process has counted; by the thread that counts here, if there is one."""
        counters = self._options.counters

        def add() -> None:
            for name, count in counts.items():
                if not (self._local and name in _GAUGES):  # a thread that reads here too sets them
                    counters.add(name, count)
            counters.traffic.merge(traffic)
            counters.leave_traffic()

        if self._local:
            self._local[-1][0].submit(add)
        else:
            add()

    def _send(self, *message: Any) -> None:
        if self._socket is None:
            return
        self._events.flying = 1
        try:
            self._socket.sendall(_frame(message))
        except OSError:
            self._read_on_here()

    def _connect(self) -> bool:
        """Return whether the other process reads the shards that are added now. ``auto`` uses it once this process's
        thread needs it, and it has started."""
        if self._lost:
            return False
        automatic = value("WDS_ENGINE") == "auto"
        if self._socket is None:
            if automatic and not crowded():
                return False
            try:
                self._process = _EngineProcess.running()
                if automatic:
                    logger.info("WDS_ENGINE=auto: a process reads the next shards: %s", crowded())
                self._socket, theirs = socket.socketpair()
                with theirs:
                    socket.send_fds(self._process.socket, [b"+"], [theirs.fileno()])
            except (OSError, WdsError) as exn:
                self._give_up(f"no process can be started for the engine: {exn}")
                return False
            self._send(self._options.config, self._options.interleave, logger.getEffectiveLevel(), set_by_program())
            self._send("opened", self._opened)
        return self._process is not None and (self._process.started or not automatic)

    def _crosses(self, place: Location | WdsError) -> bool:
        """Return whether the other process can read there."""
        if isinstance(place, WdsError) or place.entry is not None or place.spec not in STORES:
            return False
        if place.fallback is not None and not self._crosses(place.fallback):
            return False
        try:
            pickle.dumps(place.options)
        except Exception:  # what they hold is the program's
            return False
        return True

    def _start_local(self) -> tuple[Engine, Pump]:
        if self._local_events is None:
            self._local_events = _LocalEvents(self._events)
        self._local.append(Engine.acquire(self._options, self._local_events))
        engine, pump = self._local[-1]
        engine.submit(pump.opened, self._opened)
        return engine, pump

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._process = None

    def _give_up(self, why: str) -> None:
        self._lost = True
        self._hang_up()
        logger.warning("%s; a thread of this process reads in its place", why)

    def _read_on_here(self) -> None:
        """Read on by this process's own thread what the other process has not delivered: it has ended."""
        pid = self._process.pid if self._process is not None else 0
        self._give_up(f"the process {pid} of the engine has ended")
        for gauge in ("connections", "window_bytes"):
            self._options.counters.set(gauge, 0)
        rest, over = [], []
        for number, ((_, url, place, span), shard) in sorted(self._queued.items()):
            at = self._delivered[number]
            end = shard.size if span.stop is None or shard.size is None else min(span.stop, shard.size)
            if at == end and at > span.start:
                over.append(shard)
            else:
                version = shard.state.version or span.version
                rest.append((number, url, place, Span(at, span.stop, version, span.crc32c)))
        skipped = self._skipped & self._queued.keys()
        self._queued.clear()
        for shard in over:
            self._events.put(End(shard))
        if rest:
            # One more pump: what it reads may come before what another one of this process has read already.
            engine, pump = self._start_local()
            engine.submit(pump.add, rest, ended=self._ended)
            for number in skipped:
                engine.submit(pump.skip, number)


_pumps: weakref.WeakSet[RemotePump] = weakref.WeakSet()
_inherited: list[_EngineProcess] = []


def _forget_in_child() -> None:
    """Close this process's copies of the connections: the other process ends with the last of them."""
    processes = {_EngineProcess.current}
    for pump in list(_pumps):
        processes.add(pump._process)
        if pump._socket is not None:
            pump._socket.close()
    for process in processes:
        if process is not None:
            process.forget()
            _inherited.append(process)
    _EngineProcess.current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


# ------------------------------------------------------------------ in the process with the engine


class _Outbox:
    """Events of one reader on their way to its process, in one message for each turn of the loop."""

    def __init__(self) -> None:
        self.slabs: dict[int, Slab] = {}
        """Slabs that the reader has, by address."""
        self.transport: asyncio.WriteTransport | None = None
        self.counters = _SentCounters(self)
        self._events: list[Any] = []
        self._facts: dict[int, Any] = {}
        self._flying = 0

    @property
    def waiting(self) -> bool:
        """True if the consumer has nothing: a reader gives its memory back before it waits."""
        return not self.slabs

    @property
    def flying(self) -> int:
        """Number of parts on their way. The reader is sent a message when it falls to zero."""
        return self._flying

    @flying.setter
    def flying(self, count: int) -> None:
        if self._flying and not count:
            self.send("idle")
        self._flying = count

    def put(self, event: Event) -> None:
        """Send an event soon."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self.flush)
        if isinstance(event, Finished):
            error = event.error and RuntimeError(repr(event.error))  # any exception, which may not pickle
            self._events.append((-1, error, None))
            return
        shard, facts = event.shard, (event.shard.size, event.shard.streamed, event.shard.error, ())
        if shard.state is not None:
            facts = (*facts[:3], tuple(getattr(shard.state, name) for name in _FACTS))
        changed = self._facts.get(shard.number) != facts
        self._facts[shard.number] = facts
        piece = None
        if isinstance(event, Piece):
            self.slabs[event.slab.address] = event.slab
            piece = event.slab.address, event.slab.size, event.length
        else:
            del self._facts[shard.number]
        self._events.append((shard.number, facts if changed else None, piece))

    def flush(self) -> None:
        """Send the events, behind what was counted until then."""
        events, self._events = self._events, []
        try:
            if events:
                self.counters.leave_traffic()
                self.send("events", events)
        except Exception:  # one that does not pickle: the reader must not wait for it
            logger.exception("WDS_ENGINE: the process of the engine cannot send what it has read")
            assert self.transport is not None
            self.transport.abort()

    def send(self, *message: Any) -> None:
        """Send a message; on the loop."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(_frame(message))


class _SentCounters(Counters):
    """Counters whose process is the reader's: what is counted here is sent there."""

    def __init__(self, outbox: _Outbox) -> None:
        super().__init__()
        self._outbox = outbox
        self._sent = Stats(*self.values()).as_dict()
        self._sent_traffic: dict[str, dict[str, Any]] = {}

    def leave_traffic(self) -> None:
        """Send what was counted since the last time."""
        before, self._sent = self._sent, Stats(*self.values()).as_dict()
        counts = {name: count - before[name] for name, count in self._sent.items() if count != before[name]}
        if counts:
            traffic, self._sent_traffic = self.traffic.since(self._sent_traffic), self.traffic.as_dict()
            self._outbox.send("counts", counts, traffic)


class _ReaderConnection(asyncio.Protocol):
    """The connection to one reader, on the loop."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._frames = connection, _Frames()
        (length,) = _LENGTH.unpack(connection.recv(_LENGTH.size, socket.MSG_WAITALL))
        config, interleave, level, configuration = pickle.loads(connection.recv(length, socket.MSG_WAITALL))
        logger.setLevel(level)
        configure(configuration)
        self.outbox = _Outbox()
        options = ReadOptions(config=config, counters=self.outbox.counters, interleave=interleave)
        self.engine, self._pump = Engine.acquire(options, self.outbox, SharedSlabPool)
        pool = self.engine.slabs
        assert isinstance(pool, SharedSlabPool)
        socket.send_fds(connection, [_BLOCK_BYTES.pack(pool.block_bytes)], [pool.file])
        connection.setblocking(False)
        self._task: asyncio.Task[Any] | None = None
        self.engine.submit(self._start)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(loop.create_connection(lambda: self, sock=self._socket))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.outbox.transport = transport  # type: ignore[assignment]  # uvloop's is no asyncio.WriteTransport

    def data_received(self, data: bytes) -> None:
        for name, *args in self._frames.add(data):
            if name == "add":
                self._pump.add(args[0], ended=args[1])
            elif name == "release":
                self._pump.release([self.outbox.slabs.pop(address) for address in args[0]])
            elif name == "opened":
                self._pump.opened(*args)
            elif name == "skip":
                self._pump.skip(*args)

    def eof_received(self) -> bool:
        self._task = asyncio.get_running_loop().create_task(self._close())
        return True  # what was counted is still to be sent

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.release(self._pump)

    async def _close(self) -> None:
        try:
            await self._pump.close()
            self.outbox.counters.leave_traffic()
        finally:
            assert self.outbox.transport is not None
            self.outbox.transport.close()


class _ForwardedLog(logging.handlers.QueueHandler):
    """Handler that sends records to the reader that came last, whose process logs them as its program wants."""

    reader: _ReaderConnection | None = None

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.reader is not None:
            self.reader.engine.submit(self.reader.outbox.send, "log", record)


def main(parent: Connection[Any, Any]) -> None:
    """Read for the readers that ``parent`` connects, until it closes the connection or ends."""
    from wds_async.child_process import begin  # noqa: PLC0415 (loaded already)

    begin()
    parent.recv_bytes()
    for handler in list(logger.handlers):  # the reader's process has it too
        logger.removeHandler(handler)
    logger.addHandler(log := _ForwardedLog(queue.SimpleQueue()))
    logger.propagate = False
    control = socket.socket(fileno=os.dup(parent.fileno()))
    poll = select.poll()
    poll.register(control, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):  # a fork of the parent may hold its end of the connection
        poll.register(os.pidfd_open(os.getppid()), select.POLLIN)
    with contextlib.suppress(KeyboardInterrupt, ConnectionError):  # the parent ended before it read all
        control.send(b"+")
        while [number for number, _ in poll.poll()] == [control.fileno()]:
            data, files, *_ = socket.recv_fds(control, 1, 1)
            if not data:
                break
            with contextlib.suppress(struct.error, EOFError, pickle.UnpicklingError, OSError):  # the reader has gone
                log.reader = _ReaderConnection(socket.socket(fileno=files[0]))
    os._exit(0)  # what is under way is wanted no more
