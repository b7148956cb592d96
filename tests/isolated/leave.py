"""The consumer leaves in the middle, in each of the ways there are, and the process is clean each time."""

import gc
import os
import threading
import time

from common import CONFIG, serve

from tests.servers import Origin
from wds_async.transfer.engine import end_idle
from wds_async.transfer.reader import open_shards


def clean() -> None:
    gc.collect()
    end_idle()
    assert not [t.name for t in threading.enumerate() if t.name == "wds-async"], threading.enumerate()
    origin.wait_until(lambda server: server.open_connections == 0)


with Origin() as origin:
    urls = serve(origin)
    with open_shards(urls, config=CONFIG) as reader:
        for shard in reader:
            shard.read()
            break
    clean()
    descriptors = len(os.listdir("/proc/self/fd"))
    reader = open_shards(urls, config=CONFIG)
    next(reader).read()
    reader.close()
    clean()
    reader = open_shards(urls, config=CONFIG)
    shard = next(reader)
    shard.read()
    del reader, shard
    clean()

    def stage() -> object:
        with open_shards(urls, config=CONFIG) as reader:
            for shard in reader:
                while shard.read() is not None:
                    yield shard.number

    generator = iter(stage())  # type: ignore[call-overload]
    next(generator)
    del generator
    clean()
    deadline = time.monotonic() + 2  # the server's sockets close in turns of its own loop
    while len(os.listdir("/proc/self/fd")) > descriptors:
        assert time.monotonic() < deadline, "a file descriptor is left"
        time.sleep(0.001)
