"""``python -m benchmarks.faults``: what faults cost. Every sample is compared with what was written.

* 5 % of the requests fail at random, in every way of `faultserver.KINDS`: throughput beside the fault-free one, over
  loopback with nothing in the way, and from a server like a store (30 ms to the first byte, 20 MB/s a connection).
  What is read ahead must last as long as a part takes to heal: with the default budget of 128 MiB, and with 512.
* The server is gone for 60 s: the run goes on, with default settings.
* 503 to everything for 15 s: how soon the former pace is back.
* Leaving: how long `close`, the end of the program and Ctrl-C take while the server sends slowly.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import crc32c
from rich.table import Table

from benchmarks.corpus import Corpus, image_like
from benchmarks.harness import ROOT, Bench, command
from benchmarks.http import shard_bytes

__all__ = ["main"]

_PACE_BYTES_S = 5e6
"""Of a connection, where the pace is looked at over time: what 64 of them move is steady."""
_STORE_LIKE = ("latency 0.03", "pace 20e6")


class Served:
    """A `faultserver` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faultserver", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.base = f"http://127.0.0.1:{self._out.readline().strip()}"

    @property
    def _out(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def say(self, *commands: str) -> None:
        """Give commands."""
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{one}\n" for one in commands))
        self._process.stdin.flush()

    def told(self) -> dict[str, int]:
        """How many answers of each kind there were."""
        self.say("told")
        counts: dict[str, int] = json.loads(self._out.readline())
        return counts

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()


@contextlib.contextmanager
def served(folder: Path, *commands: str) -> Iterator[Served]:
    """A server for as long as it is needed."""
    server = Served(folder)
    try:
        server.say(*commands)
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def reading(server: Served, corpus: Corpus, sums: dict[str, int], **job: Any) -> Iterator[subprocess.Popen[str]]:
    """A reader in a process of its own, which has its job."""
    urls = [f"{server.base}/{name}" for name in corpus.names]
    with tempfile.TemporaryFile("w+") as given:
        json.dump({"urls": urls, "sums": sums, **job}, given)
        given.seek(0)
        command = [sys.executable, "-m", "benchmarks.faultreader"]
        process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def outcome(process: subprocess.Popen[str], server: Served) -> dict[str, Any]:
    """What the reader says in the end."""
    out, _ = process.communicate(timeout=1200)
    if process.returncode:
        raise RuntimeError(f"the reader failed (see above); the server did {server.told()}")
    result: dict[str, Any] = json.loads(out)
    return result


def sums_of(path: Path) -> dict[str, int]:
    """From each sample's key to the checksum of its fields, one behind the other."""
    sums: dict[str, int] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            key = member.name.partition(".")[0]
            sums[key] = crc32c.crc32c(file.read(), sums.get(key, 0))
    return sums


def pace(result: dict[str, Any], start_s: float, stop_s: float) -> float:
    """Bytes a second that samples brought between two instants."""
    inside = [(at, count) for at, count in result["ticks"] if start_s <= at <= stop_s]
    if len(inside) < 2:
        return 0.0
    (first_at, first), (last_at, last) = inside[0], inside[-1]
    return (last - first) / (last_at - first_at)


def at_random(bench: Bench, corpus: Corpus, sums: dict[str, int], where: str, budget: str, *commands: str) -> None:
    """5 % of the requests fail."""
    table = Table(title=f"{where}: {corpus.size_bytes / 1e9:.1f} GB, 5 % of the requests fail", title_justify="left")
    for title in ("requests that fail", "MB/s", "CPU s/GB", "retries", "hedges", "came twice", "wrong samples"):
        table.add_column(title, justify="right")
    taken: dict[float, list[float]] = {0.0: [], 0.05: []}
    wrong = missing = 0
    for turn in range(bench.repeat):
        for share, paces in taken.items():
            with served(bench.root, f"seed {turn}", f"faults {share}", *commands) as server:
                with reading(server, corpus, sums, options={"transfer": {"budget_bytes": budget}}) as process:
                    result = outcome(process, server)
                counts = server.told()
            stats = result["stats"]
            paces.append(result["bytes"] / result["wall_s"])
            wrong += result["wrong"]
            missing += corpus.samples - result["samples"]
            twice = max(0.0, stats["wire_bytes"] - stats["bytes"]) / max(1.0, stats["bytes"])
            failed = 1 - counts["good"] / counts["requests"]
            table.add_row(
                f"{failed:.1%}",
                f"{paces[-1] / 1e6:.0f}",
                f"{result['cpu_s'] / (result['bytes'] / 1e9):.2f}",
                f"{stats['retries']:.0f}",
                f"{stats['hedges']:.0f}",
                f"{twice:.2%}",
                str(result["wrong"]),
            )
            bench.raw.append(
                {"case": f"{where}, faults {share}", "turn": turn, "server": counts, **result, "ticks": []}
            )
    bench.console.print(table)
    ratio = statistics.median(taken[0.05]) / statistics.median(taken[0.0])
    bench.bar(
        f"5 % faults, {where}: throughput over the fault-free one", "≥ 80 %", ratio * 100, ratio >= 0.8, "{:.0f} %"
    )
    bench.bar(
        f"5 % faults, {where}: wrong or missing samples", "0", wrong + abs(missing), wrong == missing == 0, "{:.0f}"
    )


def outage(bench: Bench, corpus: Corpus, sums: dict[str, int]) -> None:
    """The server is gone for a minute."""
    gone_s = 5 if bench.quick else 60
    with (
        served(bench.root, f"pace {_PACE_BYTES_S}") as server,
        reading(server, corpus, sums, seconds=gone_s + 25) as process,
    ):
        time.sleep(6)
        server.say("down")
        time.sleep(gone_s)
        server.say("up")
        result = outcome(process, server)
    before, after = pace(result, 2, 6), pace(result, gone_s + 14, gone_s + 25)
    bench.raw.append({"case": "outage", **result})
    bench.bar(f"outage of {gone_s} s: wrong samples", "0", result["wrong"], result["wrong"] == 0, "{:.0f}")
    share = 100 * after / before if before else 0.0
    bench.bar(f"outage of {gone_s} s: the pace 8 s later", "≥ 95 % of the former", share, share >= 95, "{:.0f} %")


def storm(bench: Bench, corpus: Corpus, sums: dict[str, int]) -> None:
    """Every answer is a 503 for a while."""
    storm_s = 5 if bench.quick else 15
    with (
        served(bench.root, f"pace {_PACE_BYTES_S}") as server,
        reading(server, corpus, sums, seconds=storm_s + 32) as process,
    ):
        time.sleep(8)
        server.say("storm")
        time.sleep(storm_s)
        server.say("calm")
        result = outcome(process, server)
    # The reader's clock began when it had been imported, some tenths of a second after ours: seen from the storm's end.
    ended = max((at for at, count in result["ticks"] if count == _stuck_at(result)), default=8.0 + storm_s)
    before, after = pace(result, 2, 7), pace(result, ended + 10, ended + 16)
    share = 100 * after / before if before else 0.0
    bench.raw.append({"case": "storm", **result})
    bench.bar(f"503 for {storm_s} s: the pace 10 s later", "≥ 95 % of the former", share, share >= 95, "{:.0f} %")
    bench.bar(f"503 for {storm_s} s: wrong samples", "0", result["wrong"], result["wrong"] == 0, "{:.0f}")


def _stuck_at(result: dict[str, Any]) -> int:
    """How much had been read when the longest pause began."""
    ticks = result["ticks"]
    longest = max(range(1, len(ticks)), key=lambda n: ticks[n][0] - ticks[n - 1][0])
    return int(ticks[longest][1])


_LEAVING = """
import sys, time
import wds_async as wds
way, url = sys.argv[1:]
dataset = wds.WebDataset(url, shardshuffle=False)
iterator = iter(dataset)
next(iterator)
print(time.time(), flush=True)
if way == "close":
    dataset.close()
elif way == "break":
    del iterator
elif way == "interrupt":
    try:
        for sample in iterator:
            pass
    except KeyboardInterrupt:
        pass
"""


def leaving(bench: Bench, corpus: Corpus) -> None:
    """Every way out, while the server sends slowly in the middle of a shard."""
    slowest = 0.0
    for way in ("close", "break", "exit", "interrupt"):
        with served(bench.root, "pace 200000") as server:
            url = f"{server.base}/{corpus.names[0]}"
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", _LEAVING, way, url], stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            assert process.stdout is not None
            began = float(process.stdout.readline())
            if way == "interrupt":
                time.sleep(0.5)
                began = time.time()
                os.kill(process.pid, signal.SIGINT)
            process.wait(timeout=60)
            took_s = time.time() - began
            process.stdout.close()
            bench.raw.append({"case": "leaving", "way": way, "s": took_s, "status": process.returncode})
            slowest = max(slowest, took_s if process.returncode == 0 else 99.0)
    bench.bar("leaving by close, break, exit, Ctrl-C: the slowest, to the end of the process", "≤ 2 s", slowest,
              slowest <= 2, "{:.2f} s")  # fmt: skip


@command("faults", shards=152)
def main(bench: Bench) -> None:
    """10 GB with 5 % of the requests failing; an outage, a storm, and leaving."""
    corpus = image_like(bench.root, bench.shards, shard_bytes(bench), distinct=False)
    sums = sums_of(bench.root / corpus.names[0])
    for budget in ("512M", "128M"):
        at_random(bench, corpus, sums, f"store-like, WDS_BUDGET={budget}", budget, *_STORE_LIKE)
        at_random(bench, corpus, sums, f"loopback, WDS_BUDGET={budget}", budget)
    outage(bench, corpus, sums)
    storm(bench, corpus, sums)
    leaving(bench, corpus)


if __name__ == "__main__":
    main()
