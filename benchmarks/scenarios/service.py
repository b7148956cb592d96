"""The loader service beside nginx and beside direct reading."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import cachepolicy
from benchmarks.bench import ROOT, Bench, Row, Source, scenario
from benchmarks.corpus import Corpus, image_like
from benchmarks.link import link
from benchmarks.processes import cpu_s, memory_bytes
from benchmarks.serveproc import ServeProcess
from tests.servers import Nginx

__all__ = ["main"]

_CONNECTIONS = 8
_SECONDS = 4.0
_IDLE, _SLOW = 1000, 200
_RANGE_BYTES = 65536
_WRK = """
math.randomseed(1)
request = function()
  local start = math.random(0, {blocks} - 1) * {size}
  wrk.headers["Range"] = "bytes=" .. start .. "-" .. (start + {size} - 1)
  local path = string.gsub("{path}", "NUMBER", string.format("%06d", math.random(0, {files} - 1)))
  return wrk.format("GET", path)
end
done = function(summary, latency, requests)
  local errors = summary.errors.connect + summary.errors.read + summary.errors.status + summary.errors.timeout
  io.write(string.format('\\n{{"requests": %d, "us": %d, "bytes": %d, "p50": %d, "p99": %d, "errors": %d}}\\n',
    summary.requests, summary.duration, summary.bytes, latency:percentile(50), latency:percentile(99), errors))
