"""An exception nobody catches, in the middle of a shard: the traceback keeps the reader alive until the very end."""

from common import CONFIG, serve

from tests.servers import Origin
from wds_async.transfer.reader import open_shards

with Origin() as origin, open_shards(serve(origin), config=CONFIG) as reader:
    for shard in reader:
        piece = shard.read()
        raise LookupError(f"expected, at {len(piece or b'')}")
