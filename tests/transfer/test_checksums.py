"""Where checksums are found: the store first, then files beside the shard, by the shard's own way and nowhere else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import Origin
from tests.transfer.reading import KIB, bytes_of, data, outcomes, quick, snapshot
from wds_async.errors import ChecksumMismatch, WdsError
from wds_async.transfer.stats import Counters

SHARD, OTHER = data(300 * KIB), data(300 * KIB, 1)
ALWAYS = quick(verify="always")
SUM, OTHER_SUM, WRONG = hashlib.sha256(SHARD).hexdigest(), hashlib.sha256(OTHER).hexdigest(), "0" * 64


@pytest.fixture
def server() -> Iterator[Origin]:
    with Origin({"/d/x.tar": SHARD, "/d/y z.tar": OTHER}) as running:
        yield running


def asked(server: Origin, path: str) -> int:
    """How often the beginning of it was."""
    return sum(request.path == path and (request.range or "").startswith("bytes=0-") for request in server.requests)


def repr_digest(digest: bytes) -> dict[str, str]:
    return {"repr-digest": f"sha-256=:{base64.b64encode(digest).decode()}:"}


@pytest.mark.parametrize(
    ("files", "good"),
    [
        ({"/d/x.tar.sha256": f"{SUM}  x.tar\n"}, True),
        ({"/d/x.tar.md5": hashlib.md5(SHARD).hexdigest()}, True),
        ({"/d/SHA256SUMS": f"{OTHER_SUM}  y z.tar\n{SUM}  x.tar\n"}, True),
        ({"/d/MD5SUMS": f"{hashlib.md5(SHARD).hexdigest()} *x.tar\n"}, True),
        ({"/d/x.tar.sha256": SUM, "/d/SHA256SUMS": f"{WRONG}  x.tar\n"}, True),  # the nearer one
        ({"/d/x.tar.sha256": WRONG}, False),
        ({"/d/SHA256SUMS": f"{WRONG}  x.tar\n"}, False),
        ({"/d/SHA256SUMS": f"{WRONG}  y z.tar\n"}, None),
        ({"/d/x.tar.sha256": "x" * 100_000}, None),  # larger than any such file
        ({"/SHA256SUMS": f"{WRONG}  d/x.tar\n"}, None),
        ({}, None),
    ],
)
def test_files_beside(server: Origin, files: dict[str, str], good: bool | None) -> None:
    server.files |= {path: text.encode() for path, text in files.items()}
    counters = Counters()
    ((got, error),) = outcomes([server.url("d/x.tar")], ALWAYS, counters)
    assert (got, type(error)) == ((b"", ChecksumMismatch) if good is False else (SHARD, type(None)))
    assert snapshot(counters).verified_shards == (good is True)


def test_a_manifest_is_asked_for_once(server: Origin) -> None:
    server.files["/d/SHA256SUMS"] = f"{SUM}  ./x.tar\n{OTHER_SUM}  y z.tar\n".encode()
    counters = Counters()
    urls = [server.url("d/x.tar"), server.url("d/y z.tar")] * 2
    assert bytes_of(urls, ALWAYS, counters) == [SHARD, OTHER] * 2
    assert snapshot(counters).verified_shards == 4
    assert asked(server, "/d/SHA256SUMS") == 1


def test_the_store_comes_first(server: Origin) -> None:
    server.files["/d/x.tar.sha256"] = WRONG.encode()
    server.behave(path="/d/x.tar", headers=repr_digest(bytes.fromhex(SUM)))
    assert bytes_of([server.url("d/x.tar")], ALWAYS) == [SHARD]
    assert asked(server, "/d/x.tar.sha256") == 0


def test_it_is_asked_for_what_it_does_not_bring(server: Origin) -> None:
    heads = {"when": lambda request: request.method == "HEAD", "headers": repr_digest(bytes(32))}
    server.behave(**heads)
    ((_, error),) = outcomes([server.url("d/x.tar")], ALWAYS)
    assert isinstance(error, ChecksumMismatch)
    (head, *_) = [request for request in server.requests if request.method == "HEAD"]
    assert "sha-256" in head.headers["want-repr-digest"]


@pytest.mark.parametrize("status", [403, 404, 405, 501])
def test_who_answers_no_such_question_is_not_believed_to_be_down(server: Origin, status: int) -> None:
    server.behave(when=lambda request: request.method == "HEAD", status=status)
    server.files["/d/x.tar.sha256"] = SUM.encode()
    counters = Counters()
    assert bytes_of([server.url("d/x.tar")], ALWAYS, counters) == [SHARD]
    assert snapshot(counters).verified_shards == 1


def test_one_that_is_down_is_asked_again(server: Origin) -> None:
    server.behave(when=lambda request: request.method == "HEAD", status=503, times=2)
    server.behave(when=lambda request: request.method == "HEAD", headers=repr_digest(bytes.fromhex(SUM)))
    counters = Counters()
    assert bytes_of([server.url("d/x.tar")], ALWAYS, counters) == [SHARD]
    assert snapshot(counters).verified_shards == 1


def test_one_that_stays_down_is_an_error(server: Origin) -> None:
    server.behave(path="/d/x.tar", when=lambda request: request.method == "HEAD", status=503)
    (got, error), other = outcomes([server.url("d/x.tar"), server.url("d/y z.tar")], ALWAYS)
    assert got == b""
    assert isinstance(error, WdsError)
    assert "503" in str(error)
    assert other == (OTHER, None)


def test_nothing_of_a_signature_leads_elsewhere(server: Origin) -> None:
    server.files["/d/x.tar.sha256"] = WRONG.encode()
    assert bytes_of([server.url("d/x.tar") + "?sig=hush"], ALWAYS) == [SHARD]
    assert {request.path for request in server.requests} == {"/d/x.tar"}


def test_credentials_go_where_the_shard_s_go(server: Origin) -> None:
    server.files["/d/x.tar.sha256"] = SUM.encode()
    with Origin() as elsewhere:
        server.behave(path="/d/x.tar.sha256", redirect=elsewhere.add("sums", SUM.encode()))
        url = server.url("d/x.tar").replace("http://", "http://user:hush@")
        counters = Counters()
        assert bytes_of([url], ALWAYS, counters) == [SHARD]
        assert snapshot(counters).verified_shards == 1
        assert all("authorization" in request.headers for request in server.requests)
        assert elsewhere.requests
        assert not any("authorization" in request.headers for request in elsewhere.requests)


def test_said_once_a_dataset(server: Origin, caplog: pytest.LogCaptureFixture) -> None:
    first, second = Counters(), Counters()
    for counters in (first, first, second):
        bytes_of([server.url("d/x.tar") + "?sig=hush", server.url("d/y z.tar")], ALWAYS, counters)
    told: list[Any] = [message for message in caplog.messages if "could not be verified" in message]
    assert len(told) == 2
    assert "2 of 2" in told[0]
    assert "hush" not in caplog.text
