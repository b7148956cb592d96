"""Ctrl-C while the consumer waits for bytes that do not come."""

import os

from common import CONFIG

from tests.servers import Origin
from wds_async.transfer.reader import open_shards

origin = Origin().start()
url = origin.add("x.tar", b"x" * 1000)
origin.behave(stall_after=10)
reader = open_shards([url], config=CONFIG)
shard = next(reader)
os.write(1, b"waiting\n")
try:
    shard.read()
except KeyboardInterrupt:
    os.write(1, b"interrupted\n")
    raise
