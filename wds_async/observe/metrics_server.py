"""Metrics of a training job: the pages of ``WDS_METRICS_PORT``, served by a daemon thread that ends without a trace."""

from __future__ import annotations

import atexit
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
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from wds_async import config, world
from wds_async._version import __version__
from wds_async.environment import variable
from wds_async.errors import ConfigError
from wds_async.observe.ledger import Ledger, Ledgers
from wds_async.observe.metrics import CONTENT_TYPE, Labels, MetricsPage, add_origins, origin_rows, prometheus
from wds_async.observe.prices import Meter, meter_of_job
from wds_async.transfer.stats import Board, Stats
from wds_async.transfer.traffic import Traffic

__all__ = ["Answer", "PageServer", "address", "join", "show", "stop"]

logger = logging.getLogger("wds_async")

Answer = Callable[[], tuple[str, bytes]]
"""Returns a page: its type, and its text."""

_POLL_S = 0.2
_ERRORS = 20
_GAUGES = ("connections", "connections_peak", "connections_limit", "connections_most", "slowdown", "window_bytes",
           "window_peak_bytes", "budget_bytes", "processes")  # fmt: skip
_COUNTERS = {
    "samples": ("samples", "Samples that were read."),
    "bad_samples": ("bad_samples", "Samples that were skipped."),
    "wait_seconds": ("wait_s", "Time in which consumers waited for bytes."),
    "read_seconds": ("read_s", "Time in which readers were open."),
    "read_bytes": ("bytes", "Bytes of shards that were decoded."),
    "epochs": ("epochs", "Passes over the data that ran to their end, of each process."),
}
_open: list[PageServer] = []


class PageServer(socketserver.ThreadingTCPServer):
    """Answers ``pages``, by path, at the address ``where`` (port 0: any that is free) until `end`. Raise OSError where
    the address is taken. A forked child closes its copy of the port."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, where: tuple[str, int], pages: dict[str, Answer]) -> None:
        self.pages = pages
        self.address_family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        super().__init__(where, _Handler)
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        self.thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
        self.thread.start()
        _open.append(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log failures, such as clients that went away, for debugging only."""
        logger.debug("metrics: a request failed", exc_info=True)

    def end(self) -> None:
        """Stop answering and free the port."""
        if self in _open:
            _open.remove(self)
            self.shutdown()
            self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server_version, sys_version, timeout = "wds-async", "", 10.0
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


def _read_board(attributes: dict[str, Any]) -> tuple[Stats, Traffic]:
    """Return the counts of a board by its attributes, which are there even while it is collected."""
    board = Board.__new__(Board)
    board.__dict__.update(attributes)
    return board.total(), board.traffic()


