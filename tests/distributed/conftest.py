"""A Ray cluster of three raylets for the tests of this folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.process import ServerMissing, required
from tests.servers.raycluster import RayCluster, ray_cluster


@pytest.fixture(scope="package")
def raylets() -> Iterator[RayCluster]:
    """A cluster that stays for the tests of this folder, and takes about 10 seconds to start. A test that kills a
    raylet calls `RayCluster.restore` when it has ended."""
    with required(), ray_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray(raylets: RayCluster) -> Iterator[Any]:
    """The module ``ray``, with this process as a driver of the cluster during the tests of a file."""
    with raylets.driver() as module:
        yield module


@pytest.fixture(scope="session")
def dask() -> Any:
    """The module ``distributed``."""
    with required():
        if importlib.util.find_spec("distributed") is None:
            raise ServerMissing("Dask is not installed: pip install 'wds-async[dask]'")
    import distributed

    return distributed
