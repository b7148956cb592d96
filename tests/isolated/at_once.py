"""Eight processes read at once: none holds more than its budget, a slab, and what it takes to read at all."""

import os
import sys
import tempfile
from pathlib import Path

import common  # noqa: F401 - the path

import wds_async as wds
from tests.servers import make_shards
from wds_async.config import TransferConfig
from wds_async.transfer.reader import open_shards

PROCESSES, BUDGET, PART = 8, 16 << 20, 4 << 20
SLACK = 10 << 20  # of the allocator, and of the threads' stacks


def status(name: str) -> int:
    """Bytes, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def work(urls: list[str]) -> None:
    with open_shards(urls[:1], config=TransferConfig(budget_bytes=1 << 20, part_bytes=1 << 18)) as reader:
        next(reader).read()  # what the first one imports and starts is no slab
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, got = status("VmRSS"), 0
    with open_shards(urls, config=TransferConfig(budget_bytes=BUDGET, part_bytes=PART)) as reader:
        for shard in reader:
            while (piece := shard.read()) is not None:
                got += len(piece)
    assert got == size, (got, size)
    more = status("VmHWM") - before
    assert more <= BUDGET + PART + SLACK, more
    assert more >= BUDGET // 4, more  # else this has measured nothing


with tempfile.TemporaryDirectory() as folder:
    paths = make_shards(Path(folder), 3, 4, payload=8 << 20)
    size = sum(path.stat().st_size for path in paths)
    assert len(list(wds.WebDataset([str(path) for path in paths], shardshuffle=False))) == 12
    children = []
    for _ in range(PROCESSES):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work([str(path) for path in paths])
                code = 0
            finally:
                if code:
                    sys.excepthook(*sys.exc_info())
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * PROCESSES
