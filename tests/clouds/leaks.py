"""Reads, writes, lists and describes the URLs that it is given as JSON, with everything that talks turned up, and
prints whatever anybody would print: a script of its own for `test_secrets`."""

# ruff: noqa: T201

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wds_async as wds
from wds_async.cli import main


def told(what: Callable[[], Any]) -> None:
    """Call it, and print what it gives, or all that its exception knows."""
    try:
        print(repr(what())[:2000])
    except SystemExit as exn:
        print("exit", exn.code)
    except BaseException as exn:
        print("".join(traceback.format_exception(exn)))
        print(repr(exn), exn.args, vars(exn), exn.__cause__, exn.__context__)


def command(*words: str) -> Callable[[], Any]:
    return lambda: main(list(words))


def all_ways(url: str, options: dict[str, Any] | None) -> None:
    """Every way in which a program touches a URL."""
    dataset = wds.WebDataset(url, shardshuffle=False, storage_options=options, verbose=True, handler=wds.warn_and_stop)
    print(dataset, repr(dataset), dataset.pipeline, [vars(stage) for stage in dataset.pipeline if hasattr(stage, "f")])
    told(lambda: list(dataset))
    told(lambda: list(wds.WebDataset(url, shardshuffle=False, storage_options=options)))
    told(dataset.statistics)
    file = wds.gopen(url, storage_options=options)
    print(repr(file))
    told(file.read)
    told(lambda: wds.WebDataset(url, shardshuffle=False, storage_options=options, check="all"))
    told(lambda: wds.WebDataset(url.rpartition("/")[0] + "/*.tar", shardshuffle=False, storage_options=options))
    with_writer: list[Any] = []
    told(lambda: with_writer.append(wds.TarWriter(url, storage_options=options)))
    for writer in with_writer:
        print(repr(writer))
        told(lambda writer=writer: writer.write({"__key__": "a", "txt": "x"}))
        told(writer.close)
    for words in (("ls", url), ("cat", url), ("resolve", url), ("resolve", "--check", "--json", url), ("check", url)):
        told(command(*words))
    told(command("ls", url.rpartition("/")[0] + "/"))
    told(command("bench", "--seconds", "1", url))


logging.basicConfig(level=logging.INFO, stream=sys.stdout)
logging.getLogger("wds_async").setLevel(logging.DEBUG)  # botocore writes tokens into its own debug log
job = json.load(sys.stdin)
print(Path("/proc/self/cmdline").read_bytes() if os.path.exists("/proc/self/cmdline") else sys.argv)
for one in job:
    print("==", one["name"])
    all_ways(one["url"], one.get("options"))
told(command("env"))
told(command("env", "--json"))
