"""What every filter keeps: it pickles, obeys its handler, has the length that it declares, and closes its source."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from wds_async import filters
from wds_async.errors import DecodingError
from wds_async.handlers import ignore_and_continue, ignore_and_stop
from wds_async.pipeline import RestCurried, traits_of


def number(x: Any) -> Any:
    """Return ``x``, or the number in it; odd ones raise."""
    n = int(x["n"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x)
    if n % 2:
        raise ZeroDivisionError(n)
    return x


def read_number(stream: Any) -> Any:
    """Return the number in a stream; odd ones raise."""
    return number(stream.read())


@dataclass(frozen=True)
class Case:
    """A filter with arguments; ``good`` items pass and ``bad`` ones raise (None: none do)."""

    args: tuple[Any, ...]
    kw: dict[str, Any]
    good: Any
    bad: Any = None


SAMPLE = {"__key__": "k", "n": 2}
CASES = {
    "associate": Case(({},), {}, SAMPLE),
    "batched": Case((3,), {}, (2,)),
    "decode": Case((), {}, {"cls": b"2"}, {"cls": b"?"}),
    "extract_keys": Case(("n",), {}, {"n": 2}, {"m": 1}),
    "info": Case((), {"n": 0}, SAMPLE),
    "log_keys": Case((), {}, SAMPLE),
    "map": Case((number,), {}, 2, 1),
    "map_dict": Case((), {"n": number}, {"n": 2}, {"n": 1}),
    "map_tuple": Case((number,), {}, (2,), (1,)),
    "rename": Case((), {"m": "n"}, {"n": 2}, {"x": 1}),
    "rename_keys": Case((("m", "n"),), {}, {"n": 2}, {"x": 1}),
    "rsample": Case((0.5,), {"seed": 1}, 2),
    "select": Case((number,), {}, 2, 1),
    "shuffle": Case((10,), {"seed": 1}, 2),
    "slice": Case((1, 4), {}, 2),
    "to_tuple": Case(("n",), {}, {"n": 2}, {"x": 1}),
    "unbatched": Case((), {}, ((1, 2),)),
    "unlisted": Case((), {}, [1, 2]),
    "xdecode": Case((), {"n": read_number}, {"n": b"2"}, {"n": b"1"}),
}


def stage(name: str, **kw: Any) -> Any:
    case = CASES[name]
    return getattr(filters, name)(*case.args, **case.kw, **kw)


def goods(name: str, n: int) -> list[Any]:
    good = CASES[name].good
    return [dict(good) if isinstance(good, dict) else good for _ in range(n)]


def test_every_filter_has_a_case() -> None:
    names = [name for name in filters.__all__ if isinstance(getattr(filters, name), RestCurried)]
    assert {name for name in names if not name.startswith("_")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_pickled_stage_does_the_same(name: str) -> None:
    twin = pickle.loads(pickle.dumps(stage(name)))
    assert repr(twin) == repr(stage(name))
    assert traits_of(twin) == traits_of(stage(name))
    assert str(list(twin(goods(name, 5)))) == str(list(stage(name)(goods(name, 5))))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.bad is not None])
def test_the_handler_decides(name: str) -> None:
    def mixed() -> Iterator[Any]:
        good, bad = CASES[name].good, CASES[name].bad
        return (dict(x) if isinstance(x, dict) else x for x in (good, bad, good, bad, good))

    assert len(list(stage(name, handler=ignore_and_continue)(mixed()))) == 3
    assert len(list(stage(name, handler=ignore_and_stop)(mixed()))) == 1
    with pytest.raises((DecodingError, ValueError, ZeroDivisionError)):
        list(stage(name)(mixed()))
    traits = traits_of(stage(name))
    assert traits is not None
    assert traits.handler == "handler"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [0, 1, 7])
def test_as_many_come_out_as_it_declares(name: str, n: int) -> None:
    traits, case = traits_of(stage(name)), CASES[name]
    count = len(list(stage(name)(goods(name, n))))
    assert traits is not None
    if traits.one_to_one:
        assert count == n
    if traits.count is not None:
        assert count == traits.count(n, *case.args, **case.kw)


@pytest.mark.parametrize("name", [name for name in CASES if name != "slice"])  # islice lets go of it when dropped
def test_a_stage_that_is_left_closes_its_source(name: str) -> None:
    closed = []

    def source() -> Iterator[Any]:
        try:
            yield from goods(name, 100)
        finally:
            closed.append(True)

    items = iter(stage(name)(source()))
    next(items)
    items.close()
    del items
    assert closed
