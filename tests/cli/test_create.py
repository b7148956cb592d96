"""``wds-async create``: what it says before it starts, and that a kill leaves no half shard."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.cli.conftest import ROOT
from tests.distributed.inline import InlineEngine
from tests.servers import Origin
from wds_async.distributed import jobs
from wds_async.errors import StorageError
from wds_async.tools.create import create_shards

ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("cat/a.jpg", "cat/a.txt", "dog/b.jpg", ".hidden", "README"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_it_says_what_it_understood_and_does_that(
    call: Callable[..., Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "engine_of", lambda *_, **__: InlineEngine())
    dry = call("create", "out/t-{000000..}.tar", "in", "--dry-run")
    for text in (
        "in/ as loose files", "samples: 2; files and URLs: 3; bytes: 27", "jpg (2), txt (1)", "1 out, hidden", "README",
        f"cat/a: jpg <- {here}/in/cat/a.jpg, txt <- {here}/in/cat/a.txt", "1, samples in each: 2", "out/_wds/create-t",
    ):  # fmt: skip
        assert text in dry.stderr, dry.stderr
    assert not (here / "out").exists()
    assert "2 samples in, 2 out" in call("create", "out/t-{000000..}.tar", "in").stdout
    assert "1 were done before" in call("create", "out/t-{000000..}.tar", "in").stdout
    call("create", "im/", "in", "--imagefolder", "--shuffle", 1)
    labels = {sample["__key__"]: sample["cls"] for sample in wds.WebDataset("im/000000.tar", shardshuffle=False)}
    assert labels == {"cat/a": b"0", "dog/b": b"1"}
    (here / "plan").write_text("b.txt pipe:echo b\n")
    call("create", "plan.tar", "plan")
    with tarfile.open("plan.tar") as tar:
        assert [(one.name, one.size, one.mtime) for one in tar] == [("b.txt", 2, 0)]


def test_standard_input_to_standard_output(program: Callable[..., Any], here: Path) -> None:
    recipe = b"a.txt text:1\na.jpg in/cat/a.jpg\n"
    done = program("create", "-", "-", input=recipe, cwd=here, env=ENV)
    assert done.returncode == 0, done.stderr
    assert b"a: txt = 1, jpg <- " in done.stderr
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        assert [(one.name, one.size) for one in tar] == [("a.jpg", 9), ("a.txt", 1)]
    (here / "plan").write_bytes(recipe)
    create_shards("plan", "x.tar", engine=InlineEngine()).run()
    assert (here / "x.tar").read_bytes() == done.stdout
    (here / "plan").write_bytes(b"a.txt pipe:exit 3\n")
    with pytest.raises(StorageError, match="plan, line 1: the field 'txt' of the sample 'a': pipe:exit 3"):
        create_shards("plan", "-", allow_pipe=True).write(io.BytesIO())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["out", "in", "--field", "cls"], "write FIELD=COLUMN"),
        (["out", "in", "--key", "id"], "in is a folder"),
        (["out", "in", "--format", "zip"], "is not one of"),
        (["out", "nowhere"], "no such folder"),
        (["out", "--", "-rf"], "-rf: no such folder"),
        (["out", "s3://bucket/folder"], "end the name of a folder with '/'"),
    ],
)
def test_wrong_arguments_have_status_2(call: Callable[..., Any], arguments: list[str], error: str, here: Path) -> None:
    result = call("create", *arguments)
    assert result.exit_code == 2
    assert error in result.stderr
    assert not (here / "out").exists()


def test_a_kill_leaves_no_half_shard_and_the_same_command_goes_on(here: Path) -> None:
    with Origin() as origin:
        rows = "".join(f"{origin.add(f'{n}.bin', os.urandom(3000))}\n" for n in range(12))
        (here / "t.csv").write_text(f"url:bin\n{rows}")
        origin.behave(path="/7.bin", stall_after=100)  # in the fourth of six shards
        line = [sys.executable, "-m", "wds_async", "create", "out", "t.csv", "--maxcount", "2", "--workers", "1"]
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV)
        origin.wait_until(lambda server: any(one.path == "/7.bin" for one in server.requests), 30)
        until = time.monotonic() + 20
        while not (here / "out/_wds/create/00002.json").exists() and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert sorted(path.name for path in (here / "out").glob("*.tar")) == [f"00000{n}.tar" for n in range(3)]
        first = {path.name: path.stat().st_mtime_ns for path in (here / "out").glob("*.tar")}
        origin.forget()
        origin.release()
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=ENV, check=True)
        assert "3 of 6 tasks done, 3 were done before" in done.stdout
        shards = sorted((here / "out").glob("*.tar"))
        assert all(path.stat().st_mtime_ns == first.get(path.name, path.stat().st_mtime_ns) for path in shards)
        got = [sample["bin"] for sample in wds.WebDataset(shards, shardshuffle=False)]
        assert got == [origin.files[f"/{n}.bin"] for n in range(12)]
        assert not [path for path in (here / "out").rglob("*") if path.suffix == ".zst" and "inputs" not in path.name]
