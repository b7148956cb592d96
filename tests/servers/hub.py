"""A double of the Hugging Face hub and its CDN: two HTTP/1.1 servers on ports of their own.

The hub answers ``resolve`` with a redirect to a signed URL of the CDN, which expires when the test says so; it lists
folders page by page and refuses in the real hub's words (``X-Error-Code``). `tests/clouds/test_huggingface.py` checks
it with the hub's own client where that is installed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Hub", "Repo", "Seen"]

_KEY = b"the CDN's signing key"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_INVALID = "Invalid credentials in Authorization header"
_RESOLVE = re.compile(r"/(?:(datasets|spaces|buckets)/)?([\w.-]+(?:/[\w.-]+)?)/resolve/(.+)")
_TREE = re.compile(r"/api/(\w+)/([\w.-]+/[\w.-]+)/tree/?(.*)")
_INFO = re.compile(r"/api/(\w+)/([\w.-]+/[\w.-]+)(?:/revision/([^/]+))?")


@dataclass
class Repo:
    """``revisions`` are files by path, by revision; a bucket has the one "". ``owners`` may read a private or gated
    one: tokens."""

    revisions: dict[str, dict[str, bytes]]
    private: bool = False
    gated: bool = False
    owners: set[str] = field(default_factory=set)
    renamed_to: str = ""


@dataclass(frozen=True)
class Seen:
    """A request as it came; ``target`` is raw, header names are lower-case."""

    method: str
    target: str
    headers: Mapping[str, str]
    status: int


class Hub:
    """Use it as a context manager. ``repos`` by ``(folder, "owner/name")``; ``tokens`` are those that it knows.

    ``lifetime``: how many requests a signed URL of the CDN is good for (None: until `expire`). Files of at most
    ``small`` bytes (none) are served by the hub itself. ``page`` is the length of a listing's pages. ``refusals`` are
    given out first, one a request: ``(status, headers)``.
    """

    def __init__(self, *, lifetime: int | None = None, small: int = -1, page: int = 1000) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.tokens: set[str] = set()
        self.lifetime, self.small, self.page = lifetime, small, page
        self.refusals: list[tuple[int, dict[str, str]]] = []
        self.seen: list[Seen] = []
        self.cdn_seen: list[Seen] = []
        self._serial = 0
        self._left: dict[str, int | None] = {}
        self._lock = threading.Lock()
        self._servers = [_Server(self, _HubHandler), _Server(self, _CdnHandler)]
        self.url, self.cdn_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def __enter__(self) -> Hub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(
        self, path: str, content: bytes, *, repo: str = "o/n", folder: str = "datasets", revision: str = "main"
    ) -> str:
        """Put a file there and return its ``hf://`` URL (without a revision)."""
        revision = "" if folder == "buckets" else revision
        found = self.repos.setdefault((folder, repo), Repo({}))
        found.revisions.setdefault(revision, {})[path] = content
        prefix = "" if folder == "models" else f"{folder}/"
        return f"hf://{prefix}{repo}/{path}"

    def expire(self) -> None:
        """No URL that was signed before now is good any more."""
        with self._lock:
            self._left.clear()

    def resolved(self) -> list[Seen]:
        """The requests for files that the hub saw."""
        return [seen for seen in self.seen if "/resolve/" in seen.target]

    def sign(self, digest: str) -> str:
        """A URL of the CDN for the content with this digest."""
        with self._lock:
            self._serial += 1
            serial = str(self._serial)
            self._left[serial] = self.lifetime
        return f"{self.cdn_url}/{digest}?Serial={serial}&Signature={_signature(digest, serial)}&x-id=Get%2BObject"

    def admits(self, digest: str, query: Mapping[str, list[str]]) -> bool:
        """Whether a signed URL is good, which uses it up by one."""
        serial = query.get("Serial", [""])[0]
        if query.get("Signature") != [_signature(digest, serial)] or query.get("x-id") != ["Get+Object"]:
            return False
        with self._lock:
            if serial not in self._left or self._left[serial] == 0:
                return False
            left = self._left[serial]
            self._left[serial] = None if left is None else left - 1
        return True

    def content(self, digest: str) -> bytes | None:
        """The file with this digest."""
        files = (files for repo in self.repos.values() for files in repo.revisions.values())
        return next((c for each in files for c in each.values() if _digest(c) == digest), None)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _signature(digest: str, serial: str) -> str:
    return hmac.new(_KEY, f"{digest} {serial}".encode(), "sha256").hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: Hub, handler: type[BaseHTTPRequestHandler]) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **fields: str) -> None:
        """Send an answer and remember the request."""
        self.log_of_requests().append(
            Seen(self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, status)
        )
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_of_requests(self) -> list[Seen]:
        raise NotImplementedError

    def file(self, content: bytes, etag: str) -> None:
        """The file or the range of it that is asked for."""
        if self.headers.get("If-Match", etag) != etag:
            return self.answer(412)
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is None:
            return self.answer(200, content, ETag=etag, Accept_Ranges="bytes")
        first = int(found[1])
        stop = min(int(found[2]) + 1 if found[2] else len(content), len(content))
        if first >= len(content):
            return self.answer(416, Content_Range=f"bytes */{len(content)}")
        span = f"bytes {first}-{stop - 1}/{len(content)}"
        return self.answer(206, content[first:stop], ETag=etag, Content_Range=span)