class _JobMetrics:
    """Counters of all datasets of this process, collected ones included, so that no counter ever falls."""

    def __init__(self) -> None:
        self.server: PageServer | None = None
        self._began = time.time()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a board may go within any of these, by garbage collection
        self._boards: dict[int, tuple[weakref.ref[Board], weakref.ref[Ledger], dict[str, Any]]] = {}
        self._stats_gone, self._traffic_gone = Stats(), Traffic()
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
            if id(board) not in self._boards:
                self._boards[id(board)] = weakref.ref(board), weakref.ref(ledger), vars(board)
                # After this one comes the board's own, which removes its folder: the last to register is called first.
                weakref.finalize(board, self._retire, id(board)).atexit = False

    def _retire(self, key: int) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            stats, traffic = _read_board(self._boards[key][2])
            self._stats_gone += replace(stats, **dict.fromkeys(_GAUGES, 0.0))
            traffic.hang_up()
            self._traffic_gone.merge(traffic)
            del self._boards[key]

    def show(self) -> None:
        """Start to answer, once."""
        if self._tried or not self._boards or world.torch_worker() is not None:
            return
        with self._lock:
            if self._tried:
                return
            self._tried = True
            host, port = self._where
            pages = {"/metrics": self.page, "/v1/stats": self.stats, "/healthz": lambda: ("text/plain", b"ok\n")}
            try:
                self.server = PageServer((host, port), pages)
            except OSError as exn:
                logger.warning(
                    "WDS_METRICS_PORT: %s:%d is not available (%s); this process shows no metrics", host, port, exn
                )
                return
            level = logging.INFO if port else logging.WARNING  # a free port has to be named
            where, own = self.server.address
            logger.log(level, "metrics of this job: http://%s:%d/metrics", f"[{where}]" if ":" in where else where, own)
            atexit.register(self.end)

    def end(self) -> None:
        """Stop to answer."""
        server, self.server = self.server, None
        if server is not None:
            atexit.unregister(self.end)
            server.end()

    def _read(self) -> tuple[Stats, Traffic, Ledgers]:
        traffic = Traffic()
        with self._lock:
            total = self._stats_gone
            traffic.merge(self._traffic_gone)
            records = list(self._boards.values())
            held = [board() for board, _, _ in records]  # none is collected while it is read
        for _, _, attributes in records:
            stats, more = _read_board(attributes)
            total += stats
            traffic.merge(more)
        del held
        return total, traffic, Ledgers(ledger for _, one, _ in records if (ledger := one()) is not None)

    def page(self) -> tuple[str, bytes]:
        """Return ``/metrics``."""
        stats, traffic, _ = self._read()
        assert self._meter is not None
        limit = config.settings().cost_limit
        page = MetricsPage()
        for name, (field, meaning) in _COUNTERS.items():
            page.counter(f"wds_{name}", meaning, getattr(stats, field))
        page.gauge("wds_processes", "Processes that have read.", stats.processes)
        page.gauge("wds_window_bytes", "Memory of parts on their way.", stats.window_bytes)
        page.gauge("wds_window_limit_bytes", "The most that they may take.", stats.budget_bytes)
        add_origins(page, traffic, self._labels, self._meter)
        dollars = float("inf") if limit is None else limit
        page.gauge("wds_cost_limit_dollars", "US dollars at which the run stops.", dollars)
        page.gauge("wds_build_info", "The version in its label.", [((__version__,), 1)], ("version",))
        return CONTENT_TYPE, page.text()

    def stats(self) -> tuple[str, bytes]:
        """Return ``/v1/stats``."""
        stats, traffic, ledgers = self._read()
        assert self._meter is not None
        here, host = world.place(), socket.gethostname()

        def of_origins(name: str) -> int:
            return sum(getattr(origin, name) for origin in traffic.origins.values())

        document = {
            "kind": "job",
            "name": f"{host} rank {here.rank}" if here.world_size > 1 else host,
            "version": __version__,
            "time": time.time(),
            "uptime_s": time.time() - self._began,
            "ready": True,
            "counters": {
                **{name: value for name, value in stats.as_dict().items() if name not in _GAUGES},
                "processes": stats.processes,
                **{f"origin_{name}": of_origins(name) for name in ("bytes", "requests", "retries")},
                "errors": of_origins("errors"),
            },
            "gauges": {
                "connections": of_origins("connections"),
                **{name: getattr(stats, name) for name in ("connections_limit", "connections_most", "slowdown")},
                "window_bytes": stats.window_bytes,
                "window_limit_bytes": stats.budget_bytes,
            },
            "origins": origin_rows(traffic, self._labels, self._meter),
            "slowest": [],
            "errors": [
                {"time": entry.time, "url": entry.shard, "error": entry.reason}
                for entry in ledgers.entries()[-_ERRORS:]
            ],
            "plans": [],
            "cost": {"dollars": self._meter.dollars(traffic).as_list(), "limit": config.settings().cost_limit},
        }
        return "application/json", json.dumps(document).encode()


def _where(text: Any) -> tuple[str, int]:
    """Return host and port of ``9464`` or ``0.0.0.0:9464``; each local rank has its own port."""
    host, _, port = str(text).rpartition(":")
    local_rank = variable("LOCAL_RANK") or "0"
    try:
        number, rank = int(port), int(local_rank)
        number += rank if number else 0
        if not 0 <= number <= 65535:
            raise ValueError
    except ValueError:
        raise ConfigError(f"WDS_METRICS_PORT={text} and LOCAL_RANK={local_rank} give no port") from None
    return host.strip("[]") or "127.0.0.1", number


_job = _JobMetrics()


def _forget_in_child() -> None:
    global _job
    for server in _open:
        server.socket.close()  # the child's copy; the thread that answers is not there
    _open.clear()
    atexit.unregister(_job.end)
    _job = _JobMetrics()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child, after_in_parent=show)
