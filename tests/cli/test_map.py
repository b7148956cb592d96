"""``wds-async map`` and ``wds-async job``: what they say, write, refuse, and run again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed.inline import InlineEngine
from wds_async.cli import running
from wds_async.distributed import jobs
from wds_async.distributed.functions import function_named
from wds_async.distributed.progress import JobProgress
from wds_async.distributed.tasks import AttemptResult, Input
from wds_async.observe.prices import Range

SHARDS, SAMPLES = 3, 4
OUT = "out/x-{task:03d}.tar"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shards and a module ``steps_of_map`` in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for shard in range(SHARDS):
        with wds.TarWriter(tmp_path / f"in-{shard}.tar", mtime=0) as sink:
            for n in range(SAMPLES):
                sink.write({"__key__": f"{shard}-{n}", "txt": f"text {n}"})
    (tmp_path / "steps_of_map.py").write_text(
        "from pathlib import Path\n"
        "def upper(sample):\n"
        "    return {**sample, 'txt': sample['txt'].upper()}\n"
        "def unless_broken(sample):\n"
        "    if Path('broken').exists() and sample['__key__'].startswith('1'):\n"
        "        raise ValueError('it is broken')\n"
        "    return upper(sample)\n"
    )
    function_named.cache_clear()
    yield tmp_path
    sys.modules.pop("steps_of_map", None)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process."""
    monkeypatch.setattr(jobs, "engine_of", lambda *_, **__: InlineEngine())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mapped(call: Callable[..., Any], *more: Any, function: str = "upper") -> Any:
    return call("map", "in-{0..2}.tar", OUT, f"steps_of_map:{function}", "--workers", 1, *more)


@pytest.mark.usefixtures("inline")
def test_it_says_what_it_will_do_and_does_it(call: Callable[..., Any], here: Path) -> None:
    dry = mapped(call, "--dry-run")
    size = sum((here / f"in-{shard}.tar").stat().st_size for shard in range(SHARDS))
    assert f"3 shards, {size / 1000:.1f} kB, from this machine's files" in dry.stderr
    assert "map: 3 of 3 tasks to run, 0 finished" in dry.stderr
    assert OUT in dry.stderr
    assert not (here / "out").exists()
    done = mapped(call)
    assert "3 of 3 tasks done" in done.stdout
    dataset = wds.WebDataset(f"{here}/out/x-{{000..002}}.tar", shardshuffle=False)
    assert [sample["txt"] for sample in dataset] == [f"TEXT {n}".encode() for n in range(SAMPLES)] * SHARDS
    before = files(here / "out")
    assert "3 were done before" in mapped(call).stdout
    assert files(here / "out") == before


@pytest.mark.usefixtures("inline")
def test_arguments_reach_the_job(call: Callable[..., Any], here: Path) -> None:
    words = ["--seed", 5, "--version", "b", "--maxcount", 3, "--maxsize", "1M", "--index", "--inputs-per-task", 2]
    call("map", "in-0.tar", "in-1.tar", "in-2.tar", "o/{task}-{part}.tar", "steps_of_map:upper", *words,
         "--job", "mine", "--skip-errors", "--workers", 1)  # fmt: skip
    work = json.loads((here / "o/_wds/mine/job.json").read_text())["work"]
    assert {name: work[name] for name in ("seed", "version", "maxcount", "maxsize", "index")} == {
        "seed": 5, "version": "b", "maxcount": 3, "maxsize": 1_000_000, "index": True,
    }  # fmt: skip
    assert work["handler"].endswith("ignore_and_continue")
    there = sorted(path.name for path in (here / "o").glob("*.tar"))
    assert there == ["0-0.tar", "0-1.tar", "0-2.tar", "1-0.tar", "1-1.tar"], "eight samples and four, three each"
    assert (here / "o/0-0.idx").exists()


@pytest.mark.usefixtures("inline")
def test_what_failed_is_told_and_run_again(call: Callable[..., Any], here: Path, program: Callable[..., Any]) -> None:
    (here / "broken").touch()
    words = ["in-{0..2}.tar", OUT, "steps_of_map:unless_broken", "--attempts", 1, "--workers", 1]
    done = program("map", *words, cwd=here, env={**_environment()})
    assert done.returncode == 1
    assert "in-1.tar" in done.stderr.decode()
    assert "it is broken" in done.stderr.decode()
    (line,) = call("job", "ls", "out").stdout.splitlines()
    assert line == "out/_wds/map: 2 of 3 tasks finished, 1 failed"
    text = call("job", "status", OUT).stdout
    assert "task 1 failed: ValueError: it is broken" in text
    status = json.loads(call("job", "status", "out/", "--json").stdout)
    assert (status["finished"], list(status["failed"]), status["missing"]) == (2, ["1"], [])
    refused = call("job", "finish", "out")
    assert refused.exit_code == 1
    assert "2 of 3 tasks finished, 1 failed" in refused.stderr
    (here / "broken").unlink()
    again = call("job", "retry", "out/_wds/map", "--workers", 1)
    assert "map: 1 of 3 tasks to run, 2 finished" in again.stderr
    assert "1 of 3 tasks done" in again.stdout
    assert call("job", "ls", "out").stdout == "out/_wds/map: 3 of 3 tasks finished, complete\n"
    assert wds.WebDataset("out/_wds/map/finished.json", shardshuffle=False).__len__() == SHARDS * SAMPLES


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.usefixtures("inline")
def test_a_job_without_its_list_is_finished(call: Callable[..., Any], here: Path) -> None:
    mapped(call)
    listed = here / "out/_wds/map/finished.json"
    before = listed.read_bytes()
    assert "finished before" in call("job", "finish", "out").stdout
    listed.unlink()
    assert "wds-async job finish" in call("job", "status", "out").stdout
    call("job", "finish", "out")
    assert listed.read_bytes() == before


