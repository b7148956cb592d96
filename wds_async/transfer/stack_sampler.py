"""Where the time of a thread that reads samples goes: a look at its stack now and then, by the loop's thread.

A clock around each sample would cost as much as a small sample does. A look costs nothing between two looks: the
loop, which runs anyway while a reader is open, asks the interpreter for the thread's frames, and the first that is of
a known room says what the thread is doing. The time since the last look is counted there. The times between looks
are drawn, so that a program which does the same thing every 50 ms is not always met at the same place in it.

Nobody looks unless asked to (``WDS_DOCTOR=1``, and `wds-async doctor`): CPython 3.11 has crashed where frames of other
threads were looked at (python/cpython#111363), and a training must not depend on how well that goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from wds_async import environment, world
from wds_async.transfer.stats import Counters

if TYPE_CHECKING:
    from wds_async.transfer.reader import ShardReader

__all__ = ["EVERY_S", "LOOKED_AT", "hot_places", "looking", "room_of", "watch"]

EVERY_S = 0.05
"""Between two looks, on average, once a reader has been open for some seconds; before that they are closer together."""

_FIRST_S = 0.002
_GROWTH = 1.1
_LONGEST_S = 5.0  # what passed while the machine slept, or the process was stopped, is nobody's time
_DEPTH = 200
_PLACES = 256

LOOKED_AT = ("waiting", "parsing", "decoding", "program", "stages", "handing", "idle", "away")
"""What a thread may be found doing; ``<name>_s`` are cells of `stats.Stats`."""

_PACKAGE = Path(__file__).parents[1].as_posix() + "/"
_LIBRARIES = tuple(
    {Path(sysconfig.get_path(name)).as_posix() + "/" for name in ("stdlib", "purelib", "platlib")}
    | {"<frozen ", "<__array", "<string>"}
)
_ROOMS = {
    "transfer/pump.py": "waiting",
    "tar/": "parsing",
    "transfer/": "parsing",
    "shardcache/": "parsing",
    "storage/": "parsing",
    "reading/": "parsing",
    "observe/ledger.py": "parsing",
    # Asked for at the beginning of a shard, when the loop wakes and the thread has to wait for it.
    **dict.fromkeys(("redact.py", "urls.py", "rewrite.py"), "parsing"),
    **dict.fromkeys(("autodecode.py", "decoding/", "tenbin.py"), "decoding"),
    "shared_batches.py": "handing",
    "filters/basic.py": "filters",
    **dict.fromkeys(("filters/threads.py", "observe/doctor.py", "cli/"), ""),
}
"""Of this package's files, the first that matches; "" asks the caller, and all others are ``stages``."""
_STAGES = ("_info", "_log_keys", "_rename", "_extract_keys")
_asked_for = False
_known: dict[str, str | None] = {}
_places: weakref.WeakKeyDictionary[Counters, Counter[str]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Look at every thread that begins to read meanwhile, in this process and those that it forks."""
    global _asked_for
    before, _asked_for = _asked_for, True
    try:
        yield
    finally:
        _asked_for = before


def watch(reader: ShardReader) -> None:
    """Look at this thread, which reads by ``reader``, until that is closed; counted in its counters. Only where that
    was asked for."""
    if not (_asked_for or environment.value("WDS_DOCTOR")):
        return
    reader.counters.set("connections_most", reader.config.connections)
    reader.engine().submit(_begin, weakref.ref(reader), threading.get_ident(), reader.counters)


def hot_places(counters: Counters, most: int = 3) -> list[str]:
    """Where the program's own functions were found most often by who counted there: ``augment (train.py:33)``."""
    return [place for place, _ in _places.get(counters, Counter()).most_common(most)]


def room_of(frame: FrameType | None, in_worker: bool) -> tuple[str, str]:
    """What a thread with this innermost frame is doing, one of `LOOKED_AT`; and the function of the program that it is
    in then, "" where it is in none."""
    program: FrameType | None = None
    for _ in range(_DEPTH):
        if frame is None:
            break
        code = frame.f_code
        file = code.co_filename
        kind = _known[file] if file in _known else _learn(file)
        if kind == "program":
            program = frame  # at last the outermost: what a stage of ours calls
        elif kind is not None:
            found = _refined(kind, code.co_name, program is not None, in_worker)
            if found:
                return found, _place(program) if found == "program" else ""
        frame = frame.f_back
    if in_worker and program is not None:
        return "program", _place(program)
    return "idle" if in_worker else "away", ""


def _refined(kind: str, function: str, program: bool, in_worker: bool) -> str:
    """``kind`` of a file, seen closely; "" where the caller says more."""
    if kind == "queue":
        return {"put": "handing", "get": "idle"}.get(function, "") if in_worker else ""
    if kind == "filters":
        kind = "decoding" if function == "_decode" else "stages" if function in _STAGES else "program"
    return "program" if kind == "stages" and program else kind  # a stage of the program's own, which one of ours asks


def _place(program: FrameType | None) -> str:
    if program is None:
        return ""
    code = program.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def _learn(file: str) -> str | None:
    """The kind of a file: a room, ``program``, or None for a library's."""
    _known[file] = kind = _kind(Path(file).as_posix())
    return kind


def _kind(file: str) -> str | None:
    if file.startswith(_PACKAGE):
        inside = file.removeprefix(_PACKAGE)
        return next((room for name, room in _ROOMS.items() if inside.startswith(name)), "stages")
    if file.endswith("multiprocessing/queues.py"):
        return "queue"
    if file.endswith("torch/utils/data/_utils/collate.py"):
        return "stages"
    library = file.startswith(_LIBRARIES) or "-packages/" in file
    return None if library else "program"


class _Looks:
    """The readers that one loop looks after, and the threads that read by them."""

    def __init__(self) -> None:
        self._readers: list[tuple[weakref.ref[ShardReader], int, Counters]] = []
        self._looking = False  # and no timer, which would hold its loop, and the loop this: it would never be freed
        self._rng = random.Random(os.getpid())
        self._every_s = _FIRST_S
        self._last = 0.0
        self._in_worker = world.torch_worker() is not None

    def add(self, reader: weakref.ref[ShardReader], thread: int, counters: Counters) -> None:
        """Look at ``thread`` too."""
        self._readers.append((reader, thread, counters))
        if not self._looking:
            self._every_s = _FIRST_S
            self._again()

    def _again(self) -> None:
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        self._every_s = min(EVERY_S, self._every_s * _GROWTH)
        self._looking = True
        loop.call_later(self._every_s * self._rng.uniform(0.5, 1.5), self._look)

    def _look(self) -> None:
        self._looking = False
        passed_s = min(asyncio.get_running_loop().time() - self._last, _LONGEST_S)
        self._readers = [one for one in self._readers if _open(one[0])]
        frames = sys._current_frames()
        seen: set[int] = set()
        for _, thread, counters in self._readers:
            if thread not in seen and thread in frames:  # who reads several sources at once waits for one of them
                seen.add(thread)
                _count(counters, *room_of(frames[thread], self._in_worker), passed_s)
                if self._in_worker and _sending(frames):
                    counters.add("sending_s", passed_s)
        frames.clear()
        if self._readers:
            self._again()


def _sending(frames: Mapping[int, FrameType]) -> bool:
    """Whether a thread that `multiprocessing.Queue` sends by is at work, pickling or writing, and not waiting."""
    feeders = (frames.get(one.ident or 0) for one in threading.enumerate() if one.name == "QueueFeederThread")
    return any(frame is not None and frame.f_code.co_name != "wait" for frame in feeders)


def _open(reader: weakref.ref[ShardReader]) -> bool:
    here = reader()
    return here is not None and not here.closed


def _count(counters: Counters, room: str, place: str, passed_s: float) -> None:
    counters.add("looked_s", passed_s)
    counters.add(f"{room}_s", passed_s)
    if budget := counters.get("budget_bytes"):
        counters.add("full_s", passed_s * min(1.0, counters.get("window_bytes") / budget))
    places = _places.setdefault(counters, Counter())
    if place and (place in places or len(places) < _PLACES):
        places[place] += 1


_of_loops: weakref.WeakKeyDictionary[Any, _Looks] = weakref.WeakKeyDictionary()


def _begin(reader: weakref.ref[ShardReader], thread: int, counters: Counters) -> None:
    loop = asyncio.get_running_loop()
    if loop not in _of_loops:
        _of_loops[loop] = _Looks()
    _of_loops[loop].add(reader, thread, counters)
