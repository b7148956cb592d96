"""The doors: names, laziness, the time an import takes."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds

DOORS = ["wds_async", "wds_async.compat", "wds_async.pytorch", "wds_async.utils", "wds_async.wids"]


def test_every_name_is_there() -> None:
    """That they are WebDataset's is what ``tests/contract/test_surface.py`` sees to."""
    for name in wds.__all__:
        getattr(wds, name)
    assert set(wds.__all__) <= set(dir(wds))


def test_older_names_are_there_and_stay_out_of_star_imports() -> None:
    older = {name for names in wds._OLDER_HOMES.values() for name in names.split()}
    assert older <= set(dir(wds))
    assert not older & set(wds.__all__)
    for _ in range(2):  # not only when it is looked up for the first time
        with pytest.warns(DeprecationWarning, match="tarfile_to_samples") as record:
            wds.url_opener  # noqa: B018
        assert record[0].filename == __file__


def test_what_a_type_checker_sees_is_what_there_is() -> None:
    tree = ast.parse(Path(wds.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {f"{node.module}.{alias.name}" for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    homes = wds._HOMES | {home: names for home, names in wds._OLDER_HOMES.items() if home != "legacy.names"}
    named = {f"wds_async.{home}.{name}" for home, names in homes.items() for name in names.split()}
    assert typed == named | {f"wds_async.{room}" for room in wds._ROOMS.values()}


def test_star_import() -> None:
    namespace: dict[str, Any] = {}
    exec("from wds_async import *", namespace)
    assert set(wds.__all__) <= set(namespace)


@pytest.mark.parametrize("door", DOORS)
def test_all_is_sorted(door: str) -> None:
    names = importlib.import_module(door).__all__
    assert list(names) == sorted(set(names))


def test_names_are_what_they_seem() -> None:
    from wds_async.dataset import WebDataset

    assert wds.WebDataset is WebDataset is wds.compat.WebDataset
    assert wds.shuffle is wds.filters.shuffle
    assert wds.utils.pytorch_worker_info() == (0, 1, 0, 1)
    assert re.fullmatch(r"\d+\.\d+\.\d+", wds.__version__)
    assert wds.__webdataset_version__ == importlib.metadata.version("webdataset")


def test_what_is_deprecated_has_a_version_and_is_gone_by_then() -> None:
    """WebDataset's older names stay, and have one function that warns."""
    package = Path(wds.__file__).parent
    calls = [
        (path, ast.unparse(node))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and "DeprecationWarning" in map(ast.unparse, node.args)
    ]
    warned = [(path, call) for path, call in calls if path != package / "legacy" / "names.py"]
    now = tuple(map(int, re.findall(r"\d+", wds.__version__)))
    assert len(warned) >= 3
    for path, call in warned:
        ends = re.search(r"removed in (\d+)\.(\d+)", call)
        assert ends, f"{path}: {call} does not name the version in which the name ends"
        assert now < (int(ends[1]), int(ends[2])), f"{path}: {call}: remove it now"


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        wds.nonsense  # noqa: B018
    assert not hasattr(wds, "__wrapped__")


def test_importing_imports_nothing_heavy() -> None:
    script = """
import sys
before = set(sys.modules)
import wds_async
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new & {"torch", "numpy", "aiohttp", "fsspec", "s3fs", "gcsfs", "adlfs", "rich", "click", "PIL"}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_reading_and_writing_need_no_torch(tmp_path: Any) -> None:
    script = """
import sys
sys.modules["torch"] = None
import wds_async as wds
with wds.ShardWriter(sys.argv[1] + "/%02d.tar", maxcount=5, verbose=0) as sink:
    for i in range(10):
        sink.write({"__key__": str(i), "cls": i, "json": {"n": i}})
ds = wds.WebDataset(sys.argv[1] + "/{00..01}.tar", shardshuffle=10).shuffle(5).decode("rgb8").to_tuple("cls", "json")
(classes, documents), = ds.batched(20)
assert sorted(classes.tolist()) == list(range(10)), classes
assert "torch.utils" not in sys.modules
try:
    wds.WebLoader(ds)
except ImportError as exn:
    assert 'pip install "wds-async[torch]"' in str(exn)
else:
    raise AssertionError("WebLoader without torch")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_m() -> None:
    done = subprocess.run([sys.executable, "-m", "wds_async", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout
