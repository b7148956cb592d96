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
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from wds_async.cli.toppicture import StatsSource, draw
from wds_async.errors import WdsError
from wds_async.observe import doctor
from wds_async.redact import redact

try:
    import termios
    import tty
except ImportError:  # not on POSIX
    termios = None  # type: ignore[assignment]

__all__ = ["Followed", "command", "look", "rates"]

_LOOK_AT_KEYS_S = 0.2


@click.command("top")
@click.argument("address", metavar="URL...", nargs=-1, required=True)
@click.option(
    "--interval", default=1.0, show_default=True, type=click.FloatRange(0.05), help="Seconds between readings."
)
@click.option("--once", is_flag=True, help="Print one picture and exit; the default if the output is not a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and exit.")
@click.option("--width", type=click.IntRange(60, 200), help="Width in columns. Default: that of the terminal.")
def command(*, address: tuple[str, ...], interval: float, once: bool, as_json: bool, width: int | None) -> None:
    """Show services and training jobs at work: throughput, hit ratio, window, origins, slowest shards, errors.

    URL is http://host:port or unix:/path of a service (wds-async serve) or of a job (WDS_METRICS_PORT). Several are
    shown together. One that cannot be reached is shown in red and tried again. Press q or Ctrl-C to quit.

    Example: wds-async top http://node-1:51080 http://node-2:51080 http://localhost:9090

    Example: wds-async top --once unix:/run/wds-async.sock
    """
    console = Console(highlight=False, width=width)
    if not once and not as_json and console.is_terminal:
        _live(address, interval, console)
        return
    sources = look(address, interval)
    if as_json:
        click.echo(json.dumps({"sources": [rates(source) for source in sources]}, indent=2))
    else:
        console.print(draw(sources, _width(console)))
    if not any(source.alive for source in sources):
        raise click.exceptions.Exit(1)


def look(addresses: tuple[str, ...], interval_s: float) -> list[StatsSource]:
    """Return all sources after two readings of each, ``interval_s`` apart."""
    with Followed(addresses, interval_s) as followed:
        while not all(source.settled for source in followed.sources):
            followed.wait(interval_s)
    return followed.sources


def rates(source: StatsSource) -> dict[str, Any]:
    """Return the state of a source, for JSON: its document, or the error, and bytes a second."""
    state: dict[str, Any] = {"address": source.address, "alive": source.alive}
    if source.error:
        return {**state, "error": source.error}
    names = {"taken_bytes_per_s": source.taken, "origin_bytes_per_s": "origin_bytes"}
    per_s = {name: round(source.rate(counter)) for name, counter in names.items()}
    return {**state, **per_s, "restarts": source.restarts, "stats": source.document}


class Followed:
    """Sources that are polled, each by a thread of its own, so that one without an answer delays no other. The thread
    that waits takes in the readings. A context manager."""

    def __init__(self, addresses: tuple[str, ...], interval_s: float, timeout_s: float = 3.0) -> None:
        self.sources = [StatsSource(redact(address)) for address in addresses]
        self._addresses = addresses
        self._readings: queue.SimpleQueue[tuple[StatsSource, float, dict[str, Any], str]] = queue.SimpleQueue()
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._over = threading.Event()

    def __enter__(self) -> Followed:
        for source in zip(self.sources, self._addresses, strict=True):
            threading.Thread(target=self._follow, args=source, name="top", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()

    def wait(self, seconds: float) -> bool:
        """Wait so long for a reading, and take in all that are there. Return whether there were any."""
        some = False
        with contextlib.suppress(queue.Empty):
            while True:
                source, at_s, document, error = self._readings.get(timeout=0.001 if some else seconds)
                source.take(at_s, document, error)
                some = True
        return some

    def _follow(self, source: StatsSource, address: str) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            try:
                self._readings.put((source, began, doctor.fetch_stats(address, self._timeout_s), ""))
            except WdsError as exn:
                self._readings.put((source, began, {}, str(exn)))
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
                live.update(draw(followed.sources, _width(console), keys=True), refresh=True)


def _width(console: Console) -> int:
    return max(60, min(200, console.width))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[bytes], bool]]:
    """Yield ``pressed(keys)``, which returns whether one of them was pressed; False where there is no terminal."""
    if termios is None or sys.stdin is None or not sys.stdin.isatty():
        yield lambda keys: False
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield lambda keys: bool(select.select([fd], [], [], 0)[0]) and any(key in keys for key in os.read(fd, 64))
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
