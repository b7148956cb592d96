"""A service that is killed at any moment: the next one serves right bytes only, and finds most of what was there."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.cache.doubles import CHUNK, Bytes, content, get, run, running
from wds_async.service.cache.disk import open_index

NAMES = [f"s3://bucket/{number}" for number in range(40)]
LIMIT = 300 * CHUNK


def filled() -> Bytes:
    origin = Bytes()
    for number, name in enumerate(NAMES):
        origin.put(name, content(12 * CHUNK + number, number), ranged=number % 7 != 3)
    return origin


async def forever(folder: Path) -> None:
    """What the killed process does: read everything, four at once, again and again, and say so."""
    async with running(folder, filled(), LIMIT) as cache:

        async def reader(step: int) -> None:
            while True:
                for name in NAMES[::step]:
                    await get(cache, name)
                    sys.stdout.write(f"{name}\n")
                    sys.stdout.flush()

        await asyncio.gather(*(reader(step) for step in (1, -1, 3, 5)))


@pytest.mark.parametrize("after", [1, 30, 90])
def test_killed(tmp_path: Path, after: int) -> None:
    for _ in range(2):
        command = [sys.executable, "-c", _CHILD, str(tmp_path / "cache")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert child.stdout is not None
        for _ in range(after):
            assert child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL

    async def main() -> None:
        origin = filled()
        async with running(tmp_path / "cache", origin, LIMIT) as cache:
            there = len(list((tmp_path / "cache" / "data").rglob("*")))
            assert there
            for name in NAMES:
                got = await get(cache, name)
                assert hashlib.sha256(got).digest() == hashlib.sha256(origin.things[name].data).digest()
            assert cache.statistics().bytes <= LIMIT
            assert cache.statistics().bad_chunks == 0  # what was said to be there was there: the power did not fail
        rows = {row.id for row in open_index(tmp_path / "cache").rows()}
        files = {int(path.name, 16) for path in (tmp_path / "cache" / "data").rglob("*") if path.is_file()}
        assert files <= rows

    run(main())


_CHILD = """
import asyncio, sys
from pathlib import Path
from tests.service.cache.test_crash import forever
asyncio.run(forever(Path(sys.argv[1])))
"""
