"""Ceph's own S3 gateway with the smallest cluster that it runs on: one monitor, one object store in memory.

As unprivileged as its user, in a temporary folder, and gone with its handle. Starts in about two seconds.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.process import ServerMissing, free_port, launch, required, stop, until

__all__ = ["KEY", "SECRET", "RadosGateway", "RadosGatewayMissing", "radosgw"]

KEY, SECRET = "AKIARADOSRADOSRADOS1", "hush-rados-secret"

_PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_START_TIMEOUT_S = 40.0

# Without keys, and so without encryption of the wire, which the gateway would insist on. The monitor may answer at
# once: what waits by default would add up to half a minute.
_CONFIG = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{monitor}/0]
public network = 127.0.0.0/8
ms bind msgr1 = false
ms mon client mode = crc
ms mon cluster mode = crc
ms mon service mode = crc
auth cluster required = none
auth service required = none
auth client required = none
keyring = {folder}/keyring
run dir = {folder}
pid file = {folder}/$name.pid
admin socket = {folder}/$name.$pid.asok
log file = {folder}/$name.log
mon data = {folder}/mon
mon data avail warn = 0
mon data avail crit = 0
mon allow pool size one = true
paxos propose interval = 0.05
paxos min wait = 0.01
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 1073741824
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
[client.rgw]
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw enable apis = s3
rgw run sync thread = false
rgw enable gc threads = false
rgw enable lc threads = false
rgw enable quota threads = false
rgw thread pool size = 32
{extra}
"""


class RadosGatewayMissing(ServerMissing):
    """Ceph's programs are not installed on this machine."""


class RadosGateway:
    """A store with one user, `KEY` and `SECRET`. ``extra`` are lines for the gateway's section of the configuration."""

    def __init__(self, extra: str = "") -> None:
        self.extra = extra
        self.port = 0
        self._folder: Path | None = None
        self._running: list[subprocess.Popen[bytes]] = []

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> RadosGateway:
        """Start it and return when it answers; `RadosGatewayMissing` where it cannot be had."""
        missing = [name for name in _PROGRAMS if shutil.which(name) is None]
        if missing:
            raise RadosGatewayMissing(f"{', '.join(missing)}: apt-get install radosgw ceph-mon ceph-osd")
        folder = self._folder = Path(tempfile.mkdtemp(prefix="wds-rados-"))
        try:
            self._start(folder)
        except BaseException as exn:
            said = "\n".join(path.read_text(errors="replace")[-800:] for path in folder.glob("*.out"))
            self.stop()
            if isinstance(exn, Exception):
                raise RuntimeError(f"radosgw did not start: {exn}\n{said}") from exn
            raise
        return self

    def stop(self) -> None:
        """Stop it and remove its folder; harmless when it is not running."""
        while self._running:
            # The gateway first. Nothing here is to be kept, and its own end takes seconds.
            stop(self._running.pop(), signal.SIGKILL)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> RadosGateway:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _start(self, folder: Path) -> None:
        fsid, osd_id = str(uuid.uuid4()), str(uuid.uuid4())
        monitor, self.port = free_port(), free_port()
        config = folder / "ceph.conf"
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()
        text = _CONFIG.format(fsid=fsid, monitor=monitor, port=self.port, folder=folder, extra=self.extra)
        config.write_text(text)
        conf = ["-c", str(config)]
        keyring = str(folder / "keyring")
        self._do("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "client.rgw")
        self._do("ceph-authtool", keyring, "--gen-key", "-n", "client.admin")
        monmap = str(folder / "monmap")
        self._do("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{monitor}]", monmap)
        self._do("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, *conf)
        self._launch("ceph-mon", "-i", "a", "-f", *conf)
        self._do("ceph", *conf, "osd", "new", osd_id)
        self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_id, *conf)
        self._launch("ceph-osd", "-i", "0", "-f", *conf)
        self._until(lambda: json.loads(self._do("ceph", *conf, "-f", "json", "osd", "stat"))["num_up_osds"] == 1)
        self._launch("radosgw", "-f", "-n", "client.rgw", *conf)
        self._until(self._answers)
        user = ("user", "create", "--uid=tester", "--display-name=tester")
        self._do("radosgw-admin", "-n", "client.rgw", *conf, *user, f"--access-key={KEY}", f"--secret-key={SECRET}")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(self.base, timeout=1):
            return True
        return False

    def _do(self, *command: str) -> bytes:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stderr.decode(errors='replace')[-800:]}")
        return done.stdout

    def _launch(self, *command: str) -> None:
        assert self._folder is not None
        self._running.append(launch(command, self._folder / f"{command[0]}.out", death="KILL"))

    def _until(self, ready: Callable[[], bool]) -> None:
        if not until(self._running[-1], ready, _START_TIMEOUT_S):
            raise RuntimeError(f"{self._running[-1].args!r} is not ready")


def started(extra: str = "") -> RadosGateway:
    """A running one; skips where it is not installed, fails instead with ``WDS_REQUIRE_SERVERS=1``."""
    with required():
        return RadosGateway(extra).start()


@pytest.fixture(scope="session")
def radosgw() -> Iterator[Any]:
    """One gateway for all tests; it answers more than four requests at once with ``503 SlowDown``."""
    gateway = started("rgw scheduler type = throttler\nrgw max concurrent requests = 4")
    yield gateway
    gateway.stop()
