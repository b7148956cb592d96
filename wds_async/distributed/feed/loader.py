"""The loader of a feed: what a trainer iterates over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from wds_async.distributed.feed.messages import FeedState, Horizon, RankReport, Started
from wds_async.distributed.feed.ranks import RankBatches, Wanted
from wds_async.errors import ReaderClosed, StateError, WdsError

__all__ = ["DecoderLost", "FeedError", "FeedLoader", "RankLink"]

logger = logging.getLogger("wds_async")

_REPORTS_EVERY_S = 0.2
_ASKS_EVERY_S = 0.005
_ASKS_AT_LEAST_EVERY_S = 0.02
_FETCHES_FOR_S = 1.0
_AGAIN_AFTER_S = 0.05
_WARNS_AFTER_S = 60.0


class FeedError(WdsError, RuntimeError):
    """A feed has failed: its pipeline raised an error, its coordinator ended, or another session took its place."""


class DecoderLost(Exception):
    """A decoder does not answer; it is started again, and asked again."""


class RankLink(Protocol):
    """Protocol: the coordinator and the decoders, as a rank reaches them, from several threads."""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Coordinator`. FeedError where it is gone."""
        ...

    def fetch(self, decoder: int, generation: int, place: int, timeout_s: float) -> tuple[Any, int] | None:
        """Return a batch and its bytes; None where there is none within ``timeout_s``. Raise DecoderLost."""
        ...


