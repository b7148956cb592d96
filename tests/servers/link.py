"""A link to another network namespace: a veth pair whose near end is shaped, and can be cut. Linux, as root.

Servers stay where they are and listen at `Link.here`; clients get sockets from `Link.connect` that were made on the
other side, so all that they receive comes through the link.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable

from tests.servers.process import ServerMissing

__all__ = ["Link"]

_CLONE_NEWNET = 0x40000000


class Link:
    """Use it as a context manager. ``rate`` is that of what goes to the other side, as ``tc`` writes it (``80mbit``).
    ServerMissing where this machine has no such thing."""

    def __init__(self, rate: str) -> None:
        number = os.getpid()
        self._name, self._near, self._far = f"wdst{number}", f"wdstn{number}", f"wdstf{number}"
        self._rate = rate
        # Of 198.18.0.0/15, which RFC 2544 sets aside for such tests; benchmarks take the lower half.
        net, last = f"198.19.{number // 64 % 256}", number % 64 * 4
        self.here, self.there = f"{net}.{last + 1}", f"{net}.{last + 2}"

    def __enter__(self) -> Link:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise ServerMissing("a link of its own needs root, and ip and tc (apt-get install iproute2)")
        try:
            _run("ip", "netns", "add", self._name)
        except OSError as exn:
            raise ServerMissing(f"this machine gives no network namespaces: {exn}") from exn
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):  # the veth pair goes with the namespace that holds one end of it
            _run("ip", "netns", "delete", self._name)
        with contextlib.suppress(OSError):  # unless sockets still keep that alive
            _run("ip", "link", "delete", self._near)

    def _make(self) -> None:
        _run("ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._name)
        _run("ip", "address", "add", f"{self.here}/30", "dev", self._near)
        _run("ip", "link", "set", self._near, "up")
        _run("ip", "-n", self._name, "address", "add", f"{self.there}/30", "dev", self._far)
        _run("ip", "-n", self._name, "link", "set", self._far, "up")
        _run("tc", "qdisc", "add", "dev", self._near, "root", *self._shape(self._rate))

    def shape(self, rate: str) -> None:
        """Another rate from now on."""
        _run("tc", "qdisc", "change", "dev", self._near, "root", *self._shape(rate))

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told."""
        _run("ip", "link", "set", self._near, "down")

    def mend(self) -> None:
        """Things pass again; harmless where they do."""
        _run("ip", "link", "set", self._near, "up")

    def connect(self, port: int, receive_bytes: int | None = None) -> socket.socket:
        """A connection from the other side to ``port`` here. ``receive_bytes``: its buffer's size."""
        return _inside(self._name, lambda: _connected(self.here, port, receive_bytes))

    @staticmethod
    def _shape(rate: str) -> tuple[str, ...]:
        return "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"


def _connected(host: str, port: int, receive_bytes: int | None) -> socket.socket:
    one = socket.socket()
    try:
        if receive_bytes is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        one.settimeout(60)
        one.connect((host, port))
    except BaseException:
        one.close()
        raise
    return one


def _inside(name: str, make: Callable[[], socket.socket]) -> socket.socket:
    """What ``make`` makes on a thread of its own that is in namespace ``name``."""
    found: list[socket.socket | BaseException] = []

    def run() -> None:
        try:
            with open(f"/run/netns/{name}") as space:
                if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            found.append(make())
        except BaseException as exn:
            found.append(exn)

    thread = threading.Thread(target=run, name="inside")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
