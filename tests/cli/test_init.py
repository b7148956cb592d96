"""The group: help without weight, exit codes, one message for a mistake, silence for a reader that goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers.behaviour import BEFORE_HEAD
from wds_async.cli import COMMANDS

posix = pytest.mark.skipif(os.name != "posix", reason="signals and pipes as POSIX has them")


def test_help_names_every_command(call: Callable[..., Any]) -> None:
    result = call("--help")
    assert result.exit_code == 0
    for name, text in COMMANDS.items():
        assert name in result.output
        assert text.split(":")[0][:30] in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, call: Callable[..., Any]) -> None:
    result = call(name, "--help")
    assert result.exit_code == 0
    assert "Example: " in result.output
    assert f"wds-async {name}" in result.output


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from wds_async.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'aiohttp', 'fsspec', 'rich', 'matplotlib', 'wds_async.cli.ls'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_version(call: Callable[..., Any]) -> None:
    import wds_async

    assert call("--version").output == f"wds-async {wds_async.__version__}\n"


def test_a_mistake_is_one_message(program: Callable[..., Any], tmp_path: Path) -> None:
    done = program("ls", tmp_path / "none.tar")
    assert done.returncode == 1
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("wds-async: ")
    assert "none.tar" in line


def test_the_log_level_shows_the_traceback(program: Callable[..., Any], tmp_path: Path) -> None:
    done = program("ls", tmp_path / "none.tar", env={**os.environ, "WDS_LOG": "debug"})
    assert done.returncode == 1
    assert b"Traceback" in done.stderr
    assert b"ShardNotFound" in done.stderr


@pytest.mark.parametrize(("variable", "value"), [("WDS_LOG", "loud"), ("WDS_BUDGET", "much"), ("WDS_PART_SIZE", "3")])
def test_a_setting_that_does_not_parse_is_a_usage_error(
    variable: str, value: str, call: Callable[..., Any], shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    result = call("ls", shards(1, 1)[0])
    assert result.exit_code == 2
    assert variable in result.output


@posix
def test_a_reader_that_goes_away_is_no_error(shards: Any) -> None:
    path = shards(1, 3000)[0]
    command = f"{sys.executable} -m wds_async ls {path}"
    writer = subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    assert writer.stdout.readline()
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait(50) == 0


@posix
@pytest.mark.parametrize("command", [("ls",), ("resolve", "--check")], ids=" ".join)
def test_ctrl_c_ends_with_130(command: tuple[str, ...], origin: Any) -> None:
    url = origin.add("x.tar", b"\0" * 1000)
    origin.behave(stall_after=BEFORE_HEAD)
    line = [sys.executable, "-m", "wds_async", *command, url]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    origin.wait_until(lambda server: len(server.requests) > 0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=50)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


MISTAKES = {
    "sl": "No such command 'sl'",
    "ls x-{0..tar": "brace",
    "ls --members --shards x.tar": "--members lists what is in shards",
    "ls -r x.tar": "'x.tar': no folder",
    "ls --shards -r .": "--shards takes no --recursive",
    "ls . x.tar": "'x.tar': no folder",
    "cat x.tar --raw --key x": "--raw",
    "cat x.tar --raw --field x": "--raw",
    "cat x.tar --raw --json": "--raw",
    "cat x.tar --raw -n 1": "--raw",
    "bench x.tar --workers two": "--workers",
    "bench x.tar --workers 1,-1": "--workers",
    "bench x.tar --pipeline fast": "--pipeline",
    "bench x.tar --pipeline bytes --workers 2": "--workers 0",
    "bench x.tar --budget lots": "--budget",
    "bench x.tar --against tfrecord": "--against",
    "bench x.tar --pipeline decode:rgb9": "rgb8",
    "env WDS_TIMEOT": "did you mean WDS_TIMEOUT?",
    "run nothing.py": "no such script: nothing.py",
    "cache rm": "--all",
    "cache ls": "Give --folder",
    "cache quota vision": "write TENANT=SHARE",
    "serve --host 0.0.0.0": "allow must say what may be read",
    "serve --bucket nonsense": "name=URL",
    "serve --bucket =x": "name=URL",
    "serve --config /nowhere.yaml": "/nowhere.yaml cannot be read: No such file or directory. --config (or WDS_SERVE_",
    "serve --port 70000": "70000",
    "serve --log loud": "loud",
    "serve --allow nonsense": "no URL's beginning",
    "serve --certificate x.pem": "both or neither",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_end_with_2(line: str, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WDS_SERVE_CONFIG", raising=False)
    result = call(*line.split())
    assert result.exit_code == 2
    assert MISTAKES[line] in " ".join(result.output.split())
