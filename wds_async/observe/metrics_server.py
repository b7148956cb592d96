"""Metrics of a training job: the pages of ``WDS_METRICS_PORT``, served by a daemon thread that ends without a trace."""

from __future__ import annotations

import atexit
import contextlib
import http.server
import json
import logging
import os
import socket
import socketserver
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from wds_async import config, world
from wds_async.environment import variable
from wds_async.errors import ConfigError
from wds_async.observe.ledger import Ledger
from wds_async.observe.metrics import (
    CONTENT_TYPE,
    Labels,
    MetricsPage,
    add_origins,
    origin_rows,
    prometheus,
    version,
)
from wds_async.observe.prices import Meter, meter_of_job
from wds_async.transfer.stats import Board, Stats
from wds_async.transfer.traffic import Traffic

__all__ = ["Answer", "PageServer", "address", "join", "show", "stop"]

logger = logging.getLogger("wds_async")


Answer = Callable[[], tuple[str, bytes]]
"""Returns a page: its type, and its text."""

_STOP_WITHIN_S = 1.0
_CLIENT_TIMEOUT_S = 10.0
_ERRORS = 20
_open: list[PageServer] = []


class PageServer(http.server.ThreadingHTTPServer):
    """Listens at ``where`` from the start (port 0: any that is free); answers ``pages``, by path, between `begin` and
    `end`. Raise OSError where the address is taken. A forked child closes its copy of the port."""

    daemon_threads = True

    def __init__(self, where: tuple[str, int], pages: dict[str, Answer]) -> None:
        self.pages = pages
        self.address_family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        super().__init__(where, _Handler)
        _open.append(self)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self.server_name, self.server_port

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name, which the base class makes."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def begin(self) -> None:
        """Start to answer."""
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            self.handle_request()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse requests once it ends."""
        return not self._ended

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log failures, such as clients that went away, for debugging only."""
        logger.debug("metrics: a request failed", exc_info=True)

    def end(self) -> None:
        """Stop answering and free the port."""
        self._ended = True
        with contextlib.suppress(OSError), socket.create_connection(self._reach(), timeout=_STOP_WITHIN_S):
            pass  # wakes the thread, which waits for a connection
        if self._thread.is_alive():
            self._thread.join(_STOP_WITHIN_S)
        self.server_close()
        with contextlib.suppress(ValueError):
            _open.remove(self)

    def _reach(self) -> tuple[str, int]:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.server_name, self.server_name)
        return host, self.server_port


