"""What faults cost. Every sample is compared with what was written.

* 5 % of the requests fail at random, from a server like a store (50 ms to the first byte, 50 MB/s a connection), with
  the default budget: one kind of fault at a time, then all of `faultserver.KINDS` together. Each throughput is divided
  by that of fault-free runs just before and after it. A turn is a seed: ``--repeat``; ``--shards`` is the amount of
  data; ``--only KIND`` (a key of `CASES`) runs these alone.
* The same with all kinds together, over loopback with nothing in the way, and with 512 MiB.
* 60 MB in 4 shards, several epochs, while 5 % of the requests stay without an answer: seconds an epoch.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import crc32c
from rich.table import Table

from benchmarks.bench import ROOT, Bench, Source, scenario
from benchmarks.corpus import Corpus, image_like
from benchmarks.faultserver import KINDS
from benchmarks.peer import load_peer

__all__ = ["CASES", "main"]

_PACE_BYTES_S = 5e6
"""Of a connection, where the pace is looked at over time: what 64 of them move is steady."""
_STORE_LIKE = ("latency 0.05", "pace 50e6")
_SHARE = 0.05
_BAR = 0.8
_BETWEEN_CLEAN = 2
"""Runs with faults between two fault-free ones, which both are compared with: what else the machine does changes."""
_EPOCHS = 5
_PATIENCE_S = 30.0
"""With peers that wait without end."""

CASES: dict[str, tuple[str, ...]] = {
    "no answer": ("no answer",),
    "stall": ("stall",),
    "trickle": ("trickle",),
    "reset": ("reset before the head", "reset in the body"),
    "429": ("429",),
    "503 with Retry-After": ("503 with Retry-After",),
    "range ignored": ("range ignored",),
    "all kinds": KINDS,
}
"""Kinds of faults, apart and together."""


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


def run(
    bench: Bench, corpus: Corpus, sums: dict[str, int], turn: int, faults: tuple[str, ...], *commands: str, **job: Any
) -> dict[str, Any]:
    """What a reader says of one run with ``faults`` (none: fault-free), with the server's counts."""
    share = [f"kinds {', '.join(faults)}", f"faults {_SHARE}"] if faults else []
    with served(bench.root, f"seed {turn}", *share, *commands) as server:
        with reading(server, corpus, sums, **job) as process:
            result = outcome(process, server)
        result["server"] = server.told()
    stats = result["stats"]
    result["mb_s"] = result["bytes"] / result["wall_s"] / 1e6
    result["twice"] = max(0.0, stats["wire_bytes"] - stats["bytes"]) / max(1.0, stats["bytes"])
    result["wrong"] += abs(corpus.samples * job.get("epochs", 1) - result["samples"])
    return result


def in_turn(
    bench: Bench, corpus: Corpus, sums: dict[str, int], cases: dict[str, tuple[str, ...]], *commands: str, **job: Any
) -> dict[str, list[dict[str, Any]]]:
    """The runs of each case, a seed each: fault-free ones are run between them, and their ``ratio`` is that to the two
    around them. A line for each as it ends; the fault-free ones are those of the case ``""``."""
    taken: dict[str, list[dict[str, Any]]] = {"": [], **{case: [] for case in cases}}
    for turn in range(bench.repeat):
        clean = run(bench, corpus, sums, turn, (), *commands, **job)
        taken[""].append(clean)
        names = list(cases)
        for first in range(0, len(names), _BETWEEN_CLEAN):
            some = [(name, run(bench, corpus, sums, turn, cases[name], *commands, **job))
                    for name in names[first : first + _BETWEEN_CLEAN]]  # fmt: skip
            before, clean = clean, run(bench, corpus, sums, turn, (), *commands, **job)
            taken[""].append(clean)
            for name, result in some:
                result["ratio"] = 2 * result["mb_s"] / (before["mb_s"] + clean["mb_s"])
                taken[name].append(result)
                bench.console.print(f"seed {turn}, {name}: {result['mb_s']:.0f} MB/s, {result['ratio']:.0%}")
    return taken


