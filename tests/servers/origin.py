"""An HTTP/1.1 server in this process whose every answer can be scripted down to the socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import ssl
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from tests.servers.behaviour import BEFORE_HEAD, Answer, Behaviour, Request, Sent, answer, short_etag

__all__ = ["Origin"]

_PIECE = 256 * 1024
_RIGHT = Behaviour()
_LOOK_EVERY_S = 0.02
_PACKETS_APART_S = 0.1


class Origin:
    """Serves ``files`` (path to bytes) with ranges, identities and keep-alive; use it as a context manager.

    It runs on a loop and thread of its own. `behave` scripts faults; `requests`, `connections`, `most_in_flight`
    and `most_connections` say what the clients did. ``latency_s`` delays every answer's head. ``seed`` drives
    `Behaviour.probability`. Everything may be called from any thread.

    ``etag_of`` makes the identity of a file. ``dialect(request, answer)`` may change every answer before it is sent, so
    that it is the one of some store's protocol. `sent` says what became of each request.
    """

    def __init__(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        latency_s: float = 0.0,
        seed: int = 0,
        host: str = "127.0.0.1",
        etag_of: Callable[[bytes], str] = short_etag,
        dialect: Callable[[Request, Answer], None] | None = None,
    ) -> None:
        self.files: dict[str, bytes] = dict(files or {})
        self.requests: list[Request] = []
        self.sent: list[Sent] = []
        self.connections = 0
        self.open_connections = 0
        self.most_connections = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.hang_up_at_once = False
        """Close every new connection before reading from it."""
        self.latency_s = latency_s
        self._tls, self._host, self.port = tls, host, 0
        self._etag_of, self._dialect = etag_of, dialect
        self._rng = random.Random(seed)
        self._script: list[tuple[Behaviour, list[int]]] = []
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._released = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._listening: socket.socket | None = None

    # -- the test's side ----------------------------------------------------------------------------------

    @property
    def base(self) -> str:
        """``http://127.0.0.1:port``, without a final slash; ``https://localhost:port`` with TLS."""
        return f"https://localhost:{self.port}" if self._tls else f"http://{self._host}:{self.port}"

    def url(self, path: str) -> str:
        """The URL of ``path``."""
        return f"{self.base}/{urllib.parse.quote(path.lstrip('/'))}"

    def add(self, path: str, content: bytes) -> str:
        """Serve ``content`` under ``path`` (or replace what is there) and return its URL."""
        self.files["/" + path.lstrip("/")] = content
        return self.url(path)

    def behave(self, behaviour: Behaviour | None = None, /, **fields: Any) -> Behaviour:
        """Script a behaviour, given whole or by its fields. The first one that takes a request has it."""
        scripted = dataclasses.replace(behaviour or _RIGHT, **fields)
        with self._changed:
            self._script.append((scripted, [0]))
        return scripted

    def forget(self) -> None:
        """Behave from now on, and forget the requests seen."""
        with self._changed:
            self._script.clear()
            self.requests.clear()
            self.sent = []  # a new one: what is on its way belongs to the old one
            self.most_in_flight, self.most_connections = self.in_flight, self.open_connections

    def release(self) -> None:
        """Let every stalled answer go on, now and in the future."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._released.set)

    def wait_until(self, condition: Callable[[Origin], bool], timeout_s: float = 10.0) -> None:
        """Return once ``condition(self)`` holds, looked at whenever something happened here."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), timeout_s):
                raise TimeoutError(f"not within {timeout_s} s; requests: {self.requests}")

    def start(self) -> Origin:
        """Listen on a free port."""
        self._listening = self._listen()
        self.port = self._listening.getsockname()[1]
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="origin", daemon=True)
        self._thread.start()
        started.wait()
        return self

    def stop(self) -> None:
        """Close every connection and end the thread; harmless when it is not running."""
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()

    def __enter__(self) -> Origin:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- the loop's side ----------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        # SO_REUSEPORT, so that `_go_deaf` can keep the port while nobody listens on it.
        return socket.create_server((self._host, self.port), backlog=512, reuse_port=hasattr(socket, "SO_REUSEPORT"))

    def _run(self, started: threading.Event) -> None:
        loop = asyncio.new_event_loop()
        self._loop, self._released = loop, asyncio.Event()
        loop.run_until_complete(self._serve())
        loop.call_soon(started.set)
        try:
            loop.run_forever()
        finally:
            if self._listening is not None:
                loop.run_until_complete(_settle(loop, self._listening))
            if self._server is not None:
                self._server.close()
            loop.run_until_complete(self._end_connections())
            loop.close()

    async def _serve(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._listening, ssl=self._tls)

    async def _go_deaf(self, seconds: float) -> None:
        """Break every connection but the caller's, and refuse new ones; after ``seconds``, unless 0, listen again."""
        loop = asyncio.get_running_loop()
        server, listening = self._server, self._listening
        if server is None or listening is None:
            return  # it is already
        self._server = self._listening = None
        taken = socket.socket()  # bound and not listening: the port is nobody else's, and connections are refused
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind((self._host, self.port))
        await _settle(loop, listening)
        server.close()
        # All of the loop's: those that asyncio itself accepts connections with wait for a handshake.
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

        async def hear() -> None:
            try:
                await asyncio.sleep(seconds) if seconds else await asyncio.Event().wait()
                self._listening = self._listen()
                await self._serve()
            finally:
                taken.close()

        hearing = loop.create_task(hear())
        self._tasks.add(hearing)
        hearing.add_done_callback(self._tasks.discard)

    async def _end_connections(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Aborted transports tell their protocols in a later turn of the loop.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with self._changed:
            number, self.connections = self.connections, self.connections + 1
            self.open_connections += 1
            self.most_connections = max(self.most_connections, self.open_connections)
            self._changed.notify_all()
        try:
            # With TLS asyncio pauses from the high mark on, so that 0 would pause for ever when nothing is left.
            writer.transport.set_write_buffer_limits(high=1 if self._tls else 0, low=0)
            # asyncio does this only for sockets made with proto=IPPROTO_TCP, which create_server's are not.
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self.hang_up_at_once and (request := await self._read(reader, number)):
                if not await self._handle(request, reader, writer):
                    break
            writer.close()
            await writer.wait_closed()
        except (OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass  # the client went away, or the server stops
        finally:
            writer.transport.abort()
            self._tasks.discard(task)
            with self._changed:
                self.open_connections -= 1
                self._changed.notify_all()

    async def _read(self, reader: asyncio.StreamReader, connection: int) -> Request | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        await reader.readexactly(int(headers.get("content-length", 0)))
        path = urllib.parse.unquote(urllib.parse.urlsplit(target).path)
        with self._changed:
            request = Request(len(self.requests), connection, method, target, path, headers)
            self.requests.append(request)
            self._changed.notify_all()
        return request

    def _choose(self, request: Request) -> Behaviour:
        with self._changed:
            for behaviour, seen in self._script:
                if not behaviour.matches(request):
                    continue
                seen[0] += 1
                before, other = divmod(seen[0] - behaviour.skip - 1, behaviour.every)
                if before < 0 or other or (behaviour.times is not None and before >= behaviour.times):
                    continue
                if behaviour.probability >= 1 or self._rng.random() < behaviour.probability:
                    return behaviour
        return _RIGHT

    async def _handle(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False where the connection has to end."""
        behaviour, sent = self._choose(request), self.sent
        with self._changed:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self._changed.notify_all()
        if behaviour.then is not None:
            behaviour.then(request)
        status, count = 0, [0]
        try:
            if behaviour.deaf_s is not None:
                await self._go_deaf(behaviour.deaf_s)
                await _cut(writer, "reset")
                return False
            if behaviour.stall_after == BEFORE_HEAD:
                await self._stall(reader, writer)
            await asyncio.sleep(self.latency_s + behaviour.delay_s)
            if behaviour.cut_after == BEFORE_HEAD:
                await _cut(writer, behaviour.cut)
                return False
            made = answer(request, self.files.get(request.path), behaviour, self._etag_of)
            if self._dialect is not None:
                self._dialect(request, made)
            status = made.status
            writer.write(_head(made))
            if request.method != "HEAD":
                await self._body(made, behaviour, reader, writer, count)
            return await self._ends_well(request, made, behaviour, writer)
        finally:
            with self._changed:
                sent.append(Sent(request, behaviour, status, count[0]))
                self.in_flight -= 1
                self._changed.notify_all()

    async def _ends_well(
        self, request: Request, made: Answer, behaviour: Behaviour, writer: asyncio.StreamWriter
    ) -> bool:
        await writer.drain()
        if behaviour.cut_after is not None:
            await _cut(writer, behaviour.cut)
            return False
        wants_close = request.headers.get("connection", "").lower() == "close"
        closes = "close" in (made.headers.get("connection"), made.framing) or behaviour.bad_chunk
        return not (wants_close or closes or behaviour.hang_up != "no" or behaviour.length_error > 0)

    async def _stall(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say nothing until `release`. ConnectionResetError once the client has gone."""
        while not self._released.is_set():
            if reader.at_eof() or writer.transport.is_closing():
                raise ConnectionResetError("the client has gone")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._released.wait(), _LOOK_EVERY_S)

    async def _body(
        self,
        made: Answer,
        behaviour: Behaviour,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        count: list[int],
    ) -> None:
        view = memoryview(made.body)
        if behaviour.cut_after is not None:
            view = view[: behaviour.cut_after]
        stall_after = behaviour.stall_after
        stops = [len(view)] if stall_after is None or stall_after > len(view) else [stall_after, len(view)]
        sent = 0
        for number, stop in enumerate(stops):
            if number:
                await writer.drain()
                await self._stall(reader, writer)
            for piece in _pieces(view[sent:stop], behaviour.rate_bytes_s):
                if made.framing == "chunked":
                    writer.write(b"%x\r\n" % len(piece) + bytes(piece) + b"\r\n")
                else:
                    writer.write(piece)
                count[0] += len(piece)
                await writer.drain()
                if behaviour.rate_bytes_s:
                    await asyncio.sleep(len(piece) / behaviour.rate_bytes_s)
            sent = max(sent, stop)
        if behaviour.bad_chunk:
            await asyncio.sleep(_PACKETS_APART_S)
            writer.write(b"zzzz\r\nrubbish")
        elif made.framing == "chunked" and behaviour.cut_after is None:
            writer.write(b"0\r\n\r\n")


async def _settle(loop: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
    """Accept no more. A connection accepted just now reaches `Origin._accept` some turns later, and needs the server
    until then."""
    loop.remove_reader(listening.fileno())
    for _ in range(5):
        await asyncio.sleep(0)


def _pieces(view: memoryview, rate_bytes_s: float | None) -> Iterable[memoryview]:
    step = _PIECE if rate_bytes_s is None else max(1, min(_PIECE, int(rate_bytes_s / 100)))
    return (view[at : at + step] for at in range(0, len(view), step))


def _head(made: Answer) -> bytes:
    phrase = HTTPStatus(made.status).phrase if made.status in HTTPStatus._value2member_map_ else "Unknown"
    lines = [f"HTTP/1.1 {made.status} {phrase}", *(f"{k}: {v}" for k, v in made.headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _cut(writer: asyncio.StreamWriter, how: str) -> None:
    """End the connection once the peer's kernel has everything: a RST throws away what is still on its way."""
    sock: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(ImportError):
        import fcntl
        import termios

        deadline = time.monotonic() + 5
        while sock.fileno() >= 0 and time.monotonic() < deadline:
            (unacknowledged,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
            if unacknowledged == 0:
                break
            await asyncio.sleep(0.001)
    if how == "ragged":
        writer.transport.abort()
    if how == "reset" and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
