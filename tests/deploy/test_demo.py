"""docker/compose.yaml without Docker: the same commands with the same variables, against the same stores' programs.

Hosts become ports of this machine, and there are fewer pictures. What is not tried is Docker itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.tools import DOCKER, ROOT, mapping
from tests.servers.azurite import Azurite, azurite_fixture
from tests.servers.fakegcs import FakeGcs, fake_gcs
from tests.servers.moto import moto, reset
from tests.servers.process import free_port, launch, stop, until

__all__ = ["azurite_fixture", "fake_gcs", "moto"]

COMPOSE = mapping(DOCKER / "compose.yaml")["services"]
SHARDS, SAMPLES, STORES = 2, 8, 3
CLEANED = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_", "AIS_", "USE_AIS", "WDS_", "RANK", "WORLD_SIZE")


@pytest.fixture
def hosts(moto: str, fake_gcs: FakeGcs, azurite: Azurite) -> dict[str, str]:
    """Where each host of the compose file is here."""
    reset(moto)
    return {"http://s3:5000": moto, "http://gcs:4443": fake_gcs.base, "http://azure:10000": azurite.endpoint}


def variables(service: str, hosts: dict[str, str]) -> dict[str, str]:
    """What a service of the compose file is told, with ``hosts`` put in; nothing of this environment's own."""
    here = {name: value for name, value in os.environ.items() if not name.startswith(CLEANED)}
    for name, text in COMPOSE[service]["environment"].items():
        value = str(text)
        for host, place in hosts.items():
            value = value.replace(host + "/devstoreaccount1", place).replace(host, place)
        here[name] = value
    places = os.pathsep.join(str(ROOT / folder) for folder in ("", "examples"))
    return {**here, "PYTHONPATH": places, "AWS_EC2_METADATA_DISABLED": "true", "PYTHONWARNINGS": "error"}


def ran(service: str, words: list[str], hosts: dict[str, str]) -> str:
    """What the program of ``service`` prints; its entry point is a script of docker/."""
    program, *rest = words
    done = subprocess.run(
        [sys.executable, str(DOCKER / program), *rest],
        env=variables(service, hosts), capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def serving(folder: Path, hosts: dict[str, str]) -> Iterator[str]:
    """The service with the demo's configuration; its URL. It ends by SIGTERM, with 0."""
    base, said = f"http://127.0.0.1:{(port := free_port())}", folder / "said"
    command = [sys.executable, "-m", "wds_async", "serve", "--config", str(DOCKER / "demo" / "serve.yaml")]
    elsewhere = ["--host", "127.0.0.1", "--port", str(port), "--folder", str(folder)]
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables("serve", hosts))
    try:
        process = launch([*command, *elsewhere], said)
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        assert until(process, lambda: healthy(base), 30), said.read_text(encoding="utf-8")
        yield base
        process.terminate()
        assert process.wait(20) == 0, said.read_text(encoding="utf-8")
    finally:
        stop(process)


def healthy(base: str) -> bool:
    """What the image's health check says."""
    check = [sys.executable, "-I", str(DOCKER / "healthy.py"), f"{base}/healthz"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


def figures(base: str) -> dict[str, float]:
    """/metrics, each name with the sum over its labels."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=20) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    found: dict[str, float] = {}
    for line in lines:
        name, value = re.match(r"([a-z_]+)(?:{.*})? (\S+)$", line).groups()  # type: ignore[union-attr]
        found[name] = found.get(name, 0) + float(value)
    return found


def test_the_demo(tmp_path: Path, hosts: dict[str, str], fake_gcs: FakeGcs) -> None:
    seed, train = COMPOSE["seed"], COMPOSE["trainer"]
    assert seed["entrypoint"] == ["python", "seed.py"]
    small = [f"--shards={SHARDS}", f"--samples={SAMPLES}", "--side=24"]
    said = ran("seed", [seed["entrypoint"][1], *seed["command"], *small], hosts)
    assert said.count(f"{SHARDS * SAMPLES} samples") == STORES
    # Ports of ranks are for an engine that gives each container its own.
    script, *rest = [word for word in train["command"] if not word.startswith(("--standalone", "--nproc", "--samples"))]
    urls = [re.sub(r"\{.*\}", f"{{000000..{SHARDS - 1:06d}}}", word) for word in rest if "://" in word]
    assert len(urls) == STORES
    count = STORES * SHARDS * SAMPLES
    with serving(tmp_path, hosts) as base:
        told = {"http://serve:51080": base, "0.0.0.0:9464": "0"}
        lines = ran("trainer", [script, *urls, f"--samples={count}", "--batch=8", "--epochs=2", "--workers=1"], told)
        assert lines.count(f"{count} samples on this rank") == 2, lines
        seen = figures(base)
    data = STORES * sum(len(fake_gcs.get("demo", name)) for name in fake_gcs.keys("demo"))
    assert seen["wds_cache_entries"] == STORES * SHARDS
    assert data <= seen["wds_origin_bytes_total"] <= 1.02 * data, "each shard is fetched, and once"
    assert seen["wds_cache_hit_bytes_total"] >= data, "the second epoch comes from the cache"
