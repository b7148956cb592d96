"""WebDataset's filters over plain iterables. Equality with WebDataset itself is in ``tests/contract``."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import webdataset.filters as reference

from wds_async import filters
from wds_async.errors import ConfigError

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
        filters.map_dict()
    with pytest.raises(TypeError, match="map_dict: jpg=3 is of type int; it must be a function"):
        list(filters._map_dict(samples(), jpg=3))


def test_map_tuple() -> None:
    assert list(filters.map_tuple(None, str)([(1, 2, 3)])) == [(1, "2", 3)]
    assert list(filters.map_tuple(str, str, str)([[1, 2]])) == [("1", "2")]
    with pytest.raises(TypeError, match=r"map_tuple: args\[0\]='str' is of type str; it must be a function"):
        list(filters._map_tuple([(1,)], "str"))


def test_slice() -> None:
    assert list(filters.slice(2)(range(5))) == [0, 1]
    assert list(filters.slice(1, None, 2)(range(5))) == [1, 3]


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


@pytest.mark.parametrize("every", [-1, 0, 1, 3])
@pytest.mark.parametrize("n", [-1, 0, 2, 9])
def test_info_writes_what_webdataset_writes(n: int, every: int) -> None:
    ours, theirs = io.StringIO(), io.StringIO()
    assert list(filters.info(n=n, every=every, stream=ours, width=3)(iter(samples()))) == SAMPLES
    assert list(reference.info(n=n, every=every, stream=theirs, width=3)(iter(samples()))) == SAMPLES
    assert ours.getvalue() == theirs.getvalue()


def test_log_keys_writes_what_webdataset_writes(tmp_path: Path) -> None:
    marked = [dict(s, __worker__=n, __rank__=2) for n, s in enumerate(samples())]
    for library, name in ((filters, "ours"), (reference, "theirs")):
        list(library.log_keys(str(tmp_path / name))(iter(marked)))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_log_keys(tmp_path: Path) -> None:
    log = tmp_path / "keys"
    for _ in range(2):
        assert list(filters.log_keys(str(log))(samples())) == SAMPLES
    assert log.read_text().splitlines()[5:7] == ["0\tNone\tNone\tk0", "1\tNone\tNone\tk1"]
    assert list(filters.log_keys(None)(samples())) == SAMPLES


def test_cached() -> None:
    stage = filters.Cached()
    assert list(stage.run(range(3))) == [0, 1, 2]
    assert list(stage.run(range(9))) == [0, 1, 2]


def test_transform_with() -> None:
    assert filters.transform_with([1, 2], [None, str]) == [1, "2"]
    assert filters.transform_with((1, 2), None) == (1, 2)
    assert filters.transform_with((1, 2), [str]) == ["1", 2]
    with pytest.raises(ConfigError, match="3 transformers"):
        filters.transform_with([1, 2], [str, str, str])


def test_every_filter_of_webdataset_is_here_as_a_stage_and_as_a_function() -> None:
    stages = [name for name, value in vars(reference).items() if isinstance(value, reference.RestCurried)]
    assert len(stages) == 19
    for name in stages:
        assert isinstance(getattr(filters, name), filters.RestCurried)
        if name != "slice":
            assert getattr(filters, name).f is getattr(filters, f"_{name}")
            assert hasattr(reference, f"_{name}")
    assert filters.LMDBCached.__name__ == "LMDBCached"
    with pytest.raises(AttributeError, match="nothing"):
        _ = filters.nothing


def test_importing_the_filters_loads_no_decoders() -> None:
    script = (
        "import sys, wds_async.filters as f; print([m for m in ('lmdb', 'sqlite3', 'PIL', 'av') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"


def test_map_dict_leaves_a_key_error_of_the_function_as_it_is() -> None:
    with pytest.raises(KeyError) as caught:
        list(filters.map_dict(jpg={}.__getitem__)([{"jpg": "x"}]))
    assert caught.value.args == ("x",)


def test_decode_wants_dicts() -> None:
    for threads in (0, 2):
        with pytest.raises(TypeError, match="not a tuple: put it before to_tuple"):
            list(filters.decode(threads=threads)([(b"x",)]))


def test_decode() -> None:
    def shout(key: str, data: bytes) -> Any:
        return data.upper() if key == ".bin" else None

    raw = {"__key__": "a", "__url__": "u", "bin": b"x", "cls": b"3", "odd": b"?"}
    decoded = list(filters.decode(shout)([dict(raw)]))
    assert decoded == [{"__key__": "a", "__url__": "u", "bin": b"X", "cls": 3, "odd": b"?"}]
