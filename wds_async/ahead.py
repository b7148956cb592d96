"""An iterator that a thread runs ahead of its consumer."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from wds_async.errors import ReaderClosed

__all__ = ["Ahead", "close_if_left", "is_ahead"]

_LEAVES_WITHIN_S = 1.0
_running: weakref.WeakSet[Ahead] = weakref.WeakSet()


class _Closeable(Protocol):
    def close(self) -> object: ...


class Ahead(Iterator[Any]):
    """The items of ``begin()``, made by a daemon thread that is at most ``most`` items ahead of the consumer.

    ``begin`` runs on that thread within the context ``within``; its error is raised here, at once. An error of the
    iterator is raised behind the items that came before it. `close`, and being dropped, ends the thread: at once where
    it waits for the consumer or for a reader, else behind the item that it makes. ReaderClosed in a forked child, where
    the thread is missing.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        most: int,
        within: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        self._owner = os.getpid()
        self._over = False
        self._exchange = exchange = _Exchange(most)
        # The thread does not refer to this object: it can be dropped while the thread runs.
        arguments = (exchange, begin, within or contextlib.nullcontext())
        self._thread = threading.Thread(target=_produce, args=arguments, name="wds-async-ahead", daemon=True)
        self._thread.start()
        _running.add(self)
        if (error := exchange.items.get()[1]) is not None:
            self._over = True
            raise error

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        if os.getpid() != self._owner:
            raise ReaderClosed("this iterator's thread is its parent process's: begin a new iteration here")
        item, error = self._exchange.items.get()
        if error is not None:
            self._over = True
            raise error
        self._exchange.room.put(None)
        return item

    def leave(self) -> None:
        """Have the thread end, without waiting."""
        self._over = True
        self._exchange.leave()

    def join(self, within_s: float) -> None:
        """Wait for the thread's end for at most ``within_s`` seconds, unless this is that thread."""
        if self._thread is not threading.current_thread():
            self._thread.join(within_s)

    def close(self) -> None:
        """End the thread, and wait for that up to a second."""
        if os.getpid() == self._owner and self._thread.is_alive():
            self.leave()
            self.join(_LEAVES_WITHIN_S)

    __del__ = close


class _Exchange:
    """Queues between the thread and its consumer. Simple queues alone: garbage may be collected, and an `Ahead`
    with it, where another lock is held."""

    def __init__(self, most: int) -> None:
        self.items: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.room: queue.SimpleQueue[None] = queue.SimpleQueue()
        """A token for each item that may be made."""
        self.left = False
        self.open: list[weakref.ref[_Closeable]] = []
        for _ in range(most):
            self.room.put(None)

    def leave(self) -> None:
        """Let the thread end: what it waits for comes, or is closed."""
        self.left = True
        self.room.put(None)
        for reference in list(self.open):
            if (opened := reference()) is not None:
                opened.close()


class _ExchangeOfThread(threading.local):
    exchange: _Exchange | None = None

    def work_for(self, exchange: _Exchange | None) -> None:
        self.exchange = exchange


_here = _ExchangeOfThread()


def _produce(exchange: _Exchange, begin: Callable[[], Iterator[Any]], within: Any) -> None:
    _here.work_for(exchange)
    try:
        with within:
            items = begin()
            exchange.items.put((None, None))
            while exchange.room.get() is None and not exchange.left:
                exchange.items.put((next(items), None))
    except BaseException as exn:  # StopIteration as well
        exchange.items.put((None, exn))
    finally:
        _here.work_for(None)


def is_ahead() -> bool:
    """Return whether this thread runs ahead of a consumer."""
    return _here.exchange is not None


def close_if_left(opened: _Closeable) -> None:
    """Have ``opened`` closed where the consumer leaves an iterator that this thread runs ahead of it."""
    exchange = _here.exchange
    if exchange is not None:
        exchange.open.append(weakref.ref(opened, exchange.open.remove))
        if exchange.left:
            opened.close()


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter: one that wakes in C++ code after its end would abort the process."""
    iterators = list(_running)
    for iterator in iterators:
        iterator.leave()
    deadline = time.monotonic() + _LEAVES_WITHIN_S
    for iterator in iterators:
        iterator.join(max(0.0, deadline - time.monotonic()))