@pytest.mark.usefixtures("inline")
def test_tasks_that_nothing_has_run_are_run(call: Callable[..., Any], here: Path) -> None:
    mapped(call)
    (here / "out/_wds/map/00002.json").unlink()
    assert "no record yet: 2" in call("job", "status", "out").stdout
    assert "0 of 3 tasks to run" in call("job", "retry", "out").stderr
    assert not (here / "out/_wds/map/00002.json").exists()
    call("job", "retry", "out", "--unfinished", "--workers", 1)
    assert (here / "out/_wds/map/00002.json").exists()


@pytest.mark.usefixtures("inline")
def test_of_several_jobs_one_is_named(call: Callable[..., Any]) -> None:
    mapped(call)
    mapped(call, "--job", "other")
    assert len(call("job", "ls", "out").stdout.splitlines()) == 2
    several = call("job", "status", "out")
    assert several.exit_code == 2
    assert "map, other" in several.stderr
    assert "_wds/other: 3 of 3" in call("job", "status", "out", "--job", "other").stdout


@pytest.mark.parametrize("command", ["ls", "status", "finish", "retry"])
def test_a_folder_without_jobs(call: Callable[..., Any], command: str) -> None:
    result = call("job", command, "elsewhere/")
    assert result.exit_code == 1
    assert "no job has written there" in result.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["in-0.tar", OUT, "steps_of_map:missing"], "missing"),
        (["in-{0..1}.tar", "out/same.tar", "steps_of_map:upper"], "task"),
        (["in-0.tar", OUT, "steps_of_map:upper", "--maxsize", "much"], "maxsize"),
        (["in-0.tar", OUT, "steps_of_map:upper", "--workers", "0"], "workers"),
        (["in-0.tar", OUT, "steps_of_map:upper", "--job", "a/b"], "job="),
    ],
)
def test_wrong_arguments_write_nothing(call: Callable[..., Any], here: Path, words: list[str], text: str) -> None:
    result = call("map", *words)
    assert result.exit_code == 2
    assert text in result.stderr
    assert not (here / "out").exists()


def test_the_estimate_adds_up_by_origin() -> None:
    inputs = [Input(f"s3://one/{n}.tar", 5 << 20) for n in range(3)] + [Input("gs://two/x.tar", 1), Input("x.tar", 7)]
    estimate = running.Estimate.of(inputs)
    assert (estimate.shards, estimate.bytes, estimate.unknown) == (5, (15 << 20) + 8, 0)
    assert estimate.traffic.origins["s3://one"].requests == 9, "three parts of 2 MiB each"
    assert "from s3://one, gs://two, which costs $" in str(estimate)
    partly = running.Estimate.of([*inputs, Input("s3://one/y.tar")])
    assert "at least 15.7 MB (1 size unknown)" in str(partly)
    assert "$" not in str(partly)


def progress(**fields: Any) -> JobProgress:
    return JobProgress(**{"job": "out/_wds/map", "tasks": 10, "seconds": 2.0, **fields})


def test_figures_of_the_progress() -> None:
    one = progress(bytes_in=3_000_000_000, retried=2, lost=1, failures=((4, "no"),), dollars=Range(0.5, 0.5))
    assert running.ProgressDisplay.figures(one) == "1.5 GB/s, $0.50, 3 repeated, 1 failed"


def test_each_kind_of_error_is_shown_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_PLAIN_EVERY_S", 0.0)
    with running.ProgressDisplay("map") as display:
        for task in range(3):
            error = f"ValueError: too red in t-{task}.tar"
            display(progress(done=task, ended=AttemptResult(task=task, error=error)))
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "too red" in line] == ["task 0: ValueError: too red in t-0.tar; it is run again"]
    assert lines[-1] == "map: 2 of 10 tasks, 0 B/s, $0.00"


@pytest.mark.usefixtures("inline")
def test_a_terminal_is_asked(call: Callable[..., Any], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def confirm(text: str, **_: Any) -> None:
        asked.append(text)
        raise running.click.Abort

    monkeypatch.setattr(running, "_is_interactive", lambda: True)
    monkeypatch.setattr(running.click, "confirm", confirm)
    assert mapped(call).exit_code == 130
    assert asked == ["Start?"]
    assert not (here / "out").exists()
    assert mapped(call, "--yes").exit_code == 0