def at_random(
    bench: Bench, corpus: Corpus, sums: dict[str, int], where: str, cases: dict[str, tuple[str, ...]], *commands: str,
    **job: Any,
) -> None:  # fmt: skip
    """5 % of the requests fail, in the ways of each case: a table, and a bar for each."""
    taken = in_turn(bench, corpus, sums, cases, *commands, **job)
    title = f"{where}: {corpus.size_bytes / 1e9:.1f} GB, {_SHARE:.0%} of the requests fail, medians of {bench.repeat}"
    table = Table(title=title, title_justify="left")
    table.add_column("fault")
    for column in ("MB/s", "of fault-free", "by seed", "CPU s/GB", "retries", "hedges", "came twice", "wrong"):
        table.add_column(column, justify="right")
    for case, runs in taken.items():
        ratios = [result.get("ratio", 1.0) for result in runs]
        table.add_row(
            case or "none",
            f"{_median(runs, lambda r: r['mb_s']):.0f}",
            f"{statistics.median(ratios):.0%}" if case else "",
            " ".join(f"{100 * ratio:.0f}" for ratio in ratios) if case else "",
            f"{_median(runs, lambda r: r['cpu_s'] / (r['bytes'] / 1e9)):.2f}",
            f"{_median(runs, lambda r: r['stats']['retries']):.0f}",
            f"{_median(runs, lambda r: r['stats']['hedges']):.0f}",
            f"{_median(runs, lambda r: r['twice']):.2%}",
            str(sum(result["wrong"] for result in runs)),
        )
        bench.raw += [{"case": f"{where}, {case or 'fault-free'}", **result, "ticks": []} for result in runs]
        if case:
            name, ratio = f"5 % faults, {where}, {case}", statistics.median(ratios)
            bench.bar(f"{name}: of the fault-free throughput", f"≥ {_BAR:.0%}", ratio * 100, ratio >= _BAR, "{:.0f} %")
    bench.console.print(table)
    wrong = sum(result["wrong"] for runs in taken.values() for result in runs)
    bench.bar(f"5 % faults, {where}: wrong or missing samples", "0", wrong, wrong == 0, "{:.0f}")


