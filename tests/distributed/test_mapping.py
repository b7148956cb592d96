"""`map_shards` on processes of this machine: what comes out, what the records say, and what is refused."""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed import functions
from tests.distributed.inline import InlineEngine
from wds_async import distributed as dist
from wds_async.errors import ConfigError, JobChanged, JobFailed, UrlError

FUNCTIONS = "tests.distributed.functions"
SHARDS, SAMPLES = 3, 20


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    for shard in range(SHARDS):
        with wds.TarWriter(tmp_path / f"in/t-{shard:03d}.tar", mtime=0) as sink:
            for n in range(SAMPLES):
                sink.write({"__key__": f"{shard:04d}-{n:03d}", "txt": f"text {n}"})
    return f"{tmp_path}/in/t-{{000..{SHARDS - 1:03d}}}.tar"


def job_of(inputs: str, out: Path, function: Any = f"{FUNCTIONS}:augment", **kw: Any) -> dist.Job:
    arguments = {"engine": "local", "workers": 1, **kw}
    return dist.map_shards(inputs, f"{out}/o-{{task:04d}}-{{part:02d}}.tar", function, **arguments)


def samples(out: Path) -> list[dict[str, Any]]:
    urls = sorted(str(path) for path in out.glob("*.tar"))
    return list(wds.WebDataset(urls, shardshuffle=False, empty_check=False)) if urls else []


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_a_function_over_all_samples(inputs: str, tmp_path: Path) -> None:
    job = job_of(inputs, tmp_path / "out", maxcount=8, index=True)
    summary = job.run()
    assert (summary.done, summary.failed, summary.before) == (SHARDS, 0, 0)
    assert (summary.samples_in, summary.samples_out, summary.dropped) == (60, 54, 6)
    there = samples(tmp_path / "out")
    assert len(there) == 54
    assert all(b" " in one["draw.txt"] for one in there)
    assert job.status().complete
    record = job.folder.record(1)
    assert [one.url for one in record.outputs if one.samples] == [f"o-0001-{part:02d}.tar" for part in range(3)]
    assert [one.samples for one in record.outputs] == [8, None, 8, None, 2, None]
    for one in record.outputs:
        data = (tmp_path / "out" / one.url).read_bytes()
        assert (len(data), one.crc32c) == (one.bytes, _crc32c(data))
    shards = json.loads((tmp_path / "out/_wds/map/finished.json").read_text())["shardlist"]
    assert sum(one["nsamples"] for one in shards) == 54
    assert len(wds.WebDataset(str(tmp_path / "out/_wds/map/finished.json"), shardshuffle=False)) == 54


def _crc32c(data: bytes) -> str:
    import crc32c

    return f"{crc32c.crc32c(data):08x}"


def test_the_same_job_gives_the_same_bytes_by_any_number_of_workers(inputs: str, tmp_path: Path) -> None:
    for workers in (1, 3):
        job_of(inputs, tmp_path / f"{workers}/out", workers=workers, index=True).run()
    one, three = files(tmp_path / "1/out"), files(tmp_path / "3/out")
    one_job, three_job = one.pop("_wds/map/job.json"), three.pop("_wds/map/job.json")
    for text in (one_job, three_job):
        assert json.loads(text)["work"]["function"] == f"{FUNCTIONS}:augment"
    ids = [{name for name in one if "_wds/map/0" in name}, {name for name in three if "_wds/map/0" in name}]
    assert ids[0] == ids[1]
    for name in ids[0]:  # the ids differ, since the output has another name
        assert json.loads(one.pop(name)) | {"id": ""} == json.loads(three.pop(name)) | {"id": ""}
    assert one == three


@pytest.mark.parametrize(
    ("function", "count"),
    [
        ("split", 120),
        ("with_rng", 60),
        ("cached_stage", 54),
        ("shuffled", 60),
        ("made_each_time", 60),
    ],
)
def test_results_do_not_depend_on_what_ran_before(inputs: str, tmp_path: Path, function: str, count: int) -> None:
    work, tasks = (job := job_of(inputs, tmp_path / "out", f"{FUNCTIONS}:{function}")).work, job.tasks
    first = [work.run(task) for task in tasks]
    bytes_first = files(tmp_path / "out")
    random.seed(5)
    assert list(reversed([work.run(task) for task in reversed(tasks)])) == first
    assert files(tmp_path / "out") == bytes_first
    assert sum(record.samples_out for record in first) == count == len(samples(tmp_path / "out"))


def test_the_programs_generators_are_left_alone(inputs: str, tmp_path: Path) -> None:
    job = job_of(inputs, tmp_path / "out")
    random.seed(3)
    expected = random.Random(3).random()
    job.work.run(job.tasks[0])
    assert random.random() == expected


def test_a_generator_function_may_be_a_stage(inputs: str, tmp_path: Path) -> None:
    summary = job_of(inputs, tmp_path / "out", f"{FUNCTIONS}:tail", stage=True).run()
    assert (summary.samples_in, summary.samples_out) == (60, 9)
    assert [one["__key__"] for one in samples(tmp_path / "out")][:3] == ["0000-017", "0000-018", "0000-019"]


