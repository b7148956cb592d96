"""One run of one scenario: its shards and servers, peers in turn in fresh processes, medians, bars, tables and JSON."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import datapath, flame
from benchmarks.corpus import SHARD_BYTES, Corpus
from benchmarks.environments import absence, interpreter
from benchmarks.peer import load_peer, peer_names
from benchmarks.processes import MemorySampler, kill_tree
from tests.servers import Nginx, NginxMissing, Tls

__all__ = ["ROOT", "Bench", "Reading", "Row", "Scenario", "Source", "load_scenarios", "measured", "scenario"]

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
_MEMORY_SLACK_BYTES = 64_000_000
_TIME_LIMIT_S = 1200.0
_ENOUGH_S = 12.0
"""A peer, other than this library and the floors, that has taken so long in one case, starting included, has no more
turns there."""
_END_S = 20.0
_LOG_S = 0.05
"""Until nginx has written the lines of requests whose connections have just been closed."""


class PeerFailed(Exception):
    """A peer ended without a reading, or with a wrong number of samples."""


@dataclass(frozen=True)
class Row:
    """One line of a comparison: a peer under a label of its own, with fields of its `Job` and its environment. It reads
    the first ``part`` of the shards."""

    peer: str
    label: str = ""
    job: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    part: float = 1.0

    @property
    def name(self) -> str:
        """The label, or the peer's name."""
        return self.label or self.peer


@dataclass(frozen=True)
class Source:
    """Where a corpus is read from: ``urls`` by ``scheme``, and for floors the same bytes at ``plain_urls``. ``base``
    is the URL of the folder. What leads clients to the server is in ``environment``."""

    corpus: Corpus
    scheme: str
    urls: list[str]
    plain_urls: list[str]
    base: str
    environment: Mapping[str, str]
    server: Nginx | None

    @property
    def plain_scheme(self) -> str:
        """The scheme of ``plain_urls``."""
        return self.plain_urls[0].partition(":")[0] if "://" in self.plain_urls[0] else "file"


@dataclass(frozen=True)
class Reading:
    """Medians of a peer's turns. ``size_bytes`` is what the shards hold as tar files, headers included, whatever the
    peer's own format. ``cpu_s`` is that of all processes, ``children_s`` the part that is not the first one's.
    ``pss_bytes`` is the peak of all processes, ``pss_start_bytes`` what they took once imported, and ``peak_bytes`` the
    growth of the first process (VmHWM): of these the worst turn counts. ``first_s`` is when the first sample or batch
    was there, and ``connected_s`` when the server had accepted the first connection; with ``only_first`` nothing more
    was read. ``spread`` has the least and the most of so many ``turns``. ``part`` is what it read of the shards."""

    peer: str
    size_bytes: int
    samples: int
    wall_s: float
    cpu_s: float
    children_s: float
    first_s: float
    connected_s: float
    pss_bytes: int
    pss_start_bytes: int
    peak_bytes: int
    processes: int
    wire_bytes: int
    requests: int
    only_first: bool
    turns: int
    part: float
    spread: dict[str, tuple[float, float]]

    @property
    def mb_s(self) -> float:
        """Megabytes (10^6) of shards a second."""
        return self.size_bytes / 1e6 / self.wall_s

    @property
    def cpu_s_per_gb(self) -> float:
        """Seconds of CPU for 10^9 bytes."""
        return self.cpu_s / (self.size_bytes / 1e9)

    @property
    def samples_per_s(self) -> float:
        """Samples a second."""
        return self.samples / self.wall_s

    @property
    def samples_per_cpu_s(self) -> float:
        """Samples for each second of CPU."""
        return self.samples / self.cpu_s

    @property
    def cpu_ms_per_sample(self) -> float:
        """Milliseconds of CPU for a sample; 0 for a floor, which makes none."""
        return 1e3 * self.cpu_s / self.samples if self.samples else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "mb_s": self.mb_s, "cpu_s_per_gb": self.cpu_s_per_gb}


@dataclass(slots=True)
class Bar:
    """One line of what must be reached."""

    measure: str
    bar: str
    measured: str
    met: bool


