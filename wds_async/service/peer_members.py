"""Members of a cluster of services: who they are, and which of them each chunk belongs to."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import os
import socket
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from wds_async.errors import ConfigError

__all__ = ["Ring", "address_of", "check_member", "find_own", "members_of", "read_token"]

_BLOCK = 512  # chunks that are ranked at once
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64
_MOST_MEMBERS = 4096
_EXAMPLES = (
    "write host:port, https://host:port, dns:name:port (all addresses of a name), or the path of a file of these"
)


class Ring:
    """Rendezvous hashing over ``members``, addresses such as ``http://10.0.0.3:51080``: each chunk belongs to the
    member with the highest hash of the two, so a member that comes or goes moves its own share only. ``own``: the
    address of this node, "" if it is none of them. ``names``: those of members that keep their chunks when their
    address changes."""

    def __init__(
        self, members: Iterable[str] = (), own: str = "", names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        own = own if own in (members := set(members)) else ""
        former = {one for one in members if one != own and own in names and names.get(one) == names[own]}
        self.members, self.own = tuple(sorted(members - former)), own
        self.names = {one: names[one] for one in self.members if one in names}
        self._own = self.members.index(own) if own else -1
        self._seeds = np.array([_hash(names.get(member, member)) for member in self.members], np.uint64)
        self._block = functools.lru_cache(4096)(self._rank)
        self.owned = functools.lru_cache(4096)(self._owned)

    def ranked(self, key: str, number: int) -> tuple[str, ...]:
        """Return the first two members for a chunk: its owner, and who stands in for that."""
        if len(self.members) < 2:
            return self.members
        first, second = self._block(key, number // _BLOCK)
        return self.members[first[number % _BLOCK]], self.members[second[number % _BLOCK]]

    def owns(self, key: str, number: int) -> bool:
        """Return whether a chunk belongs to this node. Without members all do."""
        if not self.members:
            return True
        return bool(self._block(key, number // _BLOCK)[0][number % _BLOCK] == self._own)

    def _owned(self, key: str, count: int) -> Sequence[int]:
        """Return the numbers of those of ``count`` chunks that belong to this node."""
        if not self.members:
            return range(count)
        firsts = np.concatenate([self._block(key, block)[0] for block in range(-(-count // _BLOCK))] or [np.zeros(0)])
        return [int(number) for number in np.flatnonzero(firsts[:count] == self._own)]

    def _rank(self, key: str, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the first and of the second member for each chunk of a block."""
        numbers = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
        chunks = _mixed(np.uint64(_hash(key)) + numbers * np.uint64(_GOLDEN))
        scores = _mixed(chunks[:, None] ^ self._seeds[None, :])
        first = scores.argmax(axis=1)
        scores[np.arange(_BLOCK), first] = 0
        return first.astype(np.int16), scores.argmax(axis=1).astype(np.int16)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) of each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))  # type: ignore[no-any-return]


def check_member(entry: str) -> None:
    """Raise ConfigError for an entry of ``peers`` that names no member."""
    if not (entry.startswith(("/", "dns:"))):
        address_of(entry, 51080, "http")
    elif entry.startswith("dns:") and not entry.removeprefix("dns:").strip("/"):
        raise ConfigError(f"peers: {entry!r} has no name; {_EXAMPLES}")


def members_of(entries: Iterable[str], port: int, scheme: str) -> list[str]:
    """Return the addresses of the members that ``entries`` name now. ``port`` and ``scheme`` are for those without.
    OSError if a file cannot be read or a name cannot be resolved; ConfigError for what is no address. Blocks."""
    members: list[str] = []
    for entry in entries:
        if entry.startswith("/"):
            lines = Path(entry).read_text(encoding="utf-8").splitlines()
            named = [line.split("#", 1)[0].strip() for line in lines]
            members += [address_of(name, port, scheme) for name in named if name]
        elif entry.startswith("dns:"):
            members += _resolved(address_of(entry.removeprefix("dns:").strip("/"), port, scheme))
        else:
            members.append(address_of(entry, port, scheme))
    if len(set(members)) > _MOST_MEMBERS:
        raise ConfigError(f"peers: {len(set(members))} members, and at most {_MOST_MEMBERS} are known")
    return members


def find_own(members: Iterable[str], port: int) -> str:
    """Return the address among ``members`` that is one of this machine's, with ``port``; "" for none. Blocks."""
    for member in members:
        parts = urllib.parse.urlsplit(member)
        if parts.port == port and _is_here(parts.hostname or ""):
            return member
    return ""


def _resolved(address: str) -> list[str]:
    """Return ``address`` with each of the addresses that its host resolves to; metadata servers, multicast and the like
    are left out."""
    parts = urllib.parse.urlsplit(address)
    infos = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    found = []
    for host in sorted({str(info[4][0]) for info in infos}):
        ip = ipaddress.ip_address(host.partition("%")[0])
        if not (ip.is_multicast or ip.is_unspecified or ip.is_link_local):
            found.append(f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}")
    return found


def address_of(text: str, port: int, scheme: str) -> str:
    """Return ``scheme://host:port`` of a member. ConfigError if it is none."""
    bare = text.count(":") > 1 and "[" not in text and "://" not in text  # an IPv6 address, as a pod's is given
    url = text if "://" in text else f"{scheme}://{f'[{text}]' if bare else text}"
    try:
        parts = urllib.parse.urlsplit(url)
        host, number = parts.hostname or "", parts.port or port
    except ValueError:
        raise ConfigError(f"peers: {text[:100]!r} is no member; {_EXAMPLES}") from None
    plain = parts.scheme in ("http", "https") and parts.path in ("", "/") and not parts.query and "@" not in url
    if not host or not plain or not number or any(char.isspace() for char in url):
        raise ConfigError(f"peers: {text[:100]!r} is no member; {_EXAMPLES}")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{number}"


def _is_here(host: str) -> bool:
    """Return whether ``host`` is an address of this machine: one that a socket can be bound to."""
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in infos:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
            return True
        except OSError:
            continue
    return False


def read_token(path: str) -> str:
    """Return the first word of the first line of a file of tokens. ConfigError if there is none. Blocks."""
    try:
        lines = Path(os.fspath(path)).read_text(encoding="utf-8").splitlines()
    except OSError as exn:
        raise ConfigError(f"the token for peers: {path}: {exn.strerror or exn}") from exn
    words = [line.split("#", 1)[0].split() for line in lines]
    token = next((line[0] for line in words if line), "")
    if not token.isascii() or not token.isprintable() or not token:
        raise ConfigError(f"the token for peers: {path} has none in its first line")
    return token