class _CdnHandler(_Handler):
    def log_of_requests(self) -> list[Seen]:
        return self.hub.cdn_seen

    def do_GET(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        digest = parts.path.lstrip("/")
        content = self.hub.content(digest)
        if content is None or not self.hub.admits(digest, urllib.parse.parse_qs(parts.query)):
            return self.answer(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        return self.file(content, f'"{digest}"')

    do_HEAD = do_GET


class _HubHandler(_Handler):
    def log_of_requests(self) -> list[Seen]:
        return self.hub.seen

    def do_GET(self) -> None:
        with self.hub._lock:
            refusal = self.hub.refusals.pop(0) if self.hub.refusals else None
        if refusal is not None:
            return self.answer(refusal[0], b"<html>refused</html>", **refusal[1])
        path = urllib.parse.urlsplit(self.path).path
        if found := _TREE.fullmatch(path):
            return self._tree(found[1], found[2], found[3])
        if found := _RESOLVE.fullmatch(path):
            return self._resolve(found[1] or "models", found[2], found[3])
        if found := _INFO.fullmatch(path):
            return self._info(found[1], found[2], urllib.parse.unquote(found[3] or "main"))
        return self.answer(404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(404)

    def _repo(self, folder: str, name: str) -> Repo | None:
        """The repository, where it may be seen; otherwise the answer has been given."""
        repo = self.hub.repos.get((folder, name))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            self.answer(401, X_Error_Message=_INVALID)
        elif repo is None or (repo.private and token not in repo.owners):
            status = 404 if token else 401
            self.answer(status, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif repo.gated and token not in repo.owners:
            self.answer(
                403 if token else 401, X_Error_Code="GatedRepo", X_Error_Message=f"Access to {name} is restricted"
            )
        else:
            return repo
        return None

    def _files(self, repo: Repo, folder: str, revision: str) -> dict[str, bytes] | None:
        files = repo.revisions.get("" if folder == "buckets" else revision)
        if files is None:
            self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
        return files

    def _resolve(self, folder: str, name: str, rest: str) -> None:
        repo = self._repo(folder, name)
        if repo is None:
            return
        if repo.renamed_to:
            return self.answer(307, Location=self.path.replace(f"/{name}/", f"/{repo.renamed_to}/", 1))
        revision, _, path = ("", "", rest) if folder == "buckets" else rest.partition("/")
        files = self._files(repo, folder, urllib.parse.unquote(revision))
        if files is None:
            return
        content = files.get(urllib.parse.unquote(path))
        if content is None:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        digest = _digest(content)
        etag = f'"{digest[:40]}"'
        known = {"X_Repo_Commit": _COMMIT, "X_Linked_ETag": etag, "X_Linked_Size": str(len(content))}
        if len(content) <= self.hub.small:
            return self.file(content, etag)
        return self.answer(302, b"Found", Location=self.hub.sign(digest), **known)

    def _tree(self, folder: str, name: str, rest: str) -> None:
        repo = self._repo(folder, name)
        if repo is None:
            return
        revision, _, path = ("", "", rest) if folder == "buckets" else rest.partition("/")
        files = self._files(repo, folder, urllib.parse.unquote(revision))
        if files is None:
            return
        path = urllib.parse.unquote(path)
        items = _listed(files, path, by_beginning=folder == "buckets")
        if not items and path:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message=f"{path} does not exist")
        parts = urllib.parse.urlsplit(self.path)
        at = int(urllib.parse.parse_qs(parts.query).get("cursor", ["0"])[0])
        link = {}
        if at + self.hub.page < len(items):
            following = f"{self.hub.url}{parts.path}?recursive=false&cursor={at + self.hub.page}"
            link = {"Link": f'<{following}>; rel="next"'}
        return self.answer(200, json.dumps(items[at : at + self.hub.page]).encode(), **link)

    def _info(self, folder: str, name: str, revision: str) -> None:
        repo = self._repo(folder, name)
        if repo is not None and self._files(repo, folder, revision) is not None:
            self.answer(200, json.dumps({"id": name, "_id": "1", "sha": _COMMIT, "siblings": [], "tags": []}).encode())


def _listed(files: Mapping[str, bytes], path: str, *, by_beginning: bool) -> list[dict[str, Any]]:
    """One level below ``path``; a bucket is listed by the beginning of names, and its files as deep as they are."""
    below = f"{path}/" if path else ""
    items: dict[str, dict[str, Any]] = {}
    for name, content in sorted(files.items()):
        if not name.startswith(path if by_beginning else below):
            continue
        inner, slash, _ = name.removeprefix(below).partition("/")
        digest = _digest(content)
        if slash and not by_beginning:
            items[below + inner] = {"type": "directory", "path": below + inner, "oid": digest[:40], "size": 0}
        else:
            more = {"mtime": "2026-03-01T12:00:00.000Z", "xetHash": digest} if by_beginning else {"oid": digest[:40]}
            items[name] = {"type": "file", "path": name, "size": len(content), **more}
    return list(items.values())
