"""Engine of feeds on one machine: decoders are processes, reached through sockets; batches come in shared memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from wds_async import batch_memory, shared_batches
from wds_async.child_process import ChildProcess, begin, receive
from wds_async.distributed.feed.coordinator import Coordinator
from wds_async.distributed.feed.decoder import CoordinatorLost, FeedDecoder
from wds_async.distributed.feed.loader import DecoderLost, FeedError
from wds_async.distributed.feed.production import Kept
from wds_async.errors import WdsError

__all__ = ["LocalFeedEngine", "LocalLink", "main"]

_SLOTS = 256
"""Blocks of shared memory, and so open files, of a decoder; more batches come through its sockets."""
_LOOKS_EVERY_S = 0.1
_ENDS_WITHIN_S = 3.0
_ANSWERS_WITHIN_S = 120.0
_LONGEST_FOLDER = 80
_GONE = (OSError, EOFError, AuthenticationError)


class _CallServer:
    """Calls that come to a socket, one thread for each connection."""

    def __init__(self, address: str, key: bytes, call: Callable[..., Any]) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)
        self._call = call
        self._listener = Listener(address, "AF_UNIX", backlog=128, authkey=key)
        self._closed = False
        threading.Thread(target=self._accept, name="feed-server", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except _GONE:  # a client that ended while it connected, or `close`
                threading.Event().wait(_LOOKS_EVERY_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="feed-server", daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        with contextlib.suppress(*_GONE), connection:
            while True:
                arguments = connection.recv()
                try:
                    answer = (True, self._call(*arguments))
                except WdsError as exn:
                    answer = (False, exn)
                connection.send(answer)

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.close()


class _Calls:
    """Calls of a `_CallServer`, over a connection for each thread."""

    def __init__(self, address: str, key: bytes) -> None:
        self._address, self._key = address, key
        self._local = threading.local()

    def __call__(self, *arguments: Any) -> Any:
        connection = getattr(self._local, "connection", None)
        try:
            if connection is None:
                connection = self._local.connection = Client(self._address, "AF_UNIX", authkey=self._key)
            connection.send(arguments)
            if not connection.poll(_ANSWERS_WITHIN_S):
                raise TimeoutError(f"no answer within {_ANSWERS_WITHIN_S:.0f} s")
            worked, answer = connection.recv()
        except _GONE:
            self._local.connection = None
            raise
        if not worked:
            raise answer
        return answer


class LocalLink:
    """The feed of this machine, as a rank in any of its processes reaches it."""

    def __init__(self, folder: str, key: bytes) -> None:
        self._folder, self._key = folder, key
        self._coordinator = _Calls(f"{folder}/c", key)
        self._decoders: dict[int, _Calls] = {}

    def __reduce__(self) -> Any:
        return LocalLink, (self._folder, self._key)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Coordinator`. FeedError where it is gone."""
        try:
            return self._coordinator(method, *arguments)
        except _GONE as exn:
            raise FeedError(
                "feed: the process that made the feed has ended, or closed it; make a feed anew, and load the state of "
                "a checkpoint"
            ) from exn

    def fetch(self, decoder: int, generation: int, place: int, timeout_s: float) -> tuple[Any, int] | None:
        """Return a batch and its bytes; None where there is none within ``timeout_s``. Raise DecoderLost."""
        calls = self._decoders.setdefault(decoder, _Calls(f"{self._folder}/d{decoder}", self._key))
        try:
            kept: tuple[Any, int] | None = calls(generation, place, timeout_s)
        except _GONE as exn:
            raise DecoderLost(str(exn)) from exn
        return kept


class LocalFeedEngine:
    """The decoders of a feed as processes of this machine. One that ends is started again."""

    def __init__(self, name: str, coordinator: Coordinator, credit: int) -> None:
        self._name, self._credit, self._coordinator = name, credit, coordinator
        self._lock = threading.Lock()
        short = len(tempfile.gettempdir()) < _LONGEST_FOLDER  # the paths of sockets are bounded
        self._folder = tempfile.mkdtemp(prefix="wds-feed-", dir=None if short else "/tmp")
        self._key = os.urandom(32)
        self._processes: dict[int, ChildProcess] = {}
        self._closed = threading.Event()
        self._server = _CallServer(f"{self._folder}/c", self._key, self._call)
        self._start_missing()
        self._watch = threading.Thread(target=self._look, name="feed-decoders", daemon=True)
        self._watch.start()

    def link(self) -> LocalLink:
        """Return what a rank reaches the feed by; it can be pickled for processes of this machine."""
        return LocalLink(self._folder, self._key)

    def pids(self) -> list[int]:
        """Return the processes of the decoders, by their numbers."""
        return [process.popen.pid for _, process in sorted(self._processes.items())]

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._closed.is_set():  # connections of this process stay
            raise FeedError("feed: this feed was closed")
        with self._lock:
            return getattr(self._coordinator, method)(*arguments)

    def _start_missing(self) -> None:
        needed = self._call("slots")
        for slot in range(needed):
            process = self._processes.get(slot)
            if process is None or (process.popen.poll() is not None and not self._coordinator.failed):
                how = "could not be started" if process is None else process.end(0)
                incarnation = self._call("join", slot, how)
                what = self._name, slot, incarnation, self._folder, self._key, self._credit
                self._processes[slot] = ChildProcess("distributed.feed.local", pickle.dumps(what))
        for slot in [slot for slot in self._processes if slot >= needed]:
            process = self._processes.pop(slot)
            process.stop()
            process.end(_ENDS_WITHIN_S)

    def _look(self) -> None:
        while not self._closed.wait(_LOOKS_EVERY_S):
            try:
                self._start_missing()
            except WdsError as exn:
                self._call("fail", f"feed: {exn}")

    def close(self) -> None:
        """End the decoders. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._watch.join()
        self._server.close()
        for process in self._processes.values():
            process.stop()
        for process in self._processes.values():
            process.end(_ENDS_WITHIN_S)
        shutil.rmtree(self._folder, ignore_errors=True)


# ------------------------------------------------------------------ in the decoder's process


def main(parent: Connection[Any, Any]) -> None:
    """Be the decoder that ``parent`` says, until it closes the connection or ends."""
    begin()
    name, slot, incarnation, folder, key, credit = pickle.loads(parent.recv_bytes())
    threading.Thread(target=receive, args=(parent, lambda message: None), name="feed-parent", daemon=True).start()
    coordinator = _Calls(f"{folder}/c", key)
    slots = _SLOTS if shared_batches.possible() else 0

    def ask(method: str, *arguments: Any) -> Any:
        try:
            return coordinator(method, *arguments)
        except (FeedError, *_GONE) as exn:
            raise CoordinatorLost from exn

    def pack(batch: Any) -> Kept:
        packed = shared_batches.pack(batch, slots, child=False)
        return packed, packed.nbytes

    def begin_in_slots(pipeline: Any) -> None:
        memory = shared_batches.memory_of_process()
        batch_memory.use(memory if slots and shared_batches.begins_in_slots(pipeline) else None)

    release, forget = shared_batches.Packed.release, shared_batches.abandon
    decoder = FeedDecoder(name, slot, incarnation, ask, pack, credit, release, forget, begin_in_slots)
    server = _CallServer(f"{folder}/d{slot}", key, decoder.fetch)
    with contextlib.suppress(KeyboardInterrupt):
        decoder.run()
    server.close()
