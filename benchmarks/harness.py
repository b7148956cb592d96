"""What every benchmark shares: options, fresh processes in turn, medians, bars, the table and the JSON file."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.corpus import Corpus
from tests.servers import Nginx, NginxMissing, Tls

__all__ = ["Bench", "Job", "Reading", "child", "command", "measured"]

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
_MEMORY_SLACK_BYTES = 64_000_000
_TIME_LIMIT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The median of a contender's repeats. ``size_bytes`` is what the shards hold, headers included."""

    contender: str
    size_bytes: int
    samples: int
    wall_s: float
    cpu_s: float
    children_s: float
    peak_bytes: int
    budget_bytes: int = 0

    @property
    def mb_s(self) -> float:
        """Megabytes (10^6) of shards a second."""
        return self.size_bytes / 1e6 / self.wall_s

    @property
    def cpu_s_per_gb(self) -> float:
        """Seconds of CPU of the process and its children for 10^9 bytes."""
        return self.cpu_s / (self.size_bytes / 1e9)

    @property
    def samples_per_cpu_s(self) -> float:
        """Samples for each second of CPU."""
        return self.samples / self.cpu_s


@dataclass(frozen=True, slots=True)
class Job:
    """What one fresh process does: a contender of `contenders`, what it reads, and its environment."""

    contender: str
    urls: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    spin: int = 0


@dataclass(slots=True)
class Bar:
    """One line of what must be reached."""

    measure: str
    bar: str
    measured: str
    met: bool


@dataclass
class Bench:
    """One run of one benchmark: a folder, its servers, the readings so far and the bars."""

    name: str
    quick: bool
    repeat: int
    shards: int
    only: tuple[str, ...]
    root: Path
    console: Console = field(default_factory=lambda: Console(width=max(110, Console().width)))
    raw: list[dict[str, Any]] = field(default_factory=list)
    readings: dict[str, dict[str, Reading]] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def tls(self) -> Tls:
        """A throw-away certificate authority."""
        return Tls.create(self.root)

    @contextlib.contextmanager
    def nginx(self, *, tls: bool = False, store_like: bool = False, **options: Any) -> Iterator[Nginx]:
        """nginx over the benchmark's folder."""
        if tls:
            options["tls"] = (self.tls.cert, self.tls.key)
        with Nginx.store_like(self.root, **options) if store_like else Nginx(self.root, **options) as server:
            yield server

    def read(
        self,
        case: str,
        server: Nginx,
        corpus: Corpus,
        contenders: list[str],
        *,
        repeat: int | None = None,
        spin: int = 0,
        environment: dict[str, str] | None = None,
    ) -> dict[str, Reading]:
        """Read ``corpus`` with each contender in turn, ``repeat`` times; medians by contender, kept under
        ``case`` for the table."""
        env = dict(environment or {})
        if server.tls:
            env.update(SSL_CERT_FILE=str(self.tls.ca), CURL_CA_BUNDLE=str(self.tls.ca))
        urls = [server.url(name) for name in corpus.names]
        jobs = {contender: Job(contender, urls, env, spin) for contender in contenders}
        return self.read_jobs(case, jobs, corpus, repeat=repeat)

    def read_jobs(
        self, case: str, jobs: Mapping[str, Job], corpus: Corpus, *, repeat: int | None = None
    ) -> dict[str, Reading]:
        """Do each of ``jobs`` (by the label it has in the table), which all read what ``corpus`` holds, in turn,
        ``repeat`` times; medians by label, kept under ``case`` for the table."""
        chosen = {label: job for label, job in jobs.items() if not self.only or label in self.only}
        taken: dict[str, list[dict[str, Any]]] = {label: [] for label in chosen}
        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            for turn in range(repeat or self.repeat):
                for label, job in chosen.items():
                    task = progress.add_task(f"{case}: {label}, {turn + 1} of {repeat or self.repeat}")
                    what = {"contender": job.contender, "urls": job.urls, "samples": corpus.samples, "spin": job.spin}
                    reading = {**child(what, job.environment), "contender": label}
                    progress.remove_task(task)
                    if reading["samples"] not in (0, corpus.samples):
                        message = f"{label}: {reading['samples']} samples instead of {corpus.samples}"
                        raise click.ClickException(message)
                    taken[label].append(reading)
                    self.raw.append({"case": case, **reading})
        result = {label: _median(rows, corpus) for label, rows in taken.items()}
        self.readings.setdefault(case, {}).update(result)
        return result

    def bar(self, measure: str, bar: str, value: float | None, met: bool, shown: str = "{:.2f}") -> None:
        """Add a line of what must be reached; ``value`` None where a contender was left out."""
        if value is not None:
            self.bars.append(Bar(measure, bar, shown.format(value), met))

    def ratio_bar(self, measure: str, floor: float, ours: float | None, theirs: float | None) -> None:
        """``ours / theirs`` must be at least ``floor``."""
        if ours is not None and theirs is not None:
            self.bar(measure, f"≥ {floor:g} x", ours / theirs, ours / theirs >= floor, "{:.2f} x")

    def memory_bar(self, case: str, reading: Reading | None, held: int = 0) -> None:
        """The peak above the imported interpreter must stay within the budget, 64 MB and a field of ``held`` bytes."""
        if reading is not None and reading.peak_bytes > 0:
            limit, peak = reading.budget_bytes + held + _MEMORY_SLACK_BYTES, reading.peak_bytes
            bar = f"≤ budget + {'field + ' if held else ''}64 MB = {limit / 1e6:.0f} MB"
            measure = f"{case}: peak memory above the imported interpreter"
            self.bar(measure, bar, peak / 1e6, peak <= limit, "{:.0f} MB")

    def show(self) -> None:
        """The tables."""
        for case, readings in self.readings.items():
            self.console.print(_readings_table(case, readings))
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
            "date": time.strftime("%Y-%m-%d"),
            "machine": _machine(),
            "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
            "environment": {k: v for k, v in os.environ.items() if k.startswith("WDS_")},
            "options": {"quick": self.quick, "repeat": self.repeat, "shards": self.shards},
            "bars": [asdict(bar) for bar in self.bars],
            "medians": {
                case: {
                    contender: {**asdict(r), "mb_s": r.mb_s, "cpu_s_per_gb": r.cpu_s_per_gb}
                    for contender, r in readings.items()
                }
                for case, readings in self.readings.items()
            },
            "notes": self.notes,
            "raw": self.raw,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        self.console.print(f"written: {path}")


