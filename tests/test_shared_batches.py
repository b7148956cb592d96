"""The hand-over of batches: what comes out is what went in, memory is used again, and nobody sees another's bytes."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.contract.common import same
from wds_async import batch_memory, shared_batches
from wds_async.filters.batch import default_collation_fn
from wds_async.fluid import FluidWrapper
from wds_async.loader import WebLoader
from wds_async.pipeline import DataPipeline
from wds_async.shardlists import split_by_worker
from wds_async.tar.group import RawSample

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.skipif(not shared_batches.possible(), reason="needs Linux's memfd and /proc"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def through(batch: Any) -> Any:
    """``batch`` packed and unpacked, as torch's queue does it, in one process."""
    return pickle.loads(pickle.dumps(shared_batches.pack(batch)))


def raw_sample() -> RawSample:
    sample = RawSample(__key__="k", jpg=os.urandom(100_000), cls=b"3")
    sample.shard, sample.offset = "x.tar", 512
    return sample


BATCHES = {
    "bytes": ([os.urandom(100_000) for _ in range(5)], [b"1", b"2"]),
    "small": (b"x" * 10, 3, "text", None, [1.5]),
    "dict": {"jpg": [os.urandom(70_000)], "cls": np.arange(5), "nested": {"b": os.urandom(70_000)}},
    "arrays": (np.random.default_rng(0).random((50, 60, 3)), np.arange(9).reshape(3, 3).T, np.zeros((0, 4))),
    "big endian": np.arange(20_000, dtype=">i4"),
    "not contiguous": np.arange(200_000).reshape(100, 2000)[:, ::2],
    "objects": np.array(["a", {"b": 1}] * 5000, dtype=object),
    "tensors": (torch.rand(3, 100, 100), torch.arange(3), torch.rand(200, 200).T, torch.ones(5, 7000)[:, ::2]),
    "kinds": [torch.zeros(9000, dtype=kind) for kind in (torch.bfloat16, torch.bool, torch.complex64, torch.uint8)],
    "counter": Counter({"a": 3, "b": 1}),
    "bytearray": [bytearray(os.urandom(100_000))],
}


@pytest.mark.parametrize("kind", BATCHES)
def test_what_comes_out_is_what_went_in(kind: str) -> None:
    assert same(through(BATCHES[kind]), BATCHES[kind])


def test_a_raw_sample_stays_one() -> None:
    sample = raw_sample()
    found = through(sample)
    assert type(found) is RawSample
    assert (found, found.shard, found.offset) == (sample, "x.tar", 512)
    assert type(sample["jpg"]) is bytes  # the one that was sent is as it was


def test_arrays_can_be_written_to() -> None:
    array, tensor, bytes_ = through((np.zeros(50_000), torch.zeros(50_000), os.urandom(50_000)))
    array[:] = 1
    tensor += 1
    assert array.sum() == tensor.sum() == 50_000
    assert len(bytes_) == 50_000


def taken() -> int:
    gc.collect()
    return sum(slot.memory[0] for slot in shared_batches.memory_of_process().slots)


def test_a_slot_is_free_when_the_last_view_of_it_has_gone() -> None:
    before = taken()
    through([os.urandom(100_000)])
    assert taken() == before  # bytes are copies
    array, other = through((np.ones(50_000), np.ones(50_000)))
    part = array[10:20]
    assert taken() == before + 1
    del array, other
    assert taken() == before + 1
    del part
    assert taken() == before
    slots = len(shared_batches.memory_of_process().slots)
    for i in range(20):
        assert through(np.full(50_000, i))[0] == i
    assert len(shared_batches.memory_of_process().slots) == slots


def test_batches_that_are_held_keep_their_values_when_slots_run_out() -> None:
    held = [through(np.full(30_000, i)) for i in range(3 * shared_batches._SLOTS)]
    assert [array[0] for array in held] == [array[-1] for array in held] == list(range(3 * shared_batches._SLOTS))
    held[-1][0] = 7  # this one came without a slot


