"""Servers that tests and benchmarks stand on: real ones, started on a free port and stopped by their handle."""

from tests.servers.behaviour import BEFORE_HEAD, Behaviour, Request
from tests.servers.nginx import Nginx, NginxMissing
from tests.servers.origin import Origin
from tests.servers.shards import make_shard, make_shards, make_tar, png
from tests.servers.tls import Tls

__all__ = [
    "BEFORE_HEAD",
    "Behaviour",
    "Nginx",
    "NginxMissing",
    "Origin",
    "Request",
    "Tls",
    "make_shard",
    "make_shards",
    "make_tar",
    "png",
]
