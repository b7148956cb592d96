"""One pass of a pipeline over its stages, which can be saved between two items and gone on with.

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
    load_global_random,
    pack_items,
    pack_references,
    save_global_random,
    unpack_items,
    unpack_references,
)
from wds_async.checkpoint.states import Held, StageState, check_keys
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
    """What it holds between two items: a class, True for nothing; False is unknown."""
    same_items: bool
    pure: bool
    """It gives the same item whenever it is run over the same sample."""

    @property
    def reads(self) -> bool:
        """It reads shards, and can go on in one."""
        return hasattr(self.stage, "samples_at")


class Run:
    """One pass over ``stages``; ``saved`` is what `save` of an earlier one returned. ``sources`` are the datasets
    within the first stage."""

    def __init__(
        self, stages: Sequence[Declared], saved: Mapping[str, Any] | None = None, sources: Sequence[Any] = ()
    ) -> None:
        self._stages = stages
        self._states: dict[int, StageState] = {}
        self.source = max((number for number, one in enumerate(stages) if one.reads), default=0)
        """Number of the stage that reads shards, or else of the first."""
        self._unknown = [one.name for one in stages[self.source + 1 :] if one.state is False]
        self._given = 0
        self._ended = False
        self._random: dict[str, Any] = {}
        self._sources: list[Any] = []
        """States of the sources when the pass began, if it may have to be run again."""
        self._saved = saved
        if saved is not None:
            check_keys(saved, "replayed", "states")
            if saved["replayed"] != bool(self._unknown):
                raise StateError("this state was saved by a pipeline whose stages declare other states")
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
        """Return the shards that come to the stage that reads them, all of them."""
        source = self.first(open_stage)
        for number in range(1, self.source):
            source = open_stage(self.bind(number, self._stages[number].stage), source)
        return source  # type: ignore[no-any-return]

    @property
    def reads(self) -> bool:
        """Whether a stage reads shards."""
        return self._stages[self.source].reads

    def bind(self, number: int, stage: Any) -> Any:
        """Return ``stage``, which stands at place ``number``, with the state that it declares."""
        kind = self._stages[number].state
        if not isinstance(kind, type):
            return stage
        state = self._states[number] = kind()
        saved = {} if self._saved is None else self._saved["states"].get(str(number), {})
        if saved:
            state.load(self._with_items(saved, number))
        if number == self.source and self._saved is not None and self._stages[number].reads:
            state.know(dict(self._saved.get("shards", ())))  # type: ignore[attr-defined]
        if hasattr(stage, "with_state"):
            return stage.with_state(state)
        return functools.partial(stage.run if hasattr(stage, "run") else stage, state=state)

    def items(self, items: Iterable[Any]) -> Iterator[Any]:
        """Return what comes out of the last stage: all of it, or what comes behind the items that were given before."""
        if not self._unknown:
            return iter(items)
        return self._behind_given(iter(items))

    def _until_end(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items of a source that saves itself, and note its end: behind it comes its next epoch."""
        yield from items
        self._ended = True

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items of a source of which nothing is known but that it begins again in the same way."""
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

    def save(self) -> dict[str, Any]:
        """Return the state between two items, as JSON can hold it."""
        if self._unknown:
            starts = {str(number): state.save_start() for number, state in self._states.items()}
            return {
                "replayed": True,
                "given": self._given,
                "states": starts,
                "random": self._random,
                "sources": self._sources,
                "random_now": save_global_random(),
            }
        urls: dict[str, int] = {}
        saved: dict[str, Any] = {"replayed": False, "states": {}}
        for number, state in self._states.items():
            front = number < self.source
            saved["states"][str(number)] = state.save_start() if front else self._packed(state.save(), number, urls)
        first = self._stages[0].stage
        if hasattr(first, "datasets") and 0 not in self._states:
            raise StateError(
                f"a {type(first).__name__} has a state if each of its datasets has one and none is there twice: put "
                "lists and mixes into wds.DataPipeline(...)"
            )
        if self.source == 0 and 0 not in self._states:
            saved["source"] = first.state_dict() if hasattr(first, "state_dict") else self._given
            saved["ended"] = self._ended
        if urls:
            facts = self._states[self.source].facts(urls)  # type: ignore[attr-defined]
            saved["shards"] = list(zip(urls, facts, strict=True))
        return saved

    def _packed(self, value: Any, number: int, urls: dict[str, int]) -> Any:
        """Return ``value`` of stage ``number`` with its `Held` items as references, or as themselves."""
        if isinstance(value, Held):
            again = value.results is not None
            if self._may_refer(number + again) and all(type(item) is RawSample for item in value):
                return pack_references(value, urls)
            name = self._stages[number].name
            packed = {**pack_items(value if value.results is None else value.results(), name), "done": again}
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
            return {key: self._packed(one, number, urls) for key, one in value.items()}
        return [self._packed(one, number, urls) for one in value] if isinstance(value, list) else value

    def _may_refer(self, number: int) -> bool:
        """Return whether the items that stage ``number`` holds can be made again of the samples in their shards."""
        between = self._stages[self.source + 1 : number]
        return self._stages[self.source].reads and all(one.same_items or one.pure for one in between)

    def _with_items(self, value: Any, number: int) -> Any:
        """Return ``value`` from `_packed` with the items in their places."""
        if isinstance(value, dict) and "references" in value:
            return self._made_again(value, number)
        if isinstance(value, dict) and "items" in value and "bytes" in value:
            return Held(unpack_items(value), done=value["done"])
        if isinstance(value, dict):
            # States of other pipelines ("nested") have their items in their own places.
            return {k: one if k == "nested" else self._with_items(one, number) for k, one in value.items()}
        return [self._with_items(one, number) for one in value] if isinstance(value, list) else value

    def _made_again(self, packed: dict[str, Any], number: int) -> Held:
        """Return the items of references: their samples, read by ranges, after the stages in between."""
        assert self._saved is not None
        shards = self._saved.get("shards", [])
        references = unpack_references(packed, [url for url, _ in shards])
        items: Iterable[Any] = self._stages[self.source].stage.samples_at(references, dict(shards))
        for one in self._stages[self.source + 1 : number]:
            items = items if one.same_items else one.stage.run(items)
        made = Held(items)
        if len(made) != len(references):
            name = self._stages[number].name
            raise StateError(f"{len(references)} samples of the stage {name} were saved, and {len(made)} come now")
        return made
