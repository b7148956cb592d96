"""A decoder: what runs the pipeline of a feed at one place of several, in a process of its own."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from wds_async import environment
from wds_async.distributed.attempts import one_line
from wds_async.distributed.feed.production import DecoderBatches, DecoderWork, Kept, Production
from wds_async.distributed.functions import function_named
from wds_async.errors import ConfigError

__all__ = ["Ask", "CoordinatorLost", "FeedDecoder", "pipeline_of"]

logger = logging.getLogger("wds_async")

_REPORTS_EVERY_S = 0.02
_LISTENS_EVERY_S = 0.1


class CoordinatorLost(Exception):
    """The coordinator has ended, and with it the feed."""


class Ask(Protocol):
    """Protocol: call ``method`` of the coordinator, wherever that is. CoordinatorLost where it does not answer."""

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Return what the method does."""
        ...


def pipeline_of(name: str) -> Any:
    """Return the pipeline that ``module:function`` makes. ConfigError for what has no state."""
    made = function_named(name, "pipeline")()
    if not all(hasattr(made, method) for method in ("__iter__", "state_dict", "load_state_dict")):
        raise ConfigError(
            f"feed: {name}() returns a {type(made).__name__}, which has no state: it must return a dataset, pipeline "
            "or WebLoader of wds_async, or an iterable with state_dict and load_state_dict"
        )
    return made


class FeedDecoder:
    """Decoder ``slot`` of a feed. It makes batches of the pipeline ``name`` in the thread that calls `run`, and tells
    the coordinator of them in another. `fetch` may be called from any thread. ``pack`` returns what is kept of a
    batch, and its bytes; the thread of `run` calls it, ``begin`` with each pipeline that is made, ``release`` for what
    is not needed, and ``forget`` when all ranks begin anew."""

    def __init__(
        self,
        name: str,
        slot: int,
        incarnation: int,
        ask: Ask,
        pack: Callable[[Any], Kept],
        credit: int,
        release: Callable[[Any], None] | None = None,
        forget: Callable[[], None] = lambda: None,
        begin: Callable[[Any], None] = lambda pipeline: None,
    ) -> None:
        self._name, self._slot, self._incarnation, self._ask = name, slot, incarnation, ask
        self._release, self._forget = release, forget
        self._unneeded: list[Any] = []

        def make() -> Any:
            pipeline = pipeline_of(name)
            begin(pipeline)
            return pipeline

        work = DecoderWork(make, pack, self._unneeded.append)
        self._batches = DecoderBatches(work, credit)
        self._news = threading.Condition()
        self._tell = threading.Event()
        self._dropped: list[Production] = []
        self._restarted = False
        self._error = ""
        self._ended = False

    def fetch(self, generation: int, place: int, timeout_s: float) -> Kept | None:
        """Return a batch and its bytes, and forget it; None where it is not made within ``timeout_s``."""
        until = time.monotonic() + timeout_s
        with self._news:
            kept = self._batches.take(generation, place)
            self._news.notify_all()  # it is asked for, or there is credit again
            while kept is None and not self._ended and (left := until - time.monotonic()) > 0:
                self._news.wait(left)
                kept = self._batches.take(generation, place)
            return kept

    def run(self) -> None:
        """Make batches until the feed ends."""
        # Of decoders that have less than others: ranks take the same number of steps all the same.
        warnings.filterwarnings("ignore", r"\d+ shards for \d+ ranks", UserWarning)
        threading.Thread(target=self._report, name="feed-reports", daemon=True).start()
        try:
            while (production := self._next()) is not None:
                self._make(production)
        finally:
            self._batches.close()

    def _next(self) -> Production | None:
        """Wait for something to make; None at the end of the feed."""
        while True:
            with self._news:
                dropped, self._dropped = self._dropped, []
                restarted, self._restarted = self._restarted, False
                production = None if self._ended else self._batches.due()
                if not (dropped or self._unneeded or production or self._ended):
                    self._news.wait()
                    continue
                unneeded = list(self._unneeded)
                self._unneeded.clear()
            for one in dropped:
                one.close()
            if self._release is not None:
                for packed in unneeded:
                    self._release(packed)
            if restarted:
                self._forget()
            if production is not None or self._ended:
                return production

    def _make(self, production: Production) -> None:
        environment.take_rank(*production.place)
        try:
            made = production.advance()
            with self._news:
                production.store(made)
                self._news.notify_all()
        except Exception as exn:
            place, places = production.place
            logger.exception("feed: decoder %d of %d failed", place, places)
            with self._news:
                self._batches.fail(production)
                self._error = f"feed: decoder {place} of {places} ({self._name}): {one_line(exn)}"
        self._tell.set()

    def _report(self) -> None:
        """Tell the coordinator what is made, and take what it wants."""
        known: set[int] = set()
        while not self._ended:
            with self._news:
                reports, error = self._batches.reports(), self._error
            try:
                assignments = self._ask("report", self._slot, self._incarnation, reports, error)
            except CoordinatorLost:
                assignments = None
            with self._news:
                if assignments is None:
                    self._ended = True
                else:
                    self._batches.told(reports)
                    self._error = "" if self._error == error else self._error
                    self._dropped += self._batches.follow(assignments)
                    now = {one.generation for one in assignments}
                    self._restarted = self._restarted or (bool(known) and not known & now)
                    known = now
                self._news.notify_all()
            self._tell.wait(_LISTENS_EVERY_S)
            self._tell.clear()
            threading.Event().wait(_REPORTS_EVERY_S)
