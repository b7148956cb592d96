"""A link of a given rate to a network namespace of its own (Linux, as root)."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator

import click

__all__ = ["link"]


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(words)}: {done.stderr.strip()}")


_COUNT = itertools.count()


@contextlib.contextmanager
def link(rate: str) -> Iterator[tuple[str, str]]:
    """A network namespace joined to this one by a shaped veth pair; its name and its address inside.

    Addresses are from 198.18.0.0/15, which RFC 2544 sets aside for benchmarks.
    """
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise click.ClickException("this benchmark shapes a link: run it as root, with iproute2 installed")
    number = os.getpid() + next(_COUNT)  # a link that has just been removed may still have its name
    name, near, far = f"wdsb{number}", f"wdsn{number}", f"wdsf{number}"
    net = f"198.18.{number // 64 % 256}.{number % 64 * 4}".rpartition(".")
    here, there = (f"{net[0]}.{int(net[2]) + n}" for n in (1, 2))
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _run("ip", "address", "add", f"{here}/30", "dev", near)
        _run("ip", "link", "set", near, "up")
        _run("ip", "-n", name, "address", "add", f"{there}/30", "dev", far)
        _run("ip", "-n", name, "link", "set", far, "up")
        shape = ("tbf", "rate", rate, "burst", "1mb", "latency", "100ms")
        _run("tc", "-n", name, "qdisc", "add", "dev", far, "root", *shape)
        yield name, there
    finally:
        # The veth pair goes with the namespace that holds one end of it.
        _run("ip", "netns", "delete", name)
