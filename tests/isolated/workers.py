"""DataLoader workers: forked, from a fork server, and spawned, in a process that has read before and is reading; kept
for three epochs; one of them killed. The last loader is in the middle when the program ends."""

import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common  # noqa: F401 - the path

import wds_async as wds
from tests.servers import Origin, make_shards

KEYS = [f"{i:06d}" for i in range(20)]


def name(sample: Any) -> Any:
    """At module level, so that spawned workers find it."""
    return sample["__key__"], sample["bin"]


def loader(urls: list[str], **options: Any) -> Any:
    dataset = wds.WebDataset(urls, shardshuffle=False).map(name)
    return wds.WebLoader(dataset, **{"batch_size": None, "num_workers": 2, **options})


def check(items: Any) -> None:
    found = dict(items)
    assert sorted(found) == KEYS, sorted(found)
    assert found == CONTENT


def memory() -> list[str]:
    """Names in shared memory that are this program's, or torch's."""
    return sorted(entry for entry in os.listdir("/dev/shm") if "torch" in entry and str(os.getpid()) in entry)


def kept(urls: list[str]) -> None:
    items = loader(urls, persistent_workers=True)
    for _ in range(3):
        check(items)
    pids = {child.pid for child in multiprocessing.active_children()}
    check(items)
    assert pids == {child.pid for child in multiprocessing.active_children()}
    assert len(pids) == 2


def killed(urls: list[str]) -> None:
    """One that waits for bytes: torch says so, and nothing stays."""
    origin.behave(when=lambda request: "stalls" in request.target, stall_after=600)
    stalls = [origin.add(f"stalls-{i}.tar", bytes(10_000)) for i in range(2)]
    items = iter(loader(stalls))

    def kill() -> None:
        origin.wait_until(lambda server: server.in_flight >= 2)
        os.kill(min(child.pid for child in multiprocessing.active_children()), signal.SIGKILL)

    threading.Thread(target=kill).start()
    told = ""
    try:
        next(items)
    except RuntimeError as exn:
        told = str(exn)
    assert told.startswith("DataLoader worker"), told
    del items
    gone()
    check(loader(urls))


def gone() -> None:
    """No child, no folder of counters, no memory."""
    gc.collect()
    deadline = time.monotonic() + 15
    while (left := multiprocessing.active_children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, left
    assert not memory()
    assert not list(Path(folder).glob("wds-async-*/*/*")), list(Path(folder).glob("wds-async-*/*/*"))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, when it is imported
        import torch.utils.data  # noqa: F401
    warnings.filterwarnings("ignore", "This DataLoader will create")
    folder = tempfile.tempdir = sys.argv[1]
    origin = Origin().start()
    paths = make_shards(Path(folder, "shards"), 4, 5, payload=70_000)
    urls = [origin.add(path.name, path.read_bytes()) for path in paths]
    reference = wds.WebDataset(urls, shardshuffle=False).map(name)
    CONTENT = dict(reference)
    open_one = iter(reference)
    begun = [next(open_one)]
    tasks: list[Callable[[list[str]], None]] = [kept, killed]
    check(loader(urls, multiprocessing_context="fork"))
    for task in tasks:
        task(urls)
        gone()
    multiprocessing.set_forkserver_preload(["torch.utils.data", "wds_async.dataset"])
    # Side by side, since both take seconds to import torch.
    with ThreadPoolExecutor() as threads:
        list(
            threads.map(
                check, [loader(urls, num_workers=1, multiprocessing_context=how) for how in ("spawn", "forkserver")]
            )
        )
    check([*begun, *open_one])  # which the process was reading all the time
    gone()
    left = iter(loader(urls * 20))
    next(left)
    shutil.rmtree(Path(folder, "shards"))
    os.write(1, b"end of the script\n")
