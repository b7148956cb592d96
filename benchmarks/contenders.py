"""One contender, alone in a fresh process: ``python -m benchmarks.contenders`` with a `Job` as JSON on standard
input, a reading as JSON on standard output. Imports and construction come before the clock starts."""

# ruff: noqa: PLC0415  (a contender's process imports only what that contender needs)

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
import urllib.parse
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["CONTENDERS", "main", "spin"]

Run = Callable[[], int]
"""Reads everything and returns the number of samples (0 where the contender reads bytes only)."""


def spin(turns: int) -> int:
    """Pure Python that holds the GIL: about 30 ns a turn."""
    x = 1
    for _ in range(turns):
        x = (x * 1103515245 + 12345) & 0x7FFFFFFF
    return x


def _count(samples: Iterable[Any], turns: int) -> int:
    count = 0
    for _ in samples:
        count += 1
        if turns:
            spin(turns)
    return count


def _dataset(module: str, job: dict[str, Any], **options: Any) -> Run:
    wds = __import__(module)
    dataset = wds.WebDataset(job["urls"], shardshuffle=False, **options)
    if module == "wds_async":
        from wds_async.storage.registry import import_clients

        import_clients(job["urls"])
    return lambda: _count(dataset, job["spin"])


def _pipeline(module: str, job: dict[str, Any]) -> Run:
    wds = __import__(module)
    dataset = wds.DataPipeline(wds.SimpleShardList(job["urls"]), wds.tarfile_to_samples())
    return lambda: _count(dataset, job["spin"])


def _loader(module: str, job: dict[str, Any], workers: int, batch: int, decoded: bool = False) -> Run:
    """Workers that make batches of undecoded samples, or of pictures decoded to tensors."""
    import torch

    torch.set_num_threads(1)
    wds = __import__(module)
    dataset = wds.WebDataset(job["urls"], shardshuffle=False)
    dataset = dataset.decode("torchrgb").to_tuple("jpg", "cls") if decoded else dataset.to_tuple("jpg", "cls", "json")
    loader = wds.WebLoader(dataset.batched(batch), batch_size=None, num_workers=workers)
    return lambda: sum(len(batch[0]) for batch in loader)


def _on_asyncio(job: dict[str, Any]) -> Run:
    """Ours on asyncio's own loop, where uvloop's would be taken."""
    from wds_async import background

    vars(background)["new_event_loop"] = asyncio.new_event_loop
    return _dataset("wds_async", job)


def _webdataset_over_fsspec(job: dict[str, Any]) -> Run:
    """What webdataset's users are told to do where curl is too slow: fsspec's HTTP file, 32 MiB blocks."""
    import fsspec
    import webdataset

    def opened(url: str, mode: str, bufsize: int, **kwargs: Any) -> Any:
        return fsspec.open(url, "rb", block_size=32 << 20).open()

    fsspec.filesystem("http")  # imports what it needs, before the clock starts
    webdataset.gopen_schemes["http"] = webdataset.gopen_schemes["https"] = opened
    return _dataset("webdataset", job)


def _tarfile_over_fsspec(job: dict[str, Any]) -> Run:
    """Python's ``tarfile`` over the store's own fsspec file, 32 MiB blocks: samples counted by their first field."""
    import tarfile

    import fsspec

    if job["urls"][0].startswith("gs:"):  # its default asks by gRPC first, and waits where there is none
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    filesystem, _ = fsspec.core.url_to_fs(job["urls"][0])

    def run() -> int:
        count = 0
        for url in job["urls"]:
            with (
                filesystem.open(url, "rb", block_size=32 << 20) as file,
                tarfile.open(fileobj=file, mode="r|") as archive,
            ):
                for member in archive:
                    data = archive.extractfile(member)
                    assert data is not None
                    data.read()
                    count += member.name.endswith(".jpg")
        return count

    return run


def _aiohttp(job: dict[str, Any]) -> Run:
    """The raw bytes as they come, shard after shard over one connection."""
    import aiohttp

    async def read() -> int:
        async with aiohttp.ClientSession(read_bufsize=1 << 20) as session:
            for url in job["urls"]:
                async with session.get(url) as response:
                    response.raise_for_status()
                    async for _ in response.content.iter_any():
                        pass
        return 0

    return lambda: asyncio.run(read())


def _curl(job: dict[str, Any]) -> Run:
    """Sixteen connections, the bytes thrown away."""
    config = "".join(f'url = "{url}"\noutput = "/dev/null"\n' for url in job["urls"])
    command = ["curl", "-sSf", "-Z", "--parallel-immediate", "--parallel-max", "16", "-K", "-"]

    def run() -> int:
        done = subprocess.run(command, input=config.encode(), stderr=subprocess.PIPE, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.decode(errors="replace"))
        return 0

    return run


