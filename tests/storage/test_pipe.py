"""Commands and standard input."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.transfer.reading import KIB, MIB, bytes_of, data, open_fds, outcomes, quick
from wds_async.background import BlockingThreads
from wds_async.errors import PipeError, StorageError, UnsafeContent, UrlError
from wds_async.storage.pipe import FdStream
from wds_async.transfer.reader import open_shards

PART = 256 * KIB


def _children() -> set[str]:
    """Processes of ours, zombies included."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    before = _children()
    yield
    _wait_for(lambda: not _children() - before)


@pytest.mark.parametrize("size", [0, 1, 3 * PART + 7])
def test_bytes(tmp_path: Path, size: int) -> None:
    content = data(size)
    (tmp_path / "x.tar").write_bytes(content)
    assert bytes_of([f"pipe:cat '{tmp_path}/x.tar'", f"pipe: cat <{tmp_path}/x.tar | cat"]) == [content, content]


def test_many_pipes_in_order(tmp_path: Path) -> None:
    assert bytes_of([f"pipe:printf %05d {i}" for i in range(30)]) == [f"{i:05d}".encode() for i in range(30)]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("printf hello; exit 3", "status 3"),
        ("printf hello; kill -9 $$", "signal SIGKILL"),
        ("printf hello; no-such-command-here 2>/dev/null", "status 127"),
    ],
)
def test_a_failing_command_is_an_error_behind_its_bytes(command: str, words: str) -> None:
    (got, error), following = outcomes([f"pipe:{command}", "pipe:printf next"])
    assert got == b"hello"
    assert isinstance(error, PipeError)
    assert words in str(error)
    assert "at byte 5" in str(error)
    assert "pipe:printf hello" in str(error)
    assert following == (b"next", None)


def test_a_pipeline_whose_last_command_has_enough_is_no_failure() -> None:
    assert bytes_of(["pipe:printf hello; exit 141"]) == [b"hello"]


def test_a_failing_command_is_not_run_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    outcomes([f"pipe:echo ran >>{log}; exit 1"])
    assert log.read_text() == "ran\n"


def test_secrets_of_a_command_are_not_shown() -> None:
    ((_, error),) = outcomes(["pipe:false --token TOPSECRET"])
    assert isinstance(error, PipeError)
    assert "TOPSECRET" not in str(error)


def test_no_command() -> None:
    ((_, error),) = outcomes(["pipe:"])
    assert isinstance(error, UrlError)


def test_leaving_early_kills_the_whole_pipeline(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = f"pipe:echo $$ >{pids}; sh -c 'echo $$ >>{pids}; exec sleep 1000' & printf ready; yes | cat; wait"
    with open_shards([command], config=quick()) as reader:
        shard = next(reader)
        assert bytes(shard.read() or b"").startswith(b"ready")
        _wait_for(lambda: len(pids.read_text().split()) == 2)
    for pid in map(int, pids.read_text().split()):
        _wait_for(lambda pid=pid: not _runs(pid))


def test_leaving_at_once_leaves_no_process() -> None:
    before = open_fds()
    for _ in range(20):
        with open_shards([f"pipe:sleep {i + 1000}" for i in range(4)], config=quick()) as reader:
            next(reader)
    assert open_fds() <= before


def test_skipping_at_once(tmp_path: Path) -> None:
    with open_shards([*["pipe:yes"] * 20, "pipe:printf last"], config=quick()) as reader:
        assert [bytes(shard.read() or b"") for shard in reader if shard.url.endswith("last")] == [b"last"]


def test_the_next_command_starts_early(tmp_path: Path) -> None:
    marks = [tmp_path / f"{i}" for i in range(3)]
    urls = [f"pipe:touch {mark}; printf x" for mark in marks]
    with open_shards(urls, config=quick()) as reader:
        shard = next(reader)
        assert shard.read() is not None
        _wait_for(lambda: all(mark.exists() for mark in marks))


def test_no_more_commands_than_allowed_run_ahead(tmp_path: Path) -> None:
    urls = [f"pipe:touch {tmp_path}/{i}; cat /dev/zero | head -c 3000000" for i in range(10)]
    with open_shards(urls, config=quick(open_streams=2, budget_bytes=1 * MIB)) as reader:
        shard = next(reader)
        for _ in range(8):
            assert shard.read() is not None
        assert len(list(tmp_path.iterdir())) <= 2


def test_a_slow_command_is_not_held_back() -> None:
    with open_shards(["pipe:printf first; sleep 1000"], config=quick()) as reader:
        shard = next(reader)
        assert bytes(shard.read() or b"") == b"first"


def test_secure_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WDS_SECURE", "1")
    mark = tmp_path / "ran"
    ((_, error),) = outcomes([f"pipe:touch {mark}"])
    assert isinstance(error, UnsafeContent)
    assert not mark.exists()


def test_a_read_that_was_given_up_writes_no_more() -> None:
    # The memory has another owner by the time that bytes come.
    async def scenario() -> None:
        threads = BlockingThreads(asyncio.get_running_loop(), 1)
        read_end, write_end = os.pipe()
        memory = bytearray(100)
        stream = FdStream(threads.call, lambda: read_end)
        await stream.open()
        task = asyncio.ensure_future(stream.readinto(memoryview(memory)))
        await threads_are_busy(threads)
        task.cancel()
        await asyncio.wait([task])
        os.write(write_end, b"late")
        await threads.call(int)  # the one thread is free again
        assert memory == bytes(100)
        await stream.close()
        os.close(write_end)
        threads.stop()

    async def threads_are_busy(threads: BlockingThreads) -> None:
        while not threads._jobs.empty():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.001)

    asyncio.run(scenario())


_STDIN = """
import sys
from wds_async.transfer.reader import open_shards
with open_shards(["-"]) as reader:
    for shard in reader:
        while (piece := shard.read()) is not None:
            sys.stdout.buffer.write(piece)
"""


def test_standard_input() -> None:
    content = data(2 * MIB)
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", _STDIN]
    done = subprocess.run(command, input=content, capture_output=True, timeout=30, check=True)
    assert done.stdout == content
    assert done.stderr == b""


def test_no_standard_input_is_an_error() -> None:
    command = [sys.executable, "-c", _STDIN.replace("import sys", "import sys; sys.stdin = None", 1)]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert b"wds_async.errors.TransferError: - at byte 0" in done.stderr
    assert done.returncode == 1


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def test_an_error_of_another_kind_is_of_the_tree() -> None:
    ((_, error),) = outcomes(["pipe:printf x\0y"])
    assert isinstance(error, StorageError)
