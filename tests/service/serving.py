"""Services to test with: one in this process (`Inside`), quick to begin and open to be looked at, or a real
``wds-async serve`` (`Process`) with signals and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.servers.process import launch
from tests.servers.process import stop as end
from tests.transfer.reading import QUICK
from wds_async.service.config import load_config
from wds_async.service.context import Context
from wds_async.service.running import Service

__all__ = ["Inside", "Process", "answers", "ask", "asked", "dial", "spoken", "until"]

_START_S = 50.0  # a fifth of a second, where nothing else runs


class Inside:
    """A service on a loop and thread of its own, at a free port of loopback; use it as a context manager.

    ``settings`` are those of `ServiceConfig` (``allow``, ``folder``, …); ``transfer`` fields of `TransferConfig`, by
    default three quick attempts.
    """

    def __init__(self, *, transfer: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self.config = load_config(None, **{"port": 0, "folder": "", "cache_size": "1G", **_plain(settings)})
        self._transfer = {"retry": QUICK, **(transfer or {})}
        self.service: Service
        self.loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self._begun, self._ending = threading.Event(), asyncio.Event()
        self.at_once = asyncio.Event()
        """Set on its loop, it ends without waiting."""
        self._failure: BaseException | None = None

    def __enter__(self) -> Inside:
        self._thread.start()
        assert self._begun.wait(_START_S)
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def base(self) -> str:
        """``http://127.0.0.1:port``."""
        return self.service.addresses[0]

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    @property
    def context(self) -> Context:
        """What its routes see."""
        return self.service.context

    def stop(self) -> None:
        """Drain and end it; harmless when it has ended."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(_START_S)
            assert not self._thread.is_alive()
            if self._failure is not None:
                raise self._failure

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` on the service's loop; its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(_START_S)

    def quiet(self) -> None:
        """Return once no request is under way. TimeoutError where one is for half a minute."""

        async def none_left() -> None:
            while len(self.context.in_flight):  # noqa: ASYNC110 (nothing tells of it)
                await asyncio.sleep(0.005)

        self.call(none_left())

    def stored(self) -> None:
        """Return once nothing is on its way from a store or to the cache's disk. TimeoutError after half a minute."""
        self.call(self.context.cache.fetching.quiet())

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exn:
            self._failure = exn
        finally:
            self._begun.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.service = Service(self.config, **self._transfer)
        await self.service.start()
        self._begun.set()
        await self._ending.wait()
        await self.service.stop(self.at_once)


class Process:
    """``wds-async serve`` with a YAML file of ``settings``, at a free port unless they say otherwise, its files in
    ``place``; ``by_environment``: the file is the one that WDS_SERVE_CONFIG names. ``environ`` is added to the
    environment (None takes a variable away). ``script`` runs in place of the module. ``before`` are the words before
    the command (``ip netns exec name``)."""

    def __init__(
        self,
        place: Path,
        *,
        environ: Mapping[str, str | None] | None = None,
        options: tuple[str, ...] = (),
        by_environment: bool = False,
        script: Path | None = None,
        before: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self._file, self.log = place / "serve.yaml", place / "serve.log"
        self.configure(**settings)
        self._environ, self._before = dict(environ or {}), before
        self._program = ("-m", "wds_async") if script is None else (str(script),)
        self._options = options if by_environment else ("--config", str(self._file), *options)
        self.process: subprocess.Popen[bytes] | None = None
        self.addresses: list[str] = []

    def __enter__(self) -> Process:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        end(self.process)

    @property
    def base(self) -> str:
        """``http://127.0.0.1:port``."""
        return self.addresses[0]

    @property
    def said(self) -> str:
        """What it wrote to standard output and error."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def launch(self) -> subprocess.Popen[bytes]:
        """Start it, without waiting for anything."""
        command = [sys.executable, *self._program, "serve", *self._options]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WDS_SERVE", "NOTIFY_"))}
        changed = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1", **self._environ}
        variables = {name: value for name, value in {**kept, **changed}.items() if value is not None}
        assigned = ["env", "-i", *(f"{name}={value}" for name, value in variables.items())]
        self.process = launch([*assigned, *command], self.log, before=self._before)
        return self.process

    def start(self) -> Process:
        """Start it and return when it listens."""
        self.launch()
        return self.listening()

    def listening(self) -> Process:
        """Return when it listens, after `launch`."""
        assert self.process is not None
        process, deadline = self.process, time.monotonic() + _START_S
        while time.monotonic() < deadline:
            said = self.said  # the last of its lines: what may be read
            if "what may be read" in said and (found := re.search(r"listening at (.+)", said)):
                self.addresses = found[1].strip().rstrip('"}').split(", ")
                return self
            if process.poll() is not None:
                break
            time.sleep(0.01)
        end(process)
        raise RuntimeError(f"the service did not start: {self.said}")

    def configure(self, **settings: Any) -> None:
        """Write ``settings`` in the place of those in its file."""
        self._file.write_text(yaml.safe_dump({"port": 0, "cache_size": "1G", **_plain(settings)}))

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Its exit code, once it has ended."""
        assert self.process is not None
        return self.process.wait(timeout_s)


def ask(url: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request without any client's own ideas: status, header fields in lower case, body. ``headers``: underscores
    stand for hyphens."""
    import http.client
    import urllib.parse

    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        target = url.removeprefix(f"{parts.scheme}://{parts.netloc}") or "/"
        connection.request(method, target, data, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def dial(service: Inside, *, local: bool = False, receive_bytes: int = 0) -> socket.socket:
    """A connection to ``service``, by TCP or its Unix socket, that waits for nothing longer than 20 s."""
    connection = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(20)
    connection.connect(service.config.socket if local else ("127.0.0.1", service.port))
    return connection


def asked(path: str, method: str = "GET", body: bytes = b"", **fields: str) -> bytes:
    """A request as it goes over the wire. ``fields``: underscores stand for hyphens."""
    if body:
        fields["Content_Length"] = str(len(body))
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode() + body


def answers(connection: socket.socket, *methods: str) -> list[tuple[int, dict[str, str], bytes]]:
    """As many answers as requests were sent by ``methods``, in order: status, fields (lower case), body. EOFError where
    the connection closes before."""
    got, left = [], bytearray()

    def more() -> None:
        data = connection.recv(1 << 20)
        if not data:
            raise EOFError(f"closed after {bytes(left[:200])!r}")
        left.extend(data)

    for method in methods:
        while b"\r\n\r\n" not in left:
            more()
        head, _, rest = bytes(left).partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
        left = bytearray(rest)
        length = 0 if method == "HEAD" else int(fields.get("content-length", "0"))
        while len(left) < length:
            more()
        got.append((int(line.split()[1]), fields, bytes(left[:length])))
        del left[:length]
    assert not left, left[:200]
    return got


def spoken(service: Inside, *raw: bytes, end: bool = False) -> bytes:
    """All that comes back for ``raw`` on one connection, until the service closes it. ``end``: it is half-closed."""
    with dial(service) as one:
        for piece in raw:
            one.sendall(piece)
        if end:
            one.shutdown(socket.SHUT_WR)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := one.recv(1 << 20):
                got += piece
    return got


def until(condition: Callable[[], bool]) -> None:
    """Return when ``condition()`` is true; AssertionError after 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As YAML can hold them: paths are text, tuples lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        return [plain(one) for one in value] if isinstance(value, tuple) else value

    return {name: plain(value) for name, value in settings.items()}
