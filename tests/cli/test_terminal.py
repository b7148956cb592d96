"""Nothing that data bring with them is obeyed by a terminal."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from wds_async.cli import main
from wds_async.cli.shards import human
from wds_async.cli.terminal import line
from wds_async.redact import redact

EVIL = "\x1b]0;title\x07\x1b[2J\x9b5mname\r\nforged\x7f"


def test_what_is_obeyed_is_shown() -> None:
    shown = line(f"a {EVIL} b")
    assert shown == r"a \x1b]0;title\x07\x1b[2J\x9b5mname\r\nforged\x7f b"
    assert line(shown) == shown
    assert line("a\nb\tc", keep="\n\t") == "a\nb\tc"
    assert line("ünïcode 日本 ✓") == "ünïcode 日本 ✓"
    assert line("rtl \u202e here") == r"rtl \u202e here"


def test_our_colours_stay() -> None:
    assert line(click.style("bold", bold=True, fg="red")) == click.style("bold", bold=True, fg="red")


def test_urls_in_errors_are_shown_so_too() -> None:
    assert redact(f"s3://bucket/{EVIL}.tar") == r"s3://bucket/\x1b]0;title\x07\x1b[2J\x9b5mname\r\nforged\x7f.tar"


@pytest.mark.parametrize("words", [["ls"], ["ls", "--members"], ["resolve"], ["resolve", "--check"], ["cat"]])
def test_no_command_obeys_a_name(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "x\x1b]0;t\x07.tar"
    with tarfile.open(path, "w") as archive:
        for suffix in ("txt", "\x1b[2Jx"):
            member = tarfile.TarInfo(f"k\x1b]52;c;x\x07\x9bey.{suffix}")
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
    result = CliRunner().invoke(main, [*words, str(path)], color=False)
    said = result.output + (result.stderr if result.stderr_bytes else "")
    assert "\\x1b" in said
    assert not set(said) & set("\x1b\x07\x9b")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e6, "2.5 MB"), (3e9, "3.0 GB"), (4e12, "4.0 TB")],
)
def test_human(count: float, text: str) -> None:
    assert human(count) == text
