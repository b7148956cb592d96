"""Processes that create the same object at the same moment: ``python -m tests.storage.racing N URL…``.

Prints a line of JSON for each URL: what `publish_new` returned in each process. The clients are imported once and the
processes forked from there.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

__all__ = ["race"]

_CLIENTS = ("s3fs", "aiohttp", "azure.storage.blob.aio", "google.auth.transport.requests", "paramiko")


def race(urls: list[str], processes: int) -> dict[str, list[Any]]:
    """Return for each URL what each process was told: True, False, or the text of an error. Process n writes the bytes
    of ``n``."""
    command = [sys.executable, "-m", "tests.storage.racing", str(processes), *urls]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(urls, map(json.loads, done.stdout.splitlines()), strict=True))


def _main(processes: int, urls: list[str]) -> None:
    for name in _CLIENTS:
        importlib.import_module(name)
    from wds_async.storage.sink import publish_new

    for url in urls:
        start_read, start_write = os.pipe()
        result_read, result_write = os.pipe()
        children = []
        for number in range(processes):
            if child := os.fork():
                children.append(child)
                continue
            os.close(start_write)
            os.read(start_read, 1)  # returns when the parent closes its end
            try:
                result: Any = publish_new(url, b"%d" % number)
            except Exception as exn:
                result = str(exn)[:300]
            os.write(result_write, json.dumps([number, result]).encode() + b"\n")
            os._exit(0)
        os.close(start_write)
        os.close(result_write)
        with open(result_read, encoding="utf-8") as lines:
            results = dict(map(json.loads, lines))
        os.close(start_read)
        for child in children:
            os.waitpid(child, 0)
        print(json.dumps([results[number] for number in range(processes)]), flush=True)  # noqa: T201


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