class _Handler(http.server.BaseHTTPRequestHandler):
    server_version, sys_version = "wds-async", ""
    timeout = _CLIENT_TIMEOUT_S
    server: PageServer

    def do_GET(self) -> None:
        """Send the page of the path."""
        answer = self.server.pages.get(urlsplit(self.path).path)
        if answer is None:
            self.send_error(404, "there are /metrics, /v1/stats and /healthz")
            return
        try:
            kind, body = answer()
        except Exception as exn:
            logger.warning("metrics: %s failed", self.path[:80], exc_info=True)
            self.send_error(500, f"{type(exn).__name__}; the job's log has more")
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log for debugging, and not to standard error."""
        logger.debug("metrics: " + format, *args)


def _close_in_child() -> None:
    # What is closed here is the child's copy; the thread that answers is not there.
    for server in _open:
        server.socket.close()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


_GAUGES = ("connections", "connections_peak", "connections_limit", "connections_most", "slowdown", "window_bytes",
           "window_peak_bytes", "budget_bytes", "processes")  # fmt: skip


def join(ledger: Ledger) -> None:
    """Include a reading stage of this process, by its ledger. Raise MissingExtra where prometheus_client is not
    installed, ConfigError for an invalid port or table of prices."""
    prometheus()
    _job.add(ledger)


def show() -> None:
    """Start to answer, if this process has datasets of its own."""
    _job.show()


def address() -> tuple[str, int] | None:
    """Return the address where this process answers; None where it does not."""
    return None if _job.server is None else _job.server.address


def stop() -> None:
    """Stop to answer, and reset all counters."""
    global _job
    job, _job = _job, _JobMetrics()
    job.end()


@dataclass(frozen=True, slots=True)
class _BoardRecord:
    """A board and its attributes, which can be read even while the board is collected."""

    board: weakref.ref[Board]
    ledger: weakref.ref[Ledger]
    names: dict[str, Any]

    def read(self) -> tuple[Stats, Traffic]:
        """Return the counts of now."""
        board = Board.__new__(Board)
        board.__dict__.update(self.names)
        return board.total(), board.traffic()


class _JobMetrics:
    """Counters of all datasets of this process, collected ones included, so that no counter ever falls."""

    def __init__(self) -> None:
        self.server: PageServer | None = None
        self._began = time.time()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a board may go within any of these, by garbage collection
        self._sheets: dict[int, _BoardRecord] = {}
        self._gone = Stats()
        self._traffic_gone = Traffic()
        self._tried = False
        self._labels = Labels()
        self._where = ("", 0)
        self._meter: Meter | None = None

    def add(self, ledger: Ledger) -> None:
        """Include the ledger's board from now on, and keep its counts when it is collected."""
        board = ledger.board
        with self._lock:
            if self._meter is None:
                self._where = _where(config.settings().metrics_port)
                self._meter = meter_of_job()
            if id(board) not in self._sheets:
                self._sheets[id(board)] = _BoardRecord(weakref.ref(board), weakref.ref(ledger), vars(board))
                # After this one comes the board's own, which removes its folder: the last to register is asked first.
                weakref.finalize(board, self._retire, id(board)).atexit = False

    def _retire(self, key: int) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            stats, traffic = self._sheets[key].read()
            self._gone += replace(stats, **dict.fromkeys(_GAUGES, 0.0))
            traffic.hang_up()
            self._traffic_gone.merge(traffic)
            del self._sheets[key]

    def show(self) -> None:
        """Start to answer, once."""
        if self._tried or not self._sheets or world.torch_worker() is not None:
            return
        with self._lock:
            if self._tried:
                return
            self._tried = True
            host, port = self._where
            pages = {"/metrics": self.page, "/v1/stats": self.stats, "/healthz": _fine}
            try:
                self.server = PageServer((host, port), pages)
            except OSError as exn:
                logger.warning(
                    "WDS_METRICS_PORT: %s:%d is not available (%s); this process shows no metrics", host, port, exn
                )
                return
            level = logging.INFO if port else logging.WARNING  # a free port has to be named
            where, own = self.server.address
            where = f"[{where}]" if ":" in where else where
            logger.log(level, "metrics of this job: http://%s:%d/metrics", where, own)
            self.server.begin()
            atexit.register(self.end)

    def end(self) -> None:
        """Stop to answer."""
        server, self.server = self.server, None
        if server is not None:
            atexit.unregister(self.end)
            server.end()

    def _read(self) -> tuple[Stats, Traffic, list[Ledger]]:
        traffic = Traffic()
        with self._lock:
            total = self._gone
            traffic.merge(self._traffic_gone)
            sheets = list(self._sheets.values())
            held = [sheet.board() for sheet in sheets]  # none is collected while it is read
        for sheet in sheets:
            stats, more = sheet.read()
            total += stats
            traffic.merge(more)
        del held
        return total, traffic, [ledger for sheet in sheets if (ledger := sheet.ledger()) is not None]

    def page(self) -> tuple[str, bytes]:
        """Return ``/metrics``."""
        stats, traffic, _ = self._read()
        assert self._meter is not None
        page = MetricsPage()
        page.counter("wds_samples", "Samples that were read.", stats.samples)
        page.counter("wds_bad_samples", "Samples that were skipped.", stats.bad_samples)
        page.counter("wds_wait_seconds", "Time in which consumers waited for bytes.", stats.wait_s)
        page.counter("wds_read_seconds", "Time in which readers were open.", stats.read_s)
        page.counter("wds_read_bytes", "Bytes of shards that were decoded.", stats.bytes)
        page.counter("wds_epochs", "Passes over the data that ran to their end, of each process.", stats.epochs)
        page.gauge("wds_processes", "Processes that have read.", stats.processes)
        page.gauge("wds_window_bytes", "Memory of parts on their way.", stats.window_bytes)
        page.gauge("wds_window_limit_bytes", "The most that they may take.", stats.budget_bytes)
        add_origins(page, traffic, self._labels, self._meter)
        page.gauge("wds_cost_limit_dollars", "US dollars at which the run stops.", _limit(float("inf")))
        page.gauge("wds_build_info", "The version in its label.", [((version(),), 1)], ("version",))
        return CONTENT_TYPE, page.text()

    def stats(self) -> tuple[str, bytes]:
        """Return ``/v1/stats``."""
        stats, traffic, ledgers = self._read()
        assert self._meter is not None
        origins = list(traffic.origins.values())
        here = world.place()
        document = {
            "kind": "job",
            "name": f"{socket.gethostname()} rank {here.rank}" if here.world_size > 1 else socket.gethostname(),
            "version": version(),
            "time": time.time(),
            "uptime_s": time.time() - self._began,
            "ready": True,
            "counters": {
                **{name: value for name, value in stats.as_dict().items() if name not in _GAUGES},
                "processes": stats.processes,
                "origin_bytes": sum(origin.bytes for origin in origins),
                "origin_requests": sum(origin.requests for origin in origins),
                "origin_retries": sum(origin.retries for origin in origins),
                "errors": sum(origin.errors for origin in origins),
            },
            "gauges": {
                "connections": sum(origin.connections for origin in origins),
                "connections_limit": stats.connections_limit,
                "connections_most": stats.connections_most,
                "slowdown": stats.slowdown,
                "window_bytes": stats.window_bytes,
                "window_limit_bytes": stats.budget_bytes,
            },
            "origins": origin_rows(traffic, self._labels, self._meter),
            "slowest": [],
            "errors": _errors(ledgers),
            "plans": [],
            "cost": {"dollars": self._meter.dollars(traffic).as_list(), "limit": _limit(None)},
        }
        return "application/json", json.dumps(document).encode()


def _limit(otherwise: Any) -> Any:
    limit = config.settings().cost_limit
    return otherwise if limit is None else limit


def _errors(ledgers: list[Ledger]) -> list[dict[str, Any]]:
    entries = sorted((entry for ledger in ledgers for entry in ledger.entries()), key=lambda entry: entry.time)
    return [{"time": entry.time, "url": entry.shard, "error": entry.reason} for entry in entries[-_ERRORS:]]


def _fine() -> tuple[str, bytes]:
    return "text/plain", b"ok\n"


def _where(given: Any) -> tuple[str, int]:
    """Return host and port of ``9464`` or ``0.0.0.0:9464``; each local rank has its own port."""
    host, _, port = str(given).rpartition(":")
    local_rank = variable("LOCAL_RANK") or "0"
    try:
        number, rank = int(port), int(local_rank)
        number += rank if number else 0
        if not 0 <= number <= 65535:
            raise ValueError
    except ValueError:
        raise ConfigError(f"WDS_METRICS_PORT={given} and LOCAL_RANK={local_rank} give no port") from None
    return host.strip("[]") or "127.0.0.1", number


_job = _JobMetrics()


def _forget_in_child() -> None:
    global _job
    atexit.unregister(_job.end)
    _job = _JobMetrics()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child, after_in_parent=show)
