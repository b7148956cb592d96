"""The floor of Python: one connection, one reused buffer."""

from __future__ import annotations

import socket
import ssl
import urllib.parse

from benchmarks.peer import Job, Peer, Run

__all__ = ["PEER"]


def samples(job: Job) -> Run:
    """The bytes of all shards."""

    def run() -> int:
        first = urllib.parse.urlsplit(job.urls[0])
        sock = socket.create_connection((first.hostname, first.port))
        if first.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=first.hostname)
        view = memoryview(bytearray(1 << 20))
        with sock:
            for url in job.urls:
                path = urllib.parse.urlsplit(url).path
                sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {first.hostname}\r\n\r\n".encode())
                head = b""
                while b"\r\n\r\n" not in head:
                    head += bytes(view[: sock.recv_into(view)])
                head, _, body = head.partition(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                left = length - len(body)
                while left:
                    left -= sock.recv_into(view, min(left, len(view)))
        return 0

    return run


PEER = Peer("a bare recv_into loop, raw bytes: the floor of Python", tasks={"samples": samples}, floor=True)
