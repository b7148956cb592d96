"""The servers that fsspec's other filesystems are proved on, each in a process of its own: FTP (pyftpdlib), SFTP
(paramiko's own server interface) and WebDAV (wsgidav on cheroot). All know one user and serve one folder as the root.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PACKAGES", "PASSWORD", "USER", "Other", "OtherMissing", "free_port"]

USER, PASSWORD = "reader", "hush-Pa55word"
PACKAGES = {"ftp": ("pyftpdlib",), "sftp": ("paramiko",), "webdav": ("webdav4", "wsgidav", "cheroot")}
"""What has to be installed for each: the server's packages, and the client's that fsspec does not bring."""


class OtherMissing(RuntimeError):
    """A package is not installed."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Other:
    """One running server of ``kind``, which serves ``root``; a context manager. With ``key`` (the file of a public key)
    SFTP lets that key in, too."""

    kind: str
    root: Path
    key: Path | None = None
    port: int = 0
    _process: subprocess.Popen[str] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str, *, user: str = USER, password: str = PASSWORD) -> str:
        """A URL with user and password in it; without ``user`` there is neither."""
        pair = f"{user}:{password}@" if password else f"{user}@" if user else ""
        return f"{self.kind}://{pair}{self.host}/{path}"

    def __enter__(self) -> Other:
        missing = [name for name in PACKAGES[self.kind] if importlib.util.find_spec(name) is None]
        if missing:
            raise OtherMissing(f"not installed: pip install {' '.join(missing)}")
        # The kernel stops it when this process dies without stopping it.
        guard = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        command = [*guard, sys.executable, "-m", "tests.servers.others", self.kind, str(self.root), str(self.key or "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.strip():
            self.__exit__()
            raise RuntimeError(f"the {self.kind} server did not start")
        self.port = int(line)
        return self

    def __exit__(self, *exc: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _told(port: int) -> None:
    print(port, flush=True)  # noqa: T201 - read by `Other`


def _ftp(root: str) -> None:
    import logging

    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import FTPHandler
    from pyftpdlib.servers import ThreadedFTPServer

    logging.basicConfig(level=logging.CRITICAL)
    authorizer = DummyAuthorizer()
    authorizer.add_user(USER, PASSWORD, root, perm="elradfmwMT")

    class Handler(FTPHandler):  # type: ignore[misc]
        auth_failed_timeout = 0.1  # otherwise each wrong password takes 3 s

    Handler.authorizer = authorizer
    server = ThreadedFTPServer(("127.0.0.1", 0), Handler)
    _told(server.address[1])
    server.serve_forever()


def _webdav(root: str) -> None:
    from cheroot.wsgi import Server
    from wsgidav.wsgidav_app import WsgiDAVApp

    config: dict[str, Any] = {
        "provider_mapping": {"/": root},
        "simple_dc": {"user_mapping": {"*": {USER: {"password": PASSWORD}}}},
        "http_authenticator": {"accept_basic": True, "accept_digest": False, "default_to_digest": False},
        "verbose": 0,
        "logging": {"enable": False},
    }
    server = Server(("127.0.0.1", 0), WsgiDAVApp(config))
    server.prepare()
    _told(server.bind_addr[1])
    server.serve()


def _sftp(root: str, key: str) -> None:
    import paramiko

    known = paramiko.PKey.from_path(key.removesuffix(".pub")) if key else None

    class Gate(paramiko.ServerInterface):
        def check_auth_password(self, username: str, password: str) -> int:
            return paramiko.AUTH_SUCCESSFUL if (username, password) == (USER, PASSWORD) else paramiko.AUTH_FAILED

        def check_auth_publickey(self, username: str, offered: Any) -> int:
            return paramiko.AUTH_SUCCESSFUL if username == USER and offered == known else paramiko.AUTH_FAILED

        def get_allowed_auths(self, username: str) -> str:
            return "password,publickey"

        def check_channel_request(self, kind: str, chanid: int) -> int:
            return paramiko.OPEN_SUCCEEDED

    files = _files_of(root)
    host_key = paramiko.ECDSAKey.generate()

    def serve(connection: socket.socket) -> None:
        transport = paramiko.Transport(connection)
        transport.add_server_key(host_key)
        transport.set_subsystem_handler("sftp", paramiko.SFTPServer, files)
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            transport.start_server(server=Gate())
            transport.join()

    listener = socket.create_server(("127.0.0.1", 0))
    _told(listener.getsockname()[1])
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as OpenSSH does
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def _files_of(root: str) -> Any:
    """A folder as paramiko's server wants it."""
    import paramiko

    def kept(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except OSError as exn:
                return paramiko.SFTPServer.convert_errno(exn.errno or 0)

        return call

    class Handle(paramiko.SFTPHandle):
        @kept
        def stat(self) -> Any:
            return paramiko.SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))

    class Files(paramiko.SFTPServerInterface):
        def _real(self, path: str) -> str:
            return root + os.path.normpath("/" + path)

        @kept
        def list_folder(self, path: str) -> Any:
            real = self._real(path)
            return [paramiko.SFTPAttributes.from_stat(os.stat(f"{real}/{n}"), n) for n in os.listdir(real)]

        @kept
        def stat(self, path: str) -> Any:
            return paramiko.SFTPAttributes.from_stat(os.stat(self._real(path)))

        lstat = stat

        @kept
        def open(self, path: str, flags: int, attr: Any) -> Any:
            file = os.fdopen(os.open(self._real(path), flags, 0o666), "r+b" if flags & os.O_ACCMODE else "rb")
            handle = Handle(flags)
            handle.readfile = handle.writefile = file
            return handle

        @kept
        def remove(self, path: str) -> int:
            os.remove(self._real(path))
            return int(paramiko.SFTP_OK)

        @kept
        def mkdir(self, path: str, attr: Any) -> int:
            os.mkdir(self._real(path))
            return int(paramiko.SFTP_OK)

        @kept
        def posix_rename(self, old: str, new: str) -> int:
            os.replace(self._real(old), self._real(new))
            return int(paramiko.SFTP_OK)

        def rename(self, old: str, new: str) -> int:
            return int(paramiko.SFTP_FAILURE) if os.path.exists(self._real(new)) else self.posix_rename(old, new)

    return Files


if __name__ == "__main__":
    kind, folder, key_file = sys.argv[1:4]
    if kind == "sftp":
        _sftp(folder, key_file)
    else:
        {"ftp": _ftp, "webdav": _webdav}[kind](folder)
