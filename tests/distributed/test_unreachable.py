"""Engines whose cluster is not there, in a process that is connected to none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.probes import Probe
from tests.servers.process import free_port
from wds_async.distributed.engines import engine_of
from wds_async.errors import ConfigError


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "no-such-host.invalid:{}"])
def test_ray_a_cluster_that_does_not_answer(address: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"no cluster answers at .*its head"):
        engine_of("ray", address=address.format(free_port())).start(Probe(str(tmp_path)))


def test_dask_a_scheduler_that_does_not_answer(dask: Any, tmp_path: Path) -> None:
    engine = engine_of("dask", address=f"tcp://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="no cluster answers at"):
        engine.start(Probe(str(tmp_path)))
