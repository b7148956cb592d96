"""AIStore's backend: listing, explaining, describing, and the ways that it chooses."""

# ruff: noqa: F811 - fixtures that are imported

from __future__ import annotations

import json
import ssl
from typing import Any

import pytest

from tests.clouds.ais import ais, no_settings  # noqa: F401 - fixtures
from tests.servers import Tls
from tests.servers.aistore import AisDouble
from tests.storage.locations import location_of, on_backend, page_through
from wds_async.storage.ais.backend import AisBackend, explain_answer, explain_service
from wds_async.storage.base import Answer, Description, RefusedAnswer, Request, Verdict
from wds_async.storage.http.backend import HttpStream
from wds_async.storage.http.errors import explain_exception


def listed(url: str, **options: Any) -> list[tuple[str, int | None]]:
    return [(entry.url, entry.size) for entry in page_through(AisBackend, url, options)]


@pytest.mark.parametrize(
    ("exn", "words", "nobody"),
    [
        (FileNotFoundError(2, "No such file"), "nothing listens there", True),
        (ConnectionRefusedError(111, "refused"), "nothing listens there", True),
        (PermissionError(13, "Permission denied"), "permission denied", True),
        (ConnectionResetError(104, "reset by peer"), "reset by peer", False),
    ],
)
def test_what_fails_on_the_way_to_our_own_service(exn: OSError, words: str, nobody: bool) -> None:
    fault = explain_service(exn, explain_exception(exn), "unix:/run/s.sock", elsewhere=nobody)
    assert (fault.verdict, fault.connection_refused) == (Verdict.TRANSIENT, nobody)
    assert words in fault.reason
    assert "wds-async serve --socket /run/s.sock" in fault.advice
    assert ("WDS_AIS_FALLBACK=1" in fault.advice) == nobody


@pytest.mark.parametrize("recursive_only", [False, True])
def test_a_folder_in_pages(ais: AisDouble, recursive_only: bool) -> None:
    ais.page, ais.recursive_only = 3, recursive_only
    for i in range(10):
        ais.put(f"gcp/b/dir/x-{i}.tar", b"x" * i)
        ais.put(f"gcp/b/dir/sub #{i // 5}/{i}", b"x")
    ais.put("gcp/b/other", b"12")
    files = [(f"gs://b/dir/x-{i}.tar", i) for i in range(10)]
    assert sorted(listed("gs://b/dir/"), key=str) == sorted(
        [("gs://b/dir/sub #0/", None), ("gs://b/dir/sub #1/", None), *files], key=str
    )
    assert listed("gs://b/") == [("gs://b/dir/", None), ("gs://b/other", 2)]
    assert listed("gs://b/no/") == []
    assert ais.at("t*") == []  # a listing reads no data


def test_a_folder_of_a_namespace(ais: AisDouble) -> None:
    ais.put("ais/@u#n/b/d/x", b"123")
    assert listed("ais://@u#n/b/d/") == [("ais://@u#n/b/d/x", 3)]
    assert listed("ais://@u#n/b/") == [("ais://@u#n/b/d/", None)]


