"""The demo's server does what an object store does."""

from __future__ import annotations

import http.client
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from wds_async.cli.demo_server import serving
from wds_async.dataset import WebDataset


def ask(base: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=20)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_ranges_identity_and_latency(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(bytes(range(200)))
    with serving(tmp_path, first_byte_s=0.05) as base:
        began = time.monotonic()
        status, headers, body = ask(base, "/x.tar", Range="bytes=10-19")
        assert time.monotonic() - began >= 0.05
        assert (status, body) == (206, bytes(range(10, 20)))
        assert headers["content-range"] == "bytes 10-19/200"
        tag = headers["etag"]
        assert ask(base, "/x.tar", If_Match=tag)[0] == 200
        assert ask(base, "/x.tar", If_Match='"other"')[0] == 412
        assert ask(base, "/none.tar")[0] == 404
    with pytest.raises(OSError):
        ask(base, "/x.tar")


def test_shards_are_read_from_it(shards: object, tmp_path: Path) -> None:
    paths = shards(2, 5)  # type: ignore[operator]
    with serving(paths[0].parent, first_byte_s=0.0) as base:
        assert len(list(WebDataset([f"{base}/{path.name}" for path in paths], shardshuffle=False))) == 10
