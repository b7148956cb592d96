"""An attempt that does what its task says, for tests of engines."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wds_async.distributed.tasks import AttemptResult, Record, Task

__all__ = ["Probe", "Unloadable", "task"]


def task(number: int, do: str = "", **parameters: Any) -> Task:
    return Task(number, (), {"do": do, **parameters})


@dataclass(frozen=True)
class Probe:
    """Writes a file for each attempt that begins, and one for each that ends."""

    folder: str

    def __call__(self, task: Task) -> AttemptResult:
        began = Path(self.folder, f"{task.number}.began.{os.getpid()}.{time.monotonic_ns()}")
        began.touch()
        match task.parameters["do"]:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fail":
                return AttemptResult(task.number, error="it never works", permanent=True)
            case "sleep":
                threading.Event().wait(task.parameters["seconds"])
        Path(self.folder, f"{task.number}.ended").touch()
        record = Record(task.number, f"id{task.number}", (), (), samples_in=7)
        return AttemptResult(task.number, record, place=str(os.getpid()))


class Unloadable:
    """Can be pickled here, and not loaded in another process."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["home"] != os.getpid():
            raise ImportError("there is no such module here")
        self.__dict__ |= state

    def __call__(self, task: Task) -> AttemptResult:
        raise AssertionError