def test_a_listing_that_fails_at_first(ais: AisDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_RETRIES", "2")
    ais.put("ais/b/x", b"1")
    ais.script("proxy", status=503, message="busy")
    assert listed("ais://b/") == [("ais://b/x", 1)]
    with pytest.raises(RefusedAnswer) as caught:
        listed("ais://nowhere/")
    assert caught.value.answer.status == 404


def test_a_listing_shows_the_token(ais: AisDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    ais.token = "t"
    ais.put("ais/b/x", b"1")
    assert listed("ais://b/", token="t") == [("ais://b/x", 1)]


@pytest.mark.parametrize(
    ("status", "message", "verdict", "words"),
    [
        (401, "token expired", Verdict.DENIED, "ais auth login"),
        (403, "no access", Verdict.DENIED, "permission to read this bucket"),
        (404, 'object "ais://b/x" does not exist', Verdict.MISSING, "object's name"),
        (404, 'object "ais://@u#n/b/x" does not exist', Verdict.MISSING, "object's name"),
        (404, 'bucket "ais://b" does not exist', Verdict.MISSING, "no such bucket"),
        (404, 'remote bucket "gs://@u#n/b" does not exist', Verdict.MISSING, "no such bucket"),
        (404, "", Verdict.MISSING, "object's name"),
        (404, 'etl job "x" not found', Verdict.MISSING, "Start that ETL"),
        (409, "cold get", Verdict.TRANSIENT, "being fetched"),
        (429, "slow down", Verdict.TRANSIENT, "overloaded"),
        (503, "no targets", Verdict.TRANSIENT, "overloaded"),
        (507, "out of space", Verdict.TRANSIENT, "no room left"),
        (400, "bad", Verdict.FATAL, ""),
        (501, "range of archive", Verdict.FATAL, ""),
        (412, "", Verdict.CHANGED, ""),
    ],
)
def test_answers(status: int, message: str, verdict: Verdict, words: str) -> None:
    body = json.dumps({"status": status, "message": message}).encode()
    fault = explain_answer(Answer(status, {"retry-after": "3"}, body), "token of AIS_AUTHN_TOKEN", "http://p")
    assert fault.verdict is verdict
    assert message in fault.reason
    assert words in fault.advice
    assert fault.retry_after_s == (3.0 if verdict is Verdict.TRANSIENT else None)
    assert fault.throttled is (status in (429, 503))


def test_what_the_cluster_says_wherever_it_says_it() -> None:
    said = json.dumps({"message": "not here", "status": 404})
    for answer in (
        Answer(404, {}, said.encode()),
        Answer(404, {"hdr-error": said}),
        Answer(404, {}, said.encode()[:-12]),
        Answer(404, {}, b"<p>not here</p>\n"),
    ):
        assert "answered 404 (not here)" in explain_answer(answer, "", "http://p").reason
    assert explain_answer(Answer(404, {}, b"\x1b[2J"), "me", "http://p").reason.endswith("answered 404 to me")
    secret = Answer(500, {}, b'{"message": "GET http://t/x?token=MARKED failed"}')
    assert "MARKED" not in explain_answer(secret, "", "http://p").reason


def test_a_token_of_a_file_is_read_again(ais: AisDouble, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text('{"token": "one"}')
    monkeypatch.setenv("AIS_AUTHN_TOKEN_FILE", str(path))

    async def work(backend: AisBackend) -> list[Any]:
        first = await backend.access(location_of("ais://b/x"))
        verdict = backend.classify(RefusedAnswer(Answer(401, {})), location_of("ais://b/x")).verdict
        path.write_text('{"token": "two"}')
        return [first, verdict, await backend.access(location_of("ais://b/x"))]

    first, verdict, second = on_backend(AisBackend, work)
    assert verdict is Verdict.EXPIRED
    assert dict(first.headers)["Authorization"] == "Bearer one"
    assert dict(second.headers)["Authorization"] == "Bearer two"
    assert "one" not in repr(first)


def test_the_way_of_each(ais: AisDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    ais.put("ais/b/x", b"123")

    def way(url: str, **kwargs: Any) -> Any:
        return on_backend(AisBackend, lambda backend: backend.access(location_of(url)), **kwargs)

    request = way("ais://b/x")
    assert isinstance(request, Request)
    assert not request.keeps_redirect
    assert way("ais://b/x", direct=False).size == 3
    assert isinstance(way("ais://b/x?archpath=y"), HttpStream)
    ais.script("t*", status=503, message="busy")
    with pytest.raises(RefusedAnswer):
        way("ais://b/x", direct=False)


def test_described(ais: AisDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    def described(url: str = "ais://b/x", **kwargs: Any) -> Description:
        found: Description = on_backend(AisBackend, lambda backend: backend.describe(location_of(url)), **kwargs)
        return found

    assert described() == Description("AIStore", ais.endpoint, "anonymous (no token)", True)
    monkeypatch.setenv("AIS_AUTHN_TOKEN", "MARKED")
    assert described(direct=False) == Description(
        "AIStore", ais.endpoint, "token of AIS_AUTHN_TOKEN", False, "WDS_DIRECT=0"
    )
    assert not described("ais://b/x?etl_name=y").direct
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert described().why == "a proxy is in the way"
    assert ais.seen == []


def test_a_proxy_in_the_way(ais: AisDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double takes requests in the form that proxies get for what it is: its own."""
    ais.put("ais/b/x", b"0123456789")
    monkeypatch.setenv("AIS_ENDPOINT", "http://cluster.invalid:51080")
    monkeypatch.setenv("HTTP_PROXY", ais.endpoint)

    async def work(backend: AisBackend) -> Any:
        with pytest.raises(RefusedAnswer) as caught:
            await backend.access(location_of("ais://b/x"))
        return caught.value.answer.status

    assert on_backend(AisBackend, work) == 400  # it reached the double, which is no proxy
    assert ais.seen[0].path.startswith("http://cluster.invalid:51080/v1/objects/b/x")


def test_a_client_certificate(no_settings: None, tls: Tls) -> None:
    context = tls.server_context()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tls.ca)
    with AisDouble(tls=context) as double:
        double.put("ais/b/x", b"1")
        ours = {"certificate": str(tls.cert), "key": str(tls.key)}
        given = {"endpoint": double.endpoint, "ca_file": str(tls.ca)}
        assert listed("ais://b/", **given, **ours) == [("ais://b/x", 1)]
