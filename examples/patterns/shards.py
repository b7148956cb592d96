"""Shards for the calling patterns beside this file: ``python examples/patterns/shards.py``."""

import functools
import http.server
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import wds_async as wds

SHARDS, SAMPLES = 3, 20


def write(folder: str) -> str:
    """Three shards of twenty samples with ``jpg``, ``json``, ``cls`` and ``npy``; their URL in brace notation."""
    rng = np.random.default_rng(0)
    with wds.ShardWriter(f"{folder}/x-%06d.tar", maxcount=SAMPLES, verbose=0, mtime=0) as sink:
        for i in range(SHARDS * SAMPLES):
            picture = rng.random((16, 16, 3), dtype=np.float32)
            sample = {"jpg": picture, "json": {"n": i}, "cls": i % 10, "npy": rng.random(4)}
            sink.write({"__key__": f"sample{i:06d}", **sample})
    return f"{folder}/x-{{000000..{SHARDS - 1:06d}}}.tar"


@contextmanager
def shards() -> Iterator[str]:
    """The URL of shards that are there while the block runs, in the folder that it runs in."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            write(".")
            yield f"x-{{000000..{SHARDS - 1:06d}}}.tar"
        finally:
            os.chdir(before)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *args: object) -> None:
        """Nothing: a client that leaves early is no error."""


@contextmanager
def served(folder: str = ".") -> Iterator[str]:
    """The address of a web server on ``folder``."""
    handler = functools.partial(_Quiet, directory=str(Path(folder).resolve()))
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    with shards() as url:
        print(url, "holds", sum(1 for _ in wds.WebDataset(url, shardshuffle=False)), "samples")
