"""The doctor, asked of pipelines in which each thing in turn is the bottleneck for real."""

from __future__ import annotations

import gc
import io
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.servers import Origin, make_shard
from tests.servers.behaviour import BEFORE_HEAD
from tests.servers.narrow import narrow
from tests.transfer.reading import KIB, MIB, QUICK, data
from wds_async.config import RetryPolicy
from wds_async.dataset import WebDataset
from wds_async.loader import WebLoader
from wds_async.mix import RoundRobin
from wds_async.observe.diagnosis import Bound
from wds_async.observe.doctor import examine

# torch advises against more workers than processors, wherever these tests run.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SECONDS = 0.5


def shard(samples: int, field: bytes, name: str = "bin") -> bytes:
    return make_shard({f"{i:06d}": {name: field} for i in range(samples)})


def served(origin: Origin, shards: int, size: int) -> list[str]:
    """URLs of so many shards with one sample each."""
    return [origin.add(f"{i}.tar", shard(1, data(size, i))) for i in range(shards)]


def dataset(urls: Any, **transfer: Any) -> WebDataset:
    return WebDataset(urls, shardshuffle=False, transfer={"retry": QUICK, **transfer})


def bound(pipeline: Any, seconds: float = SECONDS) -> tuple[Bound, str]:
    found = examine(pipeline, seconds).diagnosis
    return found.bound, found.knob


def test_a_full_link(origin: Origin) -> None:
    urls = served(origin, 40, 2 * MIB)
    with narrow(origin.port, 20e6) as port:
        pipeline = dataset([url.replace(str(origin.port), str(port)) for url in urls], part_bytes=256 * KIB)
        found = examine(pipeline, 1.2)
    assert found.diagnosis.bound is Bound.NETWORK, found
    assert "connections bring no more" in found.diagnosis.sentence
    assert found.diagnosis.knob.startswith("a faster way to the store")


def test_slow_connections_of_which_more_would_bring_more(origin: Origin) -> None:
    origin.behave(rate_bytes_s=2e6)
    pipeline = dataset(served(origin, 40, 256 * KIB), connections=4)
    assert bound(pipeline) == (Bound.NETWORK, "WDS_CONNECTIONS=8")


def test_a_store_that_takes_its_time_for_the_first_byte(origin: Origin) -> None:
    origin.latency_s = 0.08
    pipeline = dataset(served(origin, 60, 64 * KIB), connections=4)
    assert bound(pipeline) == (Bound.LATENCY, "WDS_CONNECTIONS=8")


def test_a_budget_that_is_too_small_for_the_latency(origin: Origin) -> None:
    origin.latency_s = 0.08
    pipeline = dataset(served(origin, 40, 1 * MIB), budget_bytes=2 * MIB, part_bytes=256 * KIB)
    assert bound(pipeline) == (Bound.BUDGET, "WDS_BUDGET=4M")


def test_a_store_that_refuses(origin: Origin) -> None:
    origin.behave(status=429, every=3)
    patient = RetryPolicy(base_s=0.05, cap_s=0.1, timeout_s=30.0)
    found, knob = bound(dataset(served(origin, 60, 64 * KIB), retry=patient))
    assert (found, "quota" in knob) == (Bound.THROTTLING, True)


def test_a_store_that_fails(origin: Origin) -> None:
    origin.behave(cut_after=1000, every=3)
    patient = RetryPolicy(base_s=0.05, cap_s=0.1, timeout_s=30.0)
    found, knob = bound(dataset(served(origin, 60, 64 * KIB), retry=patient))
    assert (found, "WDS_LOG=info" in knob) == (Bound.FAULTS, True)


