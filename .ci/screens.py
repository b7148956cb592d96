"""Draw the screens of the documentation, ``docs/img/screen-*.svg``, from commands that run now.

    pip install pyte && python .ci/screens.py

A service reads from a server in this process that sends 60 MB/s, two trainings read through it, and a terminal of pyte
shows what `wds-async top`, the progress bar and a job print.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.servers import Behaviour, Origin, make_shards  # noqa: E402

IMAGES = ROOT / "docs" / "img"
WDS = [sys.executable, "-m", "wds_async"]
TRAIN = """\
import sys, time, wds_async as wds
for sample in wds.WebDataset(sys.argv[1], shardshuffle=False, length=12000):
    time.sleep({seconds})
"""
KEEP = ("PATH", "HOME", "LANG", "PYTHONPATH")


def environment(**more: str) -> dict[str, str]:
    return {name: os.environ[name] for name in KEEP if name in os.environ} | {"TERM": "xterm-256color"} | more


def screen_of(
    command: list[str], seconds: float, columns: int, rows: int, folder: str | None = None, **variables: str
) -> pyte.Screen:
    """Return the screen of ``command`` after so many seconds; it is ended then."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment(**variables),
        cwd=folder,
        start_new_session=True,
    )
    os.close(terminal)
    os.set_blocking(master, False)
    until = time.monotonic() + seconds
    while time.monotonic() < until and (process.poll() is None or until - time.monotonic() > 0.5):
        with contextlib.suppress(BlockingIOError, OSError):
            stream.feed(os.read(master, 1 << 16))
        time.sleep(0.01)
    process.terminate()
    process.wait()
    os.close(master)
    return screen


def draw(name: str, prompt: str, screen: pyte.Screen) -> None:
    """Write ``docs/img/screen-NAME.svg``: the command, and the lines of ``screen`` that have something."""
    lines = [Text(f"$ {prompt}", style="bold")]
    for row in range(screen.lines):
        text = Text()
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            text.append(cell.data, Style(color=color_of(cell.fg), bgcolor=color_of(cell.bg), bold=cell.bold))
        text.rstrip()
        lines.append(text)
    while not lines[-1].plain:
        lines.pop()
    console = Console(record=True, width=screen.columns, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    console.save_svg(str(IMAGES / f"screen-{name}.svg"), title=name)


def color_of(name: str) -> str | None:
    if name == "default":
        return None
    name = {"brown": "yellow", "brightbrown": "bright_yellow"}.get(name, name)
    return (
        f"#{name}" if len(name) == 6 and set(name) <= set("0123456789abcdef") else name.replace("bright", "bright_", 1)
    )


@contextlib.contextmanager
def running(command: list[str], **variables: str) -> Iterator[subprocess.Popen[Any]]:
    process = subprocess.Popen(
        command, env=environment(**variables), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    with Origin() as origin, tempfile.TemporaryDirectory() as folder:
        paths = make_shards(Path(folder, "shards"), 60, 200, payload=100_000)
        for number, path in enumerate(paths):
            origin.add(f"train-{number:03d}.tar", path.read_bytes())
        origin.behave(Behaviour(rate_bytes_s=4e6))
        base = f"http://127.0.0.1:{origin.port}"
        urls = f"{base}/train-{{000..059}}.tar"
        cached = "ais://train/train-{000..059}.tar"
        service = [
            *WDS,
            "serve",
            "--port",
            "51080",
            "--folder",
            f"{folder}/cache",
            "--allow",
            f"{base}/",
            "--bucket",
            f"train={base}/",
        ]
        through = {"AIS_ENDPOINT": "http://127.0.0.1:51080"}
        with (
            running(service),
            running([sys.executable, "-c", TRAIN.format(seconds=0.002), cached], WDS_METRICS_PORT="9464", **through),
            running([sys.executable, "-c", TRAIN.format(seconds=0.004), cached], WDS_METRICS_PORT="9465", **through),
        ):
            time.sleep(6)
            addresses = [f"http://127.0.0.1:{port}" for port in (51080, 9464, 9465)]
            draw("top", "wds-async top " + " ".join(addresses), screen_of([*WDS, "top", *addresses], 12, 130, 40))
        command = [sys.executable, "-c", TRAIN.format(seconds=0.001), urls]
        draw("progress", "WDS_PROGRESS=1 python train.py", screen_of(command, 7, 128, 6, WDS_PROGRESS="1"))
        job = [*WDS, "filter", urls, "large/", "fraction(key) < 0.5", "--yes"]
        shown = "wds-async filter 'http://…/train-{000..059}.tar' large/ 'fraction(key) < 0.5' --yes"
        draw("job", shown, screen_of(job, 9, 110, 12, folder))


if __name__ == "__main__":
    main()
