"""Services on eight nodes, and one store behind a link that they share.

The nodes are network namespaces of this machine (Linux, as root); what the store sends to all of them together is
limited, what they send each other is not. On each node a loader reads by the node's service; the floor is the same
loaders that read the store directly.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.bench import ROOT, Bench, scenario
from benchmarks.corpus import Corpus, image_like
from tests.servers import Origin
from tests.servers.nodes import Nodes
from tests.servers.process import ServerMissing, stop
from tests.service.serving import Process

__all__ = ["main"]

NODES, PORT, RATE, SHARD_BYTES = 8, 51080, "300mbit", 4_000_000

_READER = """
import json, sys, time
asked = json.loads(sys.stdin.readline())
import wds_async as wds
dataset = wds.WebDataset(asked["urls"], shardshuffle="epoch", seed=3)
print("ready", flush=True)
while sys.stdin.readline():
    began, samples, size = time.perf_counter(), 0, 0
    for sample in dataset:
        samples, size = samples + 1, size + len(sample["jpg"])
    print(json.dumps({"samples": samples, "bytes": size, "wall_s": time.perf_counter() - began}), flush=True)
"""


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One epoch of all loaders: seconds until the last one was through, their samples, and the store's bytes."""

    wall_s: float
    samples: int
    store_bytes: int