end
"""


@dataclass(frozen=True, slots=True)
class Side:
    """One of two servers of the same files."""

    label: str
    port: int
    pid: int
    path: Callable[[str], str]


@scenario("service", repeat=3)
def main(bench: Bench) -> None:
    """Warm and cold reads through `wds-async serve`, its hit ratio, and what many clients cost it (--only warm,
    cold, sixteen, epochs)."""
    for name, part in (("warm", _served_warm), ("cold", _cold), ("sixteen", _sixteen), ("epochs", _epochs)):
        if not bench.only or name in bench.only:
            part(bench)


def _served_warm(bench: Bench) -> None:
    """What the service has already: whole shards, small ranges, and both among many clients."""
    corpus = image_like(bench.root, bench.shards, 8_000_000 if bench.quick else 64_000_000)
    with bench.nginx() as origin:
        with _served(bench, origin) as service:
            _get(service.port, [[_path(name) for name in corpus.names]])  # what is warm from now on
            sides = (
                Side("nginx", origin.port, _pid(origin), lambda name: f"/{name}"),
                Side("service", service.port, service.pid, _path),
            )
            _warm(bench, corpus, sides)
            _ranges(bench, corpus, sides)
        _crowd(bench, corpus, origin)


def _rotated(names: list[str]) -> list[list[str]]:
    """The names for each connection, which begins elsewhere."""
    return [names[n:] + names[:n] for n in range(_CONNECTIONS)]


def _path(name: str) -> str:
    return f"/v1/objects/bench/{name}?provider=ais"


def _pid(server: Nginx) -> int:
    assert server._process is not None
    return server._process.pid


@contextlib.contextmanager
def _served(bench: Bench, origin: Nginx, *options: str) -> Iterator[ServeProcess]:
    folder = Path(tempfile.mkdtemp(dir=bench.root))
    try:
        with ServeProcess(folder, origin.base, *options) as service:
            yield service
    finally:
        shutil.rmtree(folder)


def _get(port: int, paths: list[list[str]], seconds: float | None = None) -> dict[str, Any]:
    """What `benchmarks.getter` did, a connection for each of ``paths``."""
    job = {"host": "127.0.0.1", "port": port, "paths": paths, **({"seconds": seconds} if seconds else {})}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.getter"],
        input=json.dumps(job) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    if result["failures"]:
        raise click.ClickException(f"the client failed: {result['failures'][0]}")
    return result


def _warm(bench: Bench, corpus: Corpus, sides: tuple[Side, Side]) -> None:
    """GETs of whole shards over a few connections, each side in turn."""
    rates: dict[str, list[float]] = {side.label: [] for side in sides}
    costs: dict[str, list[float]] = {side.label: [] for side in sides}
    seconds = 1.0 if bench.quick else _SECONDS
    for turn in range(bench.repeat):
        for side in sides:
            names = [side.path(name) for name in corpus.names]
            before = cpu_s(side.pid)
            got = _get(side.port, _rotated(names), seconds)
            spent = cpu_s(side.pid) - before
            rates[side.label].append(got["bytes"] / 1e6 / got["wall_s"])
            costs[side.label].append(spent / (got["bytes"] / 1e9))
            bench.raw.append({"case": "warm", "turn": turn, "contender": side.label, "server_cpu_s": spent, **got})
    rate = {label: statistics.median(values) for label, values in rates.items()}
    cost = {label: statistics.median(values) for label, values in costs.items()}
    bench.notes.append(f"warm GETs, {_CONNECTIONS} connections: {_shown(rate, 'MB/s')}; {_shown(cost, 'CPU s/GB', 3)}")
    bench.ratio_bar("warm GETs of 64 MB shards: bytes/s, service over nginx", 0.7, rate["service"], rate["nginx"])
    ratio = cost["service"] / cost["nginx"] if cost["nginx"] else None
    bench.bar("warm GETs: CPU s/GB, service over nginx", "≤ 2 x", ratio, ratio is not None and ratio <= 2, "{:.2f} x")


def _ranges(bench: Bench, corpus: Corpus, sides: tuple[Side, Side]) -> None:
    """Ranges of 64 KB at random places, by wrk."""
    program = shutil.which("wrk")
    if program is None:
        bench.notes.append("wrk is not installed (apt-get install wrk): small ranges were not measured")
        return
    found: dict[str, list[dict[str, Any]]] = {side.label: [] for side in sides}
    blocks = corpus.size_bytes // len(corpus.names) // _RANGE_BYTES
    for _ in range(bench.repeat):
        for side in sides:
            script = bench.root / "ranges.lua"
            path = side.path("images-NUMBER.tar")
            script.write_text(_WRK.format(blocks=blocks, size=_RANGE_BYTES, path=path, files=len(corpus.names)))
            seconds = "1" if bench.quick else f"{_SECONDS:g}"
            call = [program, "-t1", "-c16", f"-d{seconds}s", "-s", str(script), f"http://127.0.0.1:{side.port}"]
            said = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True).stdout
            one = json.loads(said.strip().splitlines()[-1])
            if one["errors"]:
                raise click.ClickException(f"wrk met {one['errors']} errors at {side.label}")
            found[side.label].append(one)
            bench.raw.append({"case": "ranges", "contender": side.label, **one})
    rate = {k: statistics.median(r["requests"] / (r["us"] / 1e6) for r in v) for k, v in found.items()}
    tail = {k: statistics.median(r["p99"] / r["p50"] for r in v) for k, v in found.items()}
    bench.notes.append(f"warm ranges of 64 KB, 16 connections: {_shown(rate, 'requests/s')}; p99/p50 {_shown(tail)}")
    bench.ratio_bar("warm ranges of 64 KB: requests/s, service over nginx", 0.15, rate["service"], rate["nginx"])
    bench.bar("warm ranges of 64 KB: p99 over median", "≤ 10 x", tail["service"], tail["service"] <= 10, "{:.1f} x")


def _crowd(bench: Bench, corpus: Corpus, origin: Nginx) -> None:
    """What a thousand idle and two hundred slow connections cost the service, and the others."""
    names = [_path(name) for name in corpus.names]
    seconds = 1.0 if bench.quick else _SECONDS
    with _served(bench, origin) as service:
        _get(service.port, [names])
        alone, among = [], []
        for _ in range(bench.repeat):
            alone.append(_rate(_get(service.port, _rotated(names), seconds)))
            with _held(service.port, names):
                among.append(_rate(_get(service.port, _rotated(names), seconds)))
        memory = memory_bytes(service.pid, "VmHWM")
    share = statistics.median(among) / statistics.median(alone)
    label = f"{_IDLE:,} idle and {_SLOW} slow connections"
    bench.bar(f"{label}: the service's peak memory", "≤ 300 MB", memory / 1e6, memory <= 300e6, "{:.0f} MB")
    bench.bar(f"{label}: the others' throughput", "≥ 90 %", share * 100, share >= 0.9, "{:.0f} %")


def _rate(got: dict[str, Any]) -> float:
    return float(got["bytes"]) / got["wall_s"]


@contextlib.contextmanager
def _held(port: int, names: list[str]) -> Iterator[None]:
    job = {"host": "127.0.0.1", "port": port, "paths": [], "idle": _IDLE, "slow": _SLOW}
    job |= {"large": names, "tiny": "/healthz"}
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.getter"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as crowd:
        assert crowd.stdin is not None
        assert crowd.stdout is not None
        crowd.stdin.write(json.dumps(job) + "\n")
        crowd.stdin.flush()
        assert json.loads(crowd.stdout.readline())["held"] == _IDLE + _SLOW
        yield
        crowd.stdin.close()


def _cold(bench: Bench) -> None:
    """Our own loader from a store-like server: directly, and through a service that has nothing yet. On loopback the
    CPU is the bound, and every byte crosses it twice; behind a link it is the link, as where a service is of use.
    Four times as many shards as elsewhere on loopback: a second's start is a quarter of a read that takes four."""
    corpus = image_like(bench.root, bench.shards * 4, distinct=False, name="cold")
    with bench.serve(corpus, store_like=True) as source:
        _cold_over_direct(bench, corpus, source, "cold")
    if os.geteuid() != 0 or not shutil.which("tc"):
        bench.notes.append("not root, or no iproute2: cold reads over a link were not measured")
        return
    corpus = image_like(bench.root, bench.shards, distinct=False, name="cold-link")
    with link("1gbit") as (namespace, address):
        inside = ("ip", "netns", "exec", namespace)
        with bench.serve(corpus, store_like=True, command=inside, host=address) as source:
            _cold_over_direct(bench, corpus, source, "cold, link of 1 Gbit/s")


