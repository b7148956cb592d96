"""States of stages between two items, as values that JSON can hold.

An iteration pulls its items one by one, so that between two of them every stage is suspended, and what it holds is well
defined. A stage that holds something declares a class of `StageState` (`stages.Traits.state`) and receives an object
of it as ``state``.
"""

from __future__ import annotations

import base64
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from wds_async.errors import StateError

__all__ = [
    "NO_BATCH",
    "Counted",
    "Held",
    "RandomState",
    "Rest",
    "SourceState",
    "StageState",
    "WorkerState",
    "WorkerStates",
    "check_keys",
    "pack_bytes",
    "pack_random",
    "unpack_bytes",
    "unpack_random",
    "without_history",
    "without_random",
]


NO_BATCH = object()
"""An item that stands for a batch that was given before: a worker that goes on in the middle of a turn begins so."""


class StageState:
    """Base of the states that stages hold between two items.

    `save` returns values that JSON can hold, in dicts and lists, and `Held` for items; `load` receives the same with
    the items in their places, before the stage begins. What stands under the key ``nested`` is left as it is: states of
    other pipelines. A stage in front of the one that reads shards is run again from its beginning: `save_start` returns
    what `load` needs for that.
    """

    amounts: ClassVar[tuple[str, ...]] = ()
    """Names of numbers of what is left to do, which are divided as items are where a state is shared out."""

    def save(self) -> dict[str, Any]:
        """Return what the stage holds."""
        return {}

    def load(self, saved: dict[str, Any]) -> None:
        """Restore what was saved."""

    def save_start(self) -> dict[str, Any]:
        """Return what the stage held when it began."""
        return {}

    @classmethod
    def shared(cls, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the argument of `load` (without items) for one of several processes that share what was saved in
        ``states``.
        """
        return {}

    @classmethod
    def at_start(cls, stage: Any, start: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `load` needs to begin again: ``start``, what `save_start` returned, and of pipelines within
        ``stage``, whose states are in ``saved``, the states at their start."""
        return dict(start)


class SourceState(StageState):
    """Base of the position of a stage that reads shards."""

    stopped = False
    """A handler ended the stream."""

    def stop(self) -> None:
        """Note that a handler ended the stream."""
        self.stopped = True

    def record_shards(self, shards: dict[str, Any]) -> None:
        """Record in ``shards``, by URL, how to read a part of a shard again (``stage.samples_at``)."""
        raise NotImplementedError

    def shards(self, source: Iterable[Any]) -> Iterator[Any]:
        """Return the shards of ``source`` that are still to be read, beginning in the middle of the open one."""
        raise NotImplementedError

    def listed(self) -> Iterator[Any]:
        """Return the remaining shards that do not come from an endless source."""
        raise NotImplementedError


class Held(list[Any]):
    """Items that a stage holds: saved as references to samples in shards if possible, otherwise themselves.

    Where the stage has still to run its function over them, ``results`` returns what that made of them. They are saved
    in their place if the function may give something else the next time, and loaded with ``done``.

    Where there may be any number of items, ``limit_bytes`` is the most that they may take if they are saved themselves.
    """

    def __init__(
        self,
        items: Iterable[Any] = (),
        results: Callable[[], list[Any]] | None = None,
        done: bool = False,
        limit_bytes: int | None = None,
    ) -> None:
        super().__init__(items)
        self.results = results
        self.done = done
        self.limit_bytes = limit_bytes


class Rest(StageState):
    """State of a stage that splits its input, or holds it for later: ``items``, the next one first."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()

    def hold(self, items: Iterable[Any]) -> None:
        """Hold ``items`` in place of those before."""
        self.items = deque(items)

    def rest(self) -> Iterator[Any]:
        """Yield the held items and release each."""
        while self.items:
            yield self.items.popleft()

    def save(self) -> dict[str, Any]:
        return {"items_held": Held(self.items)}

    def load(self, saved: dict[str, Any]) -> None:
        self.items = deque(saved["items_held"])


class Counted(StageState):
    """State of a stage that counts what it took: ``count``."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        """Count one more."""
        self.count += 1

    def save(self) -> dict[str, Any]:
        return {"count": self.count}

    def load(self, saved: dict[str, Any]) -> None:
        self.count = saved["count"]

    @classmethod
    def shared(cls, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"count": max((state.get("count", 0) for state in states), default=0)}


class RandomState(StageState):
    """State of a stage that draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng: Any = None
        self._start: Any = None
        self._loaded: Any = None

    def begin(self, rng: Any) -> Any:
        """Return the generator to draw from: ``rng``, in the state that was loaded if there is one."""
        if self._loaded is not None:
            rng.setstate(self._loaded)
        self.rng = rng
        self._start = rng.getstate() if hasattr(rng, "getstate") else None
        return rng

    def save(self) -> dict[str, Any]:
        if self.rng is None:
            return {} if self._loaded is None else {"random": pack_random(self._loaded)}
        if self._start is None:
            raise StateError(f"a generator of type {type(self.rng).__name__} cannot be saved: give random.Random")
        return {"random": pack_random(self.rng.getstate())}

    def load(self, saved: dict[str, Any]) -> None:
        self._loaded = unpack_random(saved["random"]) if "random" in saved else None

    def save_start(self) -> dict[str, Any]:
        start = self._loaded if self._start is None else self._start
        return {} if start is None else {"random": pack_random(start)}


@dataclass(frozen=True)
class WorkerState:
    """State of a DataLoader worker's dataset: ``behind`` batches came after it, or the worker has ``ended``."""

    state: Any
    behind: int = 0
    ended: bool = False


@dataclass(frozen=True)
class WorkerStates:
    """States of a loader's workers."""

    workers: Sequence[WorkerState]
    next: int
    """The worker whose batch comes next."""
    items_each: int
    """Items of the dataset in a batch."""


def check_keys(state: Any, *keys: str) -> None:
    """Raise StateError if ``state`` is not a dict with all of ``keys``."""
    missing = [key for key in keys if key not in state] if isinstance(state, Mapping) else list(keys)
    if missing:
        raise StateError(
            f"{state!r:.60} is no state, or a damaged one: it has no {', '.join(map(repr, missing))}. Load what "
            "state_dict() returned, whole"
        )


def without_random(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` of a pipeline within another without the program's generators, which that one saves."""
    kept = {name: value for name, value in state.items() if name != "random"}
    if not (history := state.get("history")):
        return kept
    start, first = history["start"], history["first"]
    if start is not None:
        start = {name: value for name, value in start.items() if name != "random"}
    return {**kept, "history": {**history, "start": start, "first": first and without_random(first)}}


def without_history(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` without what it tells of the past."""
    return {name: value for name, value in state.items() if name != "history"}


def pack_random(state: tuple[Any, ...]) -> list[Any]:
    """Return the state of a ``random.Random`` for JSON."""
    version, numbers, gauss = state
    return [version, pack_bytes(array("I", numbers).tobytes()), gauss]


def unpack_random(packed: Sequence[Any]) -> tuple[Any, ...]:
    """Return the state of a ``random.Random`` from `pack_random`."""
    version, numbers, gauss = packed
    return version, tuple(array("I", unpack_bytes(numbers))), gauss


def pack_bytes(data: bytes) -> str:
    """Return ``data`` as text."""
    return base64.b64encode(data).decode()


def unpack_bytes(text: str) -> bytes:
    """Return the bytes in ``text``."""
    return base64.b64decode(text)
