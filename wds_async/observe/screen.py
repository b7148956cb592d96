"""Lines at the bottom of a terminal that several processes share.

Ranks and DataLoader workers share one terminal, and would overwrite each other's lines. So each writes its line into a
file of a folder that belongs to the terminal, and the process that holds the lock there draws all of them; when it
ends, another takes over. Texts that stay (summaries) go the same way.

The lines stand below the cursor, which stays where it was: what the program prints, from any process, is written above
them, and moves them down with the next drawing. (rich's Live takes over the output of its own process alone, and erases
what others print.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from wds_async.transfer.stats import alive, temporary_folder

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["ScreenLine", "bar", "can_draw", "say"]

_REDRAW_EVERY_S = 0.25
_DOWN, _SAVE, _RESTORE, _ERASE_BELOW = "\x1bD", "\x1b7", "\x1b8", "\x1b[J"  # ECMA-48, and DEC's of a VT100


def can_draw(console: Console) -> bool:
    """Return whether ``console`` is a terminal that obeys control sequences; a notebook does not."""
    return console.is_terminal and not (console.is_jupyter or console.legacy_windows or console.is_dumb_terminal)


def bar(share: float, cells: int, style: str = "green") -> Text:
    """Return a bar of so many cells, of which ``share`` (0 to 1) is filled."""
    filled = round(cells * min(1.0, share))
    return Text("━" * filled, style=style).append("─" * (cells - filled), style="dim")


class ScreenLine:
    """A line of ``console`` while the context lasts: ``draw`` gives it, four times a second, on a thread of its own."""

    def __init__(self, console: Console, draw: Callable[[], Text]) -> None:
        self._screen = _Screen(console)
        self._draw = draw
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wds-async-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            ended = False
            while not ended:
                ended = self._done.wait(_REDRAW_EVERY_S)
                self._screen.show(self._draw())
        finally:
            self._screen.close()


def say(console: Console, text: str) -> None:
    """Print ``text`` above the lines of ``console``, to stay there."""
    if not can_draw(console):
        console.print(text, soft_wrap=True, highlight=False)
        return
    _Screen(console).say(text)


class _Screen:
    """The lines of one terminal, as seen by the process of one line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        device = None  # of the terminal, which its processes share; a notebook and a file have none
        with contextlib.suppress(OSError, ValueError):
            number = console.file.fileno()
            device = f"{os.fstat(number).st_rdev:x}" if os.isatty(number) else None
        self._shared = device is not None
        self._folder = temporary_folder() / f"screen-{device or f'{os.getpid()}-{id(console.file):x}'}"
        self._own = self._folder / f"{time.time_ns():020d}-{os.getpid()}-{uuid.uuid4().hex[:8]}.line"
        self._lock: BaseFileLock | None = None
        self._draws = False

    def show(self, line: Text) -> None:
        """Set our line to ``line``, and draw all lines unless another process does."""
        self._leave(self._own, line.markup)
        self._draws = self._draws or self._acquire()
        if self._draws:
            self._draw(self._lines())

    def say(self, text: str) -> None:
        """Print ``text`` above the lines, or have it printed by the process that draws them."""
        self._leave(self._own.with_suffix(".text"), f"{text}\n")
        self.close()

    def close(self) -> None:
        """Remove our line; the next process draws the others. Print texts that came meanwhile."""
        self._own.unlink(missing_ok=True)
        while self._draws or (any(self._folder.glob("*.text")) and self._acquire()):
            self._draw(self._lines())
            self._draws = False
            if self._lock is not None:
                self._lock.release()  # a text written now meets a free lock, or the next turn prints it
        if not self._shared and not any(self._folder.glob("*.line")):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _draw(self, lines: list[Text]) -> None:
        """Write the texts that are to stay at the cursor, and ``lines`` below it."""
        texts = ""
        for path in sorted(self._folder.glob("*.text")):
            texts += path.read_text(encoding="utf-8")
            path.unlink()
        with self._console.capture() as captured:
            for line in lines:
                self._console.print(line, no_wrap=True, overflow="ellipsis", crop=True, highlight=False, end="\r\n")
        below = captured.get().removesuffix("\r\n")
        room = f"{_DOWN * len(lines)}\x1b[{len(lines)}A" if lines else ""
        file = self._console.file
        file.write(f"{_ERASE_BELOW}{texts}{room}{_SAVE}\r\n{below}{_RESTORE}" if lines else f"{_ERASE_BELOW}{texts}")
        file.flush()

    def _acquire(self) -> bool:
        from filelock import FileLock, Timeout  # noqa: PLC0415 (only where lines are drawn)

        if self._lock is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FileLock(self._folder / "lock", blocking=False, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            return False
        return True

    def _leave(self, path: Path, text: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)

    def _lines(self) -> list[Text]:
        lines = []
        for path in sorted(self._folder.glob("*.line")):
            try:
                if alive(int(path.name.split("-")[1])):
                    lines.append(Text.from_markup(path.read_text(encoding="utf-8")))
                else:
                    path.unlink()  # its process was killed
            except FileNotFoundError:  # it has ended meanwhile
                continue
        return lines
