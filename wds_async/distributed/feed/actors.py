"""Engine of feeds on a Ray cluster: coordinator and decoders are actors; batches come through Ray's object store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from typing import Any

import numpy as np

from wds_async import config, shared_batches
from wds_async.distributed.engines.ray import RayEngine
from wds_async.distributed.engines.remote import short_error
from wds_async.distributed.feed.coordinator import Coordinator
from wds_async.distributed.feed.decoder import CoordinatorLost, FeedDecoder
from wds_async.distributed.feed.loader import DecoderLost, FeedError
from wds_async.distributed.feed.production import Kept
from wds_async.errors import WdsError
from wds_async.packages import optional

__all__ = ["RayFeedEngine", "RayLink"]

_NAMESPACE = "wds_async"
_LOOKS_EVERY_S = 0.5
_POLLS_EVERY_S = 0.02
_ANSWERS_WITHIN_S = 120.0


class RayLink:
    """A feed of a Ray cluster, as a rank reaches it in any process of the cluster. Pickled, it connects a program that
    is not connected."""

    def __init__(self, feed: str, address: str | None) -> None:
        self._feed, self._address = feed, address
        self._actors: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return RayLink, (self._feed, self._address)

    def _call(self, actor: str, method: str, *arguments: Any, timeout_s: float = _ANSWERS_WITHIN_S) -> Any:
        ray: Any = optional("ray", "a feed with engine='ray'", "ray")
        with self._lock:
            if not ray.is_initialized():
                RayEngine(address=self._address).connect()
            if actor not in self._actors:
                self._actors[actor] = ray.get_actor(f"{self._feed}-{actor}", namespace=_NAMESPACE)
            handle = self._actors[actor]
        try:
            return ray.get(getattr(handle, method).remote(*arguments), timeout=timeout_s)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError:
            self._actors.pop(actor, None)  # one that was ended has perhaps a successor
            raise

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Coordinator`. FeedError where it is gone."""
        try:
            worked, answer = self._call("coordinator", "call", method, *arguments)
        except WdsError:
            raise
        except Exception as exn:
            raise FeedError(
                "feed: its coordinator does not answer: the program that made the feed has ended, or closed it, or its "
                f"machine failed; make a feed anew, and load the state of a checkpoint ({short_error(exn)})"
            ) from exn
        if not worked:
            raise answer
        return answer

    def fetch(self, decoder: int, generation: int, place: int, timeout_s: float) -> tuple[Any, int] | None:
        """Return a batch and its bytes; None where there is none within ``timeout_s``. Raise DecoderLost."""
        errors = optional("ray", "a feed", "ray").exceptions
        try:
            kept = self._call(f"{decoder}", "fetch", generation, place, timeout_s, timeout_s=_ANSWERS_WITHIN_S)
        except errors.RayTaskError as exn:
            raise FeedError(f"feed: decoder {decoder}: {short_error(exn)}") from exn
        except (errors.RayError, ValueError) as exn:  # ValueError: no actor has that name yet
            raise DecoderLost(short_error(exn)) from exn
        if kept is None:
            return None
        (stream, buffers), size = kept
        return shared_batches.joined(stream, buffers), size


class _CoordinatorActor:
    """The coordinator, which takes one call at a time."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Return whether the method did not raise a `WdsError`, and its value or that."""
        try:
            return True, getattr(self._coordinator, method)(*arguments)
        except WdsError as exn:
            return False, exn


class _DecoderActor:
    """A decoder. Ray starts it again where its process or its machine ends."""

    def __init__(self, link: RayLink, name: str, slot: int, credit: int) -> None:
        config.configure_logging()
        self._link = link
        incarnation = self._ask("join", slot)
        self._decoder = FeedDecoder(name, slot, incarnation, self._ask, _pack, credit)
        threading.Thread(target=self._decoder.run, name="feed-decoder", daemon=True).start()

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self._link.ask(method, *arguments)
        except FeedError as exn:
            raise CoordinatorLost from exn

    async def fetch(self, generation: int, place: int, timeout_s: float) -> Kept | None:
        """See `FeedDecoder.fetch`. A call that waits costs no thread, as there may be as many as ranks."""
        until = time.monotonic() + timeout_s
        while (kept := self._decoder.fetch(generation, place, 0)) is None and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_POLLS_EVERY_S)
        return kept


def _pack(batch: Any) -> Kept:
    """Return the batch as Ray moves it without a copy: arrays, of which the receiver has views."""
    stream, raws = shared_batches.split(batch)
    return (stream, [np.frombuffer(raw, np.uint8) for raw in raws]), len(stream) + sum(raw.nbytes for raw in raws)


class RayFeedEngine:
    """The actors of a feed. They end with the program that makes it, or with `close`."""

    def __init__(self, name: str, coordinator: Coordinator, credit: int, engine: RayEngine) -> None:
        self._name, self._credit, self._engine = name, credit, engine
        self._ray = ray = engine.connect()
        here = ray.get_runtime_context()
        self._feed = f"wds-feed-{os.urandom(6).hex()}"
        self._link = RayLink(self._feed, here.gcs_address)
        node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here.get_node_id(), soft=False)
        # With this program, as the feed ends with it anyway.
        self._coordinator = ray.remote(_CoordinatorActor).options(
            num_cpus=0, name=f"{self._feed}-coordinator", namespace=_NAMESPACE, scheduling_strategy=node
        ).remote(coordinator)  # fmt: skip
        self._decoders: dict[int, tuple[Any, Any]] = {}
        """Actors, and what is there once they have started."""
        self._closed = threading.Event()
        self._start_missing()
        self._watch = threading.Thread(target=self._look, name="feed-decoders", daemon=True)
        self._watch.start()

    def link(self) -> RayLink:
        """Return what a rank reaches the feed by."""
        return self._link

    def _start_missing(self) -> None:
        ray, needed = self._ray, self._link.ask("slots")
        for slot, (_, started) in list(self._decoders.items()):
            if ray.wait([started], timeout=0)[0] and (error := self._error_of(started)):
                self._link.ask("fail", f"feed: decoder {slot} cannot be started: {error}")
                self._end(slot)
        for slot in range(needed):
            if slot not in self._decoders:
                actor = ray.remote(_DecoderActor).options(
                    name=f"{self._feed}-{slot}", namespace=_NAMESPACE, max_restarts=-1,
                    scheduling_strategy="SPREAD", **self._engine.options(),
                ).remote(self._link, self._name, slot, self._credit)  # fmt: skip
                self._decoders[slot] = actor, actor.__ray_ready__.remote()
        for slot in [slot for slot in self._decoders if slot >= needed]:
            self._end(slot)

    def _error_of(self, started: Any) -> str:
        try:
            self._ray.get(started)
        except self._ray.exceptions.ActorUnavailableError:
            return ""  # it is started again
        except Exception as exn:
            return short_error(exn)
        return ""

    def _end(self, slot: int) -> None:
        with contextlib.suppress(Exception):
            self._ray.kill(self._decoders.pop(slot)[0])

    def _look(self) -> None:
        while not self._closed.wait(_LOOKS_EVERY_S):
            try:
                self._start_missing()
            except Exception:  # the coordinator has ended: ranks find that themselves
                if self._closed.is_set() or not self._ray.is_initialized():
                    return

    def close(self) -> None:
        """End the actors, and the connection where this engine has made it. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._watch.join()
        if self._ray.is_initialized():
            for slot in list(self._decoders):
                self._end(slot)
            with contextlib.suppress(Exception):
                self._ray.kill(self._coordinator)
        self._engine.close()