class FeedLoader:
    """The batches of one rank of a feed, an epoch in each iteration. All ranks end an epoch with the same step.

    An iteration that was left early goes on with the next batch. `state_dict` is the state of the whole feed behind
    the batches that this rank was given; take it at the same step on all ranks, and load it on all of them. Any number
    of ranks can load it. Raises FeedError where the pipeline raised an error.
    """

    def __init__(self, link: RankLink, rank: int, world_size: int, ahead: int, *, even: bool, silence_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._link, self._ahead, self._even, self._silence_s = link, ahead, even, silence_s
        self._state: FeedState | None = None
        self._news = threading.Condition()
        self._batches: RankBatches | None = None
        self._between = False
        """Between two epochs."""
        self._threads: dict[int, threading.Thread] = {}
        self._failed: BaseException | None = None
        self._lagging: tuple[int, ...] = ()
        self._waited_s, self._told_at = 0.0, 0.0
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise ReaderClosed("this loader of a feed was closed; make another by feed.loader")
        if self._batches is None:
            self._begin()
        elif self._between:
            with self._news:
                self._batches.begin_epoch()
                self._between = False
                self._news.notify_all()
        return self._run()

    def _begin(self) -> None:
        started: Started = self._link.ask("begin", self.rank, self.world_size, self._state)
        batches = RankBatches(self.rank, self.world_size, started, self._ahead, even=self._even)
        self._batches, self._failed, self._between, self._threads = batches, None, False, {}
        self._told_at = time.monotonic()
        threading.Thread(target=self._exchange, args=(batches,), name="feed-horizon", daemon=True).start()

    def _run(self) -> Iterator[Any]:
        while True:
            batches = self._batches
            with self._news:
                if batches is None or self._between:
                    return
                self._wait(batches)
                if batches.is_over:
                    self._between = True
                    if left := batches.left_over:
                        logger.info("feed: %d batches at the end of the epoch are fewer than ranks: left out", left)
                    return
                batch = batches.take()
                self._news.notify_all()
            yield batch
            del batch

    def _wait(self, batches: RankBatches) -> None:
        """Wait until there is a batch, or none for this epoch."""
        began = time.monotonic()
        warns_at = began + _WARNS_AFTER_S
        while not (batches.is_ready or batches.is_over):
            if self._failed is not None:
                raise self._failed
            if self._closed:
                raise ReaderClosed("this loader of a feed was closed")
            self._news.notify_all()
            self._news.wait(_REPORTS_EVERY_S)
            if time.monotonic() > warns_at:
                warns_at += _WARNS_AFTER_S
                self._warn(batches, time.monotonic() - began)
        self._waited_s += time.monotonic() - began

    def _warn(self, batches: RankBatches, waited_s: float) -> None:
        logger.warning(
            "feed: rank %d has waited %.0f s for batch %d of epoch %d; ranks %s are the furthest behind (ranks take "
            "their batches at the same pace), decoders that it asks: %s",
            self.rank, waited_s, batches.next + self.rank, batches.epoch, list(self._lagging), batches.decoders(),
        )  # fmt: skip

    # ------------------------------------------------------------------ in threads

    def _is_current(self, batches: RankBatches) -> bool:
        return self._batches is batches and not self._closed and self._failed is None

    def _exchange(self, batches: RankBatches) -> None:
        """Tell the coordinator what was given, and learn which batches there are."""
        pause = 0.0
        while self._is_current(batches):
            with self._news:
                report = self._report(batches)
            try:
                horizon: Horizon = self._link.ask("exchange", report)
            except BaseException as exn:
                return self._fail(batches, exn)
            if horizon.superseded:
                text = f"rank {self.rank}: another session has begun, by a rank that was started again"
                return self._fail(batches, FeedError(f"feed: {text}; load a state and iterate again"))
            if horizon.failed:
                return self._fail(batches, FeedError(horizon.failed))
            with self._news:
                known = batches.decoders()
                self._lagging = horizon.lagging
                batches.update(horizon)
                self._start_fetching(batches)
                self._news.notify_all()
                pause = (
                    _ASKS_EVERY_S
                    if known != batches.decoders()
                    else min(2 * pause + _ASKS_EVERY_S, _ASKS_AT_LEAST_EVERY_S)
                )
                until = time.monotonic() + _REPORTS_EVERY_S
                while self._is_current(batches) and not self._is_hungry(batches) and time.monotonic() < until:
                    self._news.wait(until - time.monotonic())
            threading.Event().wait(pause)
        return None

    def _is_hungry(self, batches: RankBatches) -> bool:
        return batches.is_starving and not self._between

    def _report(self, batches: RankBatches) -> RankReport:
        now = time.monotonic()
        waited_s, self._waited_s = self._waited_s, 0.0
        elapsed_s, self._told_at = now - self._told_at, now
        return RankReport(
            batches.session, self.rank, batches.epoch, batches.next, waited_s, elapsed_s, batches.batch_bytes
        )

    def _start_fetching(self, batches: RankBatches) -> None:
        for decoder in batches.decoders():
            if (thread := self._threads.get(decoder)) is None or not thread.is_alive():
                thread = threading.Thread(
                    target=self._fetch, args=(batches, decoder), name=f"feed-{decoder}", daemon=True
                )
                self._threads[decoder] = thread
                thread.start()

    def _fetch(self, batches: RankBatches, decoder: int) -> None:
        """Fetch the batches of one decoder, one after the other."""
        answered_at = time.monotonic()
        while self._is_current(batches):
            with self._news:
                if (wanted := batches.wanted(decoder)) is None:
                    self._news.wait(_FETCHES_FOR_S)
                    answered_at = time.monotonic()
                    continue
            try:
                fetched = self._link.fetch(decoder, wanted.generation, wanted.place, _FETCHES_FOR_S)
            except DecoderLost as exn:
                if (lost_s := time.monotonic() - answered_at) > self._silence_s:
                    text = f"feed: rank {self.rank} did not reach decoder {decoder} for {lost_s:.0f} s: {exn}"
                    return self._fail(batches, FeedError(text))
                threading.Event().wait(_AGAIN_AFTER_S)
                continue
            except BaseException as exn:
                return self._fail(batches, exn)
            answered_at = time.monotonic()
            if fetched is not None:
                self._arrived(batches, wanted, fetched)
                del fetched
        return None

    def _arrived(self, batches: RankBatches, wanted: Wanted, fetched: tuple[Any, int]) -> None:
        with self._news:
            batches.arrived(wanted, *fetched)
            self._news.notify_all()

    def _fail(self, batches: RankBatches, exn: BaseException) -> None:
        with self._news:
            if self._batches is batches:
                self._failed = exn
            self._news.notify_all()

    # ------------------------------------------------------------------ states

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the feed behind the batches that this rank was given, as values that JSON can hold: the
        place in the data and a state of each decoder. Any one rank's state is that of all, at the same step."""
        with self._news:
            batches, between = self._batches, self._between
            if batches is None:
                beginning = {"feed": 1, "epoch": 0, "next": 0, "start": 0, "ended": False, "decoders": []}
                return dict(self._state) if self._state is not None else beginning
            place = (batches.epoch + 1, 0) if between else (batches.epoch, batches.next)
        return dict(self._link.ask("state_at", batches.session, *place))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batches of ``state`` at the next iteration; the same on all ranks, of which there may be
        another number. Decoders go on from it too; for another number of them their states are shared out."""
        if "feed" not in state:
            raise StateError(f"{state!r:.60} is no state of a feed")
        with self._news:
            self._state, self._batches, self._between = dict(state), None, False
            self._news.notify_all()

    def close(self) -> None:
        """End the threads of this loader. Idempotent; the feed goes on for other ranks."""
        with self._news:
            self._closed, self._batches = True, None
            self._news.notify_all()
