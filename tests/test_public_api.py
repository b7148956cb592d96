"""The doors: names, laziness, the time an import takes."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from typing import Any

import pytest

import wds_async as wds

DOORS = ["wds_async", "wds_async.compat", "wds_async.utils"]

# What WebDataset programs use and this version has; a name that goes missing breaks them.
PROMISED = [
    "AsyncReader",
    "Cached",
    "Continue",
    "DataPipeline",
    "Decoder",
    "DecodingError",
    "FluidInterface",
    "FluidWrapper",
    "PipelineStage",
    "ResampledShards",
    "ShardWriter",
    "SimpleShardList",
    "TarWriter",
    "WdsError",
    "WebDataset",
    "WebLoader",
    "associate",
    "batched",
    "decode",
    "default_collation_fn",
    "detshuffle",
    "extract_keys",
    "getfirst",
    "gzfilter",
    "handle_extension",
    "ignore_and_continue",
    "ignore_and_stop",
    "imagehandler",
    "info",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "non_empty",
    "pipelinefilter",
    "rename",
    "rename_keys",
    "reraise_exception",
    "resampled",
    "rsample",
    "select",
    "shuffle",
    "single_node_only",
    "slice",
    "split_by_node",
    "split_by_worker",
    "tarfile_samples",
    "tarfile_to_samples",
    "tenbin",
    "to_tuple",
    "transform_with",
    "unbatched",
    "unlisted",
    "utils",
    "warn_and_continue",
    "warn_and_stop",
]

SUBMODULE_NAMES = {
    "compat": "FluidInterface FluidWrapper WebDataset WebLoader check_empty",
    "filters": "_shuffle detshuffle shuffle pipelinefilter reraise_exception default_collation_fn getfirst unlisted "
    "map rename to_tuple batched select decode identity transform_with",
    "pipeline": "DataPipeline",
    "shardlists": "expand_urls expand_source split_by_node split_by_worker SimpleShardList ResampledShards "
    "ResampledShardList non_empty single_node_only resampled",
    "tariterators": "base_plus_ext valid_sample meta_prefix meta_suffix tarfile_samples tarfile_to_samples",
    "utils": "pytorch_worker_info pytorch_worker_seed identity make_seed PipelineStage",
    "handlers": "reraise_exception ignore_and_continue warn_and_continue ignore_and_stop warn_and_stop",
}


def test_the_promised_names() -> None:
    assert sorted(PROMISED) == wds.__all__
    for name in wds.__all__:
        assert getattr(wds, name) is not None
    assert set(wds.__all__) <= set(dir(wds))


def test_star_import() -> None:
    namespace: dict[str, Any] = {}
    exec("from wds_async import *", namespace)
    assert set(wds.__all__) <= set(namespace)


@pytest.mark.parametrize("door", DOORS)
def test_all_is_sorted(door: str) -> None:
    names = importlib.import_module(door).__all__
    assert list(names) == sorted(set(names))


@pytest.mark.parametrize("module", SUBMODULE_NAMES)
def test_names_of_submodules(module: str) -> None:
    assert getattr(wds, module) is importlib.import_module(f"wds_async.{module}")
    for name in SUBMODULE_NAMES[module].split():
        assert hasattr(getattr(wds, module), name), f"{module}.{name}"


def test_names_are_what_they_seem() -> None:
    from wds_async.dataset import WebDataset

    assert wds.WebDataset is WebDataset is wds.compat.WebDataset
    assert wds.shuffle is wds.filters.shuffle
    assert wds.utils.pytorch_worker_info() == (0, 1, 0, 1)
    assert re.fullmatch(r"\d+\.\d+\.\d+", wds.__version__)


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        wds.nonsense  # noqa: B018
    assert not hasattr(wds, "__wrapped__")


def test_importing_is_quick_and_imports_nothing_heavy() -> None:
    script = """
import sys, time
before = set(sys.modules)
began = time.perf_counter()
import wds_async
took = time.perf_counter() - began
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(took)
print(*sorted(new & {"torch", "numpy", "aiohttp", "fsspec", "s3fs", "gcsfs", "adlfs", "rich", "click", "PIL"}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    took, heavy = done.stdout.split("\n")[:2]
    assert float(took) <= 0.25
    assert heavy == ""


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
