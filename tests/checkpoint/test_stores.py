"""Going on exactly from stores that fail now and then: over HTTP, from S3 and through the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.pipelines import dataset, doubled, shown, taken
from tests.checkpoint.test_resume import state_of
from tests.clouds.ais import no_settings  # noqa: F401 - fixture
from tests.servers import Origin, make_shard
from tests.servers import moto as moto_server
from tests.servers.shards import sample_fields
from tests.service.serving import Inside

clean_aws, moto = moto_server.clean_aws, moto_server.moto
pytestmark = [pytest.mark.servers, pytest.mark.slow]

NAMES = [f"train-{number}.tar" for number in range(5)]
BODIES = {
    name: make_shard(
        {f"{7 * shard + i:06d}": {**sample_fields(7 * shard + i), "bin": bytes([i]) * 90_000} for i in range(7)}
    )
    for shard, name in enumerate(NAMES)
}


@pytest.fixture
def failing() -> Iterator[Origin]:
    """A server of the shards, a fifth of whose answers fail."""
    with Origin({f"/d/{name}": body for name, body in BODIES.items()}, seed=4) as origin:
        for fault in ({"status": 503}, {"cut_after": 30_000}, {"cut_after": 70_000, "cut": "fin"}):
            origin.behave(probability=0.07, **fault)
        yield origin


def http(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    origin: Origin = request.getfixturevalue("failing")
    return [origin.url(f"d/{name}") for name in NAMES]


def s3(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    client = moto_server.empty_bucket(request.getfixturevalue("moto"), request.getfixturevalue("clean_aws"))
    for name, body in BODIES.items():
        client.put_object(Bucket="bucket", Key=name, Body=body)
    return [f"s3://bucket/{name}" for name in NAMES]


def service(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    request.getfixturevalue("no_settings")
    origin, patch = request.getfixturevalue("failing"), request.getfixturevalue("monkeypatch")
    buckets = {"b": origin.url("d/")}
    inside = Inside(folder=tmp_path / "cache", socket=tmp_path / "s", buckets=buckets, private=True)
    running = inside.__enter__()
    request.addfinalizer(lambda: inside.__exit__(None, None, None))
    patch.setenv("AIS_ENDPOINT", f"unix:{running.config.socket}")
    return [f"ais://b/{name}" for name in NAMES]


@pytest.mark.parametrize("store", [http, s3, service], ids=lambda store: store.__name__)
def test_goes_on_exactly(
    store: Callable[..., list[str]], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WDS_PART_SIZE", "65536")
    urls = store(request, tmp_path)

    def make() -> Any:
        return dataset(urls, shardshuffle=5, seed=2).shuffle(9, seed=1).map(doubled).shuffle(4, seed=2)

    pipeline = make()
    states, items = [], []
    for item in pipeline:
        items += shown([item])
        states.append(state_of(pipeline))
    later = shown(pipeline)
    assert len(items) == 35
    for count in (1, 8, 20, 31):
        resumed = make()
        resumed.load_state_dict(states[count - 1])
        iterator = iter(resumed)
        assert taken(iterator, 3) == items[count : count + 3]
        again = make()
        again.load_state_dict(state_of(resumed))
        assert shown(again) == items[count + 3 :]
        assert shown(again) == later