@dataclass
class Bench:
    """One run of one scenario. ``peers`` are those chosen, None for all; ``only`` are the cases chosen, where a
    scenario has some to choose from. ``readings`` and ``absent`` (reasons) are by case and label. With ``flame`` the
    first reading of this library is drawn there instead of measured. From the time ``until`` on (of the monotonic
    clock) each peer has one turn."""

    name: str
    quick: bool
    repeat: int
    shards: int
    peers: tuple[str, ...] | None
    only: tuple[str, ...]
    root: Path
    console: Console = field(default_factory=lambda: Console(width=max(160, Console().width)))
    raw: list[dict[str, Any]] = field(default_factory=list)
    readings: dict[str, dict[str, Reading]] = field(default_factory=dict)
    absent: dict[str, dict[str, str]] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: bool = False
    flame: Path | None = None
    until: float = math.inf
    _met: set[str] = field(default_factory=set)
    _written: dict[tuple[str, Corpus], list[str]] = field(default_factory=dict)

    @property
    def shard_bytes(self) -> int:
        """66 MB, a tenth of it with ``--quick``."""
        return SHARD_BYTES // 10 if self.quick else SHARD_BYTES

    @property
    def late(self) -> bool:
        """Whether there is time for one turn only."""
        return time.monotonic() > self.until

    @functools.cached_property
    def tls(self) -> Tls:
        """A throw-away certificate authority."""
        return Tls.create(self.root)

    def make(self, maker: Callable[..., Corpus], *args: Any, **options: Any) -> Corpus:
        """Return ``maker(self.root, …)``, called in a process of its own."""
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(maker, self.root, *args, **options).result()

    @contextlib.contextmanager
    def nginx(self, *, tls: bool = False, store_like: bool = False, **options: Any) -> Iterator[Nginx]:
        """nginx over the scenario's folder."""
        if tls:
            options["tls"] = (self.tls.cert, self.tls.key)
        with Nginx.store_like(self.root, **options) if store_like else Nginx(self.root, **options) as server:
            yield server

    @contextlib.contextmanager
    def serve(self, corpus: Corpus, scheme: str = "http", **options: Any) -> Iterator[Source]:
        """Serve ``corpus``: as local files, from nginx over HTTP(S), or from nginx as the data path of a store.
        ``options`` are those of `nginx`."""
        if scheme == "file":
            paths = [str(self.root / name) for name in corpus.names]
            yield Source(corpus, scheme, paths, paths, str(self.root), {}, None)
            return
        store = datapath.STORES.get(scheme)
        if store:
            if not (self.root / datapath.BUCKET).exists():
                datapath.prepare(self.root, corpus)
            options |= {"extra": datapath.directives(self.root), "modules": datapath.MODULES}
        with self.nginx(tls=scheme == "https", access_log=True, **options) as server:
            plain = [server.url(name) for name in corpus.names]
            ca = str(self.tls.ca) if scheme == "https" else ""
            names = ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE") if ca else ()
            environment = {**dict.fromkeys(names, ca), **(store.environment(server.base) if store else {})}
            urls = store.urls(corpus) if store else plain
            base = f"{scheme}://{datapath.BUCKET}" if store else server.base
            yield Source(corpus, scheme, urls, plain, base, environment, server)

    def rows(
        self, default: Sequence[str] | None = None, *, floors: Sequence[str] | None = None, part: float = 1.0
    ) -> list[Row]:
        """Return a row for each peer: those of ``--peers``, else ``default``, else all, and then ``floors``, else all
        of these. Peers that are neither this library nor a floor read ``part`` of the shards."""
        known = {name: load_peer(name) for name in peer_names()}
        every = [name for name in known if known[name].floor]
        names = self.peers or default or [name for name in known if known[name].reads]
        others = [Row(name, part=1.0 if name.startswith("wds_async") else part) for name in names if name not in every]
        return [*others, *map(Row, every if floors is None else floors)]

    def compare(
        self,
        case: str,
        source: Source,
        task: str = "samples",
        rows: Sequence[Row] | None = None,
        *,
        repeat: int | None = None,
        before: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
        limit_s: float = _TIME_LIMIT_S,
        **job: Any,
    ) -> dict[str, Reading]:
        """Let each row's peer read ``source`` in turn, ``repeat`` times (fewer once it has taken `_ENOUGH_S`), and
        return the medians by label of all readings of ``case`` so far. ``before`` is called before each reading. A peer
        that cannot, that fails, or that takes longer than ``limit_s``, gets its reason in `absent`."""
        turns = repeat or self.repeat
        took: dict[str, float] = {}
        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            jobs = self._jobs(case, source, task, self.rows() if rows is None else rows, job, progress)
            for turn in range(turns):
                if turn and self.late:
                    break
                for row, what in list(jobs):
                    step = progress.add_task(f"{case}: {row.name}, {turn + 1} of {turns}")
                    if before:
                        before()
                    began = time.monotonic()
                    try:
                        reading = self._read(what, source, {**(environment or {}), **row.environment}, limit_s)
                        self.raw.append({"case": case, "label": row.name, **reading})
                    except PeerFailed as exn:
                        self._leave_out(case, row, f"failed: {exn}", failed=True)
                        jobs.remove((row, what))
                    seconds = time.monotonic() - began
                    took[row.name] = took.get(row.name, 0.0) + seconds
                    if not self.console.is_terminal:
                        self.console.print(f"{case}: {row.name}, {turn + 1} of {turns}: {seconds:.1f} s")
                    unlimited = row.peer.startswith("wds_async") or load_peer(row.peer).floor
                    if took[row.name] > _ENOUGH_S and not unlimited and (row, what) in jobs:
                        jobs.remove((row, what))
                    progress.remove_task(step)
        taken: dict[str, list[dict[str, Any]]] = {}
        for reading in self.raw:
            if reading.get("case") == case:
                taken.setdefault(reading["label"], []).append(reading)
        result = {label: _median(readings) for label, readings in taken.items()}
        self.readings.setdefault(case, {}).update(result)
        return result

    def _leave_out(self, case: str, row: Row, reason: str, *, failed: bool = False) -> None:
        self.failed = self.failed or failed
        self.absent.setdefault(case, {})[row.name] = reason

    def _jobs(
        self, case: str, source: Source, task: str, rows: Sequence[Row], common: Mapping[str, Any], progress: Progress
    ) -> list[tuple[Row, dict[str, Any]]]:
        """Return each row that can be run with its job; the reason of every other goes to `absent`."""
        jobs = []
        for row in rows:
            peer = load_peer(row.peer)
            self._met.add(row.peer)
            scheme, urls = source.scheme, source.urls
            if peer.floor:
                scheme, urls = source.plain_scheme, source.plain_urls
            shards = max(common.get("workers", 0), 1, round(row.part * peer.part * len(urls)))
            corpus, urls = source.corpus.first(shards), urls[:shards]
            wanted = "samples" if peer.floor else task
            reason = peer.refusal(wanted, scheme)
            if peer.floor and reason:
                continue  # the floor of another scheme
            reason = reason or absence(row.peer)
            if reason is None and peer.make is not None:
                step = progress.add_task(f"{case}: {row.name} writes its own format")
                try:
                    urls = [f"{source.base}/{name}" for name in self._own_format(row.peer, corpus)]
                except PeerFailed as exn:
                    reason = f"its writer failed: {exn}"
                progress.remove_task(step)
            if reason is not None:
                self._leave_out(case, row, reason)
                continue
            base = {"peer": row.peer, "task": wanted, "urls": urls, "samples": corpus.samples}
            base |= {"size_bytes": corpus.size_bytes, "part": len(corpus.names) / len(source.corpus.names)}
            jobs.append((row, {**base, **common, **row.job}))
        return jobs

    def _own_format(self, peer: str, corpus: Corpus) -> list[str]:
        """Let a peer write its own format of ``corpus`` into ``made-PEER-N``, once, and return its names."""
        key = (peer, corpus)
        if key not in self._written:
            folder = self.root / f"made-{peer}-{len(self._written)}"
            folder.mkdir()
            if (self.root / datapath.BUCKET).exists():
                (self.root / datapath.BUCKET / folder.name).symlink_to(folder)
            paths = [str(self.root / name) for name in corpus.names]
            job = {"peer": peer, "task": "make", "urls": paths, "samples": corpus.samples, "folder": str(folder)}
            with self._process(peer, {}, _TIME_LIMIT_S) as process:
                names = process.ask(job)["names"]
            self._written[key] = [f"{folder.name}/{name}".rstrip("/") for name in names]
        return self._written[key]

    def _process(self, peer: str, environment: Mapping[str, str], limit_s: float) -> _Process:
        limit = limit_s / (10 if self.quick else 1)
        environment = {**load_peer(peer).environment, **environment}
        return _Process([interpreter(peer), "-m", "benchmarks.runner"], environment, self.root / "stderr", limit)

    def _read(
        self, job: dict[str, Any], source: Source, environment: Mapping[str, str], limit_s: float
    ) -> dict[str, Any]:
        """Return one reading: in a fresh process, with its memory measured from here and its requests from the log."""
        sampled = self.flame if job["peer"].startswith("wds_async") else None
        if sampled:
            self.flame = None
            for name in ("urls", "samples", "size_bytes"):
                job = {**job, name: job[name] * flame.TIMES}
        with (
            tempfile.TemporaryDirectory(dir=self.root, prefix="cache-", ignore_cleanup_errors=True) as folder,
            self._process(job["peer"], {**source.environment, **environment}, limit_s) as process,
        ):
            process.ready({**job, "folder": folder})
            earlier = len(source.server.log()) if source.server else 0
            drawn = flame.recorded(process.pid, _flame_title(self.name, job), sampled) if sampled else None
            with MemorySampler(process.pid) as memory, drawn or contextlib.nullcontext():
                reading = process.result()
        if reading["samples"] not in ({0, job["samples"]} if not job.get("first") else {reading["samples"]}):
            raise PeerFailed(f"{reading['samples']} samples instead of {job['samples']}")
        wire: list[dict[str, Any]] = []
        if source.server:
            time.sleep(_LOG_S)
            wire = source.server.log()[earlier:]
        accepted = min((entry["end"] - entry["connection_s"] for entry in wire), default=0.0)
        return {
            **{name: job[name] for name in ("peer", "size_bytes", "part")},
            **reading,
            "pss_bytes": memory.peak_bytes,
            "pss_start_bytes": memory.start_bytes,
            "processes": memory.processes,
            "only_first": bool(job.get("first")),
            "connected_s": max(0.0, accepted - reading["began_at"]),
            "wire_bytes": sum(entry["body_bytes"] for entry in wire),
            "requests": len(wire),
        }

    def bar(self, measure: str, bar: str, value: float | None, met: bool, shown: str = "{:.2f}") -> None:
        """Add a line of what must be reached; ``value`` None where a peer was left out."""
        if value is not None:
            self.bars.append(Bar(measure, bar, shown.format(value), met))

    def ratio_bar(self, measure: str, least: float, ours: float | None, theirs: float | None) -> None:
        """``ours / theirs`` must be at least ``least``."""
        if ours is not None and theirs is not None:
            self.bar(measure, f"≥ {least:g} x", ours / theirs, ours / theirs >= least, "{:.2f} x")

    def least_bar(self, measure: str, ours: str, results: Mapping[str, Reading], value: Callable[[Reading], float],
                  shown: str = "{:.2f}", *, most: bool = False) -> None:  # fmt: skip
        """``value`` of ``ours`` must be below (with ``most``: above) that of every peer that makes samples."""
        others = {name: value(r) for name, r in results.items() if r.samples and not name.startswith(ours)}
        if ours in results and others:
            best = (max if most else min)(others, key=lambda name: others[name])
            mine, sign = value(results[ours]), "≥" if most else "≤"
            met = mine >= others[best] if most else mine <= others[best]
            self.bar(measure, f"{sign} every peer's ({best}: {shown.format(others[best])})", mine, met, shown)

    def memory_bar(self, case: str, reading: Reading | None, budget_bytes: int | None = None, held: int = 0) -> None:
        """The peak above the imported interpreter must stay within the budget, 64 MB and a field of ``held`` bytes."""
        if reading is not None and reading.peak_bytes > 0:
            limit, peak = (budget_bytes or _default_budget()) + held + _MEMORY_SLACK_BYTES, reading.peak_bytes
            bar = f"≤ budget + {'field + ' if held else ''}64 MB = {limit / 1e6:.0f} MB"
            measure = f"{case}: peak memory above the imported interpreter"
            self.bar(measure, bar, peak / 1e6, peak <= limit, "{:.0f} MB")

    def show(self) -> None:
        """Print the tables."""
        for case in {**self.readings, **self.absent}:
            self.console.print(_readings_table(case, self.readings.get(case, {}), self.absent.get(case, {})))
        if self.bars:
            table = Table(title="what must be reached", title_justify="left")
            for title in ("measure", "bar", "measured", "met"):
                table.add_column(title, justify="right" if title == "measured" else "left")
            for bar in self.bars:
                table.add_row(bar.measure, bar.bar, bar.measured, "[green]yes" if bar.met else "[red]no")
            self.console.print(table)
        for note in self.notes:
            self.console.print(note)

    def save(self, path: Path) -> None:
        """Write everything, raw readings included."""
        packages = ("wds-async", "webdataset", "aiohttp", "fsspec", "torch", "uvloop")
        document = {
            "benchmark": self.name,
            "what": SCENARIOS[self.name].what,
            "date": time.strftime("%Y-%m-%d"),
            "machine": _machine(),
            "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
            "environment": {k: v for k, v in os.environ.items() if k.startswith("WDS_")},
            "options": {"quick": self.quick, "repeat": self.repeat, "shards": self.shards},
            "bars": [asdict(bar) for bar in self.bars],
            "medians": {case: {k: r.as_dict() for k, r in found.items()} for case, found in self.readings.items()},
            "absent": self.absent,
            "peers": {name: (load_peer(name).what, load_peer(name).format) for name in sorted(self._met)},
            "notes": self.notes,
            "raw": self.raw,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        self.console.print(f"written: {path}")


class _Process:
    """A `benchmarks.runner`, killed with all its descendants when the block ends or its time is over."""

    def __init__(self, command: list[str], environment: Mapping[str, str], stderr: Path, limit_s: float) -> None:
        self._stderr = stderr
        with stderr.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._limit_s = limit_s
        self._late = False
        self._timer = threading.Timer(limit_s, self._kill)
        self._timer.start()

    def ready(self, job: dict[str, Any]) -> None:
        """Give it its job and wait until it is prepared."""
        self._write(json.dumps(job))
        self._line()

    def result(self) -> dict[str, Any]:
        """Start the clock and return what it measured."""
        self._write("")
        result: dict[str, Any] = json.loads(self._line())
        return result

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Give it a job that has no clock and return the answer."""
        self._write(json.dumps(job))
        result: dict[str, Any] = json.loads(self._line())
        return result

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self._process.stdin, flush=True)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            if self._late:
                raise PeerFailed(f"not done within {self._limit_s:.0f} s")
            lines = self._stderr.read_text(errors="replace").strip().splitlines() or ["it ended without a word"]
            raise PeerFailed(lines[-1][:300])
        return line

    def _kill(self) -> None:
        self._late = True
        kill_tree(self.pid)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            kill_tree(self.pid)
            self._process.wait()
        self._timer.cancel()
        self._process.stdout.close()


@dataclass(frozen=True)
class Scenario:
    """What ``--list`` shows and ``--run`` runs."""

    name: str
    what: str
    run: Callable[[Bench], None]
    shards: int
    repeat: int
    needs: str

    def command(self, *, quick: bool, repeat: int | None, shards: int | None, peers: tuple[str, ...] | None,
                only: tuple[str, ...], path: Path | None, flame: Path | None = None,
                minutes: float = math.inf) -> bool:  # fmt: skip
        """Run it, print and save (not with ``flame``); False where a peer failed."""
        shards, repeat = (shards or 2, repeat or 1) if quick else (shards or self.shards, repeat or self.repeat)
        with tempfile.TemporaryDirectory(prefix="wds-bench-") as folder:
            bench = Bench(self.name, quick, repeat, shards, peers, only, Path(folder), flame=flame)
            bench.until = time.monotonic() + 60 * minutes
            try:
                self.run(bench)
            except NginxMissing as exn:
                raise click.ClickException(str(exn)) from exn
        if quick:
            bench.notes.append("--quick: this shows that it runs; its figures mean nothing")
        bench.show()
        if path or not (quick or peers or only or flame):
            bench.save(path or RESULTS / f"{self.name.replace('.', '-')}.json")
        return not bench.failed


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str, *, shards: int = 16, repeat: int = 5, needs: str = ""
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Enter a function into the list of scenarios; the first line of its docstring is what ``--list`` shows."""

    def enter(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        what = (function.__doc__ or "").strip().partition("\n")[0]
        SCENARIOS[name] = Scenario(name, what, function, shards, repeat, needs)
        return function

    return enter


def load_scenarios() -> dict[str, Scenario]:
    """Import all modules of `benchmarks.scenarios` and return their scenarios by name."""
    folder = Path(__file__).parent / "scenarios"
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[-1] != "__init__":
            importlib.import_module(".".join(("benchmarks.scenarios", *parts)))
    return SCENARIOS


def measured(code: str, variables: Mapping[str, str] | None = None, /, **job: Any) -> Any:
    """Return the last line that a fresh interpreter prints which runs ``code``, with ``job`` on its standard input.
    Both are JSON. ``variables`` are added to its environment."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=_TIME_LIMIT_S,
        check=False,
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
    )
    if done.returncode:
        raise click.ClickException(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _flame_title(scenario: str, job: Mapping[str, Any]) -> str:
    amount = f"{job['size_bytes'] / 1e9:.0f} GB, {job['samples']:,} samples"
    return f"{scenario}, {job['peer']}: where the threads are that are at work ({amount})"


def _default_budget() -> int:
    from wds_async.config import transfer_config  # noqa: PLC0415 (--list need not wait for it)

    return transfer_config().budget_bytes


def _median(rows: list[dict[str, Any]]) -> Reading:
    def middle(name: str) -> float:
        return statistics.median(row[name] or 0.0 for row in rows)

    def spread(name: str) -> tuple[float, float]:
        values = [row[name] or 0.0 for row in rows]
        return min(values), max(values)

    return Reading(
        peer=rows[0]["peer"],
        size_bytes=rows[0]["size_bytes"],
        samples=rows[0]["samples"],
        wall_s=middle("wall_s"),
        cpu_s=middle("cpu_s"),
        children_s=middle("children_s"),
        first_s=middle("first_s"),
        connected_s=middle("connected_s"),
        # Memory is a promise, so its worst case counts.
        pss_bytes=max(row["pss_bytes"] for row in rows),
        pss_start_bytes=max(row["pss_start_bytes"] for row in rows),
        peak_bytes=max(row["own_peak_bytes"] for row in rows),
        processes=max(row["processes"] for row in rows),
        wire_bytes=round(middle("wire_bytes")),
        requests=round(middle("requests")),
        only_first=rows[0]["only_first"],
        turns=len(rows),
        part=rows[0]["part"],
        spread={name: spread(name) for name in ("wall_s", "cpu_s", "first_s", "pss_bytes")},
    )


def _readings_table(case: str, readings: Mapping[str, Reading], absent: Mapping[str, str]) -> Table:
    table = Table(title=case, title_justify="left", caption_justify="left")
    table.add_column("peer", no_wrap=True)
    for title in (
        *("MB/s (min..max)", "CPU s/GB (min..max)", "samples/s", "CPU ms/sample", "first ms (after connect)"),
        *("memory MB", "wire/size", "requests"),
    ):
        table.add_column(title, justify="right")
    for label, r in readings.items():
        slow, fast = (r.size_bytes / 1e6 / seconds for seconds in reversed(r.spread["wall_s"]))
        least, most = (seconds / (r.size_bytes / 1e9) for seconds in r.spread["cpu_s"])
        whole, counted = not r.only_first, r.samples and not r.only_first
        table.add_row(
            f"{label} ({r.part:.0%} of the data)" if r.part < 1 else label,
            f"{r.mb_s:.0f} ({slow:.0f}..{fast:.0f})" if whole else "",
            f"{r.cpu_s_per_gb:.2f} ({least:.2f}..{most:.2f})" if whole else "",
            f"{r.samples_per_s:,.0f}" if counted else "",
            f"{r.cpu_ms_per_sample:.3f}" if counted else "",
            f"{1e3 * r.first_s:.0f} ({1e3 * (r.first_s - r.connected_s):.0f})" if r.samples else "",
            f"{r.pss_bytes / 1e6:.0f}",
            f"{r.wire_bytes / r.size_bytes:.3f}" if r.wire_bytes else "",
            f"{r.requests:,}" if r.requests else "",
        )
    table.caption = "\n".join(f"{label}: {reason}" for label, reason in absent.items()) or None
    return table


def _machine() -> dict[str, Any]:
    model = ""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {"cpu": model, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release()}"}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