def _median(runs: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(value(result) for result in runs)


def short_epochs(bench: Bench) -> None:
    """A small set read several times by one process, while 5 % of the requests stay without an answer."""
    corpus = image_like(bench.root, 4, 15_000_000, distinct=False, name="small")
    sums = sums_of(bench.root / corpus.names[0])
    slowest: dict[str, float] = {}
    for case, faults in (("fault-free", ()), ("no answer", CASES["no answer"])):
        runs = [run(bench, corpus, sums, turn, faults, epochs=_EPOCHS) for turn in range(bench.repeat)]
        slowest[case] = max(seconds for result in runs for seconds in result["epochs_s"])
        bench.raw += [{"case": f"short epochs, {case}", **result, "ticks": []} for result in runs]
    bench.bar(f"60 MB, 5 % without an answer: the slowest of {_EPOCHS * bench.repeat} epochs "
              f"(fault-free: {slowest['fault-free']:.1f} s)", "≤ 5 s", slowest["no answer"],
              slowest["no answer"] <= 5, "{:.1f} s")  # fmt: skip


def interrupted(
    bench: Bench, corpus: Corpus, sums: dict[str, int], begin: str, end: str, *, calm_s: int, fault_s: int, after_s: int
) -> dict[str, Any]:
    """Return what a reader did whose server got the command ``begin`` after ``calm_s`` and ``end`` after ``fault_s``
    more; it has read for ``fault_s + after_s`` in all."""
    with (
        served(bench.root, f"pace {_PACE_BYTES_S}") as server,
        reading(server, corpus, sums, seconds=fault_s + after_s) as process,
    ):
        time.sleep(calm_s)
        server.say(begin)
        time.sleep(fault_s)
        server.say(end)
        result = outcome(process, server)
    bench.raw.append({"case": begin, **result})
    return result


def _recovered(bench: Bench, name: str, result: dict[str, Any], before: float, after: float, later: str) -> None:
    share = 100 * after / before if before else 0.0
    bench.bar(f"{name}: wrong samples", "0", result["wrong"], result["wrong"] == 0, "{:.0f}")
    bench.bar(f"{name}: the pace {later} later", "≥ 95 % of the former", share, share >= 95, "{:.0f} %")


def outage(bench: Bench, corpus: Corpus, sums: dict[str, int]) -> None:
    """The server is gone for a minute."""
    gone_s = 5 if bench.quick else 60
    result = interrupted(bench, corpus, sums, "down", "up", calm_s=6, fault_s=gone_s, after_s=25)
    after = pace(result, gone_s + 14, gone_s + 25)
    _recovered(bench, f"outage of {gone_s} s", result, pace(result, 2, 6), after, "8 s")


def storm(bench: Bench, corpus: Corpus, sums: dict[str, int]) -> None:
    """Every answer is a 503 for a while."""
    storm_s = 5 if bench.quick else 15
    result = interrupted(bench, corpus, sums, "storm", "calm", calm_s=8, fault_s=storm_s, after_s=32)
    # The reader's clock began when it had been imported, some tenths of a second after ours: seen from the storm's end.
    ended = max((at for at, count in result["ticks"] if count == _stuck_at(result)), default=8.0 + storm_s)
    _recovered(bench, f"503 for {storm_s} s", result, pace(result, 2, 7), pace(result, ended + 10, ended + 16), "10 s")


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


@scenario("faults", shards=152, repeat=5)
def main(bench: Bench) -> None:
    """10 GB with 5 % of the requests failing, kind by kind and 5 times each; an outage, a storm, and leaving."""
    corpus = image_like(bench.root, bench.shards, bench.shard_bytes, distinct=False)
    sums = sums_of(bench.root / corpus.names[0])
    cases = {name: kinds for name, kinds in CASES.items() if not bench.only or name in bench.only}
    at_random(bench, corpus, sums, "store-like", cases, *_STORE_LIKE)
    if bench.only:
        return
    together, large = {"all kinds": KINDS}, {"options": {"transfer": {"budget_bytes": "512M"}}}
    at_random(bench, corpus, sums, "store-like, WDS_BUDGET=512M", together, *_STORE_LIKE, **large)
    at_random(bench, corpus, sums, "loopback, WDS_BUDGET=512M", together, **large)
    at_random(bench, corpus, sums, "loopback", together)
    short_epochs(bench)
    outage(bench, corpus, sums)
    storm(bench, corpus, sums)
    leaving(bench, corpus)


@scenario("faults-peers", shards=192, repeat=3)
def beside(bench: Bench) -> None:
    """No, 1 % and 5 % of the requests fail in all ways, from a store-like server: which peers get through, how fast.

    Shards have 4 MB, so that the eighth of them that others read, once, is 24 requests at least. Who fails at 1 % is
    not asked again at 5 %.
    """
    corpus = bench.make(image_like, bench.shards, 4_000_000, distinct=False)
    rows = [row for row in bench.rows(floors=(), part=1 / 8) if load_peer(row.peer).format == "tar"]
    kinds, rates = f"kinds {', '.join(KINDS)}", {}
    for share in (0.0, 0.01, 0.05):
        with served(bench.root, *_STORE_LIKE, "seed 1", kinds, f"faults {share}") as server:
            urls = [f"{server.base}/{name}" for name in corpus.names]
            source = Source(corpus, "http", urls, urls, server.base, {}, None)
            # Silence is one of the faults, and not every peer has a time limit.
            case = f"{share:.0%} of the requests fail"
            bench.compare(case, source, rows=rows, repeat=1, limit_s=_PATIENCE_S)
            again = [row for row in rows if row.name == "wds_async"]
            if bench.repeat > 1:
                bench.compare(case, source, rows=again, repeat=bench.repeat - 1)
            rows = [row for row in rows if row.name not in bench.absent.get(case, {})]
        if "wds_async" in bench.readings[case]:
            rates[share] = bench.readings[case]["wds_async"].mb_s
    bench.failed = False  # that others fail is what is measured
    if len(rates) == 3:
        part = rates[0.05] / rates[0.0]
        bench.bar(
            "5 % of the requests fail: of the fault-free throughput", "≥ 80 %", 100 * part, part >= _BAR, "{:.0f} %"
        )
