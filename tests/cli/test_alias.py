"""``import webdataset`` as wds_async: the same modules, not copies, and in spawned processes too."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECKS = {
    "package": "import webdataset, wds_async; assert webdataset is wds_async",
    "version": "import webdataset, wds_async; assert webdataset.__version__ == wds_async.__version__;"
    "assert webdataset.__webdataset_version__ == '1.0.2'",
    "name": "from webdataset import WebDataset; import wds_async; assert WebDataset is wds_async.WebDataset",
    "submodule": "import webdataset.filters, wds_async.filters; assert webdataset.filters is wds_async.filters",
    "from submodule": "from webdataset.tariterators import base_plus_ext as f; assert f('a.b') == ('a', 'b')",
    "own spec": "import webdataset.filters as f; assert f.__spec__.name == f.__name__ == 'wds_async.filters'",
    "missing": "import importlib.util as u; assert u.find_spec('webdataset.nonsense') is None",
    "wids": "import wids, wds_async.wids; assert wids is wds_async.wids",
    "from wids": "from wids import ShardListDataset; from wds_async import wids; "
    "assert ShardListDataset is wids.ShardListDataset",
    "others": "import json, tarfile",
    "once": "from wds_async.cli.alias import prepare; prepare(); prepare(); import sys, webdataset;"
    "assert sum(type(f).__name__ == 'Alias' for f in sys.meta_path) == 1",
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_alias(check: str) -> None:
    done = run(f"from wds_async.cli.alias import prepare; prepare(); {check}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_shim_alone_is_enough(check: str) -> None:
    """What a spawned process has: the folder on its path, and nothing installed."""
    done = run(f"import sys; from wds_async.cli.alias import SHIM; sys.path.insert(0, SHIM); {check}")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_import_of_the_real_one_before_is_replaced() -> None:
    pytest.importorskip("webdataset")
    done = run(
        "import webdataset.filters; from wds_async.cli.alias import prepare; prepare();"
        "import webdataset.filters, wds_async; assert webdataset is wds_async"
    )
    assert (done.returncode, done.stderr) == (0, "")