@pytest.mark.parametrize(("method", "persistent"), [("fork", False), ("fork", True), ("spawn", True)])
def test_through_a_loader(method: str, persistent: bool) -> None:
    loader = WebLoader(
        DataPipeline(tuple(range(40)), split_by_worker, make_batches),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    assert isinstance(loader.pipeline[0].collate_fn, shared_batches.Handover)
    for _ in range(2):
        held = []
        for batch in loader:
            assert isinstance(batch["x"], torch.Tensor)  # as torch's own conversion makes it of an array
            held.append(batch)
        assert sorted(batch["i"] for batch in held) == list(range(40))
        assert all(int(batch["x"][0]) == int(batch["x"][-1]) == batch["i"] for batch in held)
        assert all(batch["data"] == bytes([batch["i"]]) * 90_000 for batch in held)
    if not persistent:
        del held, batch
        gc.collect()
        assert {pid for pid, _ in shared_batches._mapped} <= {os.getpid()}, "memory of workers that have ended"


def make_batches(source: Any) -> Iterator[Any]:
    """At module level, so that spawned workers can import it."""
    for i in source:
        yield {"x": np.full(40_000, i), "data": bytes([i]) * 90_000, "i": i}


def numbered(sample: int) -> Any:
    return np.full(30_000, sample), torch.full((40_000,), sample), sample, b"%d" % sample * 9000


@pytest.mark.parametrize("last", ["batches", "batches that stay", "batches in any order"])
def test_batches_are_made_in_slots_and_the_program_may_change_them(last: str) -> None:
    dataset = FluidWrapper(range(96)).map(numbered).batched(4)
    if last == "batches that stay":
        dataset = dataset.mcached()
    if last == "batches in any order":
        dataset = dataset.shuffle(10, initial=5, seed=1)
    found, held = [], []
    for batch in WebLoader(dataset.repeat(2), batch_size=None, num_workers=1):
        arrays, tensors, numbers, data = batch
        found.append(sorted({*arrays[:, 7].tolist(), *tensors[:, 7].tolist(), *numbers.tolist()}))
        assert data == [b"%d" % number * 9000 for number in numbers]
        arrays[:] = -1
        tensors[:] = -1
        held.append(arrays)
        del held[:-12]  # more than there are slots
    assert all((array == -1).all() for array in held)
    assert sorted(found) == sorted([list(range(n, n + 4)) for n in range(0, 96, 4)] * 2)


def test_a_batch_is_made_in_the_slot_that_it_is_sent_in(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = shared_batches.memory_of_process()
    monkeypatch.setattr(batch_memory._here, "memory", memory)
    values = [np.full(50_000, n) for n in range(3)]
    for _ in range(3):
        batch = default_collation_fn([(value, torch.from_numpy(value), b"x" * 70_000) for value in values])
        packed = shared_batches.pack(batch)
        slot = next(slot for slot in memory.slots if slot.token == packed.token)
        assert same(pickle.loads(pickle.dumps(packed)), batch)
    assert slot.place_of(memoryview(batch[0]).cast("B")) is not None
    assert slot.place_of(memoryview(batch[1].numpy()).cast("B")) is not None


def test_the_programs_collate_fn_is_kept_and_the_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = WebLoader(range(10), batch_size=5, num_workers=1, collate_fn=tuple)
    assert list(loader) == [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)]
    monkeypatch.setenv("WDS_HANDOVER", "0")
    off = WebLoader(range(10), num_workers=1, collate_fn=tuple).pipeline[0].collate_fn
    assert (off.collate_fn, off.shared) == (tuple, False)
    monkeypatch.delenv("WDS_HANDOVER")
    assert WebLoader(range(10), num_workers=0, collate_fn=tuple).pipeline[0].collate_fn is tuple


def test_a_forked_child_does_not_free_what_its_parent_holds() -> None:
    before = taken()
    array = through(np.ones(50_000))
    child = multiprocessing.get_context("fork").Process(target=_drop, args=([array],))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert taken() == before + 1
    assert array.sum() == 50_000


def _drop(held: list[Any]) -> None:
    held.clear()
    gc.collect()


def test_many_batches_leave_no_descriptor_behind() -> None:
    def descriptors(at_most: float = 0.0) -> int:
        gc.collect()
        deadline = time.monotonic() + 10
        # torch's queues have threads, which close their pipes once they are told that nothing more will come.
        while (count := len(os.listdir("/proc/self/fd"))) > at_most > 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        return count

    def read() -> None:
        loader = WebLoader(
            DataPipeline(tuple(range(60)), split_by_worker, make_batches), batch_size=None, num_workers=2
        )
        assert sum(1 for _ in itertools.islice(loader, 50)) == 50

    read()
    before = descriptors()
    for _ in range(3):
        read()
    assert descriptors(at_most=before) <= before


def test_without_memory_for_a_slot_batches_go_through_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(shared_batches, "_memory", None)
    monkeypatch.setattr(os, "ftruncate", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert same(through(BATCHES["bytes"]), BATCHES["bytes"])
    assert len(os.listdir("/proc/self/fd")) == descriptors
