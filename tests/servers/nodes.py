"""Several nodes on one machine: network namespaces joined by a bridge, on which this process can be reached too. Linux,
as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess

from tests.servers.process import ServerMissing

__all__ = ["Nodes"]


class Nodes:
    """``count`` namespaces with an address each; use it as a context manager. Servers of this process listen at
    `here`; what they send to all nodes together is limited to ``rate``, as ``tc`` writes it (``400mbit``), "" for no
    limit; what the nodes send each other is not. ServerMissing where this machine has no such thing."""

    def __init__(self, count: int, rate: str = "") -> None:
        number = os.getpid()
        self._bridge, self._rate = f"wdsb{number}", rate
        self.names = [f"wdsn{number}x{node}" for node in range(count)]
        # Of 198.18.0.0/15, which RFC 2544 sets aside for such tests; `link` has others of it.
        net = f"198.18.{128 + number % 128}"
        self.here, self.addresses = f"{net}.1", [f"{net}.{node + 2}" for node in range(count)]

    def __enter__(self) -> Nodes:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise ServerMissing("nodes of their own need root, and ip and tc (apt-get install iproute2)")
        try:
            self._run("ip", "link", "add", self._bridge, "type", "bridge")
        except OSError as exn:
            raise ServerMissing(f"this machine gives no bridge: {exn}") from exn
        try:
            self._make()
        except OSError as exn:
            self.__exit__()
            raise ServerMissing(f"this machine gives no network namespaces: {exn}") from exn
        return self

    def __exit__(self, *exc: object) -> None:
        for node, name in enumerate(self.names):
            with contextlib.suppress(OSError):
                self._run("ip", "netns", "delete", name)
            with contextlib.suppress(OSError):  # unless its namespace took it along
                self._run("ip", "link", "delete", self._port(node))
        with contextlib.suppress(OSError):
            self._run("ip", "link", "delete", self._bridge)

    def inside(self, node: int) -> list[str]:
        """What runs a command in a node: the words before it."""
        return ["ip", "netns", "exec", self.names[node]]

    def cut(self, node: int) -> None:
        """Take a node's cable out: nothing passes any more, and no other node is told."""
        self._run("ip", "link", "set", self._port(node), "down")

    def _make(self) -> None:
        self._run("ip", "address", "add", f"{self.here}/24", "dev", self._bridge)
        self._run("ip", "link", "set", self._bridge, "up")
        for node, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            self._run("ip", "netns", "add", name)
            self._run("ip", "link", "add", self._port(node), "type", "veth", "peer", "name", "eth0", "netns", name)
            self._run("ip", "link", "set", self._port(node), "master", self._bridge, "up")
            self._run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            self._run("ip", "-n", name, "link", "set", "eth0", "up")
            self._run("ip", "-n", name, "link", "set", "lo", "up")
        if self._rate:
            shape = ("tbf", "rate", self._rate, "burst", "512kb", "latency", "100ms")
            self._run("tc", "qdisc", "add", "dev", self._bridge, "root", *shape)

    def _port(self, node: int) -> str:
        return f"wdsp{self._bridge.removeprefix('wdsb')}x{node}"

    @staticmethod
    def _run(*words: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
