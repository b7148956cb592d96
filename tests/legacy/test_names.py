"""The older names: what each gives, and where and how it says that it is old."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest

from wds_async import filters, handlers
from wds_async.legacy import names
from wds_async.legacy.datasets import transformer, worker_urls
from wds_async.legacy.names import FUNCTIONS, deprecated


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_name_exists_and_warns_here(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"^{name} is deprecated; use ") as caught:
        assert callable(getattr(names, name))
    assert [warning.filename for warning in caught] == [__file__]


def test_import_from_warns_at_the_import() -> None:
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.warns(DeprecationWarning, match="url_opener") as caught:
        from wds_async.legacy.names import url_opener  # noqa: F401
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        names.no_such  # noqa: B018


def test_a_warning_is_given_once_for_a_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            deprecated("a name", "another")
    assert [str(warning.message) for warning in caught] == ["a name is deprecated; use another"]


def test_map_stream() -> None:
    with pytest.warns(DeprecationWarning, match="map_stream"):
        from wds_async.legacy.names import map_stream

    def odd(x: int) -> int | None:
        return x if x % 2 else None

    assert list(map_stream(odd)([1, 2, 3])) == [1, None, 3]  # today's map drops None
    assert list(filters.map(odd)([1, 2, 3])) == [1, 3]
    assert list(map_stream()([1, None])) == [1, None]
    assert list(map_stream(lambda d: {"x": 1})([{"__key__": "k"}])) == [{"x": 1, "__key__": "k"}]
    assert list(map_stream(lambda x: 1 // x, handler=handlers.ignore_and_continue)([0, 1])) == [1]
    assert list(map_stream(lambda x: 1 // x, handler=handlers.ignore_and_stop)([1, 0, 1])) == [1]
    stage: Any = pickle.loads(pickle.dumps(map_stream(str)))
    assert list(stage([1])) == ["1"]
    assert list(copy.copy(stage)([1])) == ["1"]


def test_transformer() -> None:
    f = transformer([str, None])
    assert f((1, 2, 3)) == ["1", 2, 3]
    assert pickle.loads(pickle.dumps(f))((1, 2)) == ["1", 2]


def test_worker_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_urls(["a", "b", "c"]) == ["a", "b", "c"]
    monkeypatch.setenv("NUM_WORKERS", "2")
    monkeypatch.setenv("WORKER", "1")
    assert worker_urls(["a", "b", "c"]) == ["b"]
