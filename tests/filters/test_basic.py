"""WebDataset's filters over plain iterables. Equality with WebDataset itself is in ``tests/contract``."""

from __future__ import annotations

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


def test_wrong_functions_are_named() -> None:
    with pytest.raises(KeyError, match="png"):
        list(filters.map_dict(png=str)(samples()))
    with pytest.raises(ConfigError, match="field=function"):
        filters.map_dict()
    with pytest.raises(TypeError, match="map_dict: jpg=3 is of type int; it must be a function"):
        list(filters._map_dict(samples(), jpg=3))
    with pytest.raises(TypeError, match=r"map_tuple: args\[0\]='str' is of type str; it must be a function"):
        list(filters._map_tuple([(1,)], "str"))
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