def test_a_slow_command(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(shard(1, data(100)))
    found, knob = bound(dataset([f"pipe:sleep 0.1; cat {tmp_path}/0.tar"] * 10))
    assert (found, "a faster disk or command" in knob) == (Bound.NETWORK, True)


def test_tiny_samples(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(shard(20_000, b"1", "cls"))
    found = examine(dataset([str(tmp_path / "0.tar")] * 50), 3 * SECONDS)
    assert (found.diagnosis.bound, found.diagnosis.knob[:12]) == (Bound.CPU, "num_workers="), found


def test_heavy_images(tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.new("RGB", (1500, 1500)).save(image, "PNG")  # of few bytes, so that reading them is nothing
    (tmp_path / "0.tar").write_bytes(shard(20, image.getvalue(), "png"))
    found = examine(dataset([str(tmp_path / "0.tar")] * 50).decode("rgb8"), SECONDS)
    assert (found.diagnosis.bound, found.diagnosis.knob[:12]) == (Bound.CPU, "num_workers="), found


def slowly(sample: dict[str, Any]) -> int:
    return sum(i * i for i in range(20_000))


def test_a_function_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(shard(50, b"1", "cls"))
    found = examine(dataset([str(tmp_path / "0.tar")] * 50).decode().map(slowly), SECONDS)
    assert (found.diagnosis.bound, "py-spy" in found.diagnosis.knob) == (Bound.CPU, True), found


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_a_training_waits_for(tmp_path: Path, workers: int) -> None:
    (tmp_path / "0.tar").write_bytes(shard(200, b"1", "cls"))
    pipeline: Any = dataset([str(tmp_path / "0.tar")]).map(slowly)
    if workers:
        pipeline = WebLoader(pipeline.listed(8), batch_size=None, num_workers=workers)
    for _ in pipeline:
        pass
    found = pipeline.doctor()
    assert found.bound is Bound.CPU, found


def test_two_readers_of_one_thread_count_its_time_once(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(shard(40, data(1000)))
    sources = [dataset([str(tmp_path / "0.tar")]) for _ in range(2)]
    mixed = RoundRobin(sources, longest=True)
    began, device = time.monotonic(), threading.Event()
    for _ in mixed:
        step(device)
    stats = sources[0].statistics() + sources[1].statistics()
    assert 0.8 < stats.thread_s / (time.monotonic() - began) <= 1.0
    assert stats.cpu_s < stats.thread_s


def step(device: threading.Event) -> None:
    """A step of training, in which this program waits for its device."""
    device.wait(0.02)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_consumer(tmp_path: Path, workers: int) -> None:
    (tmp_path / "0.tar").write_bytes(shard(40, data(1000)))
    pipeline: Any = dataset([str(tmp_path / "0.tar")])
    if workers:
        pipeline = WebLoader(pipeline, batch_size=None, num_workers=workers)
    device = threading.Event()
    for _ in pipeline:
        step(device)
    found = pipeline.doctor()
    assert (found.bound, found.knob[:18]) == (Bound.CONSUMER, "nothing: it is the"), found


def test_samples_that_cross_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(shard(3000, b"1", "cls"))
    loader = WebLoader(dataset([str(tmp_path / "0.tar")] * 20), batch_size=None, num_workers=1)
    found, knob = bound(loader)
    assert (found, knob[:12]) == (Bound.HANDOVER, ".batched(64)")


LARGE = bytes(8 * MIB)


def enlarged(sample: dict[str, Any]) -> dict[str, Any]:
    """What costs nothing to make, and much to send."""
    return {"bin": LARGE}


def test_batches_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_HANDOVER", "0")
    (tmp_path / "0.tar").write_bytes(shard(16, b"1", "cls"))  # few, since time is counted where a shard is read on
    loader = WebLoader(dataset([str(tmp_path / "0.tar")] * 50).map(enlarged).listed(8), batch_size=None, num_workers=1)
    assert bound(loader, 3 * SECONDS) == (
        Bound.HANDOVER,
        "WDS_HANDOVER=1, which hands large values over through shared memory",
    )


class Owned:
    """Something that tells when it has gone."""


def owned(sample: dict[str, Any]) -> Owned:
    return Owned()


def test_what_a_loader_counts_and_that_it_keeps_no_batch(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(shard(4, b"1", "cls"))
    pipeline = dataset([str(tmp_path / "0.tar")])
    loader = WebLoader(pipeline.map(owned), batch_size=None, num_workers=1, collate_fn=same)
    batches = iter(loader)
    batch, device = next(batches), threading.Event()
    device.wait(0.05)
    gone = weakref.ref(batch)
    del batch
    gc.collect()
    assert gone() is None
    assert len(list(batches)) == 3
    stats = pipeline.statistics()
    assert (stats.batches, stats.processes, loader.statistics().batches) == (4, 1, 4)
    assert stats.consumer_s >= 0.05
    assert stats.starved_s > 0


def same(batch: Any) -> Any:
    return batch


def test_a_pipeline_that_was_not_read() -> None:
    found = dataset(["none.tar"]).doctor()
    assert (found.bound, str(found)[:17]) == (Bound.NOTHING_READ, "Nothing was read:")


def test_what_a_store_that_says_nothing_is_examined_as(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_async.observe.doctor._FIRST_ITEM_S", 0.3)
    origin.behave(stall_after=BEFORE_HEAD)
    assert bound(dataset(served(origin, 1, KIB)), 0.1)[0] is Bound.NOTHING_READ
    origin.release()
