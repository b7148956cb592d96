"""A program with DataLoader workers, which is killed: two that wait for bytes, two that wait for the program, and a
child of its own, whose end is its own business. The argument is the address of a server."""

import os
import sys
import tempfile
from typing import Any

import common  # noqa: F401 - the path
import torch.utils.data

import wds_async as wds


def large(sample: Any) -> bytes:
    """More than a pipe holds."""
    return bytes(300_000)


base, tempfile.tempdir = sys.argv[1:]
waiting = iter(wds.WebLoader(wds.WebDataset([f"{base}/stalls-{i}.tar" for i in range(2)], shardshuffle=False),
                             batch_size=None, num_workers=2))  # fmt: skip
full = wds.WebDataset([f"{base}/{i}.tar" for i in range(2)], shardshuffle=False).repeat().map(large)
# Not our loader, which sends large values by another way.
items = iter(torch.utils.data.DataLoader(full, batch_size=None, num_workers=2))
next(items)
os.write(1, b"ready\n")
next(waiting)
