"""The command line as a user meets it: a process with its own streams and status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from wds_async.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def call() -> Callable[..., Result]:
    """``call("ls", url)`` runs a command in this process; gives click's result."""

    def run(*arguments: Any) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def rows(call: Callable[..., Result]) -> Callable[..., list[dict[str, Any]]]:
    """``rows("ls", url)`` runs a command with ``--json``; gives the object of each line."""
    return lambda *arguments: [json.loads(line) for line in call(*arguments, "--json").stdout.splitlines()]


@pytest.fixture
def program() -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """``program("ls", url)`` runs ``python -m wds_async`` in a process of its own."""

    def run(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[bytes]:
        line = [sys.executable, "-m", "wds_async", *(str(argument) for argument in arguments)]
        return subprocess.run(line, capture_output=True, timeout=50, check=False, **{"cwd": ROOT, **options})

    return run


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """``module:`` of a module in the working directory, whose functions make pipelines: ``samples``, ``batches``."""
    (tmp_path / "makes_pipelines.py").write_text(
        "from wds_async.pipeline import DataPipeline\n"
        "rows = [{'__key__': f'k{i}', 'txt': f't{i}', 'cls': i, 'bin': b'abc'} for i in range(5)]\n"
        "def samples():\n    return DataPipeline(lambda: iter(rows))\n"
        "def batches():\n    return [([1, 2], [3, 4])]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield "makes_pipelines:"
    sys.modules.pop("makes_pipelines", None)
