"""The service as a process of its own, for the scenario ``service``: started and stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.servers.process import free_port

__all__ = ["ServeProcess"]

ROOT = Path(__file__).parent.parent
_START_WITHIN_S = 30.0
_STOP_WITHIN_S = 40.0


class ServeProcess:
    """``wds-async serve`` with ``options`` over the bucket ``bench``, which stands for the folder at ``origin``."""

    def __init__(self, folder: Path, origin: str, *options: str) -> None:
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self._command = [
            *(sys.executable, "-m", "wds_async", "serve", "--port", str(self.port), "--folder", str(folder)),
            *("--allow", f"{origin}/", "--bucket", f"bench={origin}/", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None, "not started"
        return self._process.pid

    def url(self, name: str) -> str:
        """Where it gives the shard ``name``."""
        return f"{self.base}/v1/objects/bench/{name}?provider=ais"

    def stats(self) -> dict[str, Any]:
        """Its ``/v1/stats``."""
        with urllib.request.urlopen(f"{self.base}/v1/stats", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def __enter__(self) -> ServeProcess:
        self._process = subprocess.Popen(self._command, cwd=ROOT, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_WITHIN_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.base}/readyz", timeout=5):
                    return self
            except OSError:
                time.sleep(0.05)
        self._process.kill()
        raise RuntimeError(f"the service did not start: {' '.join(self._command)}")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
