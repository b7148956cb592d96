"""``wds-async serve``: its options, what it refuses, and its exit codes. What it does is tested in tests/service."""

from __future__ import annotations

import socket
from pathlib import Path

from click.testing import CliRunner

from tests.service.serving import Process, ask
from wds_async.cli import main
from wds_async.cli.serve import command


def refused(*arguments: str) -> tuple[int, str]:
    """Exit code and words of a command that does not begin."""
    result = CliRunner().invoke(main, ["serve", *arguments])
    return result.exit_code, result.output


def test_a_port_that_is_taken_and_a_folder_that_cannot_be_are_1(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = refused("--port", str(taken.getsockname()[1]))
        assert code == 1
        assert "another process listens there" in said
    code, said = refused("--port", "0", "--folder", str(tmp_path / "file" / "x"))
    assert code == 1
    assert "--folder names another" in said


def test_options_win_over_the_file_that_the_environment_names(tmp_path: Path) -> None:
    served = tmp_path / "data"
    served.mkdir()
    (served / "x.bin").write_bytes(b"12345")
    (tmp_path / "mine.yaml").write_text("port: 0\nlog: json\nfreshness_s: inf\n")
    environ = {"WDS_SERVE_CONFIG": str(tmp_path / "mine.yaml")}
    options = ("--bucket", f"b={served}/", "--allow", f"{served}/", "--log", "human", "--freshness", "7")
    with Process(tmp_path / "p", environ=environ, options=options, by_environment=True) as it:
        assert not it.said.startswith("{")
        assert "nothing is kept" in it.said
        assert f"{served}/" in it.said
        assert ask(f"{it.base}/ais/b/x.bin")[::2] == (200, b"12345")
        it.signal()
        assert it.wait() == 0


def test_help_names_the_essentials() -> None:
    said = CliRunner().invoke(command, ["--help"]).output
    assert all(name in said for name in ("AIS_ENDPOINT", "--allow", "--folder", "Example:"))