def test_another_seed_gives_other_draws(inputs: str, tmp_path: Path) -> None:
    for seed in (1, 2):
        job_of(inputs, tmp_path / f"{seed}", f"{FUNCTIONS}:with_rng", seed=seed).run()
    one, two = samples(tmp_path / "1"), samples(tmp_path / "2")
    assert [sample["__key__"] for sample in one] == [sample["__key__"] for sample in two]
    assert not {sample["txt"] for sample in one} & {sample["txt"] for sample in two}
    assert len({sample["txt"] for sample in one}) == 60


def test_a_second_run_does_what_is_missing(inputs: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job_of(inputs, out).run()
    before = files(out)
    (out / "_wds/map/00001.json").unlink()
    (out / "_wds/map/finished.json").unlink()
    (out / "o-0001-00.tar").write_bytes(b"cut off")
    summary = job_of(inputs, out).run()
    assert (summary.done, summary.before) == (1, 2)
    assert files(out) == before
    assert job_of(inputs, out).run().done == 0


def test_another_job_is_refused_unless_asked_for(inputs: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job_of(inputs, out).run()
    before = files(out)
    change: dict[str, Any]
    for change in ({"version": "2"}, {"seed": 4}, {"function": f"{FUNCTIONS}:split"}, {"maxcount": 5}):
        with pytest.raises(JobChanged, match=f"work.{next(iter(change))}"):
            job_of(inputs, out, **change).run()
        assert files(out) == before
    summary = job_of(inputs, out, **change, overwrite=True).run()
    assert (summary.done, summary.before) == (SHARDS, 0)
    assert job_of(inputs, out, **change, overwrite=True).run().before == SHARDS


def test_changed_inputs_are_another_job(inputs: str, tmp_path: Path) -> None:
    job_of(inputs, tmp_path / "out").run()
    with wds.TarWriter(tmp_path / "in/t-001.tar", mtime=0) as sink:
        sink.write({"__key__": "other", "txt": "x"})
    with pytest.raises(JobChanged, match=r"t-001\.tar was replaced: it had \d+ bytes, version [^;]*$"):
        job_of(inputs, tmp_path / "out").run()
    with pytest.raises(JobChanged, match=r"input 0 is .*t-000\.tar there and .*t-002\.tar here"):
        job_of(f"{tmp_path}/in/t-002.tar", tmp_path / "out").run()


def test_an_input_that_is_replaced_after_planning_is_an_error_and_not_another_result(
    inputs: str, tmp_path: Path
) -> None:
    job = job_of(inputs, tmp_path / "out")
    path = tmp_path / "in/t-001.tar"
    path.write_bytes(path.read_bytes() + bytes(10240))
    with pytest.raises(JobFailed, match=r"task 1 .*ObjectChanged") as caught:
        job.run()
    assert [number for number, _ in caught.value.failures] == [1]


def test_a_task_that_always_fails_is_named_and_the_others_finish(inputs: str, tmp_path: Path) -> None:
    job = job_of(inputs, tmp_path / "out", functions.fail_at_7, attempts=2)
    with pytest.raises(JobFailed, match=r"task 1 .*t-001\.tar.*this one never works.*'0001-007'") as caught:
        job.run()
    assert [number for number, _ in caught.value.failures] == [1]
    status = job.status()
    assert (status.finished, status.complete, [number for number, _ in status.failed]) == (2, False, [1])
    assert "0001-007" in status.failed[0][1]
    assert not (tmp_path / "out/o-0001-00.tar").exists()
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("tail", "returned several, one of them a str.*stage=True.*in the sample '0001-000' at byte 0 of .*t-001"),
        ("without_key", r"without __key__, with the fields \['txt'\].*in the sample '0001-000'"),
        ("no_bytes", "'0001-000'.*no encoder.*when it wrote the new sample '0001-000'"),
    ],
)
def test_what_is_no_sample_is_an_error_that_names_the_sample(
    inputs: str, tmp_path: Path, function: str, message: str
) -> None:
    with pytest.raises(JobFailed, match=rf"(?s)task 1 .*{message}"):
        job_of(inputs, tmp_path / "out", f"{FUNCTIONS}:{function}", attempts=1).run()


def test_a_handler_passes_samples_over_and_the_record_names_them(inputs: str, tmp_path: Path) -> None:
    job = job_of(inputs, tmp_path / "out", functions.fail_at_7, handler=wds.ignore_and_continue)
    summary = job.run()
    assert (summary.samples_out, summary.skipped) == (59, 1)
    (entry,) = job.folder.record(1).skipped
    assert (entry["key"], entry["samples"]) == ("0001-007", 1)
    assert "never works" in entry["reason"]


def test_a_killed_process_is_a_lost_attempt(tmp_path: Path) -> None:
    flags = [tmp_path / f"flag{n}" for n in range(2)]
    for flag in flags:
        flag.touch()
        with wds.TarWriter(tmp_path / f"in/{flag.name}.tar", mtime=0) as sink:
            for n in range(5):
                sink.write({"__key__": f"{flag.name}-{n}", "txt": str(flag)})
    summary = job_of(f"{tmp_path}/in/*.tar", tmp_path / "out", functions.fork_bomb_once, workers=2).run()
    assert (summary.done, summary.lost, summary.retried) == (2, 2, 0)
    assert len(samples(tmp_path / "out")) == 10


