"""What the scripts share: a server in this process, and shards on it. Imported by path, so nothing of pytest."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers import Origin
from wds_async.config import TransferConfig

SHARDS = [random.Random(i).randbytes(3 << 20) for i in range(4)]
CONFIG = TransferConfig(part_bytes=1 << 18, first_part_bytes=1 << 16, budget_bytes=1 << 20)


def serve(origin: Origin) -> list[str]:
    """Put the shards there; their URLs."""
    return [origin.add(f"{i}.tar", content) for i, content in enumerate(SHARDS)]
