"""Looks at the stacks of threads that read."""

from __future__ import annotations

import gc
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_async
from tests.servers import Origin, make_shard
from tests.servers.behaviour import BEFORE_HEAD
from tests.transfer.reading import QUICK
from wds_async.pipeline import DataPipeline
from wds_async.shardlists import SimpleShardList
from wds_async.tariterators import tarfile_to_samples
from wds_async.transfer import stack_sampler


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_DOCTOR", "1")


PACKAGE = Path(wds_async.__file__).parent.as_posix()
LIBRARY = Path(threading.__file__).as_posix()
TORCH = "/x/site-packages/torch/utils/data/_utils"


def stack(*calls: tuple[str, str]) -> Any:
    """The innermost frame of functions of these files and names, the outermost first."""
    frame: Any = None
    for file, name in calls:
        code = types.SimpleNamespace(co_filename=file, co_name=name, co_firstlineno=7)
        frame = types.SimpleNamespace(f_code=code, f_back=frame)
    return frame


PROGRAM, SAMPLES = ("/home/u/train.py", "main"), (f"{PACKAGE}/tariterators.py", "_read")


MINE, PIL = "/home/u/mine.py", "/x/site-packages/PIL/Image.py"
LOOP, QUEUES = (f"{TORCH}/worker.py", "_worker_loop"), "/x/multiprocessing/queues.py"


def ours(file: str, function: str = "f") -> tuple[str, str]:
    return f"{PACKAGE}/{file}", function


@pytest.mark.parametrize(
    ("calls", "room"),
    [
        ([PROGRAM, SAMPLES, ours("transfer/reader.py"), ours("transfer/pump.py", "take")], "waiting"),
        ([PROGRAM, SAMPLES, ours("tar/parse.py")], "parsing"),
        ([PROGRAM, SAMPLES, ours("redact.py"), (LIBRARY, "sub")], "parsing"),
        ([PROGRAM, ours("filters/basic.py", "_decode")], "decoding"),
        ([PROGRAM, ours("autodecode.py"), (PIL, "load")], "decoding"),
        ([PROGRAM, ours("autodecode.py"), (MINE, "decode")], "decoding"),
        ([PROGRAM, ours("filters/basic.py", "_map"), (MINE, "augment"), (LIBRARY, "f")], "program"),
        ([PROGRAM, ours("filters/basic.py", "_map"), ours("filters/threads.py")], "program"),
        ([PROGRAM, ours("filters/basic.py", "_decode"), ours("filters/threads.py")], "decoding"),
        ([PROGRAM, ours("batches.py"), (MINE, "stage")], "program"),
        ([PROGRAM, ours("batches.py"), ("/x/site-packages/numpy/core.py", "stack")], "stages"),
        ([PROGRAM, ours("filters/shuffling.py")], "stages"),
        ([PROGRAM, ours("shardplan.py"), ("<string>", "__init__")], "stages"),  # of a dataclass
        ([PROGRAM, ours("filters/basic.py", "_info")], "stages"),
        ([LOOP, (f"{TORCH}/collate.py", "collate")], "stages"),
        ([LOOP, ours("shared_batches.py", "_pack")], "handing"),
    ],
)
def test_the_room_of_a_stack(calls: list[tuple[str, str]], room: str) -> None:
    assert {stack_sampler.room_of(stack(*calls), in_worker)[0] for in_worker in (False, True)} == {room}


@pytest.mark.parametrize(
    ("calls", "here", "in_worker"),
    [
        ([PROGRAM], "away", "program"),
        ([PROGRAM, ours("observe/doctor.py"), ours("cli/doctor.py")], "away", "program"),
        ([LOOP, (f"{TORCH}/fetch.py", "fetch")], "away", "idle"),
        ([LOOP, (QUEUES, "get"), (LIBRARY, "poll")], "away", "idle"),
        ([LOOP, (QUEUES, "put")], "away", "handing"),
        ([], "away", "idle"),
    ],
)
def test_where_no_stage_is_at_work(calls: list[tuple[str, str]], here: str, in_worker: str) -> None:
    assert [stack_sampler.room_of(stack(*calls), worker)[0] for worker in (False, True)] == [here, in_worker]


