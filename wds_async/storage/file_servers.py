"""Clients of file servers (FTP, SFTP, WebDAV): time limits, closing, broken connections and errors. None of their
packages is imported here.
"""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import Mapping
from typing import Any

from wds_async.errors import ConfigError
from wds_async.storage.base import Fault, Verdict

__all__ = [
    "SERVER_EXTRAS",
    "end_session",
    "explain_session",
    "holds_connection",
    "prepared_session",
    "put_by_rename",
    "read_range",
    "renames_exclusively",
    "said_by_url",
    "started",
    "user_of",
]

_SFTP = frozenset({"sftp", "ssh"})
_WEBDAV = frozenset({"webdav", "dav"})
SERVER_EXTRAS = {"sftp": _SFTP, "webdav": _WEBDAV}
"""Extras of this package, and the protocols that each brings."""
_ANSWER_S = 10.0
"""Seconds that a server may be silent. Limits of these clients themselves are 15 s and 30 s, or none."""
_AS_WHOM = "Check the user and password: in the URL (user:password@), or username and password in storage_options."
_DENIED = frozenset(
    {"AuthenticationException", "BadAuthenticationType", "PasswordRequiredException", "ForbiddenOperation"}
)
_BROKEN = frozenset({"SSHException", "ChannelException", "EOFError", "error_temp", "error_reply", "error_proto"})


def prepared_session(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a file server's client, with time limits. Raise ConfigError for WebDAV without a server."""
    if protocol == "ftp":
        return {"timeout": _ANSWER_S, **options}
    if protocol in _SFTP:
        limits = {"timeout": _ANSWER_S, "banner_timeout": _ANSWER_S, "auth_timeout": _ANSWER_S}
        return {**limits, **options}
    if protocol in _WEBDAV and not ("base_url" in options or "client" in options):
        raise ConfigError(
            f"{protocol}:// names a path only: give its server as storage_options="
            f'{{"{protocol}": {{"base_url": "https://…", "auth": (user, password)}}}}'
        )
    if protocol in _WEBDAV and isinstance(options.get("auth"), list):  # as JSON has it; httpx refuses, and quotes it
        return {**options, "auth": tuple(options["auth"])}
    return dict(options)


def said_by_url(options: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the user and password that fsspec took from a URL: it leaves ``%40`` for ``@``."""
    quoted = {name: urllib.parse.unquote(options[name]) for name in ("username", "password") if options.get(name)}
    return {**options, **quoted}


def _speaks(filesystem: Any) -> frozenset[str]:
    spoken = getattr(filesystem, "protocol", ())
    return frozenset({spoken} if isinstance(spoken, str) else spoken)


def holds_connection(filesystem: Any) -> bool:
    """Return whether all its calls go over one connection, so that it is useless once that breaks."""
    return "ftp" in _speaks(filesystem) or not _SFTP.isdisjoint(_speaks(filesystem))


def started(filesystem: Any) -> Any:
    """Set a time limit for reads, which paramiko does not, and return the filesystem."""
    if not _SFTP.isdisjoint(_speaks(filesystem)):
        filesystem.ftp.get_channel().settimeout(3 * _ANSWER_S)
    return filesystem


def end_session(filesystem: Any) -> None:
    """Close the connection of a filesystem, if it has one. May block for a moment."""
    spoken = _speaks(filesystem)
    with contextlib.suppress(Exception):
        if "ftp" in spoken:
            filesystem.ftp.close()
        elif not _SFTP.isdisjoint(spoken):
            transport = filesystem.client.get_transport()
            filesystem.client.close()
            transport.join(1.0)  # its thread ends by itself, but a moment later
        elif not _WEBDAV.isdisjoint(spoken):
            filesystem.client.http.close()


def read_range(filesystem: Any, path: str, start: int, stop: int) -> bytes:
    """Return bytes ``[start, stop)``. SFTP requests them all at once: one by one, 32 KiB take a round trip each."""
    if _SFTP.isdisjoint(_speaks(filesystem)):
        return bytes(filesystem.cat_file(path, start=start, end=stop))
    with filesystem.ftp.open(path) as file:
        return b"".join(file.readv([(start, stop - start)]))


def renames_exclusively(filesystem: Any) -> bool:
    """Return whether its renaming fails where the new name is taken: SFTP's, which OpenSSH does by a link."""
    return not _SFTP.isdisjoint(_speaks(filesystem))


def put_by_rename(filesystem: Any, path: str, data: bytes) -> bool:
    """Write ``data`` under another name in the folder, then rename it. Return False where ``path`` is taken."""
    folder, _, name = path.rpartition("/")
    if folder:
        filesystem.makedirs(folder, exist_ok=True)
    first = f"{folder}/.{name}.{os.urandom(4).hex()}.tmp"
    filesystem.pipe_file(first, data)
    try:
        filesystem.ftp.rename(first, path)
    except OSError:
        if not filesystem.exists(path):
            raise
        return False
    else:
        first = ""
    finally:
        if first:
            with contextlib.suppress(Exception):  # must not hide the error that led here
                filesystem.ftp.remove(first)
    return True


def user_of(url: str, options: Mapping[str, Any]) -> str:
    """Return the user name in the URL or the options, "" where there is none."""
    with contextlib.suppress(ValueError):
        if name := urllib.parse.urlsplit(url.rpartition("::")[2]).username:
            return urllib.parse.unquote(name)
    auth = options.get("auth")
    first = auth[0] if isinstance(auth, tuple | list) and auth else ""
    return str(options.get("username") or first or "")


def explain_session(exn: BaseException, user: str = "") -> Fault | None:
    """Explain an exception of one of these clients; None for others."""
    name, text = type(exn).__name__, str(exn).rstrip(".") or type(exn).__name__
    denied = Fault(Verdict.DENIED, f"{text} (as user {user!r})" if user else f"{text} (no user was given)", _AS_WHOM)
    status = getattr(exn, "status_code", None)
    if name in _DENIED or "No authentication methods" in text:
        return denied
    if name == "BadHostKeyException":
        return Fault(Verdict.FATAL, text, "The server's key is not that in known_hosts.")
    if name == "NoValidConnectionsError":
        return Fault(Verdict.TRANSIENT, text.removeprefix("[Errno None] "), "Check that the server runs on this port.")
    if name == "error_perm":
        if text[:3] in ("530", "532"):
            return denied
        missing = text.startswith("550")
        return Fault(Verdict.MISSING if missing else Verdict.FATAL, f"the server answered: {text}")
    if name == "HTTPError" and isinstance(status, int):
        if status in (401, 403, 407):
            return denied
        again = status in (408, 409, 425, 429) or status >= 500
        verdict = Verdict.TRANSIENT if again else Verdict.FATAL
        return Fault(verdict, f"the server answered {status}", throttled=status in (429, 503))
    if name in _BROKEN:
        return Fault(Verdict.TRANSIENT, f"the connection broke: {text}", "Check the network and the server.")
    if type(exn).__module__.partition(".")[0] in ("httpx", "httpcore"):
        verdict = Verdict.STALLED if "Timeout" in name else Verdict.TRANSIENT
        return Fault(verdict, f"{name}: {text}", "Check the network and the server.")
    return None
