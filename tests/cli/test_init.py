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


def test_unknown_command_is_a_usage_error(call: Callable[..., Any]) -> None:
    result = call("sl")
    assert result.exit_code == 2
    assert "No such command 'sl'" in result.output


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


def test_a_url_that_makes_no_sense_is_a_usage_error(call: Callable[..., Any]) -> None:
    result = call("ls", "x-{0..tar")
    assert result.exit_code == 2
    assert "brace" in result.output


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
def test_ctrl_c_ends_with_130(origin: Any) -> None:
    url = origin.add("x.tar", b"\0" * 1000)
    origin.behave(stall_after=BEFORE_HEAD)
    line = [sys.executable, "-m", "wds_async", "ls", url]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    origin.wait_until(lambda server: len(server.requests) > 0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=50)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert out == b""
