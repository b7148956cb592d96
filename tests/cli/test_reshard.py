"""``wds-async reshard``: its options, what it says of two passes, and its jobs for ``wds-async job``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed.inline import InlineEngine
from wds_async.distributed import jobs
from wds_async.distributed.functions import function_named

SHARDS, SAMPLES = 3, 4
OUT = "out/s-{000..001}.tar"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shards and a module ``parts_of_reshard`` in the working directory; tasks run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(jobs, "engine_of", lambda *_, **__: InlineEngine())
    for shard in range(SHARDS):
        with wds.TarWriter(tmp_path / f"in-{shard}.tar", mtime=0) as sink:
            for n in range(SAMPLES):
                sink.write({"__key__": f"{shard}-{n}", "txt": f"text {n}"})
    (tmp_path / "parts_of_reshard.py").write_text(
        "from pathlib import Path\n"
        "def parity(sample):\n"
        "    if Path('broken').exists() and sample['__key__'] == '1-2':\n"
        "        raise ValueError('it is broken')\n"
        "    return 'odd' if int(sample['__key__'][-1]) % 2 else 'even'\n"
    )
    function_named.cache_clear()
    yield tmp_path
    sys.modules.pop("parts_of_reshard", None)


def keys(urls: str) -> list[str]:
    return [sample["__key__"] for sample in wds.WebDataset(urls, shardshuffle=False)]


def test_it_says_what_both_passes_read_and_does_it(call: Callable[..., Any], here: Path) -> None:
    dry = call("reshard", "in-{0..2}.tar", OUT, "--shuffle", 7, "--dry-run")
    size = sum((here / f"in-{shard}.tar").stat().st_size for shard in range(SHARDS)) / 1000
    assert "reshard: first pass: 1 of 1 task to run, 0 finished" in dry.stderr
    assert f"reads   3 shards, {size:.1f} kB, from this machine's files" in dry.stderr
    assert f"spills  about {size:.1f} kB below out/_wds/reshard/spill/ until the end, and reads that" in dry.stderr
    assert not (here / "out").exists()
    done = call("reshard", "in-{0..2}.tar", OUT, "--shuffle", 7)
    assert "12 samples in, 12 out" in done.stdout
    before = keys(str(here / "out/s-{000..001}.tar"))
    assert sorted(before) == [f"{shard}-{n}" for shard in range(SHARDS) for n in range(SAMPLES)] != before
    assert not (here / "out/_wds/reshard/spill").exists()
    again = call("reshard", "in-{0..2}.tar", OUT, "--shuffle", 7)
    assert "reshard: finished before" in again.stderr
    other = call("reshard", "in-{0..2}.tar", OUT, "--shuffle", 8)
    assert other.exit_code == 2
    assert "holds another job" in other.stderr


def test_arguments_reach_the_job(call: Callable[..., Any], here: Path) -> None:
    words = ["--split", "parts_of_reshard:parity", "--maxcount", 4, "--job", "by-parity", "--memory", "300MiB"]
    call("reshard", "in-*.tar", "o/{split}-{000..}.tar", *words)
    assert keys(str(here / "o/odd-{000..001}.tar")) == [f"{s}-{n}" for s in range(SHARDS) for n in (1, 3)]
    asked = json.loads((here / "o/_wds/by-parity/scatter/job.json").read_text())["inputs"]
    assert (asked["memory"], asked["order"]["split"]) == (300 << 20, "parts_of_reshard:parity")
    with wds.TarWriter(here / "labels.tar", mtime=0) as sink:
        sink.write({"__key__": "1-1", "cls": "5"})
    call("reshard", "in-*.tar", "j/{000..}.tar", "--join", "labels.tar", "--how", "left", "--sort", "__key__")
    samples = list(wds.WebDataset(str(here / "j/000.tar"), shardshuffle=False))
    assert len(samples) == SHARDS * SAMPLES
    assert [sample["__key__"] for sample in samples if "cls" in sample] == ["1-1"]
    call("reshard", "labels.tar", "r/{000..}.tar", "--join", "in-1.tar", "--how", "outer", "--shuffle", 1)
    samples = list(wds.WebDataset(str(here / "r/000.tar"), shardshuffle=False))
    assert sorted((sample["__key__"], "cls" in sample) for sample in samples) == [
        (f"1-{n}", n == 1) for n in range(SAMPLES)
    ]


def test_other_arguments_reach_the_job(call: Callable[..., Any], here: Path) -> None:
    (here / "parts_of_reshard.py").write_text("def part(s):\n    return 'a' if s['txt'] < b'text 2' else None\n")
    call("reshard", "in-{0..2}.tar", "s/{split}-{00..}.tar", "--split", "parts_of_reshard:part", "--maxsize", "3k")
    assert sorted(path.name for path in (here / "s").glob("*.tar")) == ["a-00.tar", "a-01.tar", "a-02.tar"]
    assert keys(str(here / "s/a-{00..02}.tar")) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    call("reshard", "in-2.tar", "in-0.tar", "n/{shard}.tar", "--shards", 2, "--version", "b", "--on-corrupt", "resync")
    assert keys(str(here / "n/0.tar")) == [f"2-{n}" for n in range(SAMPLES)]
    work = json.loads((here / "n/_wds/reshard/job.json").read_text())["work"]
    assert (work["version"], work["on_corrupt"], work["shards"]) == ("b", "resync", 2)


@pytest.mark.parametrize("command", ["retry", "again"])
def test_a_job_in_phases_is_seen_and_run_again(call: Callable[..., Any], here: Path, command: str) -> None:
    (here / "broken").touch()
    words = ["in-*.tar", "out/{split}-{000..}.tar", "--split", "parts_of_reshard:parity"]
    failed = call("reshard", *words, "--attempts", 1)
    assert failed.exit_code == 1
    assert "in-1.tar" in failed.stderr
    (line,) = call("job", "ls", "out").stdout.splitlines()
    assert line == "out/_wds/reshard: first pass: 0 of 1 task finished, 1 failed"
    assert "first pass: task 0 failed: " in call("job", "status", "out").stdout
    assert call("job", "finish", "out").exit_code == 1
    (here / "broken").unlink()
    done = call("job", "retry", "out") if command == "retry" else call("reshard", *words)
    assert "12 samples in, 12 out" in done.stdout, done.stderr
    (line,) = call("job", "ls", "out").stdout.splitlines()
    phases = "first pass: 1 of 1 task finished; plan: 1 of 1 task finished; second pass: 1 of 1 task finished, complete"
    assert line == f"out/_wds/reshard: {phases}"
    status = json.loads(call("job", "status", "out/_wds/reshard/scatter", "--json").stdout)
    assert (status["job"], status["kind"], status["complete"]) == ("out/_wds/reshard", "reshard", True)
    assert [(one["name"], one["finished"]) for one in status["phases"]] == [
        ("first pass", 1), ("plan", 1), ("second pass", 1),
    ]  # fmt: skip


def test_a_list_that_is_missing_is_written(call: Callable[..., Any], here: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(jobs.Job, "finish", lambda self: None)
        call("reshard", "in-*.tar", OUT)
    assert (here / "out/_wds/reshard/spill").exists()
    assert "wds-async job finish" in call("job", "status", "out").stdout
    assert call("job", "finish", "out").stdout == "out/_wds/reshard/finished.json\n"
    assert len(wds.WebDataset("out/_wds/reshard/finished.json", shardshuffle=False)) == SHARDS * SAMPLES
    assert not (here / "out/_wds/reshard/spill").exists()
    assert "finished before" in call("job", "finish", "out").stdout


def test_tasks_that_were_stopped_are_not_retried(call: Callable[..., Any], here: Path, monkeypatch: Any) -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(InlineEngine, "outcome", stop)
        stopped = call("reshard", "in-*.tar", OUT)
    assert stopped.exit_code == 130
    assert "stopped, with 0 of 1 task of reshard finished; the same command goes on from there" in stopped.stderr
    refused = call("job", "retry", "out")
    assert refused.exit_code == 1
    assert "1 tasks have no record and have not failed either" in refused.stderr
    assert "12 out" in call("job", "retry", "out", "--unfinished").stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["in-*.tar", "out/{x}.tar"], "has one number"),
        (["in-*.tar", OUT, "--shards", "3"], "give one of them"),
        (["in-*.tar", OUT, "--shuffle", "1", "--sort", "__key__"], "two orders"),
        (["in-*.tar", OUT, "--split", "parts_of_reshard:parity"], "{split}"),
        (["in-*.tar", OUT, "--memory", "1M"], "256 MiB"),
        (["nothing-*.tar", OUT], "nothing-*.tar"),
    ],
)
def test_wrong_arguments_write_nothing(call: Callable[..., Any], here: Path, words: list[str], text: str) -> None:
    result = call("reshard", *words)
    assert result.exit_code == 2
    assert text in result.stderr
    assert not (here / "out").exists()
