"""The doctor, asked of pipelines in which each thing in turn is the bottleneck for real."""

from __future__ import annotations

import gc
import io
import threading
import time
import weakref
from collections.abc import Callable
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
from wds_async.observe.diagnosis import Bound, Diagnosis
from wds_async.observe.doctor import examine

# torch advises against more workers than processors, wherever these tests run.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def shard(path: Path, samples: int, field: bytes, name: str = "cls") -> str:
    path.write_bytes(make_shard({f"{i:06d}": {name: field} for i in range(samples)}))
    return str(path)


def served(origin: Origin, shards: int, size: int) -> list[str]:
    """URLs of so many shards with one sample each."""
    return [origin.add(f"{i}.tar", make_shard({"0": {"bin": data(size, i)}})) for i in range(shards)]


def dataset(urls: Any, **transfer: Any) -> WebDataset:
    return WebDataset(urls, shardshuffle=False, transfer={"retry": QUICK, **transfer})


def settles(look: Callable[[float], Diagnosis], bound: Bound, knob: str, words: str = "") -> None:
    """Look at a pipeline for longer and longer, since a busy machine shows a bottleneck later, until the diagnosis is
    the expected one."""
    for seconds in (0.5, 1.5, 5.0, 15.0):
        found = look(seconds)
        if found.bound is bound and knob in found.knob and words in found.sentence:
            return
    raise AssertionError(found)


def examined(make: Callable[[], Any], bound: Bound, knob: str, words: str = "") -> None:
    """Examine what ``make`` returns, a new pipeline for each look."""
    settles(lambda seconds: examine(make(), seconds).diagnosis, bound, knob, words)


def test_a_full_link(origin: Origin) -> None:
    urls = served(origin, 40, 2 * MIB)
    with narrow(origin.port, 20e6) as port:
        near = [url.replace(str(origin.port), str(port)) for url in urls]
        words = "connections bring no more"
        examined(lambda: dataset(near, part_bytes=256 * KIB), Bound.NETWORK, "a faster way to the store", words)


PATIENT = RetryPolicy(base_s=0.05, cap_s=0.1, timeout_s=30.0)
STORES: dict[str, tuple[float, dict[str, Any], int, int, dict[str, Any], Bound, str]] = {
    "slow connections, of which more would bring more": (
        0, {"rate_bytes_s": 2e6}, 40, 256 * KIB, {"connections": 4}, Bound.NETWORK, "WDS_CONNECTIONS=8"),
    "takes its time for the first byte": (
        0.08, {}, 60, 64 * KIB, {"connections": 4}, Bound.LATENCY, "WDS_CONNECTIONS=8"),
    "a budget too small for the latency": (
        0.08, {}, 40, MIB, {"budget_bytes": 2 * MIB, "part_bytes": 256 * KIB}, Bound.BUDGET, "WDS_BUDGET=4M"),
    "refuses": (0, {"status": 429, "every": 3}, 60, 64 * KIB, {"retry": PATIENT}, Bound.THROTTLING, "quota"),
    "fails": (0, {"cut_after": 1000, "every": 3}, 60, 64 * KIB, {"retry": PATIENT}, Bound.FAULTS, "WDS_LOG=info"),
}  # fmt: skip
"""Latency, behaviour, number and size of the shards, settings, and the diagnosis."""


@pytest.mark.parametrize("store", STORES)
def test_stores(origin: Origin, store: str) -> None:
    origin.latency_s, behaviour, count, size, settings, bound, knob = STORES[store]
    if behaviour:
        origin.behave(**behaviour)
    urls = served(origin, count, size)
    examined(lambda: dataset(urls, **settings), bound, knob)


def image() -> bytes:
    """Return an image of few bytes, so that reading it is nothing."""
    buffer = io.BytesIO()
    Image.new("RGB", (1500, 1500)).save(buffer, "PNG")
    return buffer.getvalue()


def slowly(sample: dict[str, Any]) -> int:
    return sum(i * i for i in range(20_000))


LARGE = bytes(8 * MIB)


