"""``wds-async top``: services and jobs at work, from their ``/v1/stats``."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from wds_async.cli.toppicture import StatsReading, StatsSource, draw
from wds_async.errors import WdsError
from wds_async.observe import doctor
from wds_async.redact import redact

__all__ = ["Followed", "command", "look", "rates"]

_LOOK_AT_KEYS_S = 0.2


@click.command("top")
@click.argument("address", metavar="URL...", nargs=-1, required=True)
@click.option(
    "--interval", default=1.0, show_default=True, type=click.FloatRange(0.05), help="Seconds between readings."
)
@click.option("--once", is_flag=True, help="Print one picture and end; so it is where output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and end.")
@click.option("--width", type=click.IntRange(60, 200), help="Columns; the terminal's unless given.")
def command(*, address: tuple[str, ...], interval: float, once: bool, as_json: bool, width: int | None) -> None:
    """Show services and training jobs at work: throughput, hit ratio, window, origins, slowest shards, errors.

    URL is http://host:port or unix:/path of a service (wds-async serve) or of a job (WDS_METRICS_PORT); several are
    shown together. One that cannot be reached is a red line, and is asked again. Keys: q leaves, and Ctrl-C.

    Example: wds-async top http://node-1:51080 http://node-2:51080 http://localhost:9090

    Example: wds-async top --once unix:/run/wds-async.sock
    """
    console = Console(highlight=False, width=width)
    if once or as_json or not console.is_terminal:
        lines = look(address, interval)
        if as_json:
            click.echo(json.dumps({"sources": [rates(line) for line in lines]}, indent=2))
        else:
            console.print(draw(lines, _width(console)))
        if not any(line.alive for line in lines):
            raise click.exceptions.Exit(1)
        return
    _live(address, interval, console)


def look(addresses: tuple[str, ...], interval_s: float) -> list[StatsSource]:
    """Return all sources after two readings of each, ``interval_s`` apart."""
    with Followed(addresses, interval_s) as followed:
        while any(line.last is None or (line.alive and line.before is None) for line in followed.lines):
            followed.wait(interval_s)
    return followed.lines


def rates(line: StatsSource) -> dict[str, Any]:
    """Return the state of a source, for JSON: its document, or the error, and bytes a second."""
    state: dict[str, Any] = {"address": line.address, "alive": line.alive}
    if line.last is not None and not line.alive:
        return {**state, "error": line.last.error}
    per_s = {"taken_bytes_per_s": round(line.rate(line.taken)), "origin_bytes_per_s": round(line.rate("origin_bytes"))}
    return {**state, **per_s, "restarts": line.restarts, "stats": None if line.last is None else line.last.document}


class Followed:
    """Sources that are polled, each by a thread of its own, so that one without an answer delays no other. The thread
    that waits takes in the readings. A context manager."""

    def __init__(self, addresses: tuple[str, ...], interval_s: float, timeout_s: float = 3.0) -> None:
        self.lines = [StatsSource(redact(address)) for address in addresses]
        self._addresses = addresses
        self._readings: queue.SimpleQueue[tuple[int, StatsReading]] = queue.SimpleQueue()
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._over = threading.Event()

    def __enter__(self) -> Followed:
        for number, address in enumerate(self._addresses):
            name = f"top-{number}"
            threading.Thread(target=self._follow, args=(number, address), name=name, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()

    def wait(self, seconds: float) -> bool:
        """Take in the readings of that time, and at least those that are there. Return whether there were any."""
        deadline, some = time.monotonic() + seconds, False
        while True:
            left_s = deadline - time.monotonic()
            try:
                number, reading = self._readings.get(timeout=max(left_s, 0.001) if not some else 0.001)
            except queue.Empty:
                return some
            self.lines[number].take(reading)
            some = True

    def _follow(self, number: int, address: str) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            try:
                reading = StatsReading(began, doctor.fetch_stats(address, self._timeout_s))
            except WdsError as exn:
                reading = StatsReading(began, error=str(exn))
            self._readings.put((number, reading))
            self._over.wait(max(0.0, began + self._interval_s - time.monotonic()))


def _live(addresses: tuple[str, ...], interval_s: float, console: Console) -> None:
    with (
        Followed(addresses, interval_s) as followed,
        _keys() as pressed,
        # The alternate screen is drawn over in place, and only when there is something new: nothing flickers.
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        drawn_for = None
        while not pressed(b"q\x1b"):
            if followed.wait(_LOOK_AT_KEYS_S) or console.size != drawn_for:
                drawn_for = console.size
                live.update(draw(followed.lines, _width(console), keys=True), refresh=True)


def _width(console: Console) -> int:
    return max(60, min(200, console.width))


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Yield ``pressed(keys)``, which returns whether one of them was pressed; False where there is no terminal."""
    fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
    try:
        import termios  # noqa: PLC0415 (POSIX only)
        import tty  # noqa: PLC0415
    except ImportError:
        fd = -1
    if fd < 0:
        yield lambda keys: False
        return

    def pressed(keys: bytes) -> bool:
        return bool(select.select([fd], [], [], 0)[0]) and any(key in keys for key in os.read(fd, 64))

    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
