"""A flame graph of one reading: py-spy's samples of all its processes, drawn as a picture without a script."""

from __future__ import annotations

import contextlib
import html
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

__all__ = ["draw", "recorded"]

TIMES = 20
"""How often the shards are read under the sampler: a gigabyte is over before it has looked a hundred times."""
_HERTZ = 200
_WIDTH, _ROW = 1200, 17
_LEAST = 0.004
"""Of the whole: what is narrower is left out."""
_COLOURS = {"wds_async/": "#7cc4a4", "benchmarks/": "#c9ced4"}
_ELSEWHERE = "#e9c58f"


@contextlib.contextmanager
def recorded(pid: int, title: str, path: Path) -> Iterator[None]:
    """Sample process ``pid`` and its children during the block, and write the picture to ``path``."""
    program = Path(sys.executable).with_name("py-spy")
    found = str(program) if program.exists() else shutil.which("py-spy")
    if found is None:
        raise click.ClickException("a flame graph needs py-spy: pip install py-spy")
    raw = path.with_suffix(".raw")
    command = [
        found,
        "record",
        "--nonblocking",
        "--subprocesses",
        "--function",
        "--format",
        "raw",
        "--rate",
        str(_HERTZ),
    ]
    with subprocess.Popen(
        [*command, "--output", str(raw), "--pid", str(pid)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as sampler:
        assert sampler.stdout is not None
        line = sampler.stdout.readline()
        if "Sampling process" not in line:
            raise click.ClickException(f"py-spy (it needs the right to ptrace): {line}{sampler.stdout.read()}")
        yield
        sampler.send_signal(signal.SIGINT)
        sampler.stdout.read()
    stacks = [line.rpartition(" ") for line in raw.read_text(encoding="utf-8").splitlines()]
    raw.unlink()
    path.write_text(draw(title, {stack: int(count) for stack, _, count in stacks}), encoding="utf-8")


def _frames(stack: str) -> list[str]:
    """Return the frames of py-spy's line, the outermost first, without what only leads to the reading."""
    frames = [re.sub(r"^process \d+:.*", "process", frame) for frame in stack.split(";")]
    at = max(
        (n for n, frame in enumerate(frames) if re.search(r"runpy|benchmarks/runner|threading\.py", frame)), default=0
    )
    return [frame for n, frame in enumerate(frames) if n == 0 or n > at]


def draw(title: str, stacks: dict[str, int]) -> str:
    """Return an SVG of ``stacks``: frames joined by semicolons, with how often each stack was met."""
    whole = sum(stacks.values())
    depth, boxes = 0, []
    # Boxes of one level by their path, in the order of names, so that equal frames lie side by side.
    level: dict[tuple[str, ...], int] = {}
    for stack, count in stacks.items():
        frames = tuple(_frames(stack))
        for end in range(1, len(frames) + 1):
            level[frames[:end]] = level.get(frames[:end], 0) + count
    left: dict[tuple[str, ...], float] = {(): 0.0}
    for path in sorted(level):
        x, share = left[path[:-1]], level[path] / whole
        left[path[:-1]], left[path] = x + share, x
        if share >= _LEAST:
            depth = max(depth, len(path))
            boxes.append((len(path), x, share, path[-1]))
    height = 40 + _ROW * depth
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f"<title>{html.escape(title)}</title>",
        f'<text x="4" y="18" font-size="14" font-weight="bold">{html.escape(title)}</text>',
    ]
    for row, x, share, name in boxes:
        lines += _box(row, x, share, name, height)
    return "\n".join([*lines, "</svg>\n"])


def _box(row: int, x: float, share: float, name: str, height: int) -> list[str]:
    """Return the rectangle of a frame, whose name is cut to its width; the tooltip has all of it and its share."""
    at, wide, y = x * _WIDTH, max(1.0, share * _WIDTH), height - 4 - _ROW * row
    colour = next((colour for room, colour in _COLOURS.items() if room in name), _ELSEWHERE)
    drawn = [
        f'<g><title>{html.escape(name)}: {share:.1%}</title><rect x="{at:.1f}" y="{y}" width="{wide - 0.5:.1f}" '
        f'height="{_ROW - 1}" fill="{colour}"/>'
    ]
    letters = int(wide / 6)
    if letters > 3:
        short = name if len(name) <= letters else f"{name[: letters - 1]}…"
        drawn.append(f'<text x="{at + 3:.1f}" y="{y + 12}">{html.escape(short)}</text>')
    return ["".join([*drawn, "</g>"])]
