"""A child forked with an open reader reads on its own, ends like any program, and the parent goes on undisturbed."""

import os
import sys

from common import CONFIG, SHARDS, serve

from tests.servers import Origin
from wds_async.errors import ReaderClosed
from wds_async.transfer.reader import open_shards


def whole(shard: object, got: bytes = b"") -> bytes:
    while (piece := shard.read()) is not None:  # type: ignore[attr-defined]
        got += piece
    return got


end_read, end_write = os.pipe()
server_pid = os.fork()  # the server has a process of its own, so that forking the reader does not fork it
if server_pid == 0:
    os.close(end_write)
    with Origin() as origin:
        urls = serve(origin)
        with open(sys.argv[1] + ".new", "w") as file:
            file.write("\n".join(urls))
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        os.read(end_read, 1)  # until nobody has the other end any more
    os._exit(0)
while not os.path.exists(sys.argv[1]):
    pass
with open(sys.argv[1]) as file:
    urls = file.read().split("\n")

reader = open_shards(urls, config=CONFIG)
shard = next(reader)
begun = bytes(shard.read() or b"")
child = os.fork()
if child == 0:
    try:
        shard.read()
    except ReaderClosed:
        pass
    else:
        raise AssertionError("the parent's reader was usable")
    with open_shards(urls, config=CONFIG) as mine:
        assert [whole(other) for other in mine] == SHARDS
    del reader, shard
    sys.exit(0)  # the whole of Python's finalization runs here
assert whole(shard, begun) == SHARDS[0]
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert [whole(other) for other in reader] == SHARDS[1:]
os.close(end_write)
os.waitpid(server_pid, 0)
