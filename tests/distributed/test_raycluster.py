"""The Ray cluster that the tests stand on."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.servers.raycluster import RayCluster


def _listening() -> str:
    return subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout


def test_it_listens_on_loopback_only(raylets: RayCluster, ray: Any) -> None:
    lines = [line for line in _listening().splitlines() if f"pid={raylets.raylets[0]}," in line]
    assert lines
    assert all("127.0.0.1]:" in line or "127.0.0.1:" in line for line in lines), lines


def test_a_killed_raylet_is_replaced(raylets: RayCluster, ray: Any) -> None:
    before = raylets.raylets
    assert len(before) == 3
    raylets.kill_raylet(2)
    raylets.restore()
    assert len(raylets.raylets) == 3
    assert before[2] not in raylets.raylets
    assert sum(node["Alive"] for node in ray.nodes()) == 3
