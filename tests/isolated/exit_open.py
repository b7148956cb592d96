"""The program ends with readers open: one in the middle of a shard, one of pipes, one waiting for the server."""

import os

from common import CONFIG, serve

from tests.servers import Origin
from wds_async.transfer.reader import open_shards

origin = Origin().start()
first = open_shards(serve(origin), config=CONFIG)
next(first).read()
second = open_shards(["pipe:yes"] * 3, config=CONFIG)
next(second).read()
origin.add("stalls.tar", b"x" * 100)
origin.behave(path="/stalls.tar", stall_after=10)
third = open_shards([origin.url("stalls.tar")] * 3, config=CONFIG)
next(third)
origin.wait_until(lambda server: server.in_flight > 0)
os.write(1, b"end of the script\n")
