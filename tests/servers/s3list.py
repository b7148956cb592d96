"""A server that answers S3's ListObjectsV2 for any number of keys, page by page, and nothing else."""

from __future__ import annotations

import bisect
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

__all__ = ["S3List"]

_MODIFIED = "2026-01-02T03:04:05.000Z"


class S3List:
    """``keys`` of one bucket, sorted as S3 does. ``requests`` are the method and target of each that came, ``faults``
    the statuses (with S3's code) that the next ones get instead. A context manager; ``endpoint`` is its URL."""

    def __init__(self, keys: list[str], *, page: int = 1000) -> None:
        self.keys = sorted(keys)
        self.page = page
        self.requests: list[str] = []
        self.faults: list[tuple[int, str]] = []
        self.stall: Callable[[], object] | None = None
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def endpoint(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def listings(self) -> list[str]:
        """The prefix of each listing request, and ``+`` before that of each further page."""
        found = []
        for request in self.requests:
            query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(request).query, keep_blank_values=True))
            if "list-type" in query:
                found.append(("+" if "continuation-token" in query else "") + query.get("prefix", ""))
        return found

    def __enter__(self) -> S3List:
        listing = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                listing.requests.append(f"{self.command} {self.path}")
                if listing.stall is not None:
                    listing.stall()
                status, body = listing.answer(self.path)
                data = body.encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("x-amz-bucket-region", "us-east-1")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_HEAD = do_PUT = do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                pass  # the client went away

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="s3list", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, target: str) -> tuple[int, str]:
        """Status and body for one request."""
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(target).query, keep_blank_values=True))
        if "list-type" not in query:
            return 200, ""
        if self.faults:
            status, code = self.faults.pop(0)
            return status, f"<Error><Code>{code}</Code><Message>scripted</Message></Error>"
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after, size = query.get("continuation-token", ""), min(self.page, int(query.get("max-keys", self.page)))
        lines: list[str] = []
        last = ""
        for number in range(bisect.bisect_left(self.keys, max(prefix, after)), len(self.keys)):
            key = self.keys[number]
            if not key.startswith(prefix):
                break
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            name = prefix + head + cut if cut else key
            if name <= after or name == last:
                continue
            if len(lines) == size:
                return 200, _page("".join(lines), prefix, last)
            last = name
            lines.append(_folder(name) if cut else _object(name))
        return 200, _page("".join(lines), prefix, "")


def _object(key: str) -> str:
    return (
        f"<Contents><Key>{urllib.parse.quote(key)}</Key><LastModified>{_MODIFIED}</LastModified><ETag>&quot;e&quot;</ETag>"
        "<Size>1234</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def _folder(prefix: str) -> str:
    return f"<CommonPrefixes><Prefix>{urllib.parse.quote(prefix)}</Prefix></CommonPrefixes>"


def _page(lines: str, prefix: str, token: str) -> str:
    more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><EncodingType>url</EncodingType><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>{more}{lines}</ListBucketResult>"
    )