def enlarged(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what costs nothing to make, and much to send."""
    return {"bin": LARGE}


def loader(pipeline: Any) -> WebLoader:
    return WebLoader(pipeline, batch_size=None, num_workers=1)


FILES: dict[str, tuple[Callable[[Path], str], Callable[[Any], Any], Bound, str]] = {
    "a slow command": (
        lambda path: f"pipe:sleep 0.1; cat {shard(path, 1, data(100))}", dataset, Bound.NETWORK,
        "a faster disk or command"),
    "tiny samples": (lambda path: shard(path, 20_000, b"1"), dataset, Bound.CPU, "num_workers="),
    "heavy images": (
        lambda path: shard(path, 20, image(), "png"), lambda urls: dataset(urls).decode("rgb8"), Bound.CPU,
        "num_workers="),
    "a function of the program": (
        lambda path: shard(path, 50, b"1"), lambda urls: dataset(urls).decode().map(slowly), Bound.CPU, "py-spy"),
    "samples that cross one by one": (
        lambda path: shard(path, 3000, b"1"), lambda urls: loader(dataset(urls)), Bound.HANDOVER, ".batched(64)"),
    # Few samples, since time is counted where a shard is read on.
    "batches through a pipe": (
        lambda path: shard(path, 16, b"1"), lambda urls: loader(dataset(urls).map(enlarged).listed(8)), Bound.HANDOVER,
        "WDS_HANDOVER=1, which hands large values over through shared memory"),
}  # fmt: skip
"""What is read, the pipeline, and the diagnosis."""


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("WDS_HANDOVER", "0")
    url, pipeline, bound, knob = FILES[name]
    urls = [url(tmp_path / "0.tar")] * 50
    examined(lambda: pipeline(urls), bound, knob)


def read(pipeline: Any, step_s: float = 0.0) -> Diagnosis:
    """Read a pipeline as a training does, which waits for its device in each step, and ask the doctor then."""
    device = threading.Event()
    for _ in pipeline:
        device.wait(step_s)
    return pipeline.doctor()  # type: ignore[no-any-return]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("step_s", "bound", "knob"),
    [(0.0, Bound.CPU, ""), (0.02, Bound.CONSUMER, "nothing: it is the GPU")],
    ids=["a function that a training waits for", "a slow consumer"],
)
def test_trainings(tmp_path: Path, workers: int, step_s: float, bound: Bound, knob: str) -> None:
    url = shard(tmp_path / "0.tar", 40 if step_s else 200, data(1000))

    def look(seconds: float) -> Diagnosis:
        pipeline: Any = dataset([url] * max(1, round(seconds)))
        pipeline = pipeline if step_s else pipeline.map(slowly)
        return read(loader(pipeline if step_s else pipeline.listed(8)) if workers else pipeline, step_s)

    settles(look, bound, knob)


def test_two_readers_of_one_thread_count_its_time_once(tmp_path: Path) -> None:
    url = shard(tmp_path / "0.tar", 40, data(1000))
    sources = [dataset([url]) for _ in range(2)]
    mixed, device = RoundRobin(sources, longest=True), threading.Event()
    began = time.monotonic()
    for _ in mixed:
        device.wait(0.02)
    passed_s = time.monotonic() - began
    stats = sources[0].statistics() + sources[1].statistics()
    assert 0.5 < stats.thread_s / passed_s <= 1.0  # and not twice
    assert stats.cpu_s < stats.thread_s


class Owned:
    """Something that tells when it has gone."""


def owned(sample: dict[str, Any]) -> Owned:
    return Owned()


def test_what_a_loader_counts_and_that_it_keeps_no_batch(tmp_path: Path) -> None:
    pipeline = dataset([shard(tmp_path / "0.tar", 4, b"1")])
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


def test_a_store_that_says_nothing(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_async.observe.doctor._FIRST_ITEM_S", 0.3)
    origin.behave(stall_after=BEFORE_HEAD)
    assert examine(dataset(served(origin, 1, KIB)), 0.1).diagnosis.bound is Bound.NOTHING_READ
    origin.release()
