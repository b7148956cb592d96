"""One client's connection to the fast lane: waits for a head, sends an answer, or is lent to aiohttp.

Any doubt lends it to aiohttp, with the bytes that came. After an answer of aiohttp's to a plain request it comes back;
behind anything else (a body, pipelined requests, what is no HTTP) aiohttp keeps it.

It costs no memory for what it receives: all connections read into one buffer of their loop's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from wds_async.service.door import Warm
from wds_async.service.handing import credentials, hand, wants_file
from wds_async.service.heads import HEAD_LIMIT_BYTES, Head, read_head

if TYPE_CHECKING:
    from wds_async.service.express import Express

__all__ = ["SWEEP_EVERY_S", "Connection"]

logger = logging.getLogger("wds_async")
audit = logging.getLogger("wds_async.audit")

SWEEP_EVERY_S = 1.0
"""How often each connection is looked at (`Connection.look`)."""

_SLICE_BYTES = 1 << 20  # that one client is sent before the others have their turn
_TURNS_TO_COME_BACK = 4  # of the loop, between aiohttp's last byte and its waiting for the next request
_MORE = getattr(socket, "MSG_MORE", 0)
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Connection(asyncio.BufferedProtocol):
    """See above. ``local``: it came by the Unix socket."""

    def __init__(self, lane: Express, *, local: bool) -> None:
        self._lane, self._local = lane, local
        self.process = 0
        """Which one of this host's it comes from; 0 where that is not known."""
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._socket: socket.socket | None = None
        self._peer = ""
        self._pending = b""
        self._answer: Warm | None = None
        self._rest = b""  # of the answer's head
        self._waits = self._paused = self._over = False
        self._inner: Any = None  # aiohttp's protocol, while the connection is lent
        self._spare: Any = None  # the same, while it is not
        self._comes_back = self._introduced = False
        self._moved_at = self._loop.time()

    # What the lane does

    def drain(self) -> None:
        """See `Express.drain`."""
        if self._answer is not None:
            self._answer.keep_alive = False
        elif self._inner is None or self._inner_idle():
            self._transport.close()

    def abort(self) -> None:
        """End it now."""
        # aiohttp's task first: a `sendfile` that loses its transport leaves asyncio with a traceback.
        handler = getattr(self._inner, "_task_handler", None)
        if handler is not None:
            handler.cancel()
        if self._transport is not None:
            self._transport.abort()

    def look(self, now: float) -> None:
        """Let go of a client that does nothing any more."""
        lane, idle_s = self._lane, now - self._moved_at
        if self._over:
            if idle_s > SWEEP_EVERY_S:
                self.abort()
            return
        if self._inner is not None:
            if lane.draining and self._inner_idle():
                self._transport.close()
            return  # aiohttp has a clock of its own
        if self._answer is not None:
            if idle_s > lane.send_s:
                logger.info("a client took no byte for %g s: let go", lane.send_s)
                lane.meters.refused("slow")
                self.abort()
        elif self._pending:
            if idle_s > lane.header_s:
                lane.meters.refused("head")
                self.abort()
        elif idle_s > lane.idle_s or lane.draining:
            self._transport.close()

    # What the loop does

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._local:
            self.process = credentials(transport.get_extra_info("socket"))[0]
        if not self._lane.add(self):
            self._over = True
            self._transport.write(_TOO_MANY)
            self._transport.close()
            return
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        if transport.get_extra_info("sslcontext") is not None:
            self._lend(b"", comes_back=False)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._lane.scratch

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._lane.scratch[:nbytes])
        if self._over:
            return
        if self._inner is not None:
            self._pending += data
            self._returned(0)
        elif self._answer is not None:
            self._keep(self._pending + data)
        else:
            if not self._pending:
                self._moved_at = self._loop.time()
            self._read(self._pending + data if self._pending else data)

    def eof_received(self) -> bool | None:
        if self._inner is not None:
            return bool(self._inner.eof_received())
        if self._answer is not None:  # it may shut its side down once it has asked
            self._answer.keep_alive = False
            return True
        return None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._stop_waiting()
        if self._answer is not None:
            self._finish()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if (inner := self._inner or self._spare) is not None:
            self._inner = self._spare = None
            inner.connection_lost(exc)
        self._lane.discard(self)

    # Requests

    def _read(self, data: bytes) -> None:
        """Answer the heads in ``data``, one after another, until one takes its time or there are no more."""
        while data:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if not data[:1].isupper():  # neither is it the beginning of a head: aiohttp says so at once
                    self._lend(data, comes_back=False)
                    return
                break
            raw = data if end == len(data) else data[:end]
            head = read_head(raw)
            if head is None:
                self._lend(data, comes_back=False)
                return
            if not self._begin(head):
                # What is pipelined behind it goes along: aiohttp then answers all in order.
                self._lend(data, comes_back=end == len(data))
                return
            data = data[end:]
            if self._answer is not None or self._over:
                break
        self._keep(data)

    def _keep(self, data: bytes) -> None:
        """Hold back what cannot be read yet."""
        self._pending = data
        if len(data) < HEAD_LIMIT_BYTES:
            return
        if self._answer is not None:
            if not self._paused:
                self._paused = True
                self._transport.pause_reading()
        elif b"\r\n\r\n" not in data:
            self._over = True
            self._lane.meters.refused("head")
            self._moved_at = self._loop.time()
            self._transport.write(_TOO_LONG)
            self._transport.write_eof()  # what still comes is read and dropped, or the answer would be lost with it

    def _begin(self, head: Head) -> bool:
        """Begin to answer; False where the slow way shall."""
        if self._local and wants_file(head):
            self._hand(head)
            return True
        answer = self._lane.door.warm(head, self._peer, local=self._local)
        if answer is None:
            return False
        answer.began = self._moved_at = self._loop.time()
        answer.keep_alive = answer.keep_alive and not self._lane.draining
        self._answer, self._rest = answer, answer.head
        self._push()
        return True

    def _hand(self, head: Head) -> None:
        own = self._own_socket()
        if not self._introduced:
            self._introduced = True
            audit.info("process %d of user %d, group %d asks for files", *credentials(own))
        try:
            hand(self._lane.door, head, self._peer, own, self._lane.meters)
        except OSError as exn:
            logger.info("a file could not be handed: %s", exn)
            self._fail()
        else:
            self._moved_at = self._loop.time()

    # Answers

    def _push(self) -> None:
        """Send what the socket takes, one slice at most; then the others have their turn."""
        answer, own = self._answer, self._socket or self._own_socket()
        assert answer is not None
        try:
            if self._rest:
                sent = own.send(self._rest, _MORE if answer.at < answer.stop else 0)
                self._rest = self._rest[sent:]
                answer.first_s = answer.first_s or self._loop.time() - answer.began
            if not self._rest and answer.at < answer.stop:
                sent = os.sendfile(own.fileno(), answer.found.fd, answer.at, min(answer.stop - answer.at, _SLICE_BYTES))
                if sent == 0:
                    raise OSError(f"the cached file of {answer.api} ended before its byte {answer.stop}")
                answer.at += sent
                answer.sent += sent
                if answer.at < answer.stop:
                    self._moved_at = self._loop.time()
        except (BlockingIOError, InterruptedError):
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._fail()
            return
        except OSError as exn:
            logger.warning("the fast lane could not send: %s", exn)
            self._fail()
            return
        if self._rest or answer.at < answer.stop:
            self._wait()
        else:
            self._sent()

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._loop.add_writer(self._own_socket().fileno(), self._writable)

    def _writable(self) -> None:
        self._push()
        if self._answer is None and self._pending and not self._over and self._inner is None:
            data, self._pending = self._pending, b""
            self._moved_at = self._loop.time()
            self._read(data)

    def _stop_waiting(self) -> None:
        if self._waits and self._socket is not None:
            self._waits = False
            self._loop.remove_writer(self._socket.fileno())

    def _sent(self) -> None:
        """The answer is out."""
        assert self._answer is not None
        self._stop_waiting()
        keep = self._answer.keep_alive and not self._lane.draining
        self._finish()
        if not keep:
            self._over = True
            self._transport.close()
        elif self._paused:
            self._paused = False
            self._transport.resume_reading()

    def _fail(self) -> None:
        self._over = True
        self._transport.abort()

    def _finish(self) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        url = answer.found.url
        self._lane.door.over(answer)
        self._lane.meters.served(answer.api, answer.status, answer.first_s, answer.sent, url, answer.client)

    def _own_socket(self) -> socket.socket:
        """Another descriptor of the connection's socket: the transport's own may be watched by nobody else."""
        if self._socket is None:
            self._socket = self._transport.get_extra_info("socket").dup()
            self._socket.setblocking(False)
        return self._socket

    # aiohttp

    def _lend(self, data: bytes, *, comes_back: bool) -> None:
        inner, self._spare = self._spare, None
        if inner is None:
            inner = self._lane.slow()
            inner.connection_made(self._transport)
        self._inner, self._comes_back, self._pending = inner, comes_back, b""
        if data:
            inner.data_received(data)

    def _inner_idle(self) -> bool:
        """Whether aiohttp has answered all that it was given, and waits for the next request."""
        waiter = getattr(self._inner, "_waiter", None)
        return waiter is not None and not waiter.done() and self._transport.get_write_buffer_size() == 0

    def _returned(self, turn: int) -> None:
        """Read what came while the connection was lent: ourselves, where aiohttp is done with it."""
        inner, data = self._inner, self._pending
        if inner is None or not data or self._over:
            return
        if not self._comes_back:
            self._pending = b""
            inner.data_received(data)
        elif self._inner_idle() and not self._transport.is_closing():
            self._inner, self._spare, self._pending = None, inner, b""
            inner.keep_alive(True)  # its clock stops: whether the connection has been idle for long is ours to say
            self._moved_at = self._loop.time()
            self._read(data)
        elif turn < _TURNS_TO_COME_BACK:
            self._loop.call_soon(self._returned, turn + 1)
        else:
            self._comes_back = False
            self._returned(turn)
