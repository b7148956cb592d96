"""A process that reads shards through a cache, step by step: ``python child.py FOLDER PIECES URL…``.

Says ``ready``, waits for a line, and then for each shard says its number of bytes and their digest. With PIECES it
reads so many pieces of the first shard, says ``paused``, and waits for another line. In the end it says what it
counted.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.transfer.reading import quick, snapshot
from wds_async.shardcache.cache import shard_cache
from wds_async.transfer.reader import open_shards
from wds_async.transfer.stats import Counters


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    folder, pause_at, urls = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    cache, counters = shard_cache(folder), Counters()
    say("ready")
    sys.stdin.readline()
    with open_shards(urls, config=quick(), stats=counters, cache=cache) as shards:
        pieces = 0
        for shard in shards:
            digest, size = hashlib.sha256(), 0
            while (piece := shard.read()) is not None:
                digest.update(piece)
                size += len(piece)
                pieces += 1
                if pieces == pause_at:
                    say("paused")
                    sys.stdin.readline()
            say(f"{size} {digest.hexdigest()}")
    stats = snapshot(counters)
    say(f"hits {stats.cache_hits:g} misses {stats.cache_misses:g}")


if __name__ == "__main__":
    main()
