"""Handing a cached file to a reader on the same host: its open descriptor, over the Unix socket (SCM_RIGHTS).

Asked for by a HEAD with ``Wds-Hand: 1``: the object's head comes back with ``Wds-Handed: 1`` and the descriptor, or 204
where not all of it lies on disk (the reader then asks for ranges). Only descriptors cross the socket, so it works from
a container that shares nothing else; what is evicted meanwhile lives on until the last reader has closed it.

The descriptor is opened anew for each reader, and for reading only: nobody shares a position or flags with the cache.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING, Protocol

from wds_async.redact import redact
from wds_async.service.heads import Head

if TYPE_CHECKING:
    from wds_async.service.door import Door

__all__ = ["credentials", "hand", "wants_file"]

audit = logging.getLogger("wds_async.audit")

_NOT_WHOLE = b"HTTP/1.1 204 No Content\r\n\r\n"
_UCRED = struct.Struct("3i")


class _Counted(Protocol):
    def served(self, api: str, code: int, first_byte_s: float, count: int, url: str = "", client: str = "") -> None: ...


def wants_file(head: Head) -> bool:
    """Whether ``head`` asks for a descriptor."""
    return head.method == "HEAD" and head.keep_alive and head.fields.get(b"wds-hand") == b"1"


def hand(door: Door, head: Head, peer: str, connection: socket.socket, meters: _Counted) -> None:
    """Answer ``head`` by the object's file, or by 204: also where nothing is known of it, or it is not for this client,
    whom the ranges that it asks for next will tell why. OSError where the answer does not go out whole."""
    opened = door.opened(head, peer, local=True)
    if opened is None:
        _send(connection, _NOT_WHOLE)
        return
    found, passed, client = opened
    try:
        size = found.size
        if size is None or found.fd < 0 or not found.whole or found.ready(0, size) < size:
            _send(connection, _NOT_WHOLE)
            return
        lines, _ = door.fields(found, passed.api)
        raw = b"HTTP/1.1 200 OK\r\nWds-Handed: 1\r\n%sContent-Length: %d\r\n%s\r\n" % (lines, size, door.date())
        own = os.open(f"/proc/self/fd/{found.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _send(connection, raw, own)
        finally:
            os.close(own)
        found.served(size)
        door.rules.heard(client, passed.url)
        meters.served("handed", 200, 0.0, size, passed.url, client)
        audit.debug("handed to process %d of user %d, group %d: %s", *credentials(connection), redact(passed.url))
    finally:
        found.release()


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other side, as the kernel knows them; a process of another namespace is 0. -1
    where no kernel says so."""
    if not hasattr(socket, "SO_PEERCRED"):
        return -1, -1, -1
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def _send(connection: socket.socket, raw: bytes, fd: int = -1) -> None:
    ancillary = [] if fd < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    if connection.sendmsg([raw], ancillary) != len(raw):  # it fits into an empty socket buffer, or nobody reads
        raise BlockingIOError("the client does not read its answers")
