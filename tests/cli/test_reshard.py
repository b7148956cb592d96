"""``wds-async reshard``: what it says, writes and refuses, and how ``wds-async job`` shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.distributed.inline import InlineEngine
from wds_async.distributed import jobs


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards in the working directory; tasks run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "engine_of", lambda *_, **__: InlineEngine())
    for shard in range(3):
        with wds.TarWriter(tmp_path / f"in-{shard}.tar", mtime=0) as sink:
            for n in range(4):
                sink.write({"__key__": f"{shard}-{n}", "txt": f"text {n}"})
    with wds.TarWriter(tmp_path / "labels.tar", mtime=0) as sink:
        for shard in range(3):
            sink.write({"__key__": f"{shard}-1", "cls": shard})
    return tmp_path


def keys(pattern: str) -> list[str]:
    return [sample["__key__"] for sample in wds.WebDataset(pattern, shardshuffle=False)]


def test_it_says_what_it_will_do_and_does_it(call: Callable[..., Any], here: Path) -> None:
    words = ["reshard", "in-{0..2}.tar", "out/x-{0..1}.tar", "--shuffle", 7]
    dry = call(*words, "--dry-run")
    assert "reshard: 1 task of 1 to run in the first pass, 0 finished" in dry.stderr
    assert "3 shards" in dry.stderr
    assert "out/_wds/reshard/spill/, as many bytes, written and read once more" in dry.stderr
    assert not (here / "out").exists()
    assert "12 samples in, 12 out" in call(*words).stdout
    there = keys("out/x-{0..1}.tar")
    assert sorted(there) == keys("in-{0..2}.tar") != there
    assert call("job", "ls", "out").stdout == "out/_wds/reshard: 1 of 1 task finished, complete\n"
    assert "1 were done before" in call(*words).stdout
    other = call("reshard", "in-{0..2}.tar", "out/x-{0..1}.tar", "--shuffle", 8)
    assert other.exit_code == 2
    assert "shuffle is 7 there and 8 here" in other.stderr


def test_a_job_is_shown_in_its_first_pass_too(call: Callable[..., Any], here: Path) -> None:
    damaged = here / "in-1.tar"
    damaged.write_bytes(damaged.read_bytes()[:3000])
    assert call("reshard", "in-{0..2}.tar", "out/{0..}.tar", "--maxcount", 5, "--attempts", 1).exit_code == 1
    assert call("job", "ls", "out").stdout == "out/_wds/reshard/scatter: 0 of 1 task finished, 1 failed\n"
    assert "in-1.tar" in json.loads(call("job", "status", "out", "--json").stdout)["failed"]["0"]
    refused = call("job", "retry", "out")
    assert refused.exit_code == 2
    assert "started again in the way it was started at first" in refused.stderr
    assert "1 task of 1 without a record" in call("job", "finish", "out").stderr


def test_arguments_reach_the_job(call: Callable[..., Any], here: Path) -> None:
    join = ["--join", "labels.tar", "--how", "left", "--sort", "__key__", "--number", 2, "--memory", "512MiB"]
    call("reshard", "in-2.tar", "in-0.tar", "j/{shard}.tar", *join, "--job", "joined", "--version", "b")
    samples = list(wds.WebDataset("j/{0..1}.tar", shardshuffle=False))
    assert [sample.get("cls") for sample in samples] == [None, b"0", None, None, None, b"2", None, None]
    assert json.loads((here / "j/_wds/joined/job.json").read_text())["work"]["version"] == "b"
    (here / "parts_of_reshard.py").write_text(
        "def part(sample):\n    return 'a' if sample['txt'] < b'text 2' else None\n"
    )
    call("reshard", "in-{0..2}.tar", "s/{split}-{00..}.tar", "--split", "parts_of_reshard:part", "--maxsize", "3k")
    assert sorted(path.name for path in (here / "s").glob("*.tar")) == ["a-00.tar", "a-01.tar", "a-02.tar"]
    assert keys("s/a-{00..02}.tar") == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
