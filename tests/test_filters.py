"""WebDataset's filters over plain iterables. Equality with WebDataset itself is in ``tests/contract``."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest

from wds_async import filters
from wds_async.errors import ConfigError
from wds_async.handlers import ignore_and_continue, ignore_and_stop

SAMPLES = [{"__key__": f"k{i}", "__url__": "u", "jpg": i, "cls": -i} for i in range(5)]


def samples() -> list[dict[str, Any]]:
    return [dict(s) for s in SAMPLES]


def test_select() -> None:
    assert list(filters.select(lambda s: s["jpg"] % 2)(samples())) == [SAMPLES[1], SAMPLES[3]]


def test_map() -> None:
    assert list(filters.map(lambda x: x * 2)(range(3))) == [0, 2, 4]
    assert list(filters.map(lambda x: x if x else None)(range(3))) == [1, 2]
    assert list(filters.map(lambda s: {"n": s["jpg"]})(samples()))[1] == {"n": 1, "__key__": "k1"}


def test_map_dict() -> None:
    assert [s["jpg"] for s in filters.map_dict(jpg=str, cls=abs)(samples())] == list("01234")
    with pytest.raises(KeyError, match="png"):
        list(filters.map_dict(png=str)(samples()))
    with pytest.raises(ConfigError, match="field=function"):
        list(filters.map_dict()(samples()))
    with pytest.raises(ConfigError, match="field=function"):
        list(filters.map_dict(jpg=3)(samples()))


def test_map_tuple() -> None:
    assert list(filters.map_tuple(None, str)([(1, 2, 3)])) == [(1, "2", 3)]
    assert list(filters.map_tuple(str, str, str)([[1, 2]])) == [("1", "2")]
    with pytest.raises(ConfigError, match="functions and None"):
        list(filters.map_tuple("str")([(1,)]))


def _odd_fails(x: Any) -> Any:
    n = x["jpg"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
    if n % 2:
        raise ZeroDivisionError(n)
    return x


def _odd_misses(i: int) -> dict[str, Any]:
    return {"jpg": i} if i % 2 == 0 else {"png": i}


HANDLED = [
    (filters.map, (_odd_fails,), {}, lambda i: i),
    (filters.select, (lambda x: _odd_fails(x) is not None,), {}, lambda i: i),
    (filters.map_dict, (), {"jpg": _odd_fails}, lambda i: {"jpg": i}),
    (filters.map_tuple, (_odd_fails,), {}, lambda i: (i,)),
    (filters.rename, (), {"image": "jpg"}, _odd_misses),
    (filters.to_tuple, ("jpg",), {}, _odd_misses),
]


@pytest.mark.parametrize(("stage", "args", "kw", "make"), HANDLED, ids=lambda x: getattr(x, "__name__", None))
def test_handlers(stage: Any, args: Any, kw: Any, make: Any) -> None:
    def run(handler: Any) -> list[Any]:
        return list(stage(*args, handler=handler, **kw)([make(i) for i in range(5)]))

    assert len(run(ignore_and_continue)) == 3
    assert len(run(ignore_and_stop)) == 1
    with pytest.raises((ZeroDivisionError, ValueError)):
        list(stage(*args, **kw)([make(i) for i in range(5)]))


def test_slice() -> None:
    assert list(filters.slice(2)(range(5))) == [0, 1]
    assert list(filters.slice(1, None, 2)(range(5))) == [1, 3]
    assert list(pickle.loads(pickle.dumps(filters.slice(2)))(range(5))) == [0, 1]


def test_associate() -> None:
    assert list(filters.associate({"k1": {"text": "one"}})(samples()))[1]["text"] == "one"
    assert list(filters.associate(lambda key: {"text": key})(samples()))[2]["text"] == "k2"


def test_info() -> None:
    out = io.StringIO()
    assert list(filters.info(n=1, every=4, stream=out, name="here")(samples())) == SAMPLES
    assert out.getvalue().count("--- here") == 2
    assert "cls -3" in out.getvalue()
    out = io.StringIO()
    list(filters.info(fmt="{__key__}:{jpg}", n=2, stream=out)(samples()))
    assert out.getvalue() == "k0:0\nk1:1\n"


def test_log_keys(tmp_path: Path) -> None:
    log = tmp_path / "keys"
    for _ in range(2):
        assert list(filters.log_keys(str(log))(samples())) == SAMPLES
    assert log.read_text().splitlines()[5:7] == ["0\tNone\tNone\tk0", "1\tNone\tNone\tk1"]
    assert list(filters.log_keys(None)(samples())) == SAMPLES


def test_cached() -> None:
    stage = filters.Cached()
    iterator = stage.run(range(5))
    assert next(iterator) == 0
    iterator.close()
    assert list(stage.run(range(3))) == [0, 1, 2]
    assert list(stage.run(range(9))) == [0, 1, 2]


def test_transform_with() -> None:
    assert filters.transform_with([1, 2], [None, str]) == [1, "2"]
    assert filters.transform_with((1, 2), None) == (1, 2)
    assert filters.transform_with((1, 2), [str]) == ["1", 2]
    with pytest.raises(ConfigError, match="3 transformers"):
        filters.transform_with([1, 2], [str, str, str])


def test_decode() -> None:
    def shout(key: str, data: bytes) -> Any:
        return data.upper() if key == ".bin" else None

    raw = {"__key__": "a", "__url__": "u", "bin": b"x", "cls": b"3", "odd": b"?"}
    decoded = list(filters.decode(shout)([dict(raw)]))
    assert decoded == [{"__key__": "a", "__url__": "u", "bin": b"X", "cls": 3, "odd": b"?"}]
    bad = [dict(raw, cls=b"x"), dict(raw)]
    assert len(list(filters.decode(handler=ignore_and_continue)(bad))) == 1
    assert len(list(filters.decode(handler=ignore_and_stop)(bad))) == 0
