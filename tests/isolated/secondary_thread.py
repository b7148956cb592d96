"""Readers on threads: daemon threads that are in the middle when the program ends."""

import threading

from common import CONFIG, serve

from tests.servers import Origin
from wds_async.transfer.reader import open_shards

origin = Origin().start()
urls = serve(origin)
begun = threading.Barrier(3)


def work() -> None:
    with open_shards(urls, config=CONFIG) as reader:
        for shard in reader:
            while shard.read() is not None:
                if shard.number == 1:
                    begun.wait()
                    threading.Event().wait()


for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
