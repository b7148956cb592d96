"""Other processes for the tests of the cache, and waiting for what they do."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from tests.servers import Origin
from tests.transfer.reading import spans

__all__ = ["Child", "bytes_asked_for", "digests", "held", "leftovers", "wait_for"]

SCRIPT = Path(__file__).with_name("child.py")


class Child:
    """One `child.py`; killed at the end of the ``with`` where it has not ended by itself."""

    def __init__(self, folder: Path, urls: Iterable[str], pause_at: int = 0) -> None:
        command = [sys.executable, "-W", "error", str(SCRIPT), str(folder), str(pause_at), *urls]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Child:
        assert self.line() == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        """What it says next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> Child:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self

    def rest(self) -> list[str]:
        """What it says until its good end."""
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return out.splitlines()


def digests(contents: Iterable[bytes]) -> list[str]:
    """What a child says of shards with these bytes."""
    return [f"{len(content)} {hashlib.sha256(content).hexdigest()}" for content in contents]


def bytes_asked_for(origin: Origin) -> int:
    """How many bytes of its files the server was asked for, those asked for twice counted twice."""
    return sum(
        max(0, min(stop, len(content)) - start)
        for path, content in origin.files.items()
        for start, stop in spans(origin.requests, path)
    )


def leftovers(folder: Path) -> list[str]:
    """What is in the cache and no shard."""
    return sorted(path.name for path in (folder / ".partial").glob("*") if path.name != "eviction.lock")


def held(folder: Path, pid: int | str = "self") -> list[str]:
    """The files below ``folder`` that a process has open."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(fd))
    return [name for name in found if name.startswith(f"{folder}/")]


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Until ``condition`` holds; fails after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