def child(job: dict[str, Any], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run ``job`` in a fresh interpreter and return what it measured."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.contenders"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        timeout=_TIME_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise click.ClickException(f"{job['contender']} failed with status {done.returncode} (see above)")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measured(code: str, **job: Any) -> Any:
    """Return what a fresh interpreter prints that runs ``code`` with ``job`` on its standard input, both as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=_TIME_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise click.ClickException(done.stderr)
    return json.loads(done.stdout)


def command(name: str, shards: int = 16, repeat: int = 3) -> Callable[[Callable[[Bench], None]], click.Command]:
    """Make a benchmark's function a command with the common options."""

    def wrap(function: Callable[[Bench], None]) -> click.Command:
        @click.command(name, help=function.__doc__)
        @click.option("--shards", default=shards, show_default=True, help="Shards of 66 MB.")
        @click.option("--repeat", default=repeat, show_default=True, help="Turns; medians are reported.")
        @click.option("--quick", is_flag=True, help="Two small shards, one turn: does it run, not how fast.")
        @click.option("--only", multiple=True, help="Only this contender or case (may be given again).")
        @click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write the JSON.")
        def run(shards: int, repeat: int, quick: bool, only: tuple[str, ...], path: Path | None) -> None:
            shards, repeat = (2, 1) if quick else (shards, repeat)
            with tempfile.TemporaryDirectory(prefix="wds-bench-") as folder:
                bench = Bench(name, quick, repeat, shards, only, Path(folder))
                try:
                    function(bench)
                except NginxMissing as exn:
                    raise click.ClickException(str(exn)) from exn
            if quick:
                bench.notes.append("--quick: this shows that it runs; its figures mean nothing")
            bench.show()
            if path or not (quick or only):
                bench.save(path or RESULTS / f"{name}.json")

        return run

    return wrap


def _median(rows: list[dict[str, Any]], corpus: Corpus) -> Reading:
    def middle(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(value(row) for row in rows)

    return Reading(
        contender=rows[0]["contender"],
        size_bytes=corpus.size_bytes,
        samples=rows[0]["samples"],
        wall_s=middle(lambda r: r["wall_s"]),
        cpu_s=middle(lambda r: r["user_s"] + r["system_s"]),
        children_s=middle(lambda r: r["children_s"]),
        # Memory is a promise, so its worst case counts.
        peak_bytes=max(r["peak_bytes"] for r in rows),
        budget_bytes=rows[0].get("budget_bytes", 0),
    )


def _readings_table(case: str, readings: dict[str, Reading]) -> Table:
    table = Table(title=case, title_justify="left")
    table.add_column("contender")
    for title in ("MB/s", "wall s", "CPU s/GB", "of it children", "samples/s", "samples/CPU s", "peak MB"):
        table.add_column(title, justify="right")
    for r in readings.values():
        table.add_row(
            r.contender,
            f"{r.mb_s:.0f}",
            f"{r.wall_s:.2f}",
            f"{r.cpu_s_per_gb:.2f}",
            f"{r.children_s / (r.size_bytes / 1e9):.2f}",
            f"{r.samples / r.wall_s:,.0f}" if r.samples else "",
            f"{r.samples_per_cpu_s:,.0f}" if r.samples else "",
            f"{r.peak_bytes / 1e6:.0f}",
        )
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
