"""Ctrl-C in one phase after another: while bytes do not come, in the user's function, while a reader closes. After each
the dataset can be read again. Says ``phase`` when a signal may come, and ``interrupted`` once the phase was left; in
the last phase SIGTERM ends the program, by ``sys.exit`` of its own handler.

The argument is the number of a DataLoader's workers, 0 for none.
"""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import CONFIG

import wds_async as wds
from tests.servers import Origin, make_shards
from wds_async.storage.user_openers import gopen_schemes
from wds_async.transfer.reader import open_shards

WORKERS = int(sys.argv[1])
KEYS = [f"{i:06d}" for i in range(10)]
goes_on = threading.Event()


def say(what: str) -> None:
    os.write(1, f"{what}\n".encode())


def read(dataset: Any) -> None:
    items = wds.WebLoader(dataset, batch_size=None, num_workers=WORKERS) if WORKERS else dataset
    for _ in items:
        pass


def downloading() -> None:
    threading.Thread(target=announce, args=(len(origin.requests),), daemon=True).start()
    read(wds.WebDataset(stalls, shardshuffle=False))


def announce(before: int) -> None:
    def waits(server: Origin) -> bool:
        asked = {request.path for request in server.requests[before:]}
        return len([path for path in asked if "stalls" in path]) >= max(1, WORKERS)

    origin.wait_until(waits, 40)
    say("phase")


def decoding() -> None:
    def decode(sample: Any) -> None:
        if WORKERS == 0 or sample["__key__"] == KEYS[5]:  # the first of the second worker's
            say("phase")
        threading.Event().wait()

    read(wds.WebDataset(urls, shardshuffle=False).map(decode))


class Sticks:
    """A file that is in the middle of a read, and takes long to close."""

    def read(self, size: int) -> bytes:
        return bytes(size)

    def close(self) -> None:
        say("phase")
        goes_on.wait(20)


def closing() -> None:
    with open_shards(["sticks:x"] * 2, config=CONFIG) as reader:
        next(reader).read()


def phase(work: Callable[[], None]) -> None:
    """Run it until a signal ends it; then nothing is left, and the engine reads again."""
    try:
        work()
    except KeyboardInterrupt:
        say("interrupted")
    else:
        raise AssertionError(f"{work.__name__} was not interrupted")
    goes_on.set()
    deadline = time.monotonic() + 10
    while (left := engines()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    assert not left, (work.__name__, left)
    assert not multiprocessing.active_children()
    assert sorted(sample["__key__"] for sample in wds.WebDataset(urls, shardshuffle=False)) == KEYS


def engines() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wds-async")]


if __name__ == "__main__":
    gopen_schemes["sticks"] = lambda url, mode, bufsize: Sticks()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    with tempfile.TemporaryDirectory() as folder:
        origin = Origin().start()
        paths = make_shards(Path(folder), 2, 5)
        urls = [origin.add(path.name, path.read_bytes()) for path in paths]
        stalls = [origin.add(f"stalls-{i}.tar", bytes(10_000)) for i in range(2)]
        origin.behave(when=lambda request: "stalls" in request.target, stall_after=512)
    for work in [downloading, decoding] + [closing] * (not WORKERS):
        goes_on.clear()
        phase(work)
    downloading()
