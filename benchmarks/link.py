"""``python -m benchmarks.link``: the store-like server behind a link shaped to 2 Gbit/s (Linux, as root)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import click

from benchmarks.corpus import image_like
from benchmarks.harness import Bench, command
from benchmarks.http import shard_bytes

__all__ = ["link", "main"]

RATE = "2gbit"


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def link(rate: str = RATE) -> Iterator[tuple[str, str]]:
    """A network namespace joined to this one by a shaped veth pair; its name and its address inside.

    Addresses are from 198.18.0.0/15, which RFC 2544 sets aside for benchmarks.
    """
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise click.ClickException("this benchmark shapes a link: run it as root, with iproute2 installed")
    number = os.getpid()
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


@command("link")
def main(bench: Bench) -> None:
    """Throughput through a 2 Gbit/s link, against what curl gets with 16 connections."""
    corpus = image_like(bench.root, bench.shards, shard_bytes(bench), distinct=False)
    with link() as (name, address):
        inside = ("ip", "netns", "exec", name)
        with bench.nginx(store_like=True, command=inside, host=address) as server:
            results = bench.read(f"link of {RATE}", server, corpus, ["wds_async", "curl -Z", "webdataset"])
    ours, curl = results.get("wds_async"), results.get("curl -Z")
    if ours and curl:
        bench.ratio_bar("link: throughput, ours over curl -Z", 0.93, ours.mb_s, curl.mb_s)
    bench.memory_bar("link", ours)


if __name__ == "__main__":
    main()
