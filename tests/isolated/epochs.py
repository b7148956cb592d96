"""Two hundred epochs on small shards, over HTTP and from disk: the last one leaves the process as the hundredth did."""

import gc
import os
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import common  # noqa: F401 - the path

import wds_async as wds
from tests.servers import Origin, make_shards

EPOCHS, WARM = 200, 100  # until then the allocator finds its size


def held() -> Counter[str]:
    """How many objects of ours, and of the event loop's, there are; and threads, descriptors, files."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    ours = ("wds_async", "asyncio", "uvloop", "weakref", "mmap", "socket", "queue")
    found = Counter(f"{kind.__module__}.{kind.__name__}" for kind in kinds if str(kind.__module__).startswith(ours))
    found["threads"] = threading.active_count()
    found["descriptors"] = descriptors()
    found["files"] = sum(len(files) for _, _, files in os.walk(tempfile.gettempdir()))
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settle() -> None:
    """Let the server see that the last connection has gone: its sockets are in this process."""
    origin.wait_until(lambda server: server.open_connections == 0)
    deadline = time.monotonic() + 10 * bool(base)
    while descriptors() > base and time.monotonic() < deadline:
        time.sleep(0.001)


with Origin() as origin, tempfile.TemporaryDirectory() as folder:
    tempfile.tempdir = folder  # where whatever is left would lie
    paths = make_shards(Path(folder), 4, 5)
    urls = [origin.add(path.name, path.read_bytes()) for path in paths[:2]]
    datasets = [wds.WebDataset(urls, shardshuffle=2), wds.WebDataset([str(path) for path in paths[2:]], shardshuffle=2)]
    base = 0  # not known yet: libuv keeps a pipe, for one
    for epoch in range(EPOCHS):
        if epoch == WARM:
            settle()
            base = descriptors()
            before, before_bytes = held(), resident()
        origin.requests.clear()
        keys = sorted(sample["__key__"] for dataset in datasets for sample in dataset)
        assert keys == [f"{i:06d}" for i in range(20)], (epoch, keys)
    settle()
    more = held() - before
    grown = resident() - before_bytes
    # A few of a kind may be on their way, or in a cache; one for each epoch would be a hundred.
    assert all(count < 40 for count in more.values()), more
    assert more["threads"] + more["descriptors"] + more["files"] == 0, more
    assert grown < 4 << 20, grown