def _cold_over_direct(bench: Bench, corpus: Corpus, source: Source, case: str) -> None:
    assert source.server is not None
    for _ in range(bench.repeat):
        bench.compare(case, source, rows=[Row("wds_async", "direct")], repeat=1)
        with _served(bench, source.server) as service:
            job = {"urls": [f"ais://bench/{name}" for name in corpus.names]}
            through = Row("wds_async", "through the service", job, {"AIS_ENDPOINT": service.base})
            bench.compare(case, source, rows=[through], repeat=1)
    rate = {label: reading.mb_s for label, reading in bench.readings[case].items()}
    if len(rate) == 2:
        share = rate["through the service"] / rate["direct"]
        bench.bar(f"{case}: through the service over a direct read", "≥ 90 %", share * 100, share >= 0.9, "{:.0f} %")


def _sixteen(bench: Bench) -> None:
    """Sixteen clients that want the same shards at once, each in an order of its own."""
    corpus = image_like(bench.root, bench.shards, 8_000_000 if bench.quick else 16_000_000, name="shared")
    rng = random.Random(0)
    paths = [[_path(name) for name in rng.sample(corpus.names, len(corpus.names))] for _ in range(16)]
    with bench.nginx(access_log=True) as origin, _served(bench, origin) as service:
        got = _get(service.port, paths)
        assert got["bytes"] == 16 * corpus.size_bytes
        sent = sum(entry["body_bytes"] for entry in origin.log())
    ratio = sent / corpus.size_bytes
    bench.bar("16 clients, the same shards, cold: origin bytes over the data", "≤ 1.02", ratio, ratio <= 1.02, "{:.4f}")


def _epochs(bench: Bench) -> None:
    """Four epochs, shuffled by shard, over twice what the cache holds."""
    count = 16 if bench.quick else 64
    corpus = image_like(bench.root, count, 8_000_000, name="epoch")
    rng = random.Random(0)
    ratios = []
    with (
        bench.nginx() as origin,
        _served(bench, origin, "--cache-size", str(corpus.size_bytes // 2), "--freshness", "inf") as service,
    ):
        for _ in range(4):
            before = service.stats()["counters"]
            _get(service.port, [[_path(name) for name in rng.sample(corpus.names, count)]])
            after = service.stats()["counters"]
            hit, missed = (after[name] - before[name] for name in ("hit_bytes", "miss_bytes"))
            ratios.append(hit / (hit + missed))
    ratio = statistics.mean(ratios[1:])
    bench.notes.append(f"hit ratio by epoch: {', '.join(f'{r:.2f}' for r in ratios)}")
    bench.bar("data twice the cache, 4 epochs shuffled: hit ratio of epochs 2 to 4", "≥ 0.45", ratio, ratio >= 0.45)


def _shown(values: dict[str, float], unit: str = "", digits: int = 0) -> str:
    digits = digits or (0 if max(values.values()) > 100 else 1)
    return ", ".join(f"{label} {value:,.{digits}f}" for label, value in values.items()) + (f" {unit}" if unit else "")


@scenario("cachepolicy", repeat=1)
def policy(bench: Bench) -> None:
    """What stays in the service's cache, beside LRU and random eviction, simulated."""
    cachepolicy.main()