def test_a_function_that_exits_fails_its_task_and_nothing_hangs(inputs: str, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="SystemExit"):
        job_of(inputs, tmp_path / "out", functions.interrupted, attempts=1).run()


def test_a_function_comes_with_its_keyword_arguments(inputs: str, tmp_path: Path) -> None:
    one = job_of(inputs, tmp_path / "a", functools.partial(functions.tagged, tag="wörld {}", width=7), workers=2)
    one.run()
    assert one.document()["work"]["function"].startswith(f"{FUNCTIONS}:tagged {{")
    texts = [sample["tag.txt"] for sample in wds.WebDataset(f"{tmp_path}/a/*.tar", shardshuffle=False)]
    assert len(texts) > 1
    assert all(text.startswith("wörld {} 7 0.".encode()) for text in texts)
    with pytest.raises(JobChanged, match="width"):
        job_of(inputs, tmp_path / "a", functools.partial(functions.tagged, tag="wörld {}", width=8)).run()


def not_importable() -> Callable[..., Any]:
    def inner(sample: Any) -> Any:
        return sample

    return inner


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda sample: sample, "lambda"),
        (not_importable(), "function within a function"),
        (f"{FUNCTIONS}:nothing_here", "nothing_here"),
        ("no.such.module:f", "no module"),
        ("no_colon", "package.module:function"),
        (f"{FUNCTIONS}:FUNCTIONS", "FUNCTIONS"),
        (3, "type int"),
        (f"{FUNCTIONS}:later", "async"),
        (functools.partial(functions.tagged, tag=b"x"), "JSON"),
        (functools.partial(functions.tagged, {}), "by keyword"),
        (functools.partial(functions.tagged, tag=(1, 2)), "only what JSON can say"),
        (f'{FUNCTIONS}:tagged {{"tag"', "as JSON"),
        (f"{FUNCTIONS}:tagged [1]", "JSON object"),
    ],
)
def test_functions_that_no_worker_can_import_are_refused(
    inputs: str, tmp_path: Path, function: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job_of(inputs, tmp_path / "out", function)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("o.tar", "add {task}"),
        ("o-{task}-{nothing}.tar", "nothing"),
        ("o-{task:z}.tar", "fields"),
        ("o-{task}.tar", r"may fill more than one tar; add \{part"),
    ],
)
def test_templates_that_cannot_name_the_outputs_are_refused(
    inputs: str, tmp_path: Path, output: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dist.map_shards(inputs, f"{tmp_path}/out/{output}", f"{FUNCTIONS}:augment", maxcount=3)


@pytest.mark.parametrize(
    "wrong",
    [{"job": "a/b"}, {"attempts": 0}, {"maxsize": "5X"}, {"maxcount": 0}, {"engine": "slurm"}, {"on_corrupt": "x"},
     {"inputs_per_task": 0}, {"workers": 0}],
)  # fmt: skip
def test_wrong_arguments_are_refused(inputs: str, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        job_of(inputs, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


def test_the_outputs_of_a_job_are_inputs_of_another(inputs: str, tmp_path: Path) -> None:
    job = dist.map_shards(inputs, f"{tmp_path}/one/{{task:03d}}.tar", f"{FUNCTIONS}:augment", engine=InlineEngine())
    job.run()
    wanted = [f"{tmp_path}/one/{number:03d}.tar" for number in range(len(job.tasks))]
    lists = [job.folder.url, f"{job.folder.url}/", f"{job.folder.url}/finished.json", [job.folder.url, wanted[0]]]
    for number, given in enumerate(lists):
        made = dist.map_shards(
            given, f"{tmp_path}/{number}/{{task}}.tar", f"{FUNCTIONS}:augment", engine=InlineEngine()
        )
        read = [os.path.normpath(one.url) for task in made.tasks for one in task.inputs]
        assert read == wanted + wanted[: isinstance(given, list)]
        assert all(task.inputs[0].version for task in made.tasks)
    with pytest.raises(UrlError, match="makes samples, and a job reads shards"):
        dist.map_shards(f"{FUNCTIONS}:augment", f"{tmp_path}/x/{{task}}.tar", f"{FUNCTIONS}:augment")


def test_inputs_that_match_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises((UrlError, OSError)):
        job_of(f"{tmp_path}/none-*.tar", tmp_path / "out")
    with pytest.raises((ConfigError, UrlError)):
        job_of([], tmp_path / "out")  # type: ignore[arg-type]


def test_progress_is_reported(inputs: str, tmp_path: Path) -> None:
    seen: list[dist.JobProgress] = []
    job_of(inputs, tmp_path / "out", on_progress=seen.append, workers=2).run()
    assert [one.done for one in seen] == [1, 2, 3]
    assert seen[-1].pending == 0
    assert seen[-1].samples_in == 60
    assert "3 of 3" in str(seen[-1])
