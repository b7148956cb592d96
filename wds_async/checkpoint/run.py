"""One pass of a pipeline over its stages, which can be saved between two items and continued later.

The stages in front of the one that reads shards are run again from their beginning, which reads nothing: a state has
how they began and how many shards were taken. The stages behind it save what they hold. A pipeline with a stage that
declares nothing of that is run again from the beginning of the pass.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wds_async.checkpoint.packing import (
    Shard,
    load_global_random,
    pack_items,
    pack_places,
    save_global_random,
    shard_of,
    unpack_items,
    unpack_places,
)
from wds_async.checkpoint.states import Held, SourceState, StageState, check_keys
from wds_async.errors import StateError
from wds_async.logs import warn_once
from wds_async.tar.group import RawSample

__all__ = ["Declared", "Run"]

logger = logging.getLogger("wds_async")

_LARGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Declared:
    """A stage of a pipeline, with what it declares for its state."""

    stage: Any
    name: str
    state: bool | type[StageState]
    """Kind of what it holds between two items: a class, True for nothing; False is unknown."""
    same_items: bool
    pure: bool
    """It gives the same item whenever it is run over the same sample."""

    @property
    def reads(self) -> bool:
        """True if it reads shards and can continue in the middle of one."""
        return isinstance(self.state, type) and issubclass(self.state, SourceState)


class Run:
    """One pass over ``stages``. ``saved``: what `save` of an earlier pass returned. ``sources``: the datasets within
    the first stage. ``shards_read``: how to read shards again (`DataPipeline.shards_read`).
    """

    def __init__(
        self,
        stages: Sequence[Declared],
        saved: Mapping[str, Any] | None = None,
        sources: Sequence[Any] = (),
        shards_read: dict[str, Any] | None = None,
    ) -> None:
        self._stages = stages
        self.states: dict[int, StageState] = {}
        """States of the stages that declare one, by their numbers."""
        self._shards_read = {} if shards_read is None else shards_read
        self.source = _source_of(stages)
        """Number of the stage that reads shards, or else of the first."""
        self._unknown = [one.name for one in stages[self.source + 1 :] if one.state is False]
        self._stopped: int = 0 if saved is None else saved.get("stopped", 0)
        """Number of the stage to which nothing more comes, since a handler ended the stream there."""
        self._given = 0
        self._ended = False
        self._front: dict[str, Any] | None = None if saved is None else saved.get("front")
        """The program's generators when the first shard was asked for, if functions of the program list shards."""
        self._random: dict[str, Any] = {}
        self._sources: list[Any] = []
        """States of the sources when the pass began, if it may have to be run again."""
        self._saved = saved
        if saved is not None:
            check_keys(saved, "replayed", "states")
            if saved["replayed"] != bool(self._unknown):
                raise StateError("this state was saved by a pipeline whose stages declare other states")
            for url, facts in saved.get("shards", ()):
                read = self._shards_read
                if numbers := facts.get("source"):
                    read = _source_at(stages[0].stage, numbers).shards_read
                read[url] = {name: value for name, value in facts.items() if name != "source"}
        if self._unknown:
            self._begin_replay(sources)

    # ------------------------------------------------------------------ building the chain of iterators

    def first(self, open_stage: Callable[[Any], Any]) -> Any:
        """Return the output of the first stage, by ``open_stage``, from where it was."""
        return open_stage(self._first(open_stage))

    def _first(self, open_stage: Callable[[Any], Any]) -> Any:
        one = self._stages[0]
        bound = self.bind(0, one.stage)
        if bound is not one.stage or self.source > 0 or self._unknown:
            return bound
        if hasattr(one.stage, "load_state_dict") and hasattr(one.stage, "state_dict"):
            if self._saved is not None:
                one.stage.load_state_dict(self._saved["source"])
                if self._saved["ended"]:
                    self._ended = True
                    return ()
            return self._until_end(iter(open_stage(one.stage)))
        return self._counted(iter(open_stage(one.stage)))

    def front(self, open_stage: Callable[..., Any]) -> Iterable[Any]:
        """Return all shards that reach the stage that reads them."""
        source = self.first(open_stage)
        for number in range(1, self.source):
            source = open_stage(self.bind(number, self._stages[number].stage), source)
        return self._as_before(source) if self._draws_in_front() else source

    def shards_left(self, open_stage: Callable[..., Any], *, endless: bool) -> list[Any]:
        """Return the shards that are still to be read, beginning in the middle of the open one; of an ``endless`` list,
        those that were shared out before.
        """
        state = self._state_at(self.source)
        assert isinstance(state, SourceState), "only of a pipeline that reads shards"
        return list(state.listed() if endless else state.shards(self.front(open_stage)))

    @property
    def reads(self) -> bool:
        """True if a stage reads shards."""
        return self._stages[self.source].reads

    def bind(self, number: int, stage: Any) -> Any:
        """Return ``stage``, which is at place ``number``, with the state that it declares."""
        state = self._state_at(number)
        if state is None:
            return stage
        if hasattr(stage, "with_state"):
            return stage.with_state(state)
        return functools.partial(stage.run if hasattr(stage, "run") else stage, state=state)

    def _state_at(self, number: int) -> StageState | None:
        """Return the state of the stage at place ``number``; None for one that declares none."""
        kind = self._stages[number].state
        if not isinstance(kind, type):
            return None
        state = self.states[number] = kind()
        saved = {} if self._saved is None else self._saved["states"].get(str(number), {})
        if saved:
            state.load(self._with_items(saved, number))
        if isinstance(state, SourceState):
            state.record_shards(self._shards_read)
        return state

    def stop(self, number: int) -> None:
        """Note that a handler of stage ``number`` ended the stream."""
        self._stopped = max(self._stopped, number)

    def input_of(self, number: int, source: Any) -> Any:
        """Return what comes to stage ``number``: ``source``, or nothing where a handler had ended the stream."""
        if number and number == self._stopped:
            return iter(())
        return self._as_before(source) if number == self.source and self._draws_in_front() else source

    def _draws_in_front(self) -> bool:
        """Return whether functions of the program stand in front of the stage that reads shards: they may draw random
        numbers, as to shuffle the list."""
        front = (getattr(one.stage, "func", one.stage) for one in self._stages[1 : self.source] if one.state is False)
        return any(not str(getattr(one, "__module__", "")).startswith("wds_async.") for one in front)

    def _as_before(self, shards: Iterable[Any]) -> Iterator[Any]:
        """Yield ``shards``, for the first of which the program's generators are as they were when the pass began."""
        saved, now = (self._saved or {}).get("front"), save_global_random()
        self._front = saved or now
        items = iter(shards)
        if saved is not None:
            load_global_random(saved)
        first = list(itertools.islice(items, 1))
        if saved is not None:
            load_global_random(now)
        yield from first
        yield from items

    def items(self, items: Iterable[Any]) -> Iterator[Any]:
        """Return the output of the last stage, without the items that were given before."""
        if not self._unknown:
            return iter(self.input_of(len(self._stages), items))
        return self._behind_given(iter(items))

    def _until_end(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items of a source that has a state of its own, and note when it has ended: its next epoch follows
        then.
        """
        yield from items
        self._ended = True

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items of a source without a state, which is expected to start again in the same way."""
        self._given = 0 if self._saved is None else self._saved["source"]
        for item in itertools.islice(items, self._given, None):
            self._given += 1
            yield item

    # ------------------------------------------------------------------ running again from the beginning

    def _begin_replay(self, sources: Sequence[Any]) -> None:
        if self._saved is None:
            self._random = save_global_random()
            self._sources = [source.state_between() for source in sources]
            return
        self._sources = self._saved["sources"]
        for source, saved in zip(sources, self._sources, strict=True):
            source.load_state_dict(saved)
        self._random = self._saved["random"]
        warn_once(
            logger,
            f"replay {self._unknown}",
            "this pipeline goes on by running again over the %d items of its pass that were given before: nothing is "
            "known of the state of its stages %s. Declare it (docs/exact.md), and resuming takes no time",
            self._saved["given"],
            ", ".join(self._unknown),
        )
        load_global_random(self._random)

    def _behind_given(self, items: Iterator[Any]) -> Iterator[Any]:
        if self._saved is not None:
            self._given = self._saved["given"]
            came = sum(1 for _ in itertools.islice(items, self._given))
            if came < self._given:
                raise StateError(f"the state was saved behind {self._given} items, and only {came} come now")
            load_global_random(self._saved["random_now"])
        for item in items:
            self._given += 1
            yield item

    # ------------------------------------------------------------------ saving

    def starts(self) -> dict[str, Any]:
        """Return what the stages held when the pass began, by their numbers."""
        starts = {str(number): state.save_start() for number, state in self.states.items()}
        return {number: start for number, start in starts.items() if start}

    def save(self) -> dict[str, Any]:
        """Return the state between two items, as values that JSON can hold."""
        if self._unknown:
            return {
                "replayed": True,
                "given": self._given,
                "states": self.starts(),
                "random": self._random,
                "sources": self._sources,
                "random_now": save_global_random(),
            }
        shards: dict[Shard, int] = {}
        saved: dict[str, Any] = {"replayed": False, "states": {}}
        first = self._stages[0].stage
        if self.source == 0 and 0 not in self.states:
            self._check_has_state(first)
            saved["source"] = first.state_dict() if hasattr(first, "state_dict") else self._given
            saved["ended"] = self._ended
        for number, state in self.states.items():
            front = number < self.source
            saved["states"][str(number)] = state.save_start() if front else self._packed(state.save(), number, shards)
        of_source = self.states.get(self.source)
        if isinstance(of_source, SourceState) and of_source.stopped:
            self.stop(self.source + 1)
        if self._front is not None:
            saved["front"] = self._front
        if self._stopped:
            saved["stopped"] = self._stopped
        if shards:
            saved["shards"] = [[shard[0], self._facts_of(shard)] for shard in shards]
        return saved

    def _check_has_state(self, first: Any) -> None:
        if hasattr(first, "datasets"):
            raise StateError(
                f"a {type(first).__name__} has a state if each of its datasets has one and none is there twice: put "
                "lists and mixes into wds.DataPipeline(...)"
            )

    def _packed(self, value: Any, number: int, shards: dict[Shard, int]) -> Any:
        """Return ``value`` of stage ``number`` with its `Held` items as references, or as themselves."""
        if isinstance(value, Held):
            again = value.results is not None
            if (places := self._places(value, number + again)) is not None:
                return pack_places(places, shards)
            name = self._stages[number].name
            items = value if value.results is None else value.results()
            packed = {**pack_items(items, name, value.limit_bytes), "done": again}
            if packed["bytes"] > _LARGE_BYTES:
                warn_once(
                    logger,
                    f"large {name}",
                    "the state has the %d items that the stage %s holds, %.0f MB: put it before the functions that "
                    "make them, or mark these as wds.deterministic, and the state has their places only",
                    packed["count"],
                    name,
                    packed["bytes"] / 1e6,
                )
            return packed
        if isinstance(value, dict):
            return {key: self._packed(one, number, shards) for key, one in value.items()}
        return [self._packed(one, number, shards) for one in value] if isinstance(value, list) else value

    def _places(self, items: Held, number: int) -> list[tuple[Shard, int, int | None]] | None:
        """Return the positions of ``items`` of stage ``number``; None if not all of them can be made again from
        positions.
        """
        if not _is_pure(self._stages[self.source + 1 : number]) or not all(type(item) is RawSample for item in items):
            return None
        shards = {url: self._shard_of(url) for url in {item.shard for item in items}}
        places = [(shard, item.offset, item.stop) for item in items if (shard := shards[item.shard]) is not None]
        return places if len(places) == len(items) else None

    def _shard_of(self, url: str) -> Shard | None:
        """Return the shard ``url`` from whose samples the first stages make their items again; None if they cannot, or
        if several sources have read it.
        """
        if self.reads:
            return (url,)
        read = [one for one in self._readers if one.pipeline is None or url in one.pipeline.shards_read]
        return (url, *read[0].numbers) if len(read) == 1 and read[0].pure else None

    @functools.cached_property
    def _readers(self) -> list[_Reader]:
        return list(_readers_in(self._stages[0].stage))

    def _facts_of(self, shard: Shard) -> Mapping[str, Any]:
        """Return what is needed to read samples of ``shard`` again."""
        url, *numbers = shard
        if not numbers:
            return self._shards_read.get(url, {"version": ""})  # type: ignore[no-any-return]
        return {**_source_at(self._stages[0].stage, numbers).shards_read[url], "source": numbers}

    def _with_items(self, value: Any, number: int) -> Any:
        """Return ``value`` from `_packed` with the items in their places."""
        if isinstance(value, dict) and "count" in value and ("references" in value or "items" in value):
            return self._held(value, number)
        if isinstance(value, dict):
            # States of other pipelines ("nested") have their items in their own places.
            return {k: one if k == "nested" else self._with_items(one, number) for k, one in value.items()}
        return [self._with_items(one, number) for one in value] if isinstance(value, list) else value

    def _held(self, packed: dict[str, Any], number: int) -> Held:
        """Return the items in ``packed``. Samples are read again by ranges, and pass through the stages in between."""
        assert self._saved is not None
        held = Held(done=packed.get("done", False))
        if "references" in packed:
            facts = {shard_of(*entry): entry[1] for entry in self._saved.get("shards", ())}
            held += _made_again(self._stages[:number], unpack_places(packed, list(facts)), facts)
        if "items" in packed:
            held += unpack_items(packed)
        return held


def _source_of(stages: Sequence[Declared]) -> int:
    return max((number for number, one in enumerate(stages) if one.reads), default=0)


def _is_pure(stages: Iterable[Declared]) -> bool:
    return all(one.same_items or one.pure for one in stages)


@dataclass(frozen=True, slots=True)
class _Reader:
    """A pipeline within the first stage that reads shards."""

    numbers: tuple[int, ...]
    """See `packing.Shard`."""
    pipeline: Any
    """None for a source of which it is unknown what it reads."""
    pure: bool
    """The stages behind the reading give the same item whenever they are run over the same sample."""


def _readers_in(stage: Any) -> Iterator[_Reader]:
    for number, source in enumerate(_sources_in(stage)):
        stages = source.declared() if hasattr(source, "declared") else []
        if not stages:
            yield _Reader((number,), None, False)
            continue
        first = _source_of(stages)
        pure = _is_pure(stages[first + 1 :])
        if stages[first].reads:
            yield _Reader((number,), source, pure)
            continue
        within = list(_readers_in(stages[0].stage)) or [_Reader((), None, False)]
        yield from (_Reader((number, *one.numbers), one.pipeline, pure and one.pure) for one in within)


def _sources_in(stage: Any) -> Sequence[Any]:
    """Return the datasets whose items ``stage``, the first one of a pipeline, gives: itself, or those that it mixes."""
    return [stage] if hasattr(stage, "declared") else getattr(stage, "datasets", ())


def _source_at(stage: Any, numbers: Sequence[int]) -> Any:
    """Return the dataset within ``stage`` that has these ``numbers``."""
    source = _sources_in(stage)[numbers[0]]
    return _source_at(source.pipeline[0], numbers[1:]) if numbers[1:] else source


def _made_again(
    stages: Sequence[Declared],
    places: Sequence[tuple[Shard, int, int | None]],
    facts: Mapping[Shard, Mapping[str, Any]],
) -> list[Any]:
    """Return what ``stages`` make of the samples at ``places``, in their order; ``facts`` are those of the shards."""
    source = _source_of(stages)
    items: Iterable[Any]
    if stages[source].reads:
        of_urls = {shard[0]: of_shard for shard, of_shard in facts.items()}
        items = stages[source].stage.samples_at([(shard[0], first, last) for shard, first, last in places], of_urls)
    else:
        items = _made_by_sources(stages[0].stage, places, facts)
    for one in stages[source + 1 :]:
        items = items if one.same_items else one.stage.run(items)
    made = list(items)
    if len(made) != len(places):
        raise StateError(
            f"{len(places)} samples were saved by their places, and the stages {[one.name for one in stages]} make "
            f"{len(made)} of them now"
        )
    return made


def _made_by_sources(
    stage: Any, places: Sequence[tuple[Shard, int, int | None]], facts: Mapping[Shard, Mapping[str, Any]]
) -> list[Any]:
    """Return the output of the sources within ``stage`` for the samples at ``places``, as that stage gives them."""
    made: dict[int, Any] = {}
    for number, source in enumerate(_sources_in(stage)):
        here = [at for at, (shard, _, _) in enumerate(places) if shard[1] == number]
        within = [((places[at][0][0], *places[at][0][2:]), *places[at][1:]) for at in here]
        of_source = {(url, *rest): one for (url, first, *rest), one in facts.items() if first == number}
        if within:
            items = _made_again(source.declared(), within, of_source)
            made |= zip(here, stage.as_given(number, items) if hasattr(stage, "as_given") else items, strict=True)
    return [made[at] for at in range(len(places))]
