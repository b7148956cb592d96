"""Who writes, where writing fails."""

from __future__ import annotations

import gc
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.servers import moto
from tests.storage.locations import location_of
from wds_async.errors import StorageError, UrlError
from wds_async.storage.sink import open_sink
from wds_async.storage.upload import writer_of

clean_aws = moto.clean_aws


class _Repeats(BaseHTTPRequestHandler):
    """Refuses everything, and repeats the proof."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = self.headers.get("x-amz-security-token") or self.headers.get("Authorization", "").rpartition(" ")[2]
        if "x-amz-date" in self.headers:
            said = f"<Error><Code>InvalidToken</Code><Message>no {token}</Message></Error>"
        else:
            said = json.dumps({"error": {"code": 403, "message": f"no {token}"}})
        self.send_response(403)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())

    do_POST = do_GET = do_PUT

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Repeats) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def refused(url: str, options: dict[str, Any]) -> StorageError:
    sink = open_sink(url, options=options)
    sink.write(b"x")
    with pytest.raises(StorageError) as caught:
        sink.commit()
    assert "hush-hush" not in f"{caught.value}{caught.value.__cause__}"
    return caught.value


def test_s3_says_which_key_and_closes_its_client(
    endpoint: str, clean_aws: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("s3fs")
    given = {"key": "AKIAIOSFODNN7EXAMPLE", "secret": "hush-hush-s", "token": "hush-hush-t", "endpoint_url": endpoint}
    clean_aws.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with caplog.at_level(logging.ERROR):
        error = refused("s3://bucket/x.tar", {"s3": given})
        gc.collect()
    assert "InvalidToken (no ***) to access key AKIA…MPLE (storage_options)" in str(error)
    assert not caplog.records


def test_google_says_whose_token(endpoint: str) -> None:
    pytest.importorskip("gcsfs")
    error = refused("gs://bucket/x.tar", {"gs": {"token": "hush-hush", "endpoint_url": endpoint}})
    assert "to access token (storage_options)" in str(error)


def test_azure_says_which_account() -> None:
    writer = writer_of(location_of("az://c/x", {"account_name": "acct", "account_key": "aHVzaA=="}), None)
    assert writer.details == {"kind": "key"}
    assert writer.secrets.hidden("no aHVzaA==") == "no ***"


def test_what_cannot_be_found_out_is_not_an_error() -> None:
    writer = writer_of(location_of("s3://b/x", {"secret": "hush-hush"}), None)
    assert writer.identity == "the credentials that write"
    assert writer.secrets.hidden("hush-hush") == "***"


def test_a_scheme_in_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises((UrlError, StorageError)):
        open_sink("LOCAL://x")