def _recv_into(job: dict[str, Any]) -> Run:
    """The floor: one connection, one reused buffer."""

    def run() -> int:
        first = urllib.parse.urlsplit(job["urls"][0])
        sock = socket.create_connection((first.hostname, first.port))
        if first.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=first.hostname)
        view = memoryview(bytearray(1 << 20))
        with sock:
            for url in job["urls"]:
                path = urllib.parse.urlsplit(url).path
                sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {first.hostname}\r\n\r\n".encode())
                head = b""
                while b"\r\n\r\n" not in head:
                    head += bytes(view[: sock.recv_into(view)])
                head, _, body = head.partition(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                left = length - len(body)
                while left:
                    left -= sock.recv_into(view, min(left, len(view)))
        return 0

    return run


CONTENDERS: dict[str, Callable[[dict[str, Any]], Run]] = {
    "wds_async": lambda job: _dataset("wds_async", job),
    "wds_async pipeline": lambda job: _pipeline("wds_async", job),
    "wds_async asyncio": _on_asyncio,
    "wds_async interleave=16": lambda job: _dataset("wds_async", job, interleave=16, seed=1),
    "wds_async interleave=16, ordered=False": lambda job: _dataset(
        "wds_async", job, interleave=16, ordered=False, seed=1
    ),
    "webdataset": lambda job: _dataset("webdataset", job),
    "webdataset pipeline": lambda job: _pipeline("webdataset", job),
    "webdataset fsspec": _webdataset_over_fsspec,
    "wds_async decoded": lambda job: _loader("wds_async", job, 2, 32, decoded=True),
    "webdataset decoded": lambda job: _loader("webdataset", job, 2, 32, decoded=True),
    "wds_async raw": lambda job: _loader("wds_async", job, 8, 256),
    "webdataset raw": lambda job: _loader("webdataset", job, 8, 256),
    "wds_async workers": lambda job: _loader("wds_async", job, 4, 64),
    "tarfile fsspec": _tarfile_over_fsspec,
    "aiohttp": _aiohttp,
    "curl -Z": _curl,
    "recv_into": _recv_into,
    "nothing": lambda job: lambda: _count(range(job["samples"]), job["spin"]),
}


def _memory(field: str) -> int:
    """Bytes of ``VmRSS`` (now) or ``VmHWM`` (the peak); 0 where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _reset_peak() -> None:
    """Make ``VmHWM`` start again at ``VmRSS`` (proc(5), clear_refs)."""
    if os.path.exists("/proc/self/clear_refs"):
        Path("/proc/self/clear_refs").write_text("5")


def _cpu() -> tuple[float, float, float]:
    """User and system seconds of this process and its ended children, and the children's share."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    theirs = children.ru_utime + children.ru_stime
    return own.ru_utime + children.ru_utime, own.ru_stime + children.ru_stime, theirs


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Prepare, then read once under the clock."""
    run = CONTENDERS[job["contender"]](job)
    _reset_peak()
    base, cpu = _memory("VmRSS"), _cpu()
    began = time.perf_counter()
    samples = run()
    wall_s = time.perf_counter() - began
    after = _cpu()
    reading = {
        "contender": job["contender"],
        "wall_s": wall_s,
        "user_s": after[0] - cpu[0],
        "system_s": after[1] - cpu[1],
        "children_s": after[2] - cpu[2],
        "samples": samples,
        "peak_bytes": _memory("VmHWM") - base,
        "children_peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }
    if "wds_async" in job["contender"]:
        from wds_async.config import transfer_config

        reading["budget_bytes"] = transfer_config().budget_bytes
    return reading


def first_samples(job: dict[str, Any]) -> dict[str, Any]:
    """Begin twice in one process; the wall clock at the start and when the first sample was there."""
    module = __import__(job["contender"])
    times = []
    for _ in range(2):
        dataset = module.WebDataset(job["urls"], shardshuffle=False)
        began = time.time()
        iterator = iter(dataset)
        next(iterator)
        times.append((began, time.time()))
        del iterator, dataset
        time.sleep(0.3)
    return {"contender": job["contender"], "times": times}


def signing(job: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds that a store's backend takes for one shard's request, after the first."""
    from wds_async.storage.registry import Backends, locate

    async def run() -> float:
        backends = Backends(asyncio.to_thread)
        places = [locate(url) for url in job["urls"]]
        for place in places:
            await backends.of(place).access(place.target)
        began = time.process_time()
        for number in range(job["count"]):
            place = places[number % len(places)]
            await backends.of(place).access(place.target)
        spent = time.process_time() - began
        await backends.close()
        return spent / float(job["count"])

    return {"contender": job["contender"], "cpu_s": asyncio.run(run())}


def listing(job: dict[str, Any]) -> dict[str, Any]:
    """Expand a pattern that matches a few keys among many: wall, CPU and peak memory above the imported client."""
    import s3fs  # noqa: F401

    from wds_async.storage.listing.expand import expand_listed

    _reset_peak()
    base, cpu, began = _memory("VmRSS"), time.process_time(), time.perf_counter()
    found = expand_listed(job["url"])
    reading = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "found": len(found)}
    return {"contender": job["contender"], **reading, "peak_bytes": _memory("VmHWM") - base}


MEASURES = {"first_sample": first_samples, "signing": signing, "listing": listing, "reading": measure}


def main() -> None:
    """Read the job, print the reading."""
    warnings.simplefilter("ignore")
    job = json.load(sys.stdin)
    reading = MEASURES[job.get("measure", "reading")](job)
    print(json.dumps(reading))


if __name__ == "__main__":
    main()
