"""The system gives no more memory for slabs: an error, not a wait without end."""

import resource
import tempfile
from pathlib import Path

import common  # noqa: F401 - lets the package be imported

from wds_async.config import TransferConfig
from wds_async.errors import ReaderClosed, StorageError
from wds_async.transfer.reader import open_shards

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "x.tar")
    path.write_bytes(bytes(96 << 20))
    with open_shards([str(path)] * 2, config=TransferConfig(budget_bytes=64 << 20)) as reader:
        shard = next(reader)
        assert shard.read() is not None
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (4 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        told = ""
        try:
            while shard.read() is not None:
                pass
        except StorageError as exn:
            told = str(exn)
        assert "the engine failed" in told, told
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        try:
            next(reader)
        except ReaderClosed:
            pass
        else:
            raise AssertionError("the reader goes on")