class _Loaders:
    """A loader on each of ``nodes``, which waits for its next epoch; use it as a context manager. ``by``: the sockets
    of the services to read by; none: directly. ``share``: each reads its share of the shards, and not all of them."""

    def __init__(self, store: Origin, nodes: Nodes, urls: list[str], *, share: bool, by: list[Path] | None) -> None:
        self._store, self._processes = store, list[subprocess.Popen[str]]()
        for node in range(len(by or nodes.names)):
            place = {"WDS_RANK": str(node), "WDS_WORLD_SIZE": str(len(nodes.names))} if share else {}
            service = {"AIS_ENDPOINT": f"unix:{by[node]}"} if by else {}
            self._processes.append(
                subprocess.Popen(
                    [*nodes.inside(node), sys.executable, "-c", _READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    text=True, cwd=ROOT, env={**os.environ, **place, **service},
                )
            )  # fmt: skip
            self._say(self._processes[-1], json.dumps({"urls": urls}))

    def __enter__(self) -> _Loaders:
        for process in self._processes:
            self._heard(process)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            stop(process)

    def epoch(self, then: Callable[[], None] | None = None) -> _Epoch:
        """Have all of them read an epoch at once. ``then`` is called meanwhile."""
        self._store.forget()
        began = time.perf_counter()
        for process in self._processes:
            self._say(process, "go")
        if then is not None:
            then()
        results = [json.loads(self._heard(process)) for process in self._processes]
        wall_s = time.perf_counter() - began
        return _Epoch(wall_s, sum(one["samples"] for one in results), sum(one.body_bytes for one in self._store.sent))

    @staticmethod
    def _say(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    @staticmethod
    def _heard(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise click.ClickException("a loader ended: see its error above")
        return line


@contextlib.contextmanager
def _services(nodes: Nodes, store: Origin, place: Path, cache_bytes: int) -> Iterator[list[Process]]:
    """A service on each node, with an empty cache of so many bytes."""
    place.mkdir()
    (place / "members").write_text("".join(f"{address}:{PORT}\n" for address in nodes.addresses))
    with contextlib.ExitStack() as stack:
        started = []
        for node, address in enumerate(nodes.addresses):
            own = place / str(node)
            started.append(
                Process(
                    own,
                    before=nodes.inside(node),
                    host=address,
                    port=PORT,
                    socket=own / "socket",
                    folder=own / "cache",
                    cache_size=str(cache_bytes),
                    allow=(store.base,),
                    buckets={"b": f"{store.base}/"},
                    private=True,
                    peers=(str(place / "members"),),
                    peer_timeout_s=3,  # as many services as this on two cores
                    grace_s=1,
                )
            )
            stack.callback(started[-1].__exit__)
            started[-1].launch()
        for service in started:
            service.listening()
        yield started


def _rows(bench: Bench, nodes: Nodes, store: Origin, corpus: Corpus) -> Iterator[tuple[str, _Epoch]]:
    """Yield each case's name with its epoch."""
    direct, cached = [store.url(name) for name in corpus.names], [f"ais://b/{name}" for name in corpus.names]

    def sockets(case: str, count: int = NODES) -> list[Path]:
        return [bench.root / case / str(node) / "socket" for node in range(count)]

    for name, share in (("a share each", True), ("all of it", False)):
        with _Loaders(store, nodes, direct, share=share, by=None) as loaders:
            yield f"{name}, directly", loaders.epoch()
        case = "share" if share else "all"
        with (
            _services(nodes, store, bench.root / case, 4 * corpus.size_bytes),
            _Loaders(store, nodes, cached, share=share, by=sockets(case)) as loaders,
        ):
            yield f"{name}, cold", loaders.epoch()
            yield f"{name}, again", loaders.epoch()
    with (
        _services(nodes, store, bench.root / "half", corpus.size_bytes // 2 // NODES),
        _Loaders(store, nodes, cached, share=True, by=sockets("half")) as loaders,
    ):
        loaders.epoch()
        yield "a share each, again, with room for half", loaders.epoch()
    with (
        _services(nodes, store, bench.root / "killed", 4 * corpus.size_bytes) as services,
        _Loaders(store, nodes, cached, share=False, by=sockets("killed", NODES - 1)) as loaders,
    ):

        def kill() -> None:
            third = corpus.size_bytes // 3
            store.wait_until(lambda store: sum(one.body_bytes for one in store.sent) > third)
            services[-1].signal(signal.SIGKILL)

        yield "all of it, cold, and a node is killed", loaders.epoch(kill)


@scenario("distributed.peers", shards=64, repeat=1)
def main(bench: Bench) -> None:
    """Eight services that share what they read from one store: its bytes, and the time of epochs."""
    size = (NODES, SHARD_BYTES // 4) if bench.quick else (max(NODES, bench.shards), SHARD_BYTES)
    corpus = image_like(bench.root, *size)
    files = {f"/{name}": (bench.root / name).read_bytes() for name in corpus.names}
    rows: dict[str, _Epoch] = {}
    try:
        with Nodes(NODES, RATE) as nodes, Origin(files, host=nodes.here) as store:
            for case, epoch in _rows(bench, nodes, store, corpus):
                rows[case] = epoch
                bench.raw.append({"case": case, "wall_s": epoch.wall_s, "samples": epoch.samples,
                                  "store_bytes": epoch.store_bytes, "data_bytes": corpus.size_bytes})  # fmt: skip
    except ServerMissing as exn:
        raise click.ClickException(str(exn)) from exn
    table = Table(title=f"an epoch of {NODES} loaders, {corpus.size_bytes / 1e6:.0f} MB", title_justify="left")
    for title in ("each reads", "wall s", "samples", "from the store, MB", "x the data"):
        table.add_column(title, justify="left" if title == "each reads" else "right")
    for case, row in rows.items():
        stored = row.store_bytes / corpus.size_bytes
        table.add_row(case, f"{row.wall_s:.2f}", f"{row.samples:,}", f"{row.store_bytes / 1e6:.0f}", f"{stored:.3f}")
    bench.console.print(table)
    _judge(bench, rows, corpus)


def _judge(bench: Bench, rows: dict[str, _Epoch], corpus: Corpus) -> None:
    """Add what must be reached."""

    def stored(case: str) -> float:
        return rows[case].store_bytes / corpus.size_bytes

    for name in ("a share each", "all of it"):
        measure, value = f"{name}, cold: bytes from the store, of the data", stored(f"{name}, cold")
        bench.bar(measure, "≤ 1.02", value, value <= 1.02, "{:.3f}")
        times = rows[f"{name}, directly"].wall_s, rows[f"{name}, cold"].wall_s
        bench.ratio_bar(f"{name}, cold: speed by services over direct reading", 0.95, *times)
    missing: Any = (NODES - 1) * corpus.samples - rows["all of it, cold, and a node is killed"].samples
    bench.bar("a node is killed: samples missing at the others", "0", missing, missing == 0, "{}")
    bench.notes.append(
        "The store's bytes hold requests that were late and sent again; services allow themselves 1 % for that."
    )
    note = f"Network namespaces, {RATE} from the store for all of them, {os.cpu_count()} CPUs for everything."
    bench.notes.append(note)
