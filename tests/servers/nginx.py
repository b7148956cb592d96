"""nginx as a child process in a folder of its own, without privileges and gone with its handle."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.servers.process import ServerMissing, accepts, free_port, launch, stop, until

__all__ = ["STORE_LATENCY_MS", "STORE_RATE_BYTES_S", "Nginx", "NginxMissing", "free_port"]

STORE_LATENCY_MS = 50
STORE_RATE_BYTES_S = 50_000_000
"""Object stores look like this: 30 to 100 ms to the first byte, 50 to 100 MB/s a connection."""

_ECHO_MODULE = Path("/usr/lib/nginx/modules/ngx_http_echo_module.so")
_START_TIMEOUT_S = 10.0

_CONFIG = """\
{modules}
{user}
daemon off;
master_process off;
worker_processes 1;
pid {prefix}/nginx.pid;
error_log {prefix}/error.log warn;
events {{ worker_connections 4096; }}
http {{
    log_format json escape=json '{{"connection":$connection,"connection_s":$connection_time,"end":$msec,'
        '"request_s":$request_time,'
        '"method":"$request_method","uri":"$request_uri","range":"$http_range","status":$status,'
        '"body_bytes":$body_bytes_sent}}';
    access_log {access_log};
    client_body_temp_path {prefix}/body;
    proxy_temp_path {prefix}/proxy;
    fastcgi_temp_path {prefix}/fastcgi;
    uwsgi_temp_path {prefix}/uwsgi;
    scgi_temp_path {prefix}/scgi;
    types {{ application/x-tar tar; text/html html; }}
    default_type application/octet-stream;
    sendfile on;
    tcp_nopush on;
    keepalive_timeout 60s;
    keepalive_requests 1000000;
    {http}
    server {{
        listen {host}:{port} {ssl};
        {tls}
        root {root};
        {locations}
        {extra}
    }}
}}
"""


class NginxMissing(ServerMissing):
    """nginx, or a module of it, is not installed on this machine."""


@functools.cache
def _program() -> str:
    found = shutil.which("nginx", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")
    if found is None:
        raise NginxMissing("nginx is not installed: apt-get install nginx-light libnginx-mod-http-echo")
    return found


def _module(name: str) -> Path:
    path = _ECHO_MODULE.with_name(f"ngx_http_{name}_module.so")
    if not path.exists():
        raise NginxMissing(f"nginx has no such module: apt-get install libnginx-mod-http-{name.replace('_', '-')}")
    return path


class Nginx:
    """Serves the files under ``root``; use it as a context manager, or ``start`` and ``stop``.

    ``tls`` is ``(certificate, key)``. ``latency_ms`` is the time to the first byte of every answer, and
    ``rate_bytes_s`` the pace of each connection's body, in steps of 5 ms. ``ignore_ranges`` answers 200 with the
    whole file, ``gzip`` compresses on the fly (chunked, without ranges). ``extra`` are directives of the
    ``server`` block; they override what is set around them. ``modules`` are names of Debian's dynamic modules.
    ``command`` runs before nginx's own (``ip netns exec name``), and ``host`` is then an address inside.
    """

    def __init__(
        self,
        root: Path,
        *,
        tls: tuple[Path, Path] | None = None,
        rate_bytes_s: int | None = None,
        latency_ms: float = 0,
        ignore_ranges: bool = False,
        gzip: bool = False,
        access_log: bool = False,
        extra: str = "",
        modules: Sequence[str] = (),
        host: str = "127.0.0.1",
        command: Sequence[str] = (),
    ) -> None:
        self.root, self.tls, self.host = root, tls, host
        self.rate_bytes_s, self.latency_ms = rate_bytes_s, latency_ms
        self.ignore_ranges, self.gzip, self.access_log, self.extra = ignore_ranges, gzip, access_log, extra
        self.port = 0
        self.modules = modules
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._prefix: Path | None = None

    @classmethod
    def store_like(cls, root: Path, **kwargs: Any) -> Nginx:
        """50 ms to the first byte, 50 MB/s a connection."""
        return cls(root, rate_bytes_s=STORE_RATE_BYTES_S, latency_ms=STORE_LATENCY_MS, **kwargs)

    @property
    def base(self) -> str:
        """``http://127.0.0.1:port`` (``https://localhost:port`` with TLS), without a final slash."""
        if self.tls:
            return f"https://{'localhost' if self.host == '127.0.0.1' else self.host}:{self.port}"
        return f"http://{self.host}:{self.port}"

    def url(self, path: str) -> str:
        """The URL of ``path``, which is relative to ``root``."""
        return f"{self.base}/{path.lstrip('/')}"

    def log(self) -> list[dict[str, Any]]:
        """One entry an answered request, in the order in which the answers ended; needs ``access_log``."""
        assert self._prefix is not None, "not started"
        path = self._prefix / "access.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def start(self) -> Nginx:
        """Start it and return when it accepts connections; `NginxMissing` where it cannot be had."""
        for attempt in range(5):
            self.port = free_port() if not self._command else 18080
            if self._launch():
                return self
            message = self._failure()
            self.stop()
            if "Address already in use" not in message or attempt == 4:
                raise RuntimeError(f"nginx did not start: {message}")
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Stop it and remove its folder; harmless when it is not running."""
        process, self._process = self._process, None
        stop(process)
        prefix, self._prefix = self._prefix, None
        if prefix is not None:
            shutil.rmtree(prefix, ignore_errors=True)

    def __enter__(self) -> Nginx:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _launch(self) -> bool:
        program = _program()
        self._prefix = Path(tempfile.mkdtemp(prefix="wds-nginx-"))
        (self._prefix / "nginx.conf").write_text(self._config(self._prefix))
        command = [program, "-p", str(self._prefix), "-c", "nginx.conf"]
        self._process = launch(command, self._prefix / "stderr", before=self._command)
        written = self._prefix / "nginx.pid"
        return until(
            self._process,
            lambda: written.exists() and (bool(self._command) or accepts(self.port, self.host)),
            _START_TIMEOUT_S,
        )

    def _failure(self) -> str:
        assert self._prefix is not None
        texts = [self._prefix / "stderr", self._prefix / "error.log"]
        return "\n".join(t.read_text(errors="replace") for t in texts if t.exists())[-2000:]

    def _config(self, prefix: Path) -> str:
        http = []
        if self.rate_bytes_s:
            # nginx lets each step go at once and then pauses for as long as it should have taken, in whole
            # milliseconds. With its own steps (2 MB, over TLS 32 KB) parts of a few MB are hardly slowed.
            step = max(1024, self.rate_bytes_s // 200)
            http += [
                f"limit_rate {self.rate_bytes_s};",
                f"sendfile_max_chunk {step};",
                f"output_buffers 2 {step};",
            ]
        if self.ignore_ranges:
            http.append("max_ranges 0;")
        if self.gzip:
            http.append("gzip on; gzip_types *; gzip_min_length 0; gzip_comp_level 1;")
        modules, locations = "".join(f"load_module {_module(name)};" for name in self.modules), ""
        if self.latency_ms:
            if not _ECHO_MODULE.exists():
                raise NginxMissing("nginx has no echo module: apt-get install libnginx-mod-http-echo")
            modules += f"load_module {_ECHO_MODULE};"
            locations = (
                f"location / {{ echo_sleep {self.latency_ms / 1000:.3f}; echo_exec @file; }}\n"
                "        location @file { }"
            )
        return _CONFIG.format(
            modules=modules,
            user="user root;" if hasattr(os, "geteuid") and os.geteuid() == 0 else "",
            prefix=prefix,
            access_log=f"{prefix}/access.log json" if self.access_log else "off",
            http="\n    ".join(http),
            host=self.host,
            port=self.port,
            ssl="ssl" if self.tls else "",
            tls=f"ssl_certificate {self.tls[0]}; ssl_certificate_key {self.tls[1]};" if self.tls else "",
            root=Path(self.root).absolute(),
            locations=locations,
            extra=self.extra,
        )
