"""Handing a cached file to a reader on the same host: a descriptor of its own for reading, over the Unix socket.

A HEAD with ``Wds-Hand: 1`` requests it; 204 if not all of the object lies on disk. ``Wds-Hand: bad`` reports a wrong
file. The descriptor carries a shared ``flock``: no service gives blocks of its file back to the disk meanwhile."""

from __future__ import annotations

import array
import logging
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from wds_async.errors import ConfigError
from wds_async.redact import redact

if TYPE_CHECKING:
    from wds_async.service.cache.cache import CachedObject
    from wds_async.service.http_server import ClientConnection, HttpRequest

__all__ = ["ReadOnlyFolder", "hand", "log_handed", "open_anew", "wants_file"]

audit = logging.getLogger("wds_async.audit")
_HOW = (
    "It has to be the cache's folder by a read-only mount: mount --bind FOLDER PATH && mount -o remount,bind,ro PATH; "
    "for systemd BindReadOnlyPaths=FOLDER:PATH; in Kubernetes a second volumeMount of the volume, with readOnly: true"
)


def wants_file(request: HttpRequest) -> bool:
    """Return whether ``request`` asks for a descriptor, or reports a bad one; only over the Unix socket."""
    asks = request.method == "HEAD" and request.keep_alive and request.headers.get("wds-hand") in ("1", "bad")
    return asks and request.connection.local


class ReadOnlyFolder:
    """The cache's folder by a read-only mount of it, at ``path``. A file that is opened there cannot be opened again
    for writing, by root neither: the mount goes with the descriptor. ConfigError if ``path`` is not ``folder``, or not
    read-only."""

    def __init__(self, path: str, folder: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exn:
            raise ConfigError(f"hand_from: {path}: {exn.strerror or exn}. {_HOW}") from exn
        try:
            if not os.path.samestat(os.fstat(self._fd), os.stat(folder)):
                raise ConfigError(f"hand_from: {path} is another folder than the cache's, {folder}. {_HOW}")
            if not os.fstatvfs(self._fd).f_flag & os.ST_RDONLY:
                raise ConfigError(f"hand_from: {path} can be written to, so it protects nothing. {_HOW}")
        except BaseException:
            self.close()
            raise

    def open(self, held: CachedObject) -> int:
        """Return a new descriptor of the object's file, for reading. OSError if there is no such file any more."""
        assert held.path is not None
        fd = os.open(held.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        if os.path.samestat(os.fstat(fd), os.fstat(held.fd)):
            return fd
        os.close(fd)
        raise FileNotFoundError(f"{held.path}: it was replaced by another")

    def close(self) -> None:
        """Close the folder."""
        os.close(self._fd)


def open_anew(held: CachedObject) -> int:
    """Return a new descriptor of the object's file, for reading."""
    return os.open(f"/proc/self/fd/{held.fd}", os.O_RDONLY | os.O_CLOEXEC)


def hand(request: HttpRequest, own: int, size: int, fields: Mapping[str, str]) -> bool:
    """Answer ``request`` with the descriptor ``own`` of a file of ``size`` bytes, and close it. False, without an
    answer, if the file system has no locks. ConnectionResetError if the client does not read its answers: then there is
    no room for this one."""
    import fcntl  # noqa: PLC0415 (POSIX only)

    connection = request.connection
    try:
        fcntl.flock(own, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(own)
        return False
    raw = request.head(200, {"Wds-Handed": "1", **fields}, size)
    try:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [own]))
        whole = not connection.unsent and connection.own_socket.sendmsg([raw], [rights]) == len(raw)
    except BlockingIOError:
        whole = False
    finally:
        os.close(own)
    if not whole:
        connection.cut()
        raise ConnectionResetError("the client does not read its answers")
    return True


def log_handed(connection: ClientConnection, url: str) -> None:
    """Log which process requests files, once a connection, and (at debug) which files."""
    process, user, group = connection.process, connection.user, connection.group
    if not connection.files_logged:
        connection.files_logged = True
        audit.info("process %d of user %d, group %d asks for files", process, user, group)
    audit.debug("handed to process %d of user %d, group %d: %s", process, user, group, redact(url))