def test_the_function_that_a_stage_calls_is_named() -> None:
    deep = [(MINE, f"helper{i}") for i in range(3)]
    found = stack_sampler.room_of(
        stack(PROGRAM, ours("filters/basic.py", "_map"), (MINE, "augment"), *deep, (LIBRARY, "f")), True
    )
    assert found == ("program", "augment (mine.py:7)")
    assert stack_sampler.room_of(stack(LOOP, (MINE, "stage")), True) == ("program", "stage (mine.py:7)")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline, never = time.monotonic() + 20, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        never.wait(0.005)


def test_who_waits_for_bytes_is_seen_waiting(origin: Origin) -> None:
    origin.behave(stall_after=BEFORE_HEAD)
    stage = tarfile_to_samples(transfer={"retry": QUICK})
    url = origin.add("0.tar", make_shard({"0": {"txt": b"x"}}))
    samples: list[Any] = []
    thread = threading.Thread(target=lambda: samples.extend(DataPipeline(SimpleShardList([url]), stage)))
    thread.start()
    wait_for(lambda: stage.statistics().waiting_s > 0.05)
    origin.release()
    thread.join()
    stats = stage.statistics()
    assert [sample["txt"] for sample in samples] == [b"x"]
    assert sum(getattr(stats, f"{room}_s") for room in stack_sampler.LOOKED_AT) == pytest.approx(stats.looked_s)
    assert stats.connections_most == 64


def test_a_program_that_is_elsewhere_is_seen_there(shards: Any) -> None:
    stage = tarfile_to_samples()
    samples = iter(DataPipeline(SimpleShardList([str(path) for path in shards(2, 5)]), stage))
    next(samples)
    wait_for(lambda: stage.statistics().away_s > 0.05)
    assert stage.statistics().away_s > stage.statistics().parsing_s
    assert len(list(samples)) == 9


def test_readers_are_not_kept(shards: Any) -> None:
    stage = tarfile_to_samples()
    samples = iter(DataPipeline(SimpleShardList([str(path) for path in shards(2, 5)]), stage))
    next(samples)
    (reader,) = stage._open
    gone = weakref.ref(reader)
    del reader, samples
    gc.collect()
    assert gone() is None


def test_nothing_of_a_loop_stays(shards: Any) -> None:
    pipeline = DataPipeline(SimpleShardList([str(path) for path in shards(1, 3)]), tarfile_to_samples())
    gc.collect()
    before = len(stack_sampler._of_loops)
    for _ in range(5):
        assert len(list(pipeline)) == 3
    wait_for(lambda: not [one for one in threading.enumerate() if one.name == "wds-async"])
    gc.collect()
    assert len(stack_sampler._of_loops) <= before


def test_two_readers_of_one_thread_are_looked_at_once(shards: Any) -> None:
    one, other = tarfile_to_samples(), tarfile_to_samples()
    pipelines = [DataPipeline(SimpleShardList([str(path) for path in shards(2, 5)]), stage) for stage in (one, other)]
    began = time.monotonic()
    iterators = [iter(pipeline) for pipeline in pipelines]
    for iterator in iterators:
        next(iterator)
    wait_for(lambda: one.statistics().looked_s > 0.05)
    together = one.statistics() + other.statistics()
    assert together.looked_s <= time.monotonic() - began
    for pipeline in pipelines:
        pipeline.close()


def test_nobody_looks_unasked(shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WDS_DOCTOR")

    def looked_s() -> float:
        dataset = DataPipeline(SimpleShardList([str(path) for path in shards(2, 5)]), tarfile_to_samples())
        for _ in dataset:
            time.sleep(0.02)
        return float(dataset.statistics().looked_s)

    assert looked_s() == 0
    with stack_sampler.looking():
        assert looked_s() > 0
    assert looked_s() == 0
